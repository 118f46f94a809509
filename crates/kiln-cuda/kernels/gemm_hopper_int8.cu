// Products of int8 matrices on Hopper with a scale per row.

#include "hopper.cuh"
#include "gemm.cuh"
#include "hopper_gemm.cuh"

#if defined(KILN_EMULATED) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define KERNEL(NAME, INPUT, N, X_COLUMNS, W_COLUMNS)                                                          \
    extern "C" CLUSTERS __global__ void __launch_bounds__(384, 1) NAME(const __grid_constant__ HopperGemmArgs args) { \
        gemm_hopper<INPUT, N, X_COLUMNS, W_COLUMNS>(args);                                                            \
    }

KERNEL(gemm_hopper_int8_256, Int8Input, 256, false, false)
KERNEL(gemm_hopper_int8_128, Int8Input, 128, false, false)
#endif
