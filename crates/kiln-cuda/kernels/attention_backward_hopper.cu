// Gradients of attention in bf16 on Hopper, heads of 128, with TMA and wgmma. Some blocks compute dq, others dk and dv. Scores
// are computed for both, 7 products instead of 5, so that no sum crosses blocks: results don't depend on the order of blocks.
// A producer warp copies tiles into stages; two consumer warpgroups hold 64 rows each of the sums in registers. Probabilities
// go from the accumulators of one product to the registers of the next and never through memory.
// 4608 tokens, 24 heads on an H200: 1.27 ms; in two launches 1.42, since each leaves multiprocessors idle at its end.

#include "hopper.cuh"

const int DIM = 128;
// Rows of a block's own tile; rows of the streamed tiles and stages of either kernel.
const int ROWS = 128, KEY_ROWS = 128, KEY_STAGES = 2, QUERY_ROWS = 64, QUERY_STAGES = 4;
// Bytes of 64 columns and of all 128.
const unsigned ROW_HALF = ROWS * 128, ROW_TILE = 2 * ROW_HALF, KEY_HALF = KEY_ROWS * 128, KEY_TILE = 2 * KEY_HALF,
               QUERY_HALF = QUERY_ROWS * 128, QUERY_TILE = 2 * QUERY_HALF;
const float LOG2_E = 1.44269504088896341f;

struct HopperAttentionBackwardArgs {
    // Boxes of ROWS rows, and of streamed queries.
    TensorMap q, k, v, dout, streamed_q, streamed_dout;
    // By head: lse / ln 2 of all queries, infinite beyond the last, then delta; `padded` floats each.
    const float *stats;
    void *dq, *dk, *dv;
    int queries, keys, heads, padded;
    float scale;
    int unused[3];
};

#if defined(KILN_EMULATED) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Copies a tile: two boxes of 64 columns.
__device__ __forceinline__ void load_tile(unsigned to, unsigned half, const TensorMap &from, unsigned barrier, int column, int row) {
    tma_load(to, from, barrier, column, row);
    tma_load(to + half, from, barrier, column + 64, row);
}

// Starts d = p * b, with b MN-major, or d += p * b.
template <int N> __device__ __forceinline__ void start_sums(float (&d)[64], const unsigned (&p)[N][4], unsigned b, bool add) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < N; i++) wgmma_n128_registers_mn_major(d, p[i], descriptor_from_low(b + i * 2048 / 16), i > 0 || add);
    wgmma_commit();
}

// Stores a warpgroup's 64 rows of one head, those before `limit`.
__device__ __forceinline__ void store_rows(void *to, int row, int limit, int heads, int head, const float (&d)[64], float factor) {
    int lane = threadIdx.x % 32;
    row += threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        bf16 *out = (bf16 *)to + ((long long)(row + 8 * r) * heads + head) * DIM + lane % 4 * 8;
        // Exchange pairs among four lanes, so that each stores eight consecutive columns.
#pragma unroll
        for (int j = 0; j < 16; j += 4) {
            float words[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                words[i] = __uint_as_float(round_bf16_pair(d[4 * (j + i) + 2 * r] * factor, d[4 * (j + i) + 2 * r + 1] * factor));
            transpose_quad(words);
            if (row + 8 * r < limit) *(float4 *)(out + 8 * j) = make_float4(words[0], words[1], words[2], words[3]);
        }
    }
}

// Barriers of a ring of stages: full ones, then empty ones.
template <int STAGES> struct Ring {
    unsigned barriers;

    __device__ __forceinline__ void init() const {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(barriers + 8 * i, 1);
            // One lane of each consumer warp.
            barrier_init(barriers + 8 * (STAGES + i), 8);
        }
    }
    __device__ __forceinline__ unsigned full(unsigned n) const { return barriers + 8 * (n % STAGES); }
    __device__ __forceinline__ void wait_full(unsigned n) const { barrier_wait(full(n), n / STAGES % 2); }
    __device__ __forceinline__ void wait_empty(unsigned n) const {
        if (n >= STAGES) barrier_wait(barriers + 8 * (STAGES + n % STAGES), (n / STAGES + 1) % 2);
    }
    __device__ __forceinline__ void release(unsigned n) const {
        if (threadIdx.x % 32 == 0) barrier_arrive(barriers + 8 * (STAGES + n % STAGES));
    }
};

