// Gradients of norms, rotary embeddings, SwiGLU and gates. The formulas are those of kiln_ops::TrainingBackend.

// One block per row, which stays in the cache between passes.
template <class T>
__device__ __forceinline__ void ada_layer_norm_backward(const T *dy, const T *x, const float *scale, const T *add, T *dx, int dim,
                                                        float eps) {
    long long first = (long long)blockIdx.x * dim;
    dy += first, x += first, dx += first;
    if (add) add += first;
    // Null pointers count as aligned.
    bool vector = dim % 8 == 0 && aligned(dy) && aligned(x) && aligned(scale) && aligned(add) && aligned(dx);
    float sum = 0.0f, v[8], g[8], a[8];
    for (int i = 8 * threadIdx.x; i < dim; i += 8 * blockDim.x) {
        load8(x, i, dim, vector, v);
#pragma unroll
        for (int j = 0; j < 8; j++) sum += v[j];
    }
    float mean = block_sum(sum) / dim, squares = 0.0f;
    for (int i = 8 * threadIdx.x; i < dim; i += 8 * blockDim.x) {
        load8(x, i, dim, vector, v);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float d = i + j < dim ? v[j] - mean : 0.0f;
            squares += d * d;
        }
    }
    float r = 1.0f / sqrtf(block_sum(squares) / dim + eps), sum_g = 0.0f, sum_gn = 0.0f;
    auto gradient = [&](int i) {
        load8(x, i, dim, vector, v);
        load8(dy, i, dim, vector, g);
        load8(scale, i, dim, vector, a);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = (v[j] - mean) * r, g[j] *= 1.0f + a[j];
    };
    for (int i = 8 * threadIdx.x; i < dim; i += 8 * blockDim.x) {
        gradient(i);
#pragma unroll
        for (int j = 0; j < 8; j++) sum_g += g[j], sum_gn += g[j] * v[j];
    }
    float mean_g = block_sum(sum_g) / dim, mean_gn = block_sum(sum_gn) / dim;
    for (int i = 8 * threadIdx.x; i < dim; i += 8 * blockDim.x) {
        gradient(i);
#pragma unroll
        for (int j = 0; j < 8; j++) g[j] = r * (g[j] - mean_g - v[j] * mean_gn);
        if (add) {
            load8(add, i, dim, vector, a);
#pragma unroll
            for (int j = 0; j < 8; j++) g[j] += a[j];
        }
        store8(dx, i, dim, vector, g);
    }
}

// One warp per head, as norm_rope of rope.cu. Without a weight (null), heads are only rotated back.
template <class T>
__device__ __forceinline__ void norm_rope_backward(const T *dy, const T *x, const float *weight, const float *cosines,
                                                   const float *sines, T *dx, long long tokens, int heads, int head_dim, int halves,
                                                   float eps) {
    long long head = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (head >= tokens * heads) return;
    int lane = threadIdx.x % 32, half = head_dim / 2;
    dy += head * head_dim, x += head * head_dim, dx += head * head_dim;
    cosines += head / heads * half;
    sines += head / heads * half;
    auto pair = [&](const T *from, int i, float &a, float &b) {
        if (halves)
            a = to_float(from[i]), b = to_float(from[i + half]);
        else
            load_pair(from + 2 * i, a, b);
    };
    // The gradient before the rotation, times the weight.
    auto gradient = [&](int i, float &a, float &b) {
        float p, q, c = cosines[i], s = sines[i];
        pair(dy, i, p, q);
        a = p * c + q * s, b = q * c - p * s;
        if (weight) a *= weight[halves ? i : 2 * i], b *= weight[halves ? i + half : 2 * i + 1];
    };
    float squares = 0.0f, dot = 0.0f, r = 1.0f, a, b, p, q;
    if (weight) {
        for (int i = lane; i < half; i += 32) {
            pair(x, i, a, b);
            gradient(i, p, q);
            squares += a * a + b * b;
            dot += a * p + b * q;
        }
        r = 1.0f / sqrtf(warp_sum(squares) / head_dim + eps);
        // The mean of g * n, times r for n = x r.
        dot = warp_sum(dot) * r / head_dim * r;
    }
    for (int i = lane; i < half; i += 32) {
        gradient(i, p, q);
        if (weight) {
            pair(x, i, a, b);
            p = r * (p - a * dot), q = r * (q - b * dot);
        }
        if (halves)
            dx[i] = from_float<T>(p), dx[i + half] = from_float<T>(q);
        else
            store_pair(dx + 2 * i, p, q);
    }
}

// Heads of 128, aligned, with a weight: sixteen lanes hold eight elements each of a head.
template <bool HALVES, class T>
__device__ __forceinline__ void norm_rope_backward_128(const T *dy, const T *x, const float *weight, const float *cosines,
                                                       const float *sines, T *dx, long long tokens, int heads, float eps) {
    long long head = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 16;
    int lane = threadIdx.x % 16;
    // Idle lanes stay for the others' shuffles.
    bool valid = head < tokens * heads;
    if (!valid) head = 0;
    long long at = head * 128 + 8 * lane, angle = head / heads * 64 + (HALVES ? 8 * (lane % 8) : 4 * lane);
    float g[8], v[8], w[8], c[8], s[8];
    load_vector(dy + at, g);
    load_vector(x + at, v);
    load_vector(weight + 8 * lane, w);
#pragma unroll
    for (int j = 0; j < (HALVES ? 8 : 4); j++) c[j] = cosines[angle + j], s[j] = sines[angle + j];
    float rotated[8], squares = 0.0f, dot = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        if (HALVES) {
            float other = __shfl_xor_sync(0xffffffffu, g[j], 8);
            rotated[j] = g[j] * c[j] + (lane < 8 ? other : -other) * s[j];
        } else {
            rotated[j] = g[j] * c[j / 2] + (j % 2 ? -g[j ^ 1] : g[j ^ 1]) * s[j / 2];
        }
    }
