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

const int HELD = 4, HELD_THREADS = 128;

// The two norms again for rows of whole vectors, of which a thread holds up to HELD: each is read once, and all at once.
template <class T> struct Held {
    float v[HELD][8];

    __device__ __forceinline__ Held(const T *x, int dim) {
#pragma unroll
        for (int n = 0; n < HELD; n++) {
            int i = 8 * (threadIdx.x + n * HELD_THREADS);
            if (i < dim) load_vector(x + i, v[n]);
        }
    }

    // The block's sum of f(element).
    template <class F> __device__ __forceinline__ float sum(int dim, F f) const {
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < HELD; n++) {
            if (8 * (threadIdx.x + n * HELD_THREADS) < dim) {
#pragma unroll
                for (int j = 0; j < 8; j++) sum += f(v[n][j]);
            }
        }
        return block_sum(sum);
    }

    // The row normalised, times 1 + scale, plus shift.
    __device__ __forceinline__ void ada_layer_norm(const float *scale, const float *shift, int dim, float eps) {
        float mean = sum(dim, [](float x) { return x; }) / dim;
        float factor = 1.0f / sqrtf(sum(dim, [mean](float x) { return (x - mean) * (x - mean); }) / dim + eps);
#pragma unroll
        for (int n = 0; n < HELD; n++) {
            int i = 8 * (threadIdx.x + n * HELD_THREADS);
            if (i < dim) {
                float a[8], b[8];
                load_vector(scale + i, a);
                load_vector(shift + i, b);
#pragma unroll
                for (int j = 0; j < 8; j++) v[n][j] = (v[n][j] - mean) * factor * (1.0f + a[j]) + b[j];
            }
        }
    }
};

template <class T>
__device__ __forceinline__ void ada_layer_norm_held(const T *x, const float *scale, const float *shift, T *out, int dim, float eps) {
    Held<T> row(x + (long long)blockIdx.x * dim, dim);
    out += (long long)blockIdx.x * dim;
    row.ada_layer_norm(scale, shift, dim, eps);
#pragma unroll
    for (int n = 0; n < HELD; n++) {
        int i = 8 * (threadIdx.x + n * HELD_THREADS);
        if (i < dim) store_vector(out + i, row.v[n]);
    }
}

// The same in 8-bit floats, `padded` bytes a row: those values, rounded as they would be stored, rounded once more.
template <class T>
__device__ __forceinline__ void ada_layer_norm_fp8(const T *x, const float *scale, const float *shift, unsigned char *q,
                                                   float *scales, int dim, int padded, float eps) {
    Held<T> row(x + (long long)blockIdx.x * dim, dim);
    q += (long long)blockIdx.x * padded;
    row.ada_layer_norm(scale, shift, dim, eps);
    float largest = 0.0f;
#pragma unroll
    for (int n = 0; n < HELD; n++) {
        if (8 * (threadIdx.x + n * HELD_THREADS) < dim) {
#pragma unroll
            for (int j = 0; j < 8; j++) row.v[n][j] = to_float(from_float<T>(row.v[n][j]));
            take_largest(largest, row.v[n]);
        }
    }
    RowScale to = row_scale<HELD_THREADS / 32>(largest);
#pragma unroll
    for (int n = 0; n < HELD; n++) {
        int i = 8 * (threadIdx.x + n * HELD_THREADS);
        if (i < dim) *(u64 *)(q + i) = round_fp8(row.v[n], to.inverse);
    }
    for (int i = dim + 8 * threadIdx.x; i < padded; i += 8 * HELD_THREADS) *(u64 *)(q + i) = 0;
    if (threadIdx.x == 0) scales[blockIdx.x] = to.scale;
}

