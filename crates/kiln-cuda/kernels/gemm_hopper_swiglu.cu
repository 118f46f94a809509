// Products on Hopper that end with SwiGLU, rows along the sum.

#include "hopper.cuh"
#include "gemm.cuh"
#include "hopper_gemm.cuh"

#if defined(KILN_EMULATED) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define KERNEL(NAME, INPUT, N)                                                                                        \
    extern "C" CLUSTERS __global__ void __launch_bounds__(384, 1) NAME(const __grid_constant__ HopperGemmArgs args) { \
        gemm_hopper<INPUT, N, false, false, true>(args);                                                              \
    }

KERNEL(gemm_hopper_swiglu_bf16_256, Bf16Input, 256)
KERNEL(gemm_hopper_swiglu_bf16_192, Bf16Input, 192)
KERNEL(gemm_hopper_swiglu_bf16_128, Bf16Input, 128)
KERNEL(gemm_hopper_swiglu_fp8_256, E4m3Input, 256)
KERNEL(gemm_hopper_swiglu_fp8_192, E4m3Input, 192)
KERNEL(gemm_hopper_swiglu_fp8_128, E4m3Input, 128)
KERNEL(gemm_hopper_swiglu_int8_256, Int8Input, 256)
KERNEL(gemm_hopper_swiglu_int8_192, Int8Input, 192)
KERNEL(gemm_hopper_swiglu_int8_128, Int8Input, 128)
#endif
