// The rotary embedding of heads of 128, of which sixteen lanes have eight elements each.

// The sum of a head's sixteen lanes.
__device__ __forceinline__ float head_sum(float x) {
#pragma unroll
    for (int step = 8; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

// A lane's angles of a token. Pairs are neighbours, or with HALVES an element and the one half a head further.
template <bool HALVES> struct HeadAngles {
    static const int COUNT = HALVES ? 8 : 4;
    float c[COUNT], s[COUNT];

    // From the token's row of cosines, and of sines.
    __device__ __forceinline__ HeadAngles(const float *cosines, const float *sines) {
        int lane = threadIdx.x % 16, angle = HALVES ? 8 * (lane % 8) : 4 * lane;
#pragma unroll
        for (int j = 0; j < COUNT; j += 4) {
            float4 a = *(const float4 *)(cosines + angle + j), b = *(const float4 *)(sines + angle + j);
            c[j] = a.x, c[j + 1] = a.y, c[j + 2] = a.z, c[j + 3] = a.w;
            s[j] = b.x, s[j + 1] = b.y, s[j + 2] = b.z, s[j + 3] = b.w;
        }
    }
};

// The rotation of a token's heads by neighbours, after a norm with a weight but without its factor.
struct WeightedAngles {
    float own[8], other[8];

    __device__ __forceinline__ WeightedAngles(const float *weight, const float *cosines, const float *sines) {
        float w[8];
        load_vector(weight + threadIdx.x % 16 * 8, w);
        HeadAngles<false> angles(cosines, sines);
#pragma unroll
        for (int j = 0; j < 8; j++) own[j] = w[j] * angles.c[j / 2], other[j] = w[j ^ 1] * (j % 2 ? angles.s[j / 2] : -angles.s[j / 2]);
    }

    // Rotates eight elements, and returns the norm's factor.
    __device__ __forceinline__ float rotate(float (&v)[8], float eps) const {
        float sum = 0.0f, r[8];
#pragma unroll
        for (int j = 0; j < 8; j++) sum += v[j] * v[j];
#pragma unroll
        for (int j = 0; j < 8; j++) r[j] = v[j] * own[j] + v[j ^ 1] * other[j];
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = r[j];
        return rsqrtf(head_sum(sum) / 128 + eps);
    }
};
