// Elementwise functions of one to three tensors, eight elements per thread.

template <class T> __device__ __forceinline__ void unary(const T *x, T *out, long long n, int f) {
    long long i = 8 * ((long long)blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= n) return;
    bool vector = i + 8 <= n && aligned(x) && aligned(out);
    float v[8];
    load8(x, i, n, vector, v);
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = activate(v[j], f);
    store8(out, i, n, vector, v);
}

// 0: x + s y; 1: s y + (1 - s) x; 2: y + s (x - y).
template <class T>
__device__ __forceinline__ void binary(const T *x, const T *y, T *out, long long n, int f, float s) {
    long long i = 8 * ((long long)blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= n) return;
    bool vector = i + 8 <= n && aligned(x) && aligned(y) && aligned(out);
    float a[8], b[8];
    load8(x, i, n, vector, a);
    load8(y, i, n, vector, b);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        if (f == 0) a[j] = a[j] + s * b[j];
        if (f == 1) a[j] = s * b[j] + (1.0f - s) * a[j];
        if (f == 2) a[j] = b[j] + s * (a[j] - b[j]);
    }
    store8(out, i, n, vector, a);
}

// SwiGLU: silu of the first `cols` columns of x times the other `cols`, with the `left_cols` columns of `left` on its left.
template <class T>
__device__ __forceinline__ void swiglu(const T *left, int left_cols, const T *x, T *out, long long rows, int cols) {
    int left_chunks = (left_cols + 7) / 8, chunks = left_chunks + (cols + 7) / 8;
    long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= rows * chunks) return;
    long long row = at / chunks;
    int chunk = (int)(at % chunks);
    bool vector = cols % 8 == 0 && left_cols % 8 == 0 && aligned(left) && aligned(x) && aligned(out);
    out += row * (left_cols + cols);
    float a[8], b[8];
    if (chunk < left_chunks) {
        load8(left + row * left_cols, 8 * chunk, left_cols, vector, a);
        store8(out, 8 * chunk, left_cols, vector, a);
        return;
    }
    int i = 8 * (chunk - left_chunks);
    const T *gate = x + row * 2 * cols;
    load8(gate, i, cols, vector, a);
    load8(gate + cols, i, cols, vector, b);
#pragma unroll
    for (int j = 0; j < 8; j++) a[j] = activate_as<T>(a[j], 1) * b[j];
    store8(out + left_cols, i, cols, vector, a);
}

template <class T>
__device__ __forceinline__ void affine(const T *x, const float *scale, const float *shift, T *out, long long rows, int cols) {
    int chunks = (cols + 7) / 8;
    long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= rows * chunks) return;
    long long row = at / chunks;
    int i = 8 * (int)(at % chunks);
    bool vector = cols % 8 == 0 && aligned(x) && aligned(out) && aligned(scale) && aligned(shift);
    float v[8], a[8], b[8];
    load8(x + row * cols, i, cols, vector, v);
    load8(scale, i, cols, vector, a);
    load8(shift, i, cols, vector, b);
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = v[j] * a[j] + b[j];
    store8(out + row * cols, i, cols, vector, v);
}

template <class T>
__device__ __forceinline__ void blend_rows(const T *x, const T *y, const float *mask, T *out, long long rows, int cols) {
    int chunks = (cols + 7) / 8;
    long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= rows * chunks) return;
    long long row = at / chunks;
    int i = 8 * (int)(at % chunks);
    bool vector = cols % 8 == 0 && aligned(x) && aligned(y) && aligned(out);
    float m = mask[row], a[8], b[8];
    load8(x + row * cols, i, cols, vector, a);
    load8(y + row * cols, i, cols, vector, b);
#pragma unroll
    for (int j = 0; j < 8; j++) a[j] = (1.0f - m) * a[j] + m * b[j];
    store8(out + row * cols, i, cols, vector, a);
}

template <class S, class T> __device__ __forceinline__ void cast(const S *x, T *out, long long n) {
    long long i = 8 * ((long long)blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= n) return;
    bool vector = i + 8 <= n && aligned(x) && aligned(out);
    float v[8];
    load8(x, i, n, vector, v);
    store8(out, i, n, vector, v);
}

#define KERNELS(T, name)                                                                                              \
    extern "C" __global__ void unary_##name(const T *x, T *out, long long n, int f) { unary(x, out, n, f); }          \
    extern "C" __global__ void binary_##name(const T *x, const T *y, T *out, long long n, int f, float s) {           \
        binary(x, y, out, n, f, s);                                                                                   \
    }                                                                                                                 \
    extern "C" __global__ void swiglu_##name(const T *left, int left_cols, const T *x, T *out, long long rows,        \
                                             int cols) {                                                              \
        swiglu(left, left_cols, x, out, rows, cols);                                                                  \
    }                                                                                                                 \
    extern "C" __global__ void affine_##name(const T *x, const float *scale, const float *shift, T *out,              \
                                             long long rows, int cols) {                                              \
        affine(x, scale, shift, out, rows, cols);                                                                     \
    }                                                                                                                 \
    extern "C" __global__ void blend_rows_##name(const T *x, const T *y, const float *mask, T *out, long long rows,   \
                                                 int cols) {                                                          \
        blend_rows(x, y, mask, out, rows, cols);                                                                      \
    }

KERNELS(float, f32)
KERNELS(bf16, bf16)

extern "C" __global__ void cast_f32_bf16(const float *x, bf16 *out, long long n) { cast(x, out, n); }
extern "C" __global__ void cast_bf16_f32(const bf16 *x, float *out, long long n) { cast(x, out, n); }
extern "C" __global__ void cast_f16_f32(const f16 *x, float *out, long long n) { cast(x, out, n); }
extern "C" __global__ void cast_f16_bf16(const f16 *x, bf16 *out, long long n) { cast(x, out, n); }
