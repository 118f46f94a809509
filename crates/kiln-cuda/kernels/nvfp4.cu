// nvfp4 products: activations are rounded to what the weight is, 4-bit floats (e2m1) with an e4m3 scale per block of 16 columns
// and a scale per row; and a product for sizes that gemm_mma_nvfp4.cu does not take.

#include "row_scale.cuh"
#include "e4m3.cuh"
#include "e2m1.cuh"

// Columns that a thread keeps until the scale of their row is known, in eights.
const int KEPT = 4;

// Rounds eight columns of a lane from `column` on; those of the next lane are the rest of a block. Every lane of the warp calls it.
__device__ __forceinline__ void store_nvfp4(unsigned char *q, unsigned char *blocks, int column, int cols, const float (&v)[8],
                                            float inverse, int high_first) {
    float largest = 0.0f;
    update_abs_max(largest, v);
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    // Infinity times 0 is NaN.
    unsigned char scale = (unsigned char)round_fp8_pair(inverse > 0.0f ? largest * inverse / 6.0f : 0.0f, 0.0f);
    float block = e4m3_to_float(scale), factor = block > 0.0f ? inverse / block : 0.0f;
    unsigned codes = 0;
#pragma unroll
    for (int j = 0; j < 8; j++) codes |= round_e2m1(v[j] * factor) << 4 * (j ^ high_first);
    if (column >= cols) return;
    *(unsigned *)(q + column / 2) = codes;
    if (column % 16 == 0) blocks[column / 16] = scale;
}

// Quantizes the rows of two concatenated matrices, one block of whole warps per row; rows are zero-padded to `depth` bytes, a
// multiple of 64, and `depth` / 8 scales of blocks. Columns that don't fit the registers are read again.
template <class T>
__device__ __forceinline__ void quantize(const T *x, int x_cols, const T *y, int y_cols, unsigned char *q, unsigned char *blocks,
                                         float *scales, int depth, int high_first) {
    ConcatenatedRow<T> row(x, x_cols, y, y_cols, blockIdx.x);
    q += (long long)blockIdx.x * depth;
    blocks += (long long)blockIdx.x * (depth / 8);
    int cols = 2 * depth, lane = threadIdx.x % 32, start = 8 * (threadIdx.x - lane), stride = 8 * blockDim.x;
    float largest = 0.0f, kept[KEPT][8], v[8];
#pragma unroll
    for (int n = 0; n < KEPT; n++) {
        int column = start + n * stride;
        if (column >= cols) break;
        row.load(column + 8 * lane, kept[n]);
        update_abs_max(largest, kept[n]);
    }
    for (int column = start + KEPT * stride; column < cols; column += stride) {
        row.load(column + 8 * lane, v);
        update_abs_max(largest, v);
    }
    RowScale scale = row_scale<448 * 6>(block_max<0>(largest));
#pragma unroll
    for (int n = 0; n < KEPT; n++) {
        int column = start + n * stride;
        if (column < cols) store_nvfp4(q, blocks, column + 8 * lane, cols, kept[n], scale.inverse, high_first);
    }
    for (int column = start + KEPT * stride; column < cols; column += stride) {
        row.load(column + 8 * lane, v);
        store_nvfp4(q, blocks, column + 8 * lane, cols, v, scale.inverse, high_first);
    }
    if (threadIdx.x == 0) scales[blockIdx.x] = scale.scale;
}

// One output per thread, 16 x 16 of them per block.
template <class O>
__device__ __forceinline__ void gemm(const unsigned char *x, const unsigned char *x_blocks, const float *x_scales,
                                     const unsigned char *w, const unsigned char *w_blocks, const float *w_scales,
                                     const float *bias, const O *add, O *out, int rows, int n, int depth) {
    int row = blockIdx.x * 16 + threadIdx.x / 16, column = blockIdx.y * 16 + threadIdx.x % 16;
    if (row >= rows || column >= n) return;
    x += (long long)row * depth, x_blocks += (long long)row * (depth / 8);
    w += (long long)column * depth, w_blocks += (long long)column * (depth / 8);
    float sum = 0.0f;
    for (int block = 0; block < depth / 8; block++) {
        u64 a = *(const u64 *)(x + 8 * block), b = *(const u64 *)(w + 8 * block);
        float part = 0.0f;
        for (int j = 0; j < 16; j++) part += e2m1_to_float((int)(a >> 4 * j) & 15) * e2m1_to_float((int)(b >> 4 * j) & 15);
        sum += part * (e4m3_to_float(x_blocks[block]) * e4m3_to_float(w_blocks[block]));
    }
    long long at = (long long)row * n + column;
    float y = sum * (x_scales[row] * w_scales[column]);
    if (bias) y += bias[column];
    if (add) y += to_float(add[at]);
    out[at] = from_float<O>(y);
}

#define KERNELS(T, name)                                                                                              \
    extern "C" __global__ void __launch_bounds__(768)                                                                 \
        quantize_nvfp4_##name(const T *x, int x_cols, const T *y, int y_cols, unsigned char *q, unsigned char *blocks, \
                              float *scales, int depth, int high_first) {                                             \
        quantize(x, x_cols, y, y_cols, q, blocks, scales, depth, high_first);                                         \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(256)                                                                 \
        gemm_nvfp4_##name(const unsigned char *x, const unsigned char *x_blocks, const float *x_scales,               \
                          const unsigned char *w, const unsigned char *w_blocks, const float *w_scales,               \
                          const float *bias, const T *add, T *out, int rows, int n, int depth) {                      \
        gemm(x, x_blocks, x_scales, w, w_blocks, w_scales, bias, add, out, rows, n, depth);                           \
    }

KERNELS(float, f32)
KERNELS(bf16, bf16)