#pragma unroll
    for (int j = 0; j < 8; j++) {
        rotated[j] *= w[j];
        squares += v[j] * v[j];
        dot += v[j] * rotated[j];
    }
#pragma unroll
    for (int step = 8; step > 0; step /= 2) {
        squares += __shfl_xor_sync(0xffffffffu, squares, step);
        dot += __shfl_xor_sync(0xffffffffu, dot, step);
    }
    float r = rsqrtf(squares / 128 + eps);
    // The mean of g * n, times r for n = x r.
    dot = dot * r / 128 * r;
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = r * (rotated[j] - v[j] * dot);
    if (valid) store_vector(dx + at, v);
}

// dy is [rows, left_cols + cols]: its left columns are copied to d_left, the others go back through SwiGLU of x.
template <class T>
__device__ __forceinline__ void swiglu_backward(const T *dy, int left_cols, const T *x, T *d_left, T *dx, long long rows, int cols) {
    int left_chunks = (left_cols + 7) / 8, chunks = left_chunks + (cols + 7) / 8;
    long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= rows * chunks) return;
    long long row = at / chunks;
    int chunk = (int)(at % chunks);
    bool vector = cols % 8 == 0 && left_cols % 8 == 0 && aligned(dy) && aligned(x) && aligned(d_left) && aligned(dx);
    dy += row * (left_cols + cols);
    float g[8], a[8], u[8], da[8], du[8];
    if (chunk < left_chunks) {
        load8(dy, 8 * chunk, left_cols, vector, g);
        store8(d_left + row * left_cols, 8 * chunk, left_cols, vector, g);
        return;
    }
    int i = 8 * (chunk - left_chunks);
    load8(dy + left_cols, i, cols, vector, g);
    load8(x + row * 2 * cols, i, cols, vector, a);
    load8(x + row * 2 * cols + cols, i, cols, vector, u);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float sigmoid = 1.0f / (1.0f + expf(-a[j]));
        da[j] = g[j] * u[j] * sigmoid * (1.0f + a[j] * (1.0f - sigmoid));
        du[j] = g[j] * a[j] * sigmoid;
    }
    store8(dx + row * 2 * cols, i, cols, vector, da);
    store8(dx + row * 2 * cols + cols, i, cols, vector, du);
}

// The gradient 2 scale (x - y) of scale * sum (x - y)^2, and that sum over one range of elements per block.
extern "C" __global__ void squared_error(const float *x, const float *y, float *dx, float *partials, long long n, long long per_block,
                                         float scale) {
    long long first = (long long)blockIdx.x * per_block, end = first + per_block < n ? first + per_block : n;
    float sum = 0.0f;
    for (long long i = first + threadIdx.x; i < end; i += blockDim.x) {
        float d = x[i] - y[i];
        sum += d * d;
        dx[i] = 2.0f * scale * d;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) partials[blockIdx.x] = scale * sum;
}

#define KERNELS(T, name)                                                                                              \
    extern "C" __global__ void ada_layer_norm_backward_##name(const T *dy, const T *x, const float *scale,            \
                                                              const T *add, T *dx, int dim, float eps) {              \
        ada_layer_norm_backward(dy, x, scale, add, dx, dim, eps);                                                     \
    }                                                                                                                 \
    extern "C" __global__ void norm_rope_backward_##name(const T *dy, const T *x, const float *weight,                \
                                                         const float *cosines, const float *sines, T *dx,             \
                                                         long long tokens, int heads, int head_dim, int halves,       \
                                                         float eps) {                                                 \
        norm_rope_backward(dy, x, weight, cosines, sines, dx, tokens, heads, head_dim, halves, eps);                  \
    }                                                                                                                 \
    extern "C" __global__ void norm_rope_backward_128_##name(const T *dy, const T *x, const float *weight,            \
                                                             const float *cosines, const float *sines, T *dx,         \
                                                             long long tokens, int heads, int halves, float eps) {    \
        if (halves)                                                                                                   \
            norm_rope_backward_128<true>(dy, x, weight, cosines, sines, dx, tokens, heads, eps);                      \
        else                                                                                                          \
            norm_rope_backward_128<false>(dy, x, weight, cosines, sines, dx, tokens, heads, eps);                     \
    }                                                                                                                 \
    extern "C" __global__ void swiglu_backward_##name(const T *dy, int left_cols, const T *x, T *d_left, T *dx,       \
                                                      long long rows, int cols) {                                     \
        swiglu_backward(dy, left_cols, x, d_left, dx, rows, cols);                                                    \
    }

KERNELS(float, f32)
KERNELS(bf16, bf16)
