// Products of int8 matrices with a scale per row.

#include "gemm.cuh"
#include "mma_gemm.cuh"

#define KERNEL(NAME, WARPS_N, SWIGLU)                                                                                 \
    extern "C" __global__ void __launch_bounds__(64 * WARPS_N) NAME(const __grid_constant__ MmaGemmArgs args) {       \
        gemm_mma<MmaInt8, WARPS_N, SWIGLU>(args);                                                                  \
    }

KERNEL(gemm_mma_int8_256, 4, false)
KERNEL(gemm_mma_int8_128, 2, false)
KERNEL(gemm_mma_int8_swiglu_256, 4, true)
KERNEL(gemm_mma_int8_swiglu_128, 2, true)
