// Rows of activations as 8-bit floats (e4m3) with a scale each: what the kernels that make such rows share.

#ifndef KILN_EMULATED
// Two numbers of at most 448 rounded into two bytes, `low` in the lower one.
__device__ __forceinline__ unsigned short round_fp8_pair(float low, float high) {
    unsigned short y = 0;
#if __CUDA_ARCH__ >= 890
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(high), "f"(low));
#endif
    return y;
}
#endif

const unsigned INFINITE_BITS = 0x7f800000u;

// The larger of `largest` and the absolute values; what is no number counts as infinite.
__device__ __forceinline__ void take_largest(float &largest, const float (&v)[8]) {
    const float INFINITE = __uint_as_float(INFINITE_BITS);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float a = fabsf(v[j]);
        // A comparison with NaN is false.
        largest = fmaxf(largest, a < INFINITE ? a : INFINITE);
    }
}

// What a row is multiplied with on its way to bytes, and what takes them back.
struct RowScale {
    float inverse, scale;
};

// The largest value of a warp.
__device__ __forceinline__ float warp_largest(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

// The largest value of a block of WARPS.
template <int WARPS> __device__ __forceinline__ float block_largest(float x) {
    __shared__ float parts[WARPS];
    x = warp_largest(x);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < WARPS; i++) x = fmaxf(x, parts[i]);
    return x;
}

// Of a row with this largest value. One that holds what is no number gets a scale of NaN.
__device__ __forceinline__ RowScale row_scale(float largest) {
    if (largest == __uint_as_float(INFINITE_BITS)) return {0.0f, __uint_as_float(0x7fc00000u)};
    if (largest < 1e-30f) return {0.0f, 0.0f};
    return {448.0f / largest, largest / 448.0f};
}

// Eight elements as bytes.
__device__ __forceinline__ u64 round_fp8(const float (&v)[8], float inverse) {
    u64 bytes = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float a = v[2 * j] * inverse, b = v[2 * j + 1] * inverse;
        // Infinity times 0 is no number, and becomes 0.
        bytes |= (u64)round_fp8_pair(a == a ? a : 0.0f, b == b ? b : 0.0f) << 16 * j;
    }
    return bytes;
}
