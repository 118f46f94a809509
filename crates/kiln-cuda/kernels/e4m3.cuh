// Rounding to fp8 (e4m3).

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

// Quantizes eight elements. A row with NaN or infinity has a scale of NaN, whatever its bytes are.
__device__ __forceinline__ u64 round_fp8(const float (&v)[8], float inverse) {
    u64 bytes = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) bytes |= (u64)round_fp8_pair(v[2 * j] * inverse, v[2 * j + 1] * inverse) << 16 * j;
    return bytes;
}
