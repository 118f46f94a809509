// 4-bit floats (e2m1): sign, 2 exponent bits, 1 mantissa bit.

__device__ __forceinline__ float e2m1_to_float(int code) {
    int exponent = code >> 1 & 3, fraction = code & 1;
    float y = exponent ? (float)((2 + fraction) << exponent) * 0.25f : 0.5f * fraction;
    return code & 8 ? -y : y;
}

// Rounds to the nearest, ties to even; saturates at 6. NaN becomes 0.
__device__ __forceinline__ unsigned round_e2m1(float x) {
    float a = fabsf(x);
    unsigned code = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
    return code | (unsigned)(x < 0.0f) << 3;
}
