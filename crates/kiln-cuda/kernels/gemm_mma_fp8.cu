// Products of e4m3 matrices with a scale per row, from compute capability 8.9 on.

#include "gemm.cuh"
#include "mma_gemm.cuh"

#define KERNEL(NAME, WARPS_N, SWIGLU)                                                                                 \
    extern "C" __global__ void __launch_bounds__(64 * WARPS_N) NAME(const __grid_constant__ MmaGemmArgs args) {       \
        gemm_mma<MmaE4m3, WARPS_N, SWIGLU>(args);                                                                  \
    }

KERNEL(gemm_mma_fp8_256, 4, false)
KERNEL(gemm_mma_fp8_128, 2, false)
KERNEL(gemm_mma_fp8_swiglu_256, 4, true)
KERNEL(gemm_mma_fp8_swiglu_128, 2, true)
