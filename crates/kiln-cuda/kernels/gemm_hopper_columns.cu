// Products of bf16 matrices on Hopper, columns of w or of both along the sum.

#include "hopper.cuh"
#include "gemm.cuh"
#include "hopper_gemm.cuh"

#if defined(KILN_EMULATED) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define KERNEL(NAME, INPUT, N, X_COLUMNS, W_COLUMNS)                                                          \
    extern "C" CLUSTERS __global__ void __launch_bounds__(384, 1) NAME(const __grid_constant__ HopperGemmArgs args) { \
        gemm_hopper<INPUT, N, X_COLUMNS, W_COLUMNS>(args);                                                            \
    }

KERNEL(gemm_hopper_w_columns_256, Bf16Input, 256, false, true)
KERNEL(gemm_hopper_w_columns_192, Bf16Input, 192, false, true)
KERNEL(gemm_hopper_w_columns_128, Bf16Input, 128, false, true)
KERNEL(gemm_hopper_columns_256, Bf16Input, 256, true, true)
KERNEL(gemm_hopper_columns_192, Bf16Input, 192, true, true)
KERNEL(gemm_hopper_columns_128, Bf16Input, 128, true, true)
#endif
