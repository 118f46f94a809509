// Products of e4m3 matrices with a scale per row, from compute capability 8.9 on.

#include "gemm.cuh"
#include "mma_gemm.cuh"

#define KERNEL(NAME, INPUT, WARPS_N)                                                                                  \
    extern "C" __global__ void __launch_bounds__(64 * WARPS_N) NAME(const __grid_constant__ MmaGemmArgs args) { \
        gemm_mma<INPUT, WARPS_N>(args);                                                                         \
    }

KERNEL(gemm_mma_fp8_256, MmaE4m3, 4)
KERNEL(gemm_mma_fp8_128, MmaE4m3, 2)
