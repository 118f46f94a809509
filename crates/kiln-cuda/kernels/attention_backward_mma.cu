// Gradients of attention in bf16 on tensor cores, for all GPUs from Ampere on: one kernel for dq, one for dk and dv, as in
// attention_backward_hopper.cu. A warp holds 16 rows of the sums; the other operands are streamed through shared memory.

// Warps of a block, 16 rows each; rows of a streamed tile.
const int WARPS = 4, ROWS = 16 * WARPS, THREADS = 32 * WARPS, TILE = 32;

struct MmaAttentionBackwardArgs {
    const bf16 *q, *k, *v, *dout;
    // By head: lse / ln 2 of all queries, infinite beyond the last, then delta; `padded` floats each.
    const float *stats;
    bf16 *dq, *dk, *dv;
    int queries, keys, heads, padded;
    float scale;
    int unused;
};

// Starts copying rows first..first + N of one head; zeros beyond the last row.
template <int DIM, int N>
__device__ __forceinline__ void copy_tile(bf16 *to, const bf16 *from, int first, int rows, int heads, int head) {
    const int CHUNKS = DIM / 8;
    for (int at = threadIdx.x; at < N * CHUNKS; at += THREADS) {
        int row = at / CHUNKS, chunk = at % CHUNKS;
        bool valid = first + row < rows;
        const bf16 *source = from + ((long long)(valid ? first + row : 0) * heads + head) * DIM + 8 * chunk;
        copy_async(to + row * (DIM + 8) + 8 * chunk, source, valid);
    }
}

// The products of a warp's 16 rows of `a`, in shared memory, with all rows of `b`.
template <int DIM> __device__ __forceinline__ void scores(float (&s)[TILE / 8][4], const bf16 *a, const bf16 *b) {
    const int PITCH = DIM + 8;
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < TILE / 8; j++) s[j][0] = s[j][1] = s[j][2] = s[j][3] = 0.0f;
#pragma unroll
    for (int k = 0; k < DIM / 16; k++) {
        unsigned left[4];
        load_matrices(left, a + lane % 16 * PITCH + 16 * k + lane / 16 * 8);
#pragma unroll
        for (int j = 0; j < TILE / 16; j++) {
            unsigned right[4];
            load_matrices(right, b + (16 * j + lane / 16 * 8 + lane % 8) * PITCH + 16 * k + lane / 8 % 2 * 8);
            mma(s[2 * j], left, right[0], right[1]);
            mma(s[2 * j + 1], left, right[2], right[3]);
        }
    }
}

// d += p * b, with p rounded.
template <int DIM> __device__ __forceinline__ void add_product(float (&d)[DIM / 8][4], const float (&p)[TILE / 8][4], const bf16 *b) {
    const int PITCH = DIM + 8;
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < TILE / 16; k++) {
        unsigned left[4] = {
            round_bf16_pair(p[2 * k][0], p[2 * k][1]),
            round_bf16_pair(p[2 * k][2], p[2 * k][3]),
            round_bf16_pair(p[2 * k + 1][0], p[2 * k + 1][1]),
            round_bf16_pair(p[2 * k + 1][2], p[2 * k + 1][3]),
        };
#pragma unroll
        for (int j = 0; j < DIM / 16; j++) {
            unsigned right[4];
            load_matrices_transposed(right, b + (16 * k + lane % 16) * PITCH + 16 * j + lane / 16 * 8);
            mma(d[2 * j], left, right[0], right[1]);
            mma(d[2 * j + 1], left, right[2], right[3]);
        }
    }
}

// Stores a warp's 16 rows of one head, those before `limit`.
template <int DIM>
__device__ __forceinline__ void store_rows(bf16 *to, int row, int limit, int heads, int head, const float (&d)[DIM / 8][4], float factor) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int at = row + lane / 4 + 8 * r;
        if (at >= limit) continue;
        bf16 *out = to + ((long long)at * heads + head) * DIM + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < DIM / 8; j++) *(unsigned *)(out + 8 * j) = round_bf16_pair(d[j][2 * r] * factor, d[j][2 * r + 1] * factor);
    }
}

// A block's own rows of two matrices, and two stages of a tile of two others.
template <int DIM> struct Tiles {
    static const int PITCH = DIM + 8, OWN = ROWS * PITCH, STREAMED = TILE * PITCH;
    bf16 *own[2];
    bf16 *streamed;

    __device__ __forceinline__ Tiles(unsigned char *memory) {
        own[0] = (bf16 *)memory;
        own[1] = own[0] + OWN;
        streamed = own[1] + OWN;
    }
    // Matrix i of a stage.
    __device__ __forceinline__ bf16 *stage(int stage, int i) const { return streamed + (2 * stage + i) * STREAMED; }
};

