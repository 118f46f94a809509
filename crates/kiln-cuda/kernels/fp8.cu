// fp8 (e4m3): quantization of rows with one scale each, products for sizes that cuBLASLt does not take, and what the
// gradient of a product needs.
// Keeping some layers in bf16 is not worth it: of a small klein's velocity error (4.7 %), each block contributes 1.4 to
// 2.0 % alone, weights alone 3.7 % and activations alone 3.0 %; no layer stands out. With the double
// blocks in bf16 3.9 % would remain, with the last single block 4.4 %, with single blocks' outputs 4.2 %, inputs 3.4 %.

#include "row_scale.cuh"
#include "e4m3.cuh"

// Vectors that a thread keeps until the scale of their row is known: 4.0 TB/s on an H200 with 6, 3.8 with 4, 3.9 with 8.
const int KEPT = 6;

// Quantizes the rows of two concatenated matrices, one block of whole warps per row; rows are zero-padded to `padded` bytes. What
// does not fit the registers is read again.
template <class T>
__device__ __forceinline__ void quantize(const T *x, int x_cols, const T *y, int y_cols, unsigned char *q, float *scales, int padded) {
    ConcatenatedRow<T> row(x, x_cols, y, y_cols, blockIdx.x);
    q += (long long)blockIdx.x * padded;
    int first = 8 * threadIdx.x, stride = 8 * blockDim.x;
    float largest = 0.0f, v[8];
    Vec8<T> stored[KEPT];
#pragma unroll
    for (int n = 0; n < KEPT; n++) stored[n] = row.load_stored(first + n * stride);
#pragma unroll
    for (int n = 0; n < KEPT; n++) {
        row.values(first + n * stride, stored[n], v);
        update_abs_max(largest, v);
    }
    for (int i = first + KEPT * stride; i < row.cols; i += stride) {
        row.load(i, v);
        update_abs_max(largest, v);
    }
    RowScale scale = row_scale<448>(block_max<0>(largest));
#pragma unroll
    for (int n = 0; n < KEPT; n++) {
        row.values(first + n * stride, stored[n], v);
        if (first + n * stride < padded) *(u64 *)(q + first + n * stride) = round_fp8(v, scale.inverse);
    }
    for (int i = first + KEPT * stride; i < padded; i += stride) {
        row.load(i, v);
        *(u64 *)(q + i) = round_fp8(v, scale.inverse);
    }
    if (threadIdx.x == 0) scales[blockIdx.x] = scale.scale;
}

// 16 rows by 16 outputs per block of 256 threads, any size.
template <class O>
__device__ __forceinline__ void gemm(const unsigned char *x, const float *x_scales, const unsigned char *w, const float *w_scales,
                                        O *out, int rows, int n, int depth) {
    int row = blockIdx.x * 16 + threadIdx.x / 16, column = blockIdx.y * 16 + threadIdx.x % 16;
    if (row >= rows || column >= n) return;
    x += (long long)row * depth;
    w += (long long)column * depth;
    float sum = 0.0f;
    for (int k = 0; k < depth; k += 8) {
        u64 a = *(const u64 *)(x + k), b = *(const u64 *)(w + k);
#pragma unroll
        for (int j = 0; j < 8; j++) sum += e4m3_to_float(a >> 8 * j & 0xff) * e4m3_to_float(b >> 8 * j & 0xff);
    }
    out[(long long)row * n + column] = from_float<O>(sum * x_scales[row] * w_scales[column]);
}

// Applies row scales to a product computed without them.
template <class O>
__device__ __forceinline__ void rescale(O *out, const float *x_scales, const float *w_scales, long long rows, int n) {
    long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= rows * n) return;
    out[at] = from_float<O>(to_float(out[at]) * x_scales[at / n] * w_scales[at % n]);
}

// Rows of a gradient that a block quantizes: they share the scales of columns.
const int GRADIENT_ROWS = 4;

// Gradients that lie side by side, up to four, each [rows, its width], and the scales of their columns.
struct GradientArgs {
    const void *x[4];
    // End column of each gradient.
    int end[4];
    const float *column_scales;
    unsigned char *q;
    float *scales;
    int count, rows, padded, unused;
};

