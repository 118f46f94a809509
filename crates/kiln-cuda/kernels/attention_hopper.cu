// Flash attention in bf16 on Hopper, heads of 128, with TMA and wgmma.
// A block processes 128 queries of one head at a time. A producer thread copies tiles of 144 keys and values into two
// stages; two consumer warpgroups hold 64 queries each in registers and alternate: while the tensor cores multiply for
// one, the other computes its softmax.
// 4608 tokens, 24 heads on an H200: 0.41 ms, like cuDNN 9.14; on a hot GPU cuDNN takes 2 to 4 % less. As two row blocks
// (512 + 4096) 0.43 ms, since tiles of keys don't cross blocks; 1536 tokens 0.058 (cuDNN 0.065 to 0.079), 8704 tokens 1.47
// (1.45). The GPU is power limited, so saving energy counts. No gain: multicast of key tiles to two multiprocessors (a
// quarter slower), rescaling the output only when the maximum grows much, three consumer warpgroups.

#include "hopper.cuh"
#include "hopper_attention.cuh"

const int CONSUMERS = 2, QUERY_ROWS = 64 * CONSUMERS, KEYS = 144, SCORES = KEYS / 2, STEPS = KEYS / 16;
// Bytes of 64 and of all 128 columns: of queries, and of keys or values.
const unsigned QUERY_HALF = QUERY_ROWS * 128, QUERY_TILE = 2 * QUERY_HALF, HALF = KEYS * 128, TILE = 2 * HALF;

