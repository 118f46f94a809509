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
KERNEL(gemm_hopper_int8_192, Int8Input, 192, false, false)
KERNEL(gemm_hopper_int8_160, Int8Input, 160, false, false)
KERNEL(gemm_hopper_int8_144, Int8Input, 144, false, false)
KERNEL(gemm_hopper_int8_128, Int8Input, 128, false, false)
KERNEL(gemm_hopper_int8_96, Int8Input, 96, false, false)
KERNEL(gemm_hopper_int8_80, Int8Input, 80, false, false)
KERNEL(gemm_hopper_int8_64, Int8Input, 64, false, false)
#endif
