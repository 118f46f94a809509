// Products of bf16 matrices.

#include "gemm.cuh"
#include "mma_gemm.cuh"

#define KERNEL(NAME, WARPS_N, SWIGLU)                                                                                 \
    extern "C" __global__ void __launch_bounds__(64 * WARPS_N) NAME(const __grid_constant__ MmaGemmArgs args) {       \
        gemm_mma<MmaBf16, WARPS_N, SWIGLU>(args);                                                                  \
    }

KERNEL(gemm_mma_bf16_256, 4, false)
KERNEL(gemm_mma_bf16_128, 2, false)
KERNEL(gemm_mma_bf16_swiglu_256, 4, true)
KERNEL(gemm_mma_bf16_swiglu_128, 2, true)
