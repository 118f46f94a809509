// Flash attention in 8 bits on Hopper, heads of 128: scores are int8 products, values are multiplied in e4m3. The operands
// are those of attention_8bit.cu.
// A block processes 192 queries of one head at a time. A producer thread copies tiles of 128 keys and values; three consumer
// warpgroups have 64 queries each. In 8 bits the exponentials take as long as the products, so the warps' number counts: each
// warpgroup multiplies, computes and multiplies in turn, and the three overlap.
// 4608 tokens, 24 heads on an H200: 0.27 ms, where bf16 takes 0.40; 8704 tokens 0.96 (1.42), 1536 tokens 0.040 (0.057).
// No gain: two warpgroups that multiply while they compute (0.33), a part of the exponentials as polynomials, sums of
// exponentials by a row of ones (e4m3 products round their sums to about 13 bits, which shows in sums of one sign).

#include "hopper.cuh"
#include "hopper_attention.cuh"
#include "e4m3.cuh"

const int CONSUMERS = 3, KEYS = 128, SCORES = KEYS / 2, STEPS = KEYS / 32, DEPTH = 4;
const unsigned TILE = KEYS * HEAD_DIM, QUERY_TILE = 64 * CONSUMERS * HEAD_DIM;
// Sums of scores start with the bits of 1.5 * 2^23: added to them, an integer below 2^22 makes the float FLOAT_BASE + integer.
const int FLOAT_BITS = 0x4b400000;
const float FLOAT_BASE = 12582912.0f;
// Exponentials are multiplied by 448, the largest e4m3 value, so that few of them are too small for e4m3.
const float LOG2_448 = 8.807354922057604f;

#if defined(KILN_EMULATED) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

typedef Stages<TILE, DEPTH, CONSUMERS> TileStages;

// Online softmax: replaces sums by 448 times exponentials, as floats, and sets `rescale`, the factor for earlier ones.
// `factor` makes powers of two of a row's sums; maxima are powers of two.
__device__ __forceinline__ void update_softmax_8bit(Softmax &m, int (&s)[SCORES], const float (&factor)[2], bool has_masked,
                                                    int first_key, const int (&low)[2], const int (&high)[2]) {
    int column = first_key + threadIdx.x % 4 * 2;
    if (has_masked) {
#pragma unroll
        for (int i = 0; i < SCORES; i++) {
            int key = column + i / 4 * 8 + i % 2, r = i / 2 % 2;
            if (key < low[r] || key >= high[r]) s[i] = __float_as_int(MASKED);
        }
    }
    float base[2], sums[2][2] = {};
#pragma unroll
    for (int r = 0; r < 2; r++) {
        // Several chains, since each takes the latency of an instruction per step. Bits of positive floats have their order.
        int largest[4];
#pragma unroll
        for (int j = 0; j < 4; j++) largest[j] = max(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]);
#pragma unroll
        for (int j = 4; j < SCORES / 4; j++) largest[j % 4] = max_of_three(largest[j % 4], s[4 * j + 2 * r], s[4 * j + 2 * r + 1]);
        float tile_max = __int_as_float(max_of_three(max(largest[0], largest[1]), largest[2], largest[3]));
        tile_max = fmaxf(tile_max, __shfl_xor_sync(0xffffffffu, tile_max, 1));
        tile_max = fmaxf(tile_max, __shfl_xor_sync(0xffffffffu, tile_max, 2));
        float new_max = fmaxf(m.row_max[r], tile_max == MASKED ? MASKED : (tile_max - FLOAT_BASE) * factor[r]);
        m.rescale[r] = fast_exp2(m.row_max[r] - new_max);
        m.row_max[r] = new_max;
        // For a row that has seen no key yet, every exponential has to be 0, not 1.
        base[r] = has_masked && new_max == MASKED ? 0.0f : FLOAT_BASE * factor[r] + (new_max - LOG2_448);
    }
#pragma unroll
    for (int i = 0; i < SCORES; i++) {
        float p = fast_exp2(__int_as_float(s[i]) * factor[i / 2 % 2] - base[i / 2 % 2]);
        sums[i / 2 % 2][i / 4 % 2] += p;
        s[i] = __float_as_int(p);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) m.row_sum[r] = m.row_sum[r] * m.rescale[r] + (sums[r][0] + sums[r][1]);
}

// Of every 16 keys a lane has pairs of two groups of 8; in the left operand they are four consecutive ones. Values are
// stored in that order.
__device__ __forceinline__ void round_scores(unsigned (&p)[STEPS][4], const int (&s)[SCORES]) {
#pragma unroll
    for (int k = 0; k < STEPS; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int *at = s + 16 * k + i / 2 * 8 + i % 2 * 2;
            p[k][i] = round_fp8_pair(__int_as_float(at[0]), __int_as_float(at[1])) |
                      (unsigned)round_fp8_pair(__int_as_float(at[4]), __int_as_float(at[5])) << 16;
        }
}

// s = q * k^T, added to FLOAT_BITS.
__device__ __forceinline__ void multiply_scores(int (&s)[SCORES], unsigned q, unsigned k) {
#pragma unroll
    for (int i = 0; i < SCORES; i++) s[i] = FLOAT_BITS;
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++) wgmma_int8(s, descriptor_from_low(q + 2 * i), descriptor_from_low(k + 2 * i), 1);
    wgmma_commit();
    wgmma_wait<0>();
}

