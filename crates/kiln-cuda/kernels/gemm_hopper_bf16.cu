// Products of bf16 matrices on Hopper, rows along the sum.

#include "hopper.cuh"
#include "gemm.cuh"
#include "hopper_gemm.cuh"

#if defined(KILN_EMULATED) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define KERNEL(NAME, INPUT, N, X_COLUMNS, W_COLUMNS)                                                          \
    extern "C" CLUSTERS __global__ void __launch_bounds__(384, 1) NAME(const __grid_constant__ HopperGemmArgs args) { \
        gemm_hopper<INPUT, N, X_COLUMNS, W_COLUMNS>(args);                                                            \
    }

KERNEL(gemm_hopper_bf16_256, Bf16Input, 256, false, false)
KERNEL(gemm_hopper_bf16_192, Bf16Input, 192, false, false)
KERNEL(gemm_hopper_bf16_160, Bf16Input, 160, false, false)
KERNEL(gemm_hopper_bf16_144, Bf16Input, 144, false, false)
KERNEL(gemm_hopper_bf16_128, Bf16Input, 128, false, false)
KERNEL(gemm_hopper_bf16_96, Bf16Input, 96, false, false)
KERNEL(gemm_hopper_bf16_80, Bf16Input, 80, false, false)
KERNEL(gemm_hopper_bf16_64, Bf16Input, 64, false, false)
#endif