// Streams tiles of two matrices and calls f(tile, first matrix, second matrix) for each.
template <int DIM, class F>
__device__ __forceinline__ void for_each_tile(const Tiles<DIM> &tiles, const bf16 *a, const bf16 *b, int rows, int heads, int head, F f) {
    int count = (rows + TILE - 1) / TILE;
    auto prefetch = [&](int tile) {
        if (tile < count) {
            copy_tile<DIM, TILE>(tiles.stage(tile % 2, 0), a, tile * TILE, rows, heads, head);
            copy_tile<DIM, TILE>(tiles.stage(tile % 2, 1), b, tile * TILE, rows, heads, head);
        }
        copy_commit();
    };
    prefetch(0);
    for (int tile = 0; tile < count; tile++) {
        prefetch(tile + 1);
        copy_wait<1>();
        __syncthreads();
        f(tile, tiles.stage(tile % 2, 0), tiles.stage(tile % 2, 1));
        __syncthreads();
    }
}

const float LOG2_E = 1.44269504088896341f;

// Keys past the last are zeros, and add nothing.
template <int DIM> __device__ __forceinline__ void backward_q(const MmaAttentionBackwardArgs &args) {
    DYNAMIC_SHARED(memory);
    Tiles<DIM> tiles(memory);
    int first = blockIdx.x * ROWS, head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = first + 16 * warp;
    copy_tile<DIM, ROWS>(tiles.own[0], args.q, first, args.queries, args.heads, head);
    copy_tile<DIM, ROWS>(tiles.own[1], args.dout, first, args.queries, args.heads, head);
    copy_commit();
    const float *stats = args.stats + (long long)2 * head * args.padded + row + lane / 4;
    float scale = args.scale * LOG2_E, lse[2] = {stats[0], stats[8]}, delta[2] = {stats[args.padded], stats[args.padded + 8]};
    float dq[DIM / 8][4] = {};
    for_each_tile<DIM>(tiles, args.k, args.v, args.keys, args.heads, head, [&](int, const bf16 *k, const bf16 *v) {
        float s[TILE / 8][4], dp[TILE / 8][4];
        scores<DIM>(s, tiles.own[0] + 16 * warp * Tiles<DIM>::PITCH, k);
        scores<DIM>(dp, tiles.own[1] + 16 * warp * Tiles<DIM>::PITCH, v);
#pragma unroll
        for (int j = 0; j < TILE / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                // The exponent of a key past the last may be positive, and the exponential infinite.
                s[j][e] = fast_exp2(fminf(s[j][e] * scale - lse[e / 2], 0.0f)) * (dp[j][e] - delta[e / 2]);
        add_product<DIM>(dq, s, k);
    });
    store_rows<DIM>(args.dq, row, args.queries, args.heads, head, dq, args.scale);
}

// Transposed: rows are keys, columns queries. The probability of a query past the last is 0.
template <int DIM> __device__ __forceinline__ void backward_kv(const MmaAttentionBackwardArgs &args) {
    DYNAMIC_SHARED(memory);
    Tiles<DIM> tiles(memory);
    int first = blockIdx.x * ROWS, head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = first + 16 * warp;
    copy_tile<DIM, ROWS>(tiles.own[0], args.k, first, args.keys, args.heads, head);
    copy_tile<DIM, ROWS>(tiles.own[1], args.v, first, args.keys, args.heads, head);
    copy_commit();
    const float *stats = args.stats + (long long)2 * head * args.padded + lane % 4 * 2;
    float scale = args.scale * LOG2_E, dk[DIM / 8][4] = {}, dv[DIM / 8][4] = {};
    for_each_tile<DIM>(tiles, args.q, args.dout, args.queries, args.heads, head, [&](int tile, const bf16 *q, const bf16 *dout) {
        float s[TILE / 8][4], dp[TILE / 8][4];
        scores<DIM>(s, tiles.own[0] + 16 * warp * Tiles<DIM>::PITCH, q);
        scores<DIM>(dp, tiles.own[1] + 16 * warp * Tiles<DIM>::PITCH, dout);
#pragma unroll
        for (int j = 0; j < TILE / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) s[j][e] = fast_exp2(s[j][e] * scale - stats[tile * TILE + 8 * j + e % 2]);
        add_product<DIM>(dv, s, dout);
#pragma unroll
        for (int j = 0; j < TILE / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) s[j][e] *= dp[j][e] - stats[args.padded + tile * TILE + 8 * j + e % 2];
        add_product<DIM>(dk, s, q);
    });
    store_rows<DIM>(args.dk, row, args.keys, args.heads, head, dk, args.scale);
    store_rows<DIM>(args.dv, row, args.keys, args.heads, head, dv, 1.0f);
}

#define KERNEL(DIM)                                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                             \
        attention_backward_q_mma_##DIM(const __grid_constant__ MmaAttentionBackwardArgs args) {                       \
        backward_q<DIM>(args);                                                                                        \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                             \
        attention_backward_kv_mma_##DIM(const __grid_constant__ MmaAttentionBackwardArgs args) {                      \
        backward_kv<DIM>(args);                                                                                       \
    }

KERNEL(64)
KERNEL(128)
