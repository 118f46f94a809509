// Layer norm and RMS norm over the last axis.

#include "row_scale.cuh"
#include "e4m3.cuh"
#include "int8.cuh"
#include "rotation.cuh"

// One block per row.
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
    // A second pass over the cached row: a variance from sums of squares would cancel when the mean is large.
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

// Threads of a row's block, and vectors that a thread has of it. One warp per row, or several rows per block with scale and shift in
// registers, take 25 % longer.
const int ROW_THREADS = 128, ROW_VECTORS = 4;

// A row of whole vectors in the registers of a block: read once, with all loads in flight.
template <class T> struct RegisterRow {
    Vec8<T> x[ROW_VECTORS];

    // First element of a thread's vector n.
    static __device__ __forceinline__ int at(int n) { return 8 * (threadIdx.x + ROW_THREADS * n); }

    __device__ __forceinline__ RegisterRow(const T *row, int dim) {
#pragma unroll
        for (int n = 0; n < ROW_VECTORS; n++)
            if (at(n) < dim) x[n] = load_vec8(row + at(n));
    }

    // Calls f(first element, values) for every vector.
    template <class F> __device__ __forceinline__ void for_each(int dim, F f) const {
#pragma unroll
        for (int n = 0; n < ROW_VECTORS; n++) {
            if (at(n) < dim) {
                float v[8];
                widen(x[n], v);
                f(at(n), v);
            }
        }
    }

    // The same, and keeps what f leaves in the values, rounded to T.
    template <class F> __device__ __forceinline__ void transform(int dim, F f) {
#pragma unroll
        for (int n = 0; n < ROW_VECTORS; n++) {
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
        for_each(dim, [&](int, const float (&v)[8]) {
#pragma unroll
            for (int j = 0; j < 8; j++) sums[j] += f(v[j]);
        });
        float all = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
        return block_sum(all);
    }

    __device__ __forceinline__ void store(T *row, int dim) const {
#pragma unroll
        for (int n = 0; n < ROW_VECTORS; n++)
            if (at(n) < dim) store_vec8(row + at(n), x[n]);
    }

    // Normalises the row, times 1 + scale, plus shift.
    __device__ __forceinline__ void ada_layer_norm(const float *scale, const float *shift, int dim, float eps) {
        float mean = sum(dim, [](float x) { return x; }) / dim;
        float factor = 1.0f / sqrtf(sum(dim, [mean](float x) { return (x - mean) * (x - mean); }) / dim + eps);
        transform(dim, [&](int i, float (&v)[8]) {
            float a[8], b[8];
            load_vector(scale + i, a);
            load_vector(shift + i, b);
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] = (v[j] - mean) * factor * (1.0f + a[j]) + b[j];
        });
    }
};

template <class T>
__device__ __forceinline__ void ada_layer_norm_registers(const T *x, const float *scale, const float *shift, T *out, int dim, float eps) {
    long long first = (long long)blockIdx.x * dim;
    RegisterRow<T> row(x + first, dim);
    row.ada_layer_norm(scale, shift, dim, eps);
    row.store(out + first, dim);
}

// Fused with quantization to fp8 rows of `padded` bytes. Values are rounded to T first, as in the unfused operations.
template <class T>
__device__ __forceinline__ void ada_layer_norm_fp8(const T *x, const float *scale, const float *shift, unsigned char *q, float *scales,
                                                   int dim, int padded, float eps) {
    RegisterRow<T> row(x + (long long)blockIdx.x * dim, dim);
    q += (long long)blockIdx.x * padded;
    row.ada_layer_norm(scale, shift, dim, eps);
    float largest = 0.0f;
    row.for_each(dim, [&](int, const float (&v)[8]) { update_abs_max(largest, v); });
    RowScale scaling = row_scale<448>(block_max<ROW_THREADS / 32>(largest));
    row.for_each(dim, [&](int i, const float (&v)[8]) { *(u64 *)(q + i) = round_fp8(v, scaling.inverse); });
    for (int i = dim + 8 * threadIdx.x; i < padded; i += 8 * ROW_THREADS) *(u64 *)(q + i) = 0;
    if (threadIdx.x == 0) scales[blockIdx.x] = scaling.scale;
}