// Quantizes the rows of the gradients, multiplied by the scales of their columns; blocks of 256 threads.
template <class T> __device__ __forceinline__ void quantize_gradient(const GradientArgs &args) {
    __shared__ float largest_of_warps[GRADIENT_ROWS][8];
    int cols = args.end[args.count - 1], first_row = GRADIENT_ROWS * blockIdx.x, part = 0;
    bool vector = aligned(args.column_scales);
    for (int i = 0; i < args.count; i++) vector = vector && args.end[i] % 8 == 0 && aligned(args.x[i]);
    // Eight elements of each row, from column i on; columns only grow.
    auto load = [&](int i, float (&v)[GRADIENT_ROWS][8]) {
        if (vector && i < cols) {
            while (i >= args.end[part]) part++;
            int start = part ? args.end[part - 1] : 0, width = args.end[part] - start;
            float factors[8];
            load_vector(args.column_scales + i, factors);
#pragma unroll
            for (int r = 0; r < GRADIENT_ROWS; r++) {
                int row = first_row + r < args.rows ? first_row + r : args.rows - 1;
                load_vector((const T *)args.x[part] + (long long)row * width + (i - start), v[r]);
#pragma unroll
                for (int j = 0; j < 8; j++) v[r][j] *= factors[j];
            }
            return;
        }
        for (int r = 0; r < GRADIENT_ROWS; r++)
            for (int j = 0; j < 8; j++) {
                int column = i + j, from = 0, row = first_row + r < args.rows ? first_row + r : args.rows - 1;
                while (from < args.count && column >= args.end[from]) from++;
                v[r][j] = 0.0f;
                if (from == args.count) continue;
                int start = from ? args.end[from - 1] : 0;
                v[r][j] = to_float(((const T *)args.x[from])[(long long)row * (args.end[from] - start) + (column - start)]);
                v[r][j] *= args.column_scales[column];
            }
    };
    float largest[GRADIENT_ROWS] = {}, v[GRADIENT_ROWS][8];
    for (int i = 8 * threadIdx.x; i < cols; i += 8 * 256) {
        load(i, v);
#pragma unroll
        for (int r = 0; r < GRADIENT_ROWS; r++) update_abs_max(largest[r], v[r]);
    }
#pragma unroll
    for (int r = 0; r < GRADIENT_ROWS; r++) {
        largest[r] = warp_max(largest[r]);
        if (threadIdx.x % 32 == 0) largest_of_warps[r][threadIdx.x / 32] = largest[r];
    }
    __syncthreads();
    RowScale scale[GRADIENT_ROWS];
#pragma unroll
    for (int r = 0; r < GRADIENT_ROWS; r++) {
        for (int i = 0; i < 8; i++) largest[r] = max_or_nan(largest[r], largest_of_warps[r][i]);
        scale[r] = row_scale<448>(largest[r]);
        if (threadIdx.x == 0 && first_row + r < args.rows) args.scales[first_row + r] = scale[r].scale;
    }
    part = 0;
    for (int i = 8 * threadIdx.x; i < args.padded; i += 8 * 256) {
        load(i, v);
#pragma unroll
        for (int r = 0; r < GRADIENT_ROWS; r++)
            if (first_row + r < args.rows)
                *(u64 *)(args.q + (long long)(first_row + r) * args.padded + i) = round_fp8(v[r], scale[r].inverse);
    }
}

// The transpose of [rows, cols] bytes, rows of `depth` bytes, with rows zero-padded to `out_depth` bytes and scales of 1.
// A block of 256 threads has a tile of 128 x 128: a thread turns 4 x 4 bytes in registers.
extern "C" __global__ void __launch_bounds__(256) transpose_fp8(const unsigned char *x, unsigned char *out, float *scales, int rows,
                                                                int cols, int depth, int out_depth) {
    __shared__ unsigned tile[128][33];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first_column = 128 * blockIdx.x, first_row = 128 * blockIdx.y;
    for (int group = warp; group < 32; group += 8) {
        unsigned words[4], column = first_column + 4 * lane;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int row = first_row + 4 * group + i;
            // Rows are padded to a multiple of 16 bytes.
            words[i] = row < rows && column < depth ? *(const unsigned *)(x + (long long)row * depth + column) : 0;
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            unsigned word = 0;
#pragma unroll
            for (int i = 0; i < 4; i++) word |= (words[i] >> 8 * j & 0xff) << 8 * i;
            tile[4 * lane + j][group] = word;
        }
    }
    __syncthreads();
    for (int i = warp; i < 128; i += 8) {
        int column = first_column + i, row = first_row + 4 * lane;
        if (column < cols && row < out_depth) *(unsigned *)(out + (long long)column * out_depth + row) = tile[i][lane];
    }
    int column = first_column + threadIdx.x;
    if (blockIdx.y == 0 && threadIdx.x < 128 && column < cols) scales[column] = 1.0f;
}

#define KERNELS(T, name)                                                                                              \
    extern "C" __global__ void __launch_bounds__(512) quantize_fp8_##name(                                            \
        const T *x, int x_cols, const T *y, int y_cols, unsigned char *q, float *scales, int padded) {                \
        quantize(x, x_cols, y, y_cols, q, scales, padded);                                                            \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(256) quantize_gradient_fp8_##name(                                   \
        const __grid_constant__ GradientArgs args) {                                                                  \
        quantize_gradient<T>(args);                                                                                   \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(256) gemm_fp8_##name(                                                \
        const unsigned char *x, const float *x_scales, const unsigned char *w, const float *w_scales, T *out,         \
        int rows, int n, int depth) {                                                                                 \
        gemm(x, x_scales, w, w_scales, out, rows, n, depth);                                                          \
    }                                                                                                                 \
    extern "C" __global__ void rescale_fp8_##name(T *out, const float *x_scales, const float *w_scales,               \
                                                  long long rows, int n) {                                            \
        rescale(out, x_scales, w_scales, rows, n);                                                                    \
    }

KERNELS(float, f32)
KERNELS(bf16, bf16)
