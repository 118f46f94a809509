// int8 products: activations are rotated as the weight is and quantized with one scale per row, summed exactly and rescaled.

#include "row_scale.cuh"
#include "int8.cuh"
#include "rotation.cuh"

// Columns that a thread keeps until the scale of their row is known, in eights.
const int KEPT = 4;

// Rotates and quantizes the rows of two concatenated matrices, one block of whole warps per row; rows are zero-padded to
// `padded` bytes. Columns that don't fit the registers are read and rotated again.
template <class T>
__device__ __forceinline__ void quantize(const T *x, int x_cols, const T *y, int y_cols, signed char *q, float *scales, int padded,
                                         int group) {
    ConcatenatedRow<T> row(x, x_cols, y, y_cols, blockIdx.x);
    q += (long long)blockIdx.x * padded;
    int lane = threadIdx.x % 32, start = 8 * (threadIdx.x - lane), stride = 8 * blockDim.x;
    float largest = 0.0f, kept[KEPT][8], v[8];
#pragma unroll
    for (int n = 0; n < KEPT; n++) {
        int column = start + n * stride;
        if (column >= padded) break;
        row.load(column + 8 * lane, kept[n]);
        rotate(kept[n], group);
        update_abs_max(largest, kept[n]);
    }
    for (int column = start + KEPT * stride; column < padded; column += stride) {
        row.load(column + 8 * lane, v);
        rotate(v, group);
        update_abs_max(largest, v);
    }
    RowScale scale = row_scale<127>(block_max<0>(largest) * rotation_factor(group));
    float inverse = scale.inverse * rotation_factor(group);
    RotatedPlace place(lane, group);
#pragma unroll
    for (int n = 0; n < KEPT; n++) {
        int column = start + n * stride;
        if (column < padded) store_int8(q, column, place, padded, kept[n], inverse);
    }
    for (int column = start + KEPT * stride; column < padded; column += stride) {
        row.load(column + 8 * lane, v);
        rotate(v, group);
        store_int8(q, column, place, padded, v, inverse);
    }
    if (threadIdx.x == 0) scales[blockIdx.x] = scale.scale;
}

// The values of rows of `padded` bytes, rotated back; one block of whole warps per row.
template <class T>
__device__ __forceinline__ void dequantize(const signed char *q, const float *scales, T *out, int cols, int padded, int group) {
    q += (long long)blockIdx.x * padded;
    out += (long long)blockIdx.x * cols;
    int lane = threadIdx.x % 32;
    float scale = scales[blockIdx.x] * rotation_factor(group), v[8];
    RotatedPlace place(lane, group);
    for (int column = 8 * (threadIdx.x - lane); column < cols; column += 8 * blockDim.x) {
        // Rows are padded to whole vectors.
        u64 bytes = column + 8 * lane < padded ? *(const u64 *)(q + column + 8 * lane) : 0;
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = scale * (float)(signed char)(bytes >> 8 * j);
        rotate(v, group);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            int i = column + place.first + (j < 4 ? j : place.apart + j - 4);
            if (i < cols) out[i] = from_float<T>(v[j]);
        }
    }
}

// 64 rows by 64 outputs per block of 256 threads. The row stride of both, `depth` bytes, is a multiple of 16.
template <class O>
__device__ __forceinline__ void gemm_int8(const signed char *q, const float *q_scales, const signed char *w,
                                             const float *w_scales, const float *bias, const O *add, O *out, int rows, int n,
                                             int depth, long long ldadd, long long ldo) {
    __shared__ int qs[16][68], ws[16][68];
    int m0 = blockIdx.x * 64, n0 = blockIdx.y * 64;
    int load_row = threadIdx.x / 4, load_word = threadIdx.x % 4 * 4;
    int row = threadIdx.x / 16, column = threadIdx.x % 16;
    int sums[4][4] = {};
    for (int k0 = 0; k0 < depth; k0 += 64) {
        int k = k0 + 4 * load_word;
        uint4 a = make_uint4(0, 0, 0, 0), b = a;
        if (k < depth && m0 + load_row < rows) a = *(const uint4 *)(q + (long long)(m0 + load_row) * depth + k);
        if (k < depth && n0 + load_row < n) b = *(const uint4 *)(w + (long long)(n0 + load_row) * depth + k);
        qs[load_word][load_row] = a.x, qs[load_word + 1][load_row] = a.y;
        qs[load_word + 2][load_row] = a.z, qs[load_word + 3][load_row] = a.w;
        ws[load_word][load_row] = b.x, ws[load_word + 1][load_row] = b.y;
        ws[load_word + 2][load_row] = b.z, ws[load_word + 3][load_row] = b.w;
        __syncthreads();
#pragma unroll
        for (int kk = 0; kk < 16; kk++) {
            int left[4], right[4];
#pragma unroll
            for (int i = 0; i < 4; i++) left[i] = qs[kk][4 * row + i], right[i] = ws[kk][4 * column + i];
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) sums[i][j] = __dp4a(left[i], right[j], sums[i][j]);
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int m = m0 + 4 * row + i, c = n0 + 4 * column + j;
            if (m < rows && c < n) {
                float v = (float)sums[i][j] * q_scales[m] * w_scales[c];
                if (bias) v += bias[c];
                if (add) v += to_float(add[m * ldadd + c]);
                out[m * ldo + c] = from_float<O>(v);
            }
        }
}

#define KERNELS(O, name)                                                                                               \
    extern "C" __global__ void __launch_bounds__(768) quantize_int8_##name(                                          \
        const O *x, int x_cols, const O *y, int y_cols, signed char *q, float *scales, int padded, int group) {       \
        quantize(x, x_cols, y, y_cols, q, scales, padded, group);                                                     \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(256) dequantize_int8_##name(                                         \
        const signed char *q, const float *scales, O *out, int cols, int padded, int group) {                         \
        dequantize(q, scales, out, cols, padded, group);                                                              \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(256)                                                                 \
        gemm_int8_##name(const signed char *q, const float *q_scales, const signed char *w, const float *w_scales,    \
                            const float *bias, const O *add, O *out, int rows, int n, int depth, long long ldadd,     \
                            long long ldo) {                                                                          \
        gemm_int8(q, q_scales, w, w_scales, bias, add, out, rows, n, depth, ldadd, ldo);                              \
    }

KERNELS(float, f32)
KERNELS(bf16, bf16)
