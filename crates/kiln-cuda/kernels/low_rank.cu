// Products of wide matrices with those of a low-rank update, in bf16 on tensor cores: x * up, and x^T * inner. Both read x
// once. With so few columns cuBLASLt leaves most multiprocessors idle, and reads x for each product.

// A block of 8 warps works on tiles of 128 x 128, ROW_TILES of them above one another.
const int WARPS = 8, THREADS = 32 * WARPS, TILE = 16 * WARPS, ROW_TILES = 2, PITCH = TILE + 8;

struct LowRankArgs {
    // Up to four matrices [rows, their width] side by side.
    const bf16 *x[4];
    // End column of each matrix.
    int end[4];
    // [cols, rank] in f32, or [rank, cols] if `by_rank`; null for no x * up.
    const float *up;
    // [rows, rank]; null for no x^T * inner.
    const bf16 *inner;
    // Partial sums of x * up, [blocks of columns, rows, rank], and of x^T * inner, [blocks of rows, cols, rank].
    float *along_rows, *along_columns;
    int count, rows, rank, by_rank, column_tiles, unused;
};

// Starts copying a tile; zeros beyond the last row. Tiles don't cross matrices.
__device__ __forceinline__ void copy_tile(bf16 *to, const LowRankArgs &args, int first_row, int first_column) {
    int part = 0;
    while (first_column >= args.end[part]) part++;
    int start = part ? args.end[part - 1] : 0, width = args.end[part] - start;
    const bf16 *from = args.x[part] + (first_column - start);
    for (int at = threadIdx.x; at < TILE * TILE / 8; at += THREADS) {
        int row = at / (TILE / 8), chunk = at % (TILE / 8);
        bool valid = first_row + row < args.rows;
        copy_async(to + row * PITCH + 8 * chunk, from + (long long)(valid ? first_row + row : 0) * width + 8 * chunk, valid);
    }
    copy_commit();
}

// Rounds [rows, rank] into shared memory; zeros from row `limit` on, and beyond the rank.
template <int RANK, class T> __device__ __forceinline__ void fill(bf16 *to, const T *from, int rows, int limit, int rank) {
    if (rank == RANK && aligned(from)) {
#pragma unroll 4
        for (int at = threadIdx.x; at < rows * RANK / 8; at += THREADS) {
            int row = at / (RANK / 8), column = at % (RANK / 8) * 8;
            float v[8] = {};
            if (row < limit) load_vector(from + row * RANK + column, v);
            store_vector(to + row * (RANK + 8) + column, v);
        }
    } else {
        for (int at = threadIdx.x; at < rows * RANK; at += THREADS) {
            int row = at / RANK, column = at % RANK;
            float value = row < limit && column < rank ? to_float(from[row * rank + column]) : 0.0f;
            to[row * (RANK + 8) + column] = from_float<bf16>(value);
        }
    }
}

// d += a * b: a 16 x TILE and b TILE x RANK.
template <int RANK, class LoadLeft>
__device__ __forceinline__ void add_product(float (&d)[RANK / 8][4], const bf16 *b, LoadLeft load_left) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < TILE / 16; k++) {
        unsigned left[4];
        load_left(left, k);
#pragma unroll
        for (int j = 0; j < RANK / 16; j++) {
            unsigned right[4];
            load_matrices_transposed(right, b + (16 * k + lane % 16) * (RANK + 8) + 16 * j + lane / 16 * 8);
            mma(d[2 * j], left, right[0], right[1]);
            mma(d[2 * j + 1], left, right[2], right[3]);
        }
    }
}

// Stores a warp's 16 rows of partial sums, those before `limit`.
template <int RANK>
__device__ __forceinline__ void store_sums(float *to, int row, int limit, int rank, const float (&d)[RANK / 8][4]) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int e = 0; e < 4; e++) {
        int at = row + lane / 4 + e / 2 * 8;
#pragma unroll
        for (int j = 0; j < RANK / 8; j++) {
            int column = 8 * j + lane % 4 * 2 + e % 2;
            if (at < limit && column < rank) to[(long long)at * rank + column] = d[j][e];
        }
    }
}