// o += p * v.
__device__ __forceinline__ void multiply_values(float (&o)[64], const unsigned (&p)[STEPS][4], unsigned v) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < STEPS; i++) wgmma_e4m3_registers(o, p[i], descriptor_from_low(v + 2 * i));
    wgmma_commit();
    wgmma_wait<0>();
}

// The tiles of keys of a work range: first..end.
struct KeyTiles {
    int first, end;

    __device__ __forceinline__ KeyTiles(const QueryTile<CONSUMERS> &queries, const WorkRange &work) {
        first = queries.begin / KEYS + work.first;
        int all = (queries.end + KEYS - 1) / KEYS;
        end = all - first < work.count ? all : first + work.count;
    }
};

__device__ __forceinline__ void prefetch(const TileStages &stages, unsigned n, const TensorMap &from, int column, int row) {
    unsigned done, to = stages.begin(n, done);
    tma_load(to, from, done, column, row);
}

extern "C" __global__ void __launch_bounds__(512, 1) attention_hopper_8bit(const __grid_constant__ HopperAttentionArgs args) {
    DYNAMIC_SHARED(memory);
    // Swizzled tiles are aligned to 1024 bytes.
    unsigned base = (shared_address(memory) + 1023) & ~1023u, barriers = base + 2 * QUERY_TILE + 2 * DEPTH * TILE;
    Stages<QUERY_TILE, 2, CONSUMERS> queries = {base, barriers, barriers + 16};
    barriers += 32;
    TileStages keys = {base + 2 * QUERY_TILE, barriers, barriers + 8 * DEPTH};
    TileStages values = {base + 2 * QUERY_TILE + DEPTH * TILE, barriers + 16 * DEPTH, barriers + 24 * DEPTH};
    int group = uniform(threadIdx.x / 128);
    if (threadIdx.x == 0) {
        queries.init(), keys.init(), values.init();
        barrier_init_fence();
    }
    __syncthreads();

    Schedule schedule(args);
    WorkRange work;
    // Key tiles and query tiles so far.
    unsigned n = 0, items = 0;
    if (group == 0) {
        decrease_registers<32>();
        if (threadIdx.x == 0) {
            for (; schedule.next(args, work); items++) {
                QueryTile<CONSUMERS> query_tile(args, work.item);
                unsigned done, to = queries.begin(items, done);
                for (int i = 0; i < CONSUMERS; i++)
                    tma_load(to + 64 * HEAD_DIM * i, args.q[0], done, query_tile.head * HEAD_DIM, query_tile.first + 64 * i);
                KeyTiles tiles(query_tile, work);
                int column = query_tile.head / (args.heads / args.kv_heads) * HEAD_DIM;
                for (int tile = tiles.first; tile < tiles.end; tile++, n++) {
                    prefetch(keys, n, args.k[0], column, tile * KEYS);
                    prefetch(values, n, args.v[0], tile * KEYS, column);
                }
            }
        }
    } else {
        increase_registers<160>();
        int consumer = group - 1, lane = threadIdx.x % 32;
        for (; schedule.next(args, work); items++) {
            QueryTile<CONSUMERS> query_tile(args, work.item);
            int query = query_tile.first + 64 * consumer + threadIdx.x % 128 / 32 * 16 + lane / 4;
            int kv_head = query_tile.head / (args.heads / args.kv_heads);
            const float *k_scales = args.k_scales + kv_head * args.key_tiles;
            int low[2], high[2];
            float scale[2], o[64];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                visible_keys(args, query + 8 * r, low[r], high[r]);
                scale[r] = args.scale * 1.44269504088896341f;
                if (query + 8 * r <= query_tile.last) scale[r] *= args.q_scales[(long long)query_tile.head * args.queries + query + 8 * r];
            }
#pragma unroll
            for (int i = 0; i < 64; i++) o[i] = 0.0f;
            Softmax m = {{MASKED, MASKED}, {0.0f, 0.0f}, {1.0f, 1.0f}};
            unsigned q = uniform(descriptor_low(queries.at + items % 2 * QUERY_TILE + 64 * HEAD_DIM * consumer, 16));
            queries.wait(items);
            KeyTiles tiles(query_tile, work);
            for (int tile = tiles.first; tile < tiles.end; tile++, n++) {
                int s[SCORES];
                unsigned rounded[STEPS][4];
                float k_scale = k_scales[tile], factor[2] = {scale[0] * k_scale, scale[1] * k_scale};
                bool has_masked = args.mask != 0 || (tile + 1) * KEYS > args.keys;
                keys.wait(n);
                multiply_scores(s, q, keys.operand(n, 16));
                keys.release(n);
                update_softmax_8bit(m, s, factor, has_masked, tile * KEYS, low, high);
                // Later tiles seldom have a new maximum.
                if (any_lane(m.rescale[0] != 1.0f || m.rescale[1] != 1.0f)) {
#pragma unroll
                    for (int i = 0; i < 64; i++) o[i] *= m.rescale[i / 2 % 2];
                }
                round_scores(rounded, s);
                values.wait(n);
                multiply_values(o, rounded, values.operand(n, 16));
                values.release(n);
            }
            queries.release(items);
            if (work.stores_partial) {
                store_partial<CONSUMERS>(args, consumer, o, m);
            } else {
                if (work.merges_partial) merge_partial<CONSUMERS>(args, consumer, o, m, 1.0f);
                const float *v_scales = args.v_scales + kv_head * HEAD_DIM + lane % 4 * 2;
#pragma unroll
                for (int i = 0; i < 64; i++) o[i] *= v_scales[i / 4 * 8 + i % 2];
                write_output(args, query_tile, query, o, m);
            }
        }
    }
}
#endif
