// Rounding to int8.

// Rounds four values of at most 127, times `inverse`, the first into the lowest byte. A row with NaN or infinity has a scale of
// NaN, whatever its bytes are.
__device__ __forceinline__ unsigned round_int8(const float *v, float inverse) {
    // After adding 1.5 * 2^23, the lowest bits of a float are the rounded integer. Not fused: all backends round the product.
    const float SHIFT = 12582912.0f;
    unsigned bits[4];
#pragma unroll
    for (int j = 0; j < 4; j++) bits[j] = __float_as_uint(__fadd_rn(__fmul_rn(v[j], inverse), SHIFT));
    return __byte_perm(__byte_perm(bits[0], bits[1], 0x0040), __byte_perm(bits[2], bits[3], 0x0040), 0x5410);
}
