// Norms over the last axis.

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

// Vectors that the lanes of a row's warps hold, and threads of a block: two rows of a warp each, or one of SPREAD warps.
const int HELD = 16, HELD_THREADS = 64, SPREAD = 4;

// A row of whole vectors in the registers of WARPS warps: read once, and all at once.
template <int WARPS, class T> struct Held {
    static const int COUNT = HELD / WARPS, LANES = 32 * WARPS;
    Eight<T> x[COUNT];

    // Where a lane's vector n begins.
    static __device__ __forceinline__ int at(int n) { return 8 * (threadIdx.x % LANES + LANES * n); }

    // The row itself; there may be none.
    static __device__ __forceinline__ int row() { return WARPS == 1 ? blockIdx.x * (HELD_THREADS / 32) + threadIdx.x / 32 : blockIdx.x; }

    __device__ __forceinline__ Held(const T *row, int dim) {
#pragma unroll
        for (int n = 0; n < COUNT; n++)
            if (at(n) < dim) x[n] = load_eight(row + at(n));
    }

    // f(where, elements) of every vector.
    template <class F> __device__ __forceinline__ void each(int dim, F f) const {
#pragma unroll
        for (int n = 0; n < COUNT; n++) {
            if (at(n) < dim) {
                float v[8];
                widen(x[n], v);
                f(at(n), v);
            }
        }
    }

    // The same; what f leaves in the elements is held from then on, rounded as it would be stored.
    template <class F> __device__ __forceinline__ void change(int dim, F f) {
#pragma unroll
        for (int n = 0; n < COUNT; n++) {
            if (at(n) < dim) {
                float v[8];
                widen(x[n], v);
                f(at(n), v);
                x[n] = narrow<T>(v);
            }
        }
    }

    // The row's sum of f(element).
    template <class F> __device__ __forceinline__ float sum(int dim, F f) const {
        float sums[8] = {};
        each(dim, [&](int, const float (&v)[8]) {
#pragma unroll
            for (int j = 0; j < 8; j++) sums[j] += f(v[j]);
        });
        float all = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
        return WARPS == 1 ? warp_sum(all) : block_sum(all);
    }

    __device__ __forceinline__ void store(T *row, int dim) const {
#pragma unroll
        for (int n = 0; n < COUNT; n++)
            if (at(n) < dim) store_eight(row + at(n), x[n]);
    }

    // The row normalised, times 1 + scale, plus shift.
    __device__ __forceinline__ void ada_layer_norm(const float *scale, const float *shift, int dim, float eps) {
        float mean = sum(dim, [](float x) { return x; }) / dim;
        float factor = 1.0f / sqrtf(sum(dim, [mean](float x) { return (x - mean) * (x - mean); }) / dim + eps);
        change(dim, [&](int i, float (&v)[8]) {
            float a[8], b[8];
            load_vector(scale + i, a);
            load_vector(shift + i, b);
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] = (v[j] - mean) * factor * (1.0f + a[j]) + b[j];
        });
    }
};

template <int WARPS, class T>
__device__ __forceinline__ void ada_layer_norm_held(const T *x, const float *scale, const float *shift, T *out, int rows, int dim,
                                                    float eps) {
    int at = Held<WARPS, T>::row();
    if (at >= rows) return;
    long long first = (long long)at * dim;
    Held<WARPS, T> row(x + first, dim);
    row.ada_layer_norm(scale, shift, dim, eps);
    row.store(out + first, dim);
}

// The same in 8-bit floats, `padded` bytes a row: those values, rounded as they would be stored, rounded once more.
template <int WARPS, class T>
__device__ __forceinline__ void ada_layer_norm_fp8(const T *x, const float *scale, const float *shift, unsigned char *q,
                                                   float *scales, int rows, int dim, int padded, float eps) {
    int at = Held<WARPS, T>::row();
    if (at >= rows) return;
    Held<WARPS, T> row(x + (long long)at * dim, dim);
    q += (long long)at * padded;
    row.ada_layer_norm(scale, shift, dim, eps);
    float largest = 0.0f;
    row.each(dim, [&](int, const float (&v)[8]) { take_largest(largest, v); });
    RowScale to = row_scale(WARPS == 1 ? warp_largest(largest) : block_largest<WARPS>(largest));
    row.each(dim, [&](int i, const float (&v)[8]) { *(u64 *)(q + i) = round_fp8(v, to.inverse); });
    const int LANES = 32 * WARPS;
    for (int i = dim + 8 * (threadIdx.x % LANES); i < padded; i += 8 * LANES) *(u64 *)(q + i) = 0;
    if (threadIdx.x % LANES == 0) scales[at] = to.scale;
}

template <int WARPS, class T>
__device__ __forceinline__ void rms_norm_held(const T *x, const float *weight, T *out, int rows, int dim, float eps) {
    int at = Held<WARPS, T>::row();
    if (at >= rows) return;
    long long first = (long long)at * dim;
    Held<WARPS, T> row(x + first, dim);
    float factor = 1.0f / sqrtf(row.sum(dim, [](float x) { return x * x; }) / dim + eps);
    row.change(dim, [&](int i, float (&v)[8]) {
        float a[8];
        load_vector(weight + i, a);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = v[j] * factor * a[j];
    });
    row.store(out + first, dim);
}

// Rows that are few are spread over more warps.
#define BY_WARPS(f, ...)                                                                                             \
    if (blockDim.x == 32 * SPREAD)                                                                                   \
        f<SPREAD>(__VA_ARGS__);                                                                                      \
    else                                                                                                             \
        f<1>(__VA_ARGS__);

#define KERNELS(T, name)                                                                                             \
    extern "C" __global__ void ada_layer_norm_##name(const T *x, const float *scale, const float *shift, T *out,     \
                                                     int dim, float eps) {                                           \
        ada_layer_norm(x, scale, shift, out, dim, eps);                                                              \
    }                                                                                                                \
    extern "C" __global__ void rms_norm_##name(const T *x, const float *weight, T *out, int dim, float eps) {        \
        rms_norm(x, weight, out, dim, eps);                                                                          \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(128) ada_layer_norm_held_##name(                                    \
        const T *x, const float *scale, const float *shift, T *out, int rows, int dim, float eps) {                  \
        BY_WARPS(ada_layer_norm_held, x, scale, shift, out, rows, dim, eps)                                          \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(128) ada_layer_norm_fp8_##name(                                     \
        const T *x, const float *scale, const float *shift, unsigned char *q, float *scales, int rows, int dim,      \
        int padded, float eps) {                                                                                     \
        BY_WARPS(ada_layer_norm_fp8, x, scale, shift, q, scales, rows, dim, padded, eps)                             \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(128) rms_norm_held_##name(const T *x, const float *weight, T *out,  \
                                                                          int rows, int dim, float eps) {            \
        BY_WARPS(rms_norm_held, x, weight, out, rows, dim, eps)                                                      \
    }

KERNELS(float, f32)
KERNELS(bf16, bf16)
