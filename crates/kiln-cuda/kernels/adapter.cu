// What adapters need: transposes, columns, dropout, products with small matrices, and sums over rows.

// x^T of [rows, cols]; blocks of 32 x 8 threads and tiles of 32 x 32.
template <class U> __device__ __forceinline__ void transpose(const U *x, U *out, int rows, int cols) {
    __shared__ U tile[32][33];
    int column = 32 * blockIdx.x + threadIdx.x % 32, lane = threadIdx.x / 32;
    for (int i = lane; i < 32; i += 8) {
        int row = 32 * blockIdx.y + i;
        if (row < rows && column < cols) tile[i][threadIdx.x % 32] = x[(long long)row * cols + column];
    }
    __syncthreads();
    int row = 32 * blockIdx.y + threadIdx.x % 32;
    for (int i = lane; i < 32; i += 8) {
        int col = 32 * blockIdx.x + i;
        if (row < rows && col < cols) out[(long long)col * rows + row] = tile[threadIdx.x % 32][i];
    }
}

extern "C" __global__ void fill_zeros(unsigned *x, long long n) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = 0;
}

// Copies `width` columns from `column` on out of a wider matrix; counts are in units.
template <class U>
__device__ __forceinline__ void take_columns(const U *x, U *out, long long rows, int width, int column, int x_width) {
    long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= rows * width) return;
    out[at] = x[at / width * x_width + column + at % width];
}

// Keeps an element with probability 1 - rate: SplitMix64 of seed and index.
template <class T> __device__ __forceinline__ void dropout(const T *x, T *out, long long n, float rate, float factor, long long seed) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    u64 z = (u64)seed + (u64)(i + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    z ^= z >> 31;
    bool keep = (float)(unsigned)(z >> 40) / 16777216.0f >= rate;
    out[i] = from_float<T>(keep ? to_float(x[i]) * factor : 0.0f);
}

// out[b * to + i] = sum_j a[i, j] x[b * from + j] over rows, with strides of a for its transpose.
template <class T>
__device__ __forceinline__ void mix_rows(const T *x, const float *a, T *out, long long n, int from, int to, int dim, int row_stride,
                                         int column_stride) {
    long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= n) return;
    long long row = at / dim, block = row / to;
    int column = (int)(at % dim), i = (int)(row % to);
    float sum = 0.0f;
    for (int j = 0; j < from; j++) sum += a[i * row_stride + j * column_stride] * to_float(x[(block * from + j) * dim + column]);
    out[at] = from_float<T>(sum);
}

// out[i, j] = add + scale * sum over blocks of rows and columns of dy[b * rows + i] x[b * cols + j]; a block per element.
template <class T>
__device__ __forceinline__ void mix_rows_gradient(const T *dy, const T *x, const float *add, float *out, long long blocks, int rows,
                                                  int cols, int dim, float scale) {
    int i = blockIdx.y, j = blockIdx.x;
    float sum = 0.0f;
    for (long long at = threadIdx.x; at < blocks * dim; at += blockDim.x) {
        long long block = at / dim;
        int column = (int)(at % dim);
        sum += to_float(dy[(block * rows + i) * dim + column]) * to_float(x[(block * cols + j) * dim + column]);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) out[i * cols + j] = scale * sum + (add ? add[i * cols + j] : 0.0f);
}

// Sums of x * y by column over one range of rows per block of the grid's second axis.
template <class T>
__device__ __forceinline__ void column_dot(const T *x, const T *y, float *partials, int rows, int dim, int rows_per_block) {
    int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= dim) return;
    int first = blockIdx.y * rows_per_block, end = first + rows_per_block < rows ? first + rows_per_block : rows;
    float sum = 0.0f;
    for (int row = first; row < end; row++) sum += to_float(x[(long long)row * dim + column]) * to_float(y[(long long)row * dim + column]);
    partials[(long long)blockIdx.y * dim + column] = sum;
}

// out = add + the sum of `count` rows.
extern "C" __global__ void sum_rows(const float *partials, const float *add, float *out, int count, int dim) {
    int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= dim) return;
    float sum = add ? add[column] : 0.0f;
    for (int i = 0; i < count; i++) sum += partials[(long long)i * dim + column];
    out[column] = sum;
}

// The norm of each row, a block per row.
extern "C" __global__ void row_norms(const float *x, float *out, int dim) {
    float sum = 0.0f;
    for (int i = threadIdx.x; i < dim; i += blockDim.x) {
        float v = x[(long long)blockIdx.x * dim + i];
        sum += v * v;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) out[blockIdx.x] = sqrtf(sum);
}

// The values of fp8 rows of `depth` bytes with a scale each.
template <class T>
__device__ __forceinline__ void dequantize_fp8(const unsigned char *x, const float *scales, T *out, long long rows, int cols, int depth) {
    long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    int chunks = (cols + 7) / 8;
    if (at >= rows * chunks) return;
    long long row = at / chunks;
    int i = 8 * (int)(at % chunks);
    // Rows are padded to whole vectors of 16 bytes.
    u64 bytes = *(const u64 *)(x + row * depth + i);
    float v[8], scale = scales[row];
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = scale * e4m3_to_float((unsigned char)(bytes >> 8 * j));
    store8(out + row * cols, i, cols, cols % 8 == 0 && aligned(out), v);
}

#define TRANSPOSE(U, name)                                                                                            \
    extern "C" __global__ void transpose_##name(const U *x, U *out, int rows, int cols) { transpose(x, out, rows, cols); }
#define TAKE_COLUMNS(U, name)                                                                                         \
    extern "C" __global__ void take_columns_##name(const U *x, U *out, long long rows, int width, int column,         \
                                                   int x_width) {                                                     \
        take_columns(x, out, rows, width, column, x_width);                                                           \
    }
#define KERNELS(T, name)                                                                                              \
    extern "C" __global__ void dropout_##name(const T *x, T *out, long long n, float rate, float factor,              \
                                              long long seed) {                                                       \
        dropout(x, out, n, rate, factor, seed);                                                                       \
    }                                                                                                                 \
    extern "C" __global__ void mix_rows_##name(const T *x, const float *a, T *out, long long n, int from, int to,     \
                                               int dim, int row_stride, int column_stride) {                          \
        mix_rows(x, a, out, n, from, to, dim, row_stride, column_stride);                                             \
    }                                                                                                                 \
    extern "C" __global__ void mix_rows_gradient_##name(const T *dy, const T *x, const float *add, float *out,        \
                                                        long long blocks, int rows, int cols, int dim, float scale) { \
        mix_rows_gradient(dy, x, add, out, blocks, rows, cols, dim, scale);                                           \
    }                                                                                                                 \
    extern "C" __global__ void column_dot_##name(const T *x, const T *y, float *partials, int rows, int dim,          \
                                                 int rows_per_block) {                                                \
        column_dot(x, y, partials, rows, dim, rows_per_block);                                                        \
    }                                                                                                                 \
    extern "C" __global__ void dequantize_fp8_##name(const unsigned char *x, const float *scales, T *out,            \
                                                      long long rows, int cols, int depth) {                           \
        dequantize_fp8(x, scales, out, rows, cols, depth);                                                            \
    }

TRANSPOSE(unsigned short, 2)
TRANSPOSE(unsigned, 4)
TAKE_COLUMNS(unsigned short, 2)
TAKE_COLUMNS(unsigned, 4)
TAKE_COLUMNS(uint4, 16)
KERNELS(float, f32)
KERNELS(bf16, bf16)