template <class T> __device__ __forceinline__ void rms_norm_held(const T *x, const float *weight, T *out, int dim, float eps) {
    Held<T> row(x + (long long)blockIdx.x * dim, dim);
    out += (long long)blockIdx.x * dim;
    float factor = 1.0f / sqrtf(row.sum(dim, [](float x) { return x * x; }) / dim + eps);
#pragma unroll
    for (int n = 0; n < HELD; n++) {
        int i = 8 * (threadIdx.x + n * HELD_THREADS);
        if (i < dim) {
            float a[8];
            load_vector(weight + i, a);
#pragma unroll
            for (int j = 0; j < 8; j++) a[j] = row.v[n][j] * factor * a[j];
            store_vector(out + i, a);
        }
    }
}

const int ROPE_HEADS = 8;

// Heads of 128: sixteen lanes have eight elements each of up to ROPE_HEADS heads of one token, whose angles are read once.
template <class T>
__device__ __forceinline__ void norm_rope_128(const T *x, const float *weight, const float *cosines, const float *sines, T *out,
                                              long long tokens, int heads, int halves, float eps) {
    int parts = (heads + ROPE_HEADS - 1) / ROPE_HEADS, lane = threadIdx.x % 16;
    long long at = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 16;
    // Lanes without work stay, for the others' sums.
    bool there = at < tokens * parts;
    long long token = there ? at / parts : 0;
    int first = there ? (int)(at % parts) * ROPE_HEADS : heads;
    x += (token * heads + first) * 128 + 8 * lane;
    out += (token * heads + first) * 128 + 8 * lane;
    float v[ROPE_HEADS][8], w[8], c[8], s[8];
#pragma unroll
    for (int h = 0; h < ROPE_HEADS; h++) {
#pragma unroll
        for (int j = 0; j < 8; j++) v[h][j] = 0.0f;
        if (first + h < heads) load_vector(x + h * 128, v[h]);
    }
    load_vector(weight + 8 * lane, w);
    if (halves) {
        load_vector(cosines + token * 64 + 8 * (lane % 8), c);
        load_vector(sines + token * 64 + 8 * (lane % 8), s);
    } else {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            c[2 * j] = c[2 * j + 1] = cosines[token * 64 + 4 * lane + j];
            s[2 * j] = s[2 * j + 1] = sines[token * 64 + 4 * lane + j];
        }
    }
#pragma unroll
    for (int h = 0; h < ROPE_HEADS; h++) {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; j++) sum += v[h][j] * v[h][j];
#pragma unroll
        for (int step = 8; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        float factor = 1.0f / sqrtf(sum / 128 + eps), r[8];
#pragma unroll
        for (int j = 0; j < 8; j++) v[h][j] *= factor * w[j];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            if (halves) {
                float other = __shfl_xor_sync(0xffffffffu, v[h][j], 8);
                r[j] = v[h][j] * c[j] + (lane < 8 ? -other : other) * s[j];
            } else {
                r[j] = v[h][j] * c[j] + (j % 2 ? v[h][j ^ 1] : -v[h][j ^ 1]) * s[j];
            }
        }
        if (first + h < heads) store_vector(out + h * 128, r);
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
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(128) ada_layer_norm_held_##name(                                    \
        const T *x, const float *scale, const float *shift, T *out, int dim, float eps) {                            \
        ada_layer_norm_held(x, scale, shift, out, dim, eps);                                                         \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(128) ada_layer_norm_fp8_##name(                                     \
        const T *x, const float *scale, const float *shift, unsigned char *q, float *scales, int dim, int padded,    \
        float eps) {                                                                                                 \
        ada_layer_norm_fp8(x, scale, shift, q, scales, dim, padded, eps);                                            \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(128) rms_norm_held_##name(const T *x, const float *weight, T *out,   \
                                                                           int dim, float eps) {                     \
        rms_norm_held(x, weight, out, dim, eps);                                                                     \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(128) norm_rope_128_##name(                                          \
        const T *x, const float *weight, const float *cosines, const float *sines, T *out, long long tokens,         \
        int heads, int halves, float eps) {                                                                          \
        norm_rope_128(x, weight, cosines, sines, out, tokens, heads, halves, eps);                                   \
    }

KERNELS(float, f32)
KERNELS(bf16, bf16)