#if defined(KILN_EMULATED) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Online softmax: replaces scores by exponentials and sets `rescale`, the factor for earlier sums.
__device__ __forceinline__ void update_softmax(Softmax &m, float (&s)[SCORES], float scale, bool has_masked, int first_key,
                                             const int (&low)[2], const int (&high)[2]) {
    int column = first_key + threadIdx.x % 4 * 2;
    if (has_masked) {
#pragma unroll
        for (int i = 0; i < SCORES; i++) {
            int key = column + i / 4 * 8 + i % 2, r = i / 2 % 2;
            if (key < low[r] || key >= high[r]) s[i] = MASKED;
        }
    }
    float base[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float new_max = m.row_max[r];
#pragma unroll
        for (int j = 0; j < SCORES / 4; j++) new_max = fmaxf(new_max, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
        new_max = fmaxf(new_max, __shfl_xor_sync(0xffffffffu, new_max, 1));
        new_max = fmaxf(new_max, __shfl_xor_sync(0xffffffffu, new_max, 2));
        m.rescale[r] = fast_exp2((m.row_max[r] - new_max) * scale);
        m.row_max[r] = new_max;
        // For a row that has seen no key yet, every exponential has to be 0, not 1.
        base[r] = has_masked && new_max == MASKED ? 0.0f : new_max * scale;
        m.row_sum[r] *= m.rescale[r];
    }
#pragma unroll
    for (int i = 0; i < SCORES; i++) {
        s[i] = fast_exp2(s[i] * scale - base[i / 2 % 2]);
        m.row_sum[i / 2 % 2] += s[i];
    }
}

__device__ __forceinline__ void round_scores(unsigned (&p)[STEPS][4], const float (&s)[SCORES]) {
#pragma unroll
    for (int k = 0; k < STEPS; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) p[k][i] = round_bf16_pair(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
}

// Loads a warp's 16 queries from two swizzled boxes of 64 columns.
__device__ __forceinline__ void load_queries(unsigned (&q)[8][4], const unsigned char *box) {
    int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 16, chunk = threadIdx.x / 16 % 2;
#pragma unroll
    for (int i = 0; i < 8; i++)
        load_matrices(q[i], (const bf16 *)(box + i / 4 * QUERY_HALF + row * 128 + ((i % 4 * 2 + chunk) ^ row % 8) * 16));
}

// Starts s = q * k^T.
__device__ __forceinline__ void start_scores(float (&s)[SCORES], const unsigned (&q)[8][4], unsigned k) {
#pragma unroll
    for (int i = 0; i < 8; i++) wgmma_n144_registers(s, q[i], descriptor_from_low(k + (i / 4 * HALF + i % 4 * 32) / 16), i > 0);
    wgmma_commit();
}

// Starts o += p * v.
__device__ __forceinline__ void start_values(float (&o)[64], const unsigned (&p)[STEPS][4], unsigned v) {
#pragma unroll
    for (int i = 0; i < STEPS; i++) wgmma_n128_registers_mn_major(o, p[i], descriptor_from_low(v + i * 2048 / 16));
    wgmma_commit();
}

// Loads tile n of keys or values.
__device__ __forceinline__ void prefetch(const Stages<TILE, 2, CONSUMERS> &stages, unsigned n, const TensorMap &from, int column, int row) {
    unsigned done, to = stages.begin(n, done);
    tma_load(to, from, done, column, row);
    tma_load(to + HALF, from, done, column + 64, row);
}

extern "C" __global__ void __launch_bounds__(384, 1) attention_hopper_128(const __grid_constant__ HopperAttentionArgs args) {
    DYNAMIC_SHARED(memory);
    // Swizzled tiles are aligned to 1024 bytes.
    unsigned start = shared_address(memory), base = (start + 1023) & ~1023u;
    unsigned barriers = base + QUERY_TILE + 4 * TILE, q_full = barriers + 64, q_empty = barriers + 72;
    Stages<TILE, 2, CONSUMERS> keys = {base + QUERY_TILE, barriers, barriers + 16};
    Stages<TILE, 2, CONSUMERS> values = {base + QUERY_TILE + 2 * TILE, barriers + 32, barriers + 48};
    int group = uniform(threadIdx.x / 128);
    if (threadIdx.x == 0) {
        keys.init(), values.init();
        barrier_init(q_full, 1);
        barrier_init(q_empty, 8);
        barrier_init_fence();
    }
    __syncthreads();

    Schedule schedule(args);
    WorkRange work;
    KeyTile<KEYS> key_tile;
    // Key tiles and query tiles so far.
    unsigned n = 0, items = 0;
    if (group == 0) {
        decrease_registers<40>();
        if (threadIdx.x == 0) {
            for (; schedule.next(args, work); items++) {
                QueryTile<CONSUMERS> query_tile(args, work.item);
                if (items > 0) barrier_wait(q_empty, (items + 1) % 2);
                barrier_expect(q_full, QUERY_TILE);
                tma_load(base, args.q[query_tile.segment], q_full, query_tile.head * HEAD_DIM, query_tile.tile * QUERY_ROWS);
                tma_load(base + QUERY_HALF, args.q[query_tile.segment], q_full, query_tile.head * HEAD_DIM + 64, query_tile.tile * QUERY_ROWS);
                if (!query_tile.first_tile(args, work, key_tile)) continue;
                // Keys are needed one tile earlier than values.
                int column = query_tile.head / (args.heads / args.kv_heads) * HEAD_DIM;
                unsigned end = n;
                KeyTile<KEYS> before = key_tile;
                do {
                    prefetch(keys, end, args.k[key_tile.segment], column, key_tile.row_in_segment(args));
                    if (end > n) prefetch(values, end - 1, args.v[before.segment], column, before.row_in_segment(args));
                    before = key_tile;
                    end++;
                } while ((int)(end - n) < work.count && key_tile.next(args, query_tile.begin, query_tile.end));
                prefetch(values, end - 1, args.v[before.segment], column, before.row_in_segment(args));
                n = end;
            }
        }
    } else {
        increase_registers<232>();
        int consumer = group - 1, lane = threadIdx.x % 32;
        float scale = args.scale * 1.44269504088896341f;
        // The first consumer starts.
        if (consumer == 1) named_arrive(1, 256);
        for (; schedule.next(args, work); items++) {
            QueryTile<CONSUMERS> query_tile(args, work.item);
            int query = query_tile.first + 64 * consumer + threadIdx.x % 128 / 32 * 16 + lane / 4;
            int low[2], high[2];
            visible_keys(args, query, low[0], high[0]);
            visible_keys(args, query + 8, low[1], high[1]);
            float o[64], s[SCORES];
            unsigned q[8][4], rounded[STEPS][4];
            barrier_wait(q_full, items % 2);
            load_queries(q, memory + (base - start) + consumer * 8192);
            __syncwarp();
            if (lane == 0) barrier_arrive(q_empty);
#pragma unroll
            for (int i = 0; i < 64; i++) o[i] = 0.0f;
            Softmax m = {{MASKED, MASKED}, {0.0f, 0.0f}, {1.0f, 1.0f}};
            if (query_tile.first_tile(args, work, key_tile)) {
                auto softmax = [&](bool has_masked) {
                    int segment_end = args.key_end[key_tile.segment], limit[2];
                    limit[0] = high[0] < segment_end ? high[0] : segment_end;
                    limit[1] = high[1] < segment_end ? high[1] : segment_end;
                    update_softmax(m, s, scale, has_masked, key_tile.row, low, limit);
                };
                unsigned k = keys.operand(n, 16), v;
                // Computed before the wait, to start the tensor cores right after it.
                bool has_masked = key_tile.has_masked(args);
                keys.wait(n);
                named_sync(1 + consumer, 256);
                wgmma_fence();
                start_scores(s, q, k);
                named_arrive(2 - consumer, 256);
                wgmma_wait<0>();
                keys.release(n++);
                softmax(has_masked);
                round_scores(rounded, s);
                for (int remaining = work.count - 1; remaining > 0 && key_tile.next(args, query_tile.begin, query_tile.end);
                     remaining--, n++) {
                    k = keys.operand(n, 16), v = values.operand(n - 1, HALF);
                    has_masked = key_tile.has_masked(args);
                    keys.wait(n);
                    values.wait(n - 1);
                    named_sync(1 + consumer, 256);
                    wgmma_fence();
                    start_scores(s, q, k);
                    start_values(o, rounded, v);
                    named_arrive(2 - consumer, 256);
                    wgmma_wait<1>();
                    keys.release(n);
                    softmax(has_masked);
                    wgmma_wait<0>();
                    values.release(n - 1);
#pragma unroll
                    for (int i = 0; i < 64; i++) o[i] *= m.rescale[i / 2 % 2];
                    round_scores(rounded, s);
                }
                v = values.operand(n - 1, HALF);
                values.wait(n - 1);
                wgmma_fence();
                start_values(o, rounded, v);
                wgmma_wait<0>();
                values.release(n - 1);
            }
            if (work.stores_partial) {
                store_partial<CONSUMERS>(args, consumer, o, m);
            } else {
                if (work.merges_partial) merge_partial<CONSUMERS>(args, consumer, o, m, scale);
                write_output(args, query_tile, query, o, m);
            }
        }
    }
}
#endif