// dq of 128 queries of one head: keys and values are streamed. Keys past the last are zeros, and add nothing.
__device__ __forceinline__ void backward_q(const HopperAttentionBackwardArgs &args, int tile, int head) {
    DYNAMIC_SHARED(memory);
    // Swizzled tiles are aligned to 1024 bytes.
    unsigned base = (shared_address(memory) + 1023) & ~1023u;
    unsigned q = base, dout = q + ROW_TILE, k = dout + ROW_TILE, v = k + KEY_STAGES * KEY_TILE, barriers = v + KEY_STAGES * KEY_TILE;
    Ring<KEY_STAGES> keys = {barriers}, values = {barriers + 16 * KEY_STAGES};
    unsigned own = barriers + 32 * KEY_STAGES;
    int group = uniform(threadIdx.x / 128), first = tile * ROWS;
    if (threadIdx.x == 0) {
        keys.init(), values.init();
        barrier_init(own, 1);
        barrier_init_fence();
    }
    __syncthreads();
    unsigned tiles = (args.keys + KEY_ROWS - 1) / KEY_ROWS;
    if (group == 0) {
        decrease_registers<24>();
        if (threadIdx.x == 0) {
            barrier_expect(own, 2 * ROW_TILE);
            load_tile(q, ROW_HALF, args.q, own, head * DIM, first);
            load_tile(dout, ROW_HALF, args.dout, own, head * DIM, first);
            for (unsigned n = 0; n < tiles; n++) {
                keys.wait_empty(n);
                barrier_expect(keys.full(n), KEY_TILE);
                load_tile(k + n % KEY_STAGES * KEY_TILE, KEY_HALF, args.k, keys.full(n), head * DIM, n * KEY_ROWS);
                values.wait_empty(n);
                barrier_expect(values.full(n), KEY_TILE);
                load_tile(v + n % KEY_STAGES * KEY_TILE, KEY_HALF, args.v, values.full(n), head * DIM, n * KEY_ROWS);
            }
        }
    } else {
        increase_registers<240>();
        int consumer = group - 1, row = first + 64 * consumer;
        float scale = args.scale * LOG2_E, lse[2], delta[2];
        const float *stats = args.stats + (long long)2 * head * args.padded + row + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
        for (int r = 0; r < 2; r++) lse[r] = stats[8 * r], delta[r] = stats[args.padded + 8 * r];
        float dq[64], s[64], dp[64];
        unsigned ds[8][4];
        unsigned q_low = uniform(descriptor_low(q + consumer * 8192, 16)), dout_low = uniform(descriptor_low(dout + consumer * 8192, 16));
        barrier_wait(own, 0);
        // The first consumer starts.
        if (consumer == 1) named_arrive(1, 256);
        for (unsigned n = 0; n < tiles; n++) {
            unsigned stage = n % KEY_STAGES * KEY_TILE;
            unsigned k_low = uniform(descriptor_low(k + stage, 16)), v_low = uniform(descriptor_low(v + stage, 16));
            keys.wait_full(n);
            // The consumers alternate: while the tensor cores multiply for one, the other computes exponentials.
            named_sync(1 + consumer, 256);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 8; i++)
                wgmma_bf16<false, false>(s, descriptor_from_low(q_low + (i / 4 * ROW_HALF + i % 4 * 32) / 16),
                           descriptor_from_low(k_low + (i / 4 * KEY_HALF + i % 4 * 32) / 16), i > 0);
            wgmma_commit();
            // The sums of the tile before; their operands' registers are needed.
            wgmma_wait<1>();
            if (n > 0) keys.release(n - 1);
            values.wait_full(n);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 8; i++)
                wgmma_bf16<false, false>(dp, descriptor_from_low(dout_low + (i / 4 * ROW_HALF + i % 4 * 32) / 16),
                           descriptor_from_low(v_low + (i / 4 * KEY_HALF + i % 4 * 32) / 16), i > 0);
            wgmma_commit();
            named_arrive(2 - consumer, 256);
            wgmma_wait<0>();
            values.release(n);
            // Accumulators are only read, and never set to zero: writing them would make the compiler wait for every product.
#pragma unroll
            for (int i = 0; i < 32; i++) {
                float e[2];
#pragma unroll
                for (int j = 0; j < 2; j++)
                    // The exponent of a key past the last may be positive, and the exponential infinite.
                    e[j] = fast_exp2(fminf(s[2 * i + j] * scale - lse[i % 2], 0.0f)) * (dp[2 * i + j] - delta[i % 2]);
                ds[i / 4][i % 4] = round_bf16_pair(e[0], e[1]);
            }
            start_sums(dq, ds, uniform(descriptor_low(k + stage, KEY_HALF)), n > 0);
        }
        wgmma_wait<0>();
        store_rows(args.dq, row, args.queries, args.heads, head, dq, args.scale);
    }
}