// Fused with rotation and quantization to int8 rows.
template <class T>
__device__ __forceinline__ void ada_layer_norm_int8(const T *x, const float *scale, const float *shift, signed char *q, float *scales,
                                                    int dim, int padded, int group, float eps) {
    typedef RegisterRow<T> Row;
    Row row(x + (long long)blockIdx.x * dim, dim);
    row.ada_layer_norm(scale, shift, dim, eps);
    q += (long long)blockIdx.x * padded;
    int lane = threadIdx.x % 32;
    float largest = 0.0f, v[ROW_VECTORS][8];
#pragma unroll
    for (int n = 0; n < ROW_VECTORS; n++) {
        // All lanes rotate; the row may end within a warp's columns.
        if (Row::at(n) - 8 * lane >= dim) break;
        if (Row::at(n) < dim)
            widen(row.x[n], v[n]);
        else
            for (int j = 0; j < 8; j++) v[n][j] = 0.0f;
        rotate(v[n], group);
        update_abs_max(largest, v[n]);
    }
    RowScale scaling = row_scale<127>(block_max<ROW_THREADS / 32>(largest) * rotation_factor(group));
    RotatedPlace place(lane, group);
#pragma unroll
    for (int n = 0; n < ROW_VECTORS; n++)
        if (Row::at(n) - 8 * lane < dim)
            store_int8(q, Row::at(n) - 8 * lane, place, padded, v[n], scaling.inverse * rotation_factor(group));
    if (threadIdx.x == 0) scales[blockIdx.x] = scaling.scale;
}

template <class T> __device__ __forceinline__ void rms_norm_registers(const T *x, const float *weight, T *out, int dim, float eps) {
    long long first = (long long)blockIdx.x * dim;
    RegisterRow<T> row(x + first, dim);
    float factor = 1.0f / sqrtf(row.sum(dim, [](float x) { return x * x; }) / dim + eps);
    row.transform(dim, [&](int i, float (&v)[8]) {
        float a[8];
        load_vector(weight + i, a);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = v[j] * factor * a[j];
    });
    row.store(out + first, dim);
}

#define KERNELS(T, name)                                                                                                       \
    extern "C" __global__ void ada_layer_norm_##name(const T *x, const float *scale, const float *shift, T *out,               \
                                                     int dim, float eps) {                                                     \
        ada_layer_norm(x, scale, shift, out, dim, eps);                                                                        \
    }                                                                                                                          \
    extern "C" __global__ void rms_norm_##name(const T *x, const float *weight, T *out, int dim, float eps) {                  \
        rms_norm(x, weight, out, dim, eps);                                                                                    \
    }                                                                                                                          \
    extern "C" __global__ void __launch_bounds__(ROW_THREADS) ada_layer_norm_registers_##name(                                 \
        const T *x, const float *scale, const float *shift, T *out, int dim, float eps) {                                      \
        ada_layer_norm_registers(x, scale, shift, out, dim, eps);                                                              \
    }                                                                                                                          \
    extern "C" __global__ void __launch_bounds__(ROW_THREADS) ada_layer_norm_fp8_##name(                                       \
        const T *x, const float *scale, const float *shift, unsigned char *q, float *scales, int dim, int padded, float eps) { \
        ada_layer_norm_fp8(x, scale, shift, q, scales, dim, padded, eps);                                                      \
    }                                                                                                                          \
    extern "C" __global__ void __launch_bounds__(ROW_THREADS) ada_layer_norm_int8_##name(                                      \
        const T *x, const float *scale, const float *shift, signed char *q, float *scales, int dim, int padded,                \
        int group, float eps) {                                                                                                \
        ada_layer_norm_int8(x, scale, shift, q, scales, dim, padded, group, eps);                                              \
    }                                                                                                                          \
    extern "C" __global__ void __launch_bounds__(ROW_THREADS) rms_norm_registers_##name(const T *x, const float *weight,       \
                                                                                        T *out, int dim, float eps) {          \
        rms_norm_registers(x, weight, out, dim, eps);                                                                          \
    }

KERNELS(float, f32)
KERNELS(bf16, bf16)
