// Rounding to int8.

// Rounds four values, the first into the lowest byte.
__device__ __forceinline__ unsigned round_int8(const float *v, float inverse) {
    unsigned bytes = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float x = rintf(v[j] * inverse);
        // Infinity times 0 is NaN and becomes 0.
        bytes |= (unsigned)(unsigned char)(signed char)(x >= -127.0f && x <= 127.0f ? x : 0.0f) << 8 * j;
    }
    return bytes;
}
