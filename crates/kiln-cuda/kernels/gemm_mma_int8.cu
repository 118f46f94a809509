// Products of int8 matrices with a scale per row.

#include "gemm.cuh"
#include "mma_gemm.cuh"

#define KERNEL(NAME, INPUT, WARPS_N)                                                                                  \
    extern "C" __global__ void __launch_bounds__(64 * WARPS_N) NAME(const __grid_constant__ MmaGemmArgs args) { \
        gemm_mma<INPUT, WARPS_N>(args);                                                                         \
    }

KERNEL(gemm_mma_int8_256, MmaInt8, 4)
KERNEL(gemm_mma_int8_128, MmaInt8, 2)
