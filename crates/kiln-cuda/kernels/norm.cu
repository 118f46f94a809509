// Norms over the last axis, and the norm of heads with the rotary embedding after it.

// One block a row.
template <class T>
__device__ __forceinline__ void ada_layer_norm(const T *x, const float *scale, const float *shift, T *out, int dim, float eps) {
    x += (long long)blockIdx.x * dim;
    out += (long long)blockIdx.x * dim;
    bool vector = dim % 8 == 0 && aligned(x) && aligned(out) && aligned(scale) && aligned(shift);
    float sum = 0.0f, v[8];
    for (int i = 8 * threadIdx.x; i < dim; i += 8 * blockDim.x) {
        load8(x, i, dim, vector, v);
#pragma unroll
        for (int j = 0; j < 8; j++) sum += v[j];
    }
    float mean = block_sum(sum) / dim;
    // The row is still in the cache; a variance from sums of squares would lose its digits when the mean is large.
    float squares = 0.0f;
    for (int i = 8 * threadIdx.x; i < dim; i += 8 * blockDim.x) {
        load8(x, i, dim, vector, v);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float d = i + j < dim ? v[j] - mean : 0.0f;
            squares += d * d;
        }
    }
    float factor = 1.0f / sqrtf(block_sum(squares) / dim + eps);
    for (int i = 8 * threadIdx.x; i < dim; i += 8 * blockDim.x) {
        float a[8], b[8];
        load8(x, i, dim, vector, v);
        load8(scale, i, dim, vector, a);
        load8(shift, i, dim, vector, b);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = (v[j] - mean) * factor * (1.0f + a[j]) + b[j];
        store8(out, i, dim, vector, v);
    }
}

template <class T> __device__ __forceinline__ void rms_norm(const T *x, const float *weight, T *out, int dim, float eps) {
    x += (long long)blockIdx.x * dim;
    out += (long long)blockIdx.x * dim;
    bool vector = dim % 8 == 0 && aligned(x) && aligned(out) && aligned(weight);
    float sum = 0.0f, v[8];
    for (int i = 8 * threadIdx.x; i < dim; i += 8 * blockDim.x) {
        load8(x, i, dim, vector, v);
#pragma unroll
        for (int j = 0; j < 8; j++) sum += v[j] * v[j];
    }
    float factor = 1.0f / sqrtf(block_sum(sum) / dim + eps);
    for (int i = 8 * threadIdx.x; i < dim; i += 8 * blockDim.x) {
        float a[8];
        load8(x, i, dim, vector, v);
        load8(weight, i, dim, vector, a);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = v[j] * factor * a[j];
        store8(out, i, dim, vector, v);
    }
}

// One warp a head. A lane's pairs are two neighbours, or an element and the one half a head further.
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
    // Heads have an even number of elements, so neighbours lie together in 4 bytes.
    auto pair = [&](int i, float &a, float &b) {
        if (halves)
            a = to_float(x[i]), b = to_float(x[i + half]);
        else
            load_pair(x + 2 * i, a, b);
    };
    float sum = 0.0f, a, b;
    for (int i = lane; i < half; i += 32) {
        pair(i, a, b);
        sum += a * a + b * b;
    }
    float factor = 1.0f / sqrtf(warp_sum(sum) / head_dim + eps);
    for (int i = lane; i < half; i += 32) {
        int first = halves ? i : 2 * i, second = halves ? i + half : 2 * i + 1;
        pair(i, a, b);
        a *= factor * weight[first];
        b *= factor * weight[second];
        float c = cosines[i], s = sines[i];
        if (halves)
            out[first] = from_float<T>(a * c - b * s), out[second] = from_float<T>(a * s + b * c);
        else
            store_pair(out + first, a * c - b * s, a * s + b * c);
    }
}

#define KERNELS(T, name)                                                                                             \
    extern "C" __global__ void ada_layer_norm_##name(const T *x, const float *scale, const float *shift, T *out,      \
                                                     int dim, float eps) {                                           \
        ada_layer_norm(x, scale, shift, out, dim, eps);                                                              \
    }                                                                                                                \
    extern "C" __global__ void rms_norm_##name(const T *x, const float *weight, T *out, int dim, float eps) {         \
        rms_norm(x, weight, out, dim, eps);                                                                          \
    }                                                                                                                \
    extern "C" __global__ void norm_rope_##name(const T *x, const float *weight, const float *cosines,                \
                                                const float *sines, T *out, long long tokens, int heads,             \
                                                int head_dim, int halves, float eps) {                               \
        norm_rope(x, weight, cosines, sines, out, tokens, heads, head_dim, halves, eps);                             \
    }

KERNELS(float, f32)
KERNELS(bf16, bf16)
