// Quantization of rows to fp8 (e4m3) with one scale per row.

#ifndef KILN_EMULATED
// Rounds two values of at most 448 into two bytes, `low` in the lower one.
__device__ __forceinline__ unsigned short round_fp8_pair(float low, float high) {
    unsigned short y = 0;
#if __CUDA_ARCH__ >= 890
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(high), "f"(low));
#endif
    return y;
}
#endif

const unsigned INFINITE_BITS = 0x7f800000u;

// Updates `largest` with absolute values; NaN counts as infinite.
__device__ __forceinline__ void update_abs_max(float &largest, const float (&v)[8]) {
    const float INFINITE = __uint_as_float(INFINITE_BITS);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float a = fabsf(v[j]);
        // A comparison with NaN is false.
        largest = fmaxf(largest, a < INFINITE ? a : INFINITE);
    }
}

// A row's scale for dequantization and its inverse for quantization.
struct RowScale {
    float inverse, scale;
};

// The maximum of a warp.
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

// The maximum of a block of WARPS warps.
template <int WARPS> __device__ __forceinline__ float block_max(float x) {
    __shared__ float parts[WARPS];
    x = warp_max(x);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < WARPS; i++) x = fmaxf(x, parts[i]);
    return x;
}

// The scale for a row's largest absolute value. Rows with NaN or infinity get a scale of NaN.
__device__ __forceinline__ RowScale row_scale(float largest) {
    if (largest == __uint_as_float(INFINITE_BITS)) return {0.0f, __uint_as_float(0x7fc00000u)};
    if (largest < 1e-30f) return {0.0f, 0.0f};
    return {448.0f / largest, largest / 448.0f};
}

// Quantizes eight elements.
__device__ __forceinline__ u64 round_fp8(const float (&v)[8], float inverse) {
    u64 bytes = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float a = v[2 * j] * inverse, b = v[2 * j + 1] * inverse;
        // Infinity times 0 is NaN and becomes 0.
        bytes |= (u64)round_fp8_pair(a == a ? a : 0.0f, b == b ? b : 0.0f) << 16 * j;
    }
    return bytes;
}