// dk and dv of 128 keys of one head: queries and gradients are streamed. The probability of a query past the last is 0.
__device__ __forceinline__ void backward_kv(const HopperAttentionBackwardArgs &args, int tile, int head) {
    DYNAMIC_SHARED(memory);
    unsigned start = shared_address(memory), base = (start + 1023) & ~1023u;
    unsigned k = base, v = k + ROW_TILE, q = v + ROW_TILE, dout = q + QUERY_STAGES * QUERY_TILE;
    // Of every stage: lse and delta of its queries.
    unsigned stats_at = dout + QUERY_STAGES * QUERY_TILE, barriers = stats_at + QUERY_STAGES * 8 * QUERY_ROWS;
    float *stats = (float *)(memory + (stats_at - start));
    Ring<QUERY_STAGES> queries = {barriers};
    unsigned own = barriers + 16 * QUERY_STAGES;
    int group = uniform(threadIdx.x / 128), first = tile * ROWS, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        queries.init();
        barrier_init(own, 1);
        barrier_init_fence();
    }
    __syncthreads();
    unsigned tiles = (args.queries + QUERY_ROWS - 1) / QUERY_ROWS;
    if (group == 0) {
        decrease_registers<24>();
        if (threadIdx.x < 32) {
            if (lane == 0) {
                barrier_expect(own, 2 * ROW_TILE);
                load_tile(k, ROW_HALF, args.k, own, head * DIM, first);
                load_tile(v, ROW_HALF, args.v, own, head * DIM, first);
            }
            const float *from = args.stats + (long long)2 * head * args.padded;
            for (unsigned n = 0; n < tiles; n++) {
                unsigned stage = n % QUERY_STAGES;
                queries.wait_empty(n);
                float2 *to = (float2 *)(stats + stage * 2 * QUERY_ROWS) + lane;
                to[0] = *(const float2 *)(from + n * QUERY_ROWS + 2 * lane);
                to[QUERY_ROWS / 2] = *(const float2 *)(from + args.padded + n * QUERY_ROWS + 2 * lane);
                __syncwarp();
                if (lane == 0) {
                    barrier_expect(queries.full(n), 2 * QUERY_TILE);
                    load_tile(q + stage * QUERY_TILE, QUERY_HALF, args.streamed_q, queries.full(n), head * DIM, n * QUERY_ROWS);
                    load_tile(dout + stage * QUERY_TILE, QUERY_HALF, args.streamed_dout, queries.full(n), head * DIM, n * QUERY_ROWS);
                }
            }
        }
    } else {
        increase_registers<240>();
        int consumer = group - 1;
        float scale = args.scale * LOG2_E;
        float dk[64], dv[64], s[32], dp[32];
        unsigned p[4][4], ds[4][4];
        unsigned k_low = uniform(descriptor_low(k + consumer * 8192, 16)), v_low = uniform(descriptor_low(v + consumer * 8192, 16));
        barrier_wait(own, 0);
        for (unsigned n = 0; n < tiles; n++) {
            unsigned stage = n % QUERY_STAGES, q_at = q + stage * QUERY_TILE, dout_at = dout + stage * QUERY_TILE;
            unsigned q_low = uniform(descriptor_low(q_at, 16)), dout_low = uniform(descriptor_low(dout_at, 16));
            queries.wait_full(n);
            wgmma_fence();
            // Transposed: rows are keys, columns queries.
#pragma unroll
            for (int i = 0; i < 8; i++)
                wgmma_bf16<false, false>(s, descriptor_from_low(k_low + (i / 4 * ROW_HALF + i % 4 * 32) / 16),
                          descriptor_from_low(q_low + (i / 4 * QUERY_HALF + i % 4 * 32) / 16), i > 0);
            wgmma_commit();
            // The sums of the tile before; their operands' registers are needed.
            wgmma_wait<1>();
            if (n > 0) queries.release(n - 1);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 8; i++)
                wgmma_bf16<false, false>(dp, descriptor_from_low(v_low + (i / 4 * ROW_HALF + i % 4 * 32) / 16),
                          descriptor_from_low(dout_low + (i / 4 * QUERY_HALF + i % 4 * 32) / 16), i > 0);
            wgmma_commit();
            wgmma_wait<0>();
            const float2 *columns = (const float2 *)(stats + stage * 2 * QUERY_ROWS) + lane % 4;
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float2 lse = columns[4 * j], delta = columns[QUERY_ROWS / 2 + 4 * j];
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    int i = 4 * j + 2 * r;
                    float low = fast_exp2(s[i] * scale - lse.x), high = fast_exp2(s[i + 1] * scale - lse.y);
                    p[j / 2][j % 2 * 2 + r] = round_bf16_pair(low, high);
                    ds[j / 2][j % 2 * 2 + r] = round_bf16_pair(low * (dp[i] - delta.x), high * (dp[i + 1] - delta.y));
                }
            }
            start_sums(dv, p, uniform(descriptor_low(dout_at, QUERY_HALF)), n > 0);
            start_sums(dk, ds, uniform(descriptor_low(q_at, QUERY_HALF)), n > 0);
        }
        wgmma_wait<0>();
        store_rows(args.dk, first + 64 * consumer, args.keys, args.heads, head, dk, args.scale);
        store_rows(args.dv, first + 64 * consumer, args.keys, args.heads, head, dv, 1.0f);
    }
}

// The blocks of keys come first: they take longer.
extern "C" __global__ void __launch_bounds__(384, 1) attention_backward_hopper(const __grid_constant__ HopperAttentionBackwardArgs args) {
    int key_tiles = (args.keys + ROWS - 1) / ROWS, query_tiles = (args.queries + ROWS - 1) / ROWS;
    int block = blockIdx.x, of_queries = block - key_tiles * args.heads;
    if (of_queries < 0)
        backward_kv(args, block % key_tiles, block / key_tiles);
    else
        backward_q(args, of_queries % query_tiles, of_queries / query_tiles);
}
#endif
