// Products of bf16 matrices.

#include "gemm.cuh"
#include "mma_gemm.cuh"

#define KERNEL(NAME, INPUT, WARPS_N)                                                                                  \
    extern "C" __global__ void __launch_bounds__(64 * WARPS_N) NAME(const __grid_constant__ MmaGemmArgs args) { \
        gemm_mma<INPUT, WARPS_N>(args);                                                                         \
    }

KERNEL(gemm_mma_bf16_256, MmaBf16, 4)
KERNEL(gemm_mma_bf16_128, MmaBf16, 2)