template <int RANK> __device__ __forceinline__ void low_rank(const LowRankArgs &args) {
    DYNAMIC_SHARED(memory);
    bf16 *tiles = (bf16 *)memory, *inner = tiles + 2 * TILE * PITCH, *up = inner + ROW_TILES * TILE * (RANK + 8);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, cols = args.end[args.count - 1];
    int first_row = blockIdx.x * ROW_TILES * TILE, first_column = blockIdx.y * args.column_tiles * TILE;
    auto smaller = [](int a, int b) { return a < b ? a : b; };
    int row_tiles = smaller(ROW_TILES, (args.rows - first_row + TILE - 1) / TILE);
    int steps = smaller(args.column_tiles, (cols - first_column) / TILE) * row_tiles;
    auto copy_step = [&](int step) {
        copy_tile(tiles + step % 2 * TILE * PITCH, args, first_row + step % row_tiles * TILE, first_column + step / row_tiles * TILE);
    };
    copy_step(0);
    if (args.inner)
        fill<RANK>(inner, args.inner + (long long)first_row * args.rank, row_tiles * TILE, args.rows - first_row, args.rank);
    if (args.up && args.by_rank) {
        int own = steps / row_tiles * TILE;
#pragma unroll 8
        for (int at = threadIdx.x; at < own * RANK; at += THREADS) {
            // Neighbours read neighbouring elements.
            int row = at % own, column = at / own;
            float value = column < args.rank ? args.up[(long long)column * cols + first_column + row] : 0.0f;
            up[row * (RANK + 8) + column] = from_float<bf16>(value);
        }
    } else if (args.up) {
        int own = steps / row_tiles * TILE;
        fill<RANK>(up, args.up + (long long)first_column * args.rank, own, own, args.rank);
    }
    float along_rows[ROW_TILES][RANK / 8][4] = {};
    for (int column_tile = 0; column_tile < steps / row_tiles; column_tile++) {
        float along_columns[RANK / 8][4] = {};
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++) {
            if (r >= row_tiles) continue;
            int step = column_tile * row_tiles + r;
            copy_wait<0>();
            __syncthreads();
            if (step + 1 < steps) copy_step(step + 1);
            const bf16 *tile = tiles + step % 2 * TILE * PITCH;
            if (args.up)
                add_product<RANK>(along_rows[r], up + column_tile * TILE * (RANK + 8), [&](unsigned (&left)[4], int k) {
                    load_matrices(left, tile + (16 * warp + lane % 16) * PITCH + 16 * k + lane / 16 * 8);
                });
            if (args.inner)
                add_product<RANK>(along_columns, inner + r * TILE * (RANK + 8), [&](unsigned (&left)[4], int k) {
                    load_matrices_transposed(left, tile + (16 * k + lane / 16 * 8 + lane % 8) * PITCH + 16 * warp + lane / 8 % 2 * 8);
                });
        }
        if (args.inner)
            store_sums<RANK>(args.along_columns + (long long)blockIdx.x * cols * args.rank, first_column + column_tile * TILE + 16 * warp,
                             cols, args.rank, along_columns);
    }
    if (args.up)
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++)
            store_sums<RANK>(args.along_rows + (long long)blockIdx.y * args.rows * args.rank, first_row + r * TILE + 16 * warp, args.rows,
                             args.rank, along_rows[r]);
}

extern "C" __global__ void __launch_bounds__(THREADS) low_rank_16(const __grid_constant__ LowRankArgs args) { low_rank<16>(args); }
extern "C" __global__ void __launch_bounds__(THREADS) low_rank_32(const __grid_constant__ LowRankArgs args) { low_rank<32>(args); }

// The sums of `count` partial sums of n elements, times scale, rounded.
extern "C" __global__ void low_rank_rows(const float *partials, bf16 *out, long long n, int count, float scale) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float sum = 0.0f;
#pragma unroll 16
    for (int j = 0; j < count; j++) sum += partials[j * n + i];
    out[i] = from_float<bf16>(scale * sum);
}

// The same of [cols, rank] in f32, plus `add`; both are [rank, cols] if `by_rank`.
extern "C" __global__ void low_rank_columns(const float *partials, const float *add, float *out, int cols, int rank, int count, float scale,
                                            int by_rank) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x, n = (long long)cols * rank;
    if (i >= n) return;
    float sum = 0.0f;
#pragma unroll 16
    for (int j = 0; j < count; j++) sum += partials[j * n + i];
    long long at = by_rank ? i % rank * cols + i / rank : i;
    out[at] = scale * sum + (add ? add[at] : 0.0f);
}
