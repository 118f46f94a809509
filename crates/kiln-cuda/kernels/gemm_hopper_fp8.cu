// Products of e4m3 matrices on Hopper with a scale per row.

#include "hopper.cuh"
#include "gemm.cuh"
#include "hopper_gemm.cuh"

#if defined(KILN_EMULATED) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define KERNEL(NAME, INPUT, N, X_COLUMNS, W_COLUMNS)                                                          \
    extern "C" CLUSTERS __global__ void __launch_bounds__(384, 1) NAME(const __grid_constant__ HopperGemmArgs args) { \
        gemm_hopper<INPUT, N, X_COLUMNS, W_COLUMNS>(args);                                                            \
    }

KERNEL(gemm_hopper_fp8_256, E4m3Input, 256, false, false)
KERNEL(gemm_hopper_fp8_192, E4m3Input, 192, false, false)
KERNEL(gemm_hopper_fp8_160, E4m3Input, 160, false, false)
KERNEL(gemm_hopper_fp8_144, E4m3Input, 144, false, false)
KERNEL(gemm_hopper_fp8_128, E4m3Input, 128, false, false)
KERNEL(gemm_hopper_fp8_96, E4m3Input, 96, false, false)
KERNEL(gemm_hopper_fp8_80, E4m3Input, 80, false, false)
KERNEL(gemm_hopper_fp8_64, E4m3Input, 64, false, false)
#endif
