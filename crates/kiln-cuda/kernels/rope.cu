// RMS norm of heads, fused with the rotary embedding. Without a weight (null), heads are only rotated.

#include "rope.cuh"

const int HEADS_PER_GROUP = 4;

// Heads of 128: sixteen lanes hold eight elements each of up to HEADS_PER_GROUP heads of one token and share its angles.
template <bool HALVES, class T>
__device__ __forceinline__ void norm_rope_128(const T *x, const float *weight, T *out, int heads, const float *cosines,
                                              const float *sines, int tokens, float eps) {
    int head_groups = (heads + HEADS_PER_GROUP - 1) / HEADS_PER_GROUP, lane = threadIdx.x % 16;
    int at = (blockIdx.x * blockDim.x + threadIdx.x) / 16;
    // Idle lanes stay for the others' shuffles.
    bool valid = at < tokens * head_groups;
    long long token = valid ? at / head_groups : 0;
    int first = valid ? at % head_groups * HEADS_PER_GROUP : heads;
    x += (token * heads + first) * 128 + 8 * lane;
    out += (token * heads + first) * 128 + 8 * lane;
    Vec8<T> vectors[HEADS_PER_GROUP];
#pragma unroll
    for (int h = 0; h < HEADS_PER_GROUP; h++) {
        float zeros[8] = {};
        vectors[h] = narrow<T>(zeros);
        if (first + h < heads) vectors[h] = load_vec8(x + h * 128);
    }
    float w[8];
    if (weight) load_vector(weight + 8 * lane, w);
    HeadAngles<HALVES> angles(cosines + token * 64, sines + token * 64);
#pragma unroll
    for (int h = 0; h < HEADS_PER_GROUP; h++) {
        float v[8], r[8], sum = 0.0f;
        widen(vectors[h], v);
        if (weight) {
#pragma unroll
            for (int j = 0; j < 8; j++) sum += v[j] * v[j];
            // rsqrtf has no branch for special values, so that the heads' work overlaps.
            float factor = rsqrtf(head_sum(sum) / 128 + eps);
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] *= factor * w[j];
        }
#pragma unroll
        for (int j = 0; j < 8; j++) {
            if (HALVES) {
                float other = __shfl_xor_sync(0xffffffffu, v[j], 8);
                r[j] = v[j] * angles.c[j % angles.COUNT] + (lane < 8 ? -other : other) * angles.s[j % angles.COUNT];
            } else {
                r[j] = v[j] * angles.c[j / 2] + (j % 2 ? v[j ^ 1] : -v[j ^ 1]) * angles.s[j / 2];
            }
        }
        if (first + h < heads) store_vector(out + h * 128, r);
    }
}

// Queries and keys of the same tokens, each with its own number of heads.
template <class T>
__device__ __forceinline__ void norm_rope_qk(const T *x, const float *weight, T *out, int heads, const T *k, const float *k_weight,
                                               T *k_out, int k_heads, const float *cosines, const float *sines, int tokens,
                                               int halves, float eps) {
    if (blockIdx.y) x = k, weight = k_weight, out = k_out, heads = k_heads;
    if (halves)
        norm_rope_128<true>(x, weight, out, heads, cosines, sines, tokens, eps);
    else
        norm_rope_128<false>(x, weight, out, heads, cosines, sines, tokens, eps);
}

// One warp per head. A lane's pairs are adjacent elements, or an element and the one half a head further.
template <class T>
__device__ __forceinline__ void norm_rope(const T *x, const float *weight, const float *cosines, const float *sines, T *out,
                                          long long tokens, int heads, int head_dim, int halves, float eps) {
    long long head = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (head >= tokens * heads) return;
    int lane = threadIdx.x % 32, half = head_dim / 2;
    long long token = head / heads;
    x += head * head_dim;
    out += head * head_dim;
    cosines += token * half;
    sines += token * half;
    // Heads have an even number of elements, so pairs are aligned to 4 bytes.
    auto pair = [&](int i, float &a, float &b) {
        if (halves)
            a = to_float(x[i]), b = to_float(x[i + half]);
        else
            load_pair(x + 2 * i, a, b);
    };
    float sum = 0.0f, factor = 1.0f, a, b;
    if (weight) {
        for (int i = lane; i < half; i += 32) {
            pair(i, a, b);
            sum += a * a + b * b;
        }
        factor = 1.0f / sqrtf(warp_sum(sum) / head_dim + eps);
    }
    for (int i = lane; i < half; i += 32) {
        int first = halves ? i : 2 * i, second = halves ? i + half : 2 * i + 1;
        pair(i, a, b);
        if (weight) a *= factor * weight[first], b *= factor * weight[second];
        float c = cosines[i], s = sines[i];
        if (halves)
            out[first] = from_float<T>(a * c - b * s), out[second] = from_float<T>(a * s + b * c);
        else
            store_pair(out + first, a * c - b * s, a * s + b * c);
    }
}

#define KERNELS(T, name)                                                                                              \
    extern "C" __global__ void norm_rope_##name(const T *x, const float *weight, const float *cosines,                \
                                                const float *sines, T *out, long long tokens, int heads,              \
                                                int head_dim, int halves, float eps) {                                \
        norm_rope(x, weight, cosines, sines, out, tokens, heads, head_dim, halves, eps);                              \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(128) norm_rope_128_##name(                                           \
        const T *x, const float *weight, T *out, int heads, const T *k, const float *k_weight, T *k_out,              \
        int k_heads, const float *cosines, const float *sines, int tokens, int halves, float eps) {                   \
        norm_rope_qk(x, weight, out, heads, k, k_weight, k_out, k_heads, cosines, sines, tokens, halves, eps);        \
    }

KERNELS(float, f32)
KERNELS(bf16, bf16)
