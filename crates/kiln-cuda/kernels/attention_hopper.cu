// Flash attention in bf16 on Hopper, heads of 128, with TMA and wgmma.
// A block processes 128 queries of one head at a time. A producer thread copies tiles of 144 keys and values into two
// stages; two consumer warpgroups hold 64 queries each in registers and alternate: while the tensor cores multiply for
// one, the other computes its softmax. Blocks are persistent, and where items don't divide evenly among them, some items
// are split along the keys.
// 4608 tokens, 24 heads on an H200: 0.41 ms, like cuDNN 9.14; on a hot GPU cuDNN takes 2 to 4 % less. As two row blocks
// (512 + 4096) 0.43 ms, since tiles of keys don't cross blocks; 1536 tokens 0.058 (cuDNN 0.065 to 0.079), 8704 tokens 1.47
// (1.45). The GPU is power limited, so saving energy counts. No gain: multicast of key tiles to two multiprocessors (a
// quarter slower), rescaling the output only when the maximum grows much, three consumer warpgroups.

#include "hopper.cuh"

const int QUERIES = 128, KEYS = 144, DIM = 128, SCORES = KEYS / 2, STEPS = KEYS / 16;
// Bytes of 64 and of all 128 columns: of queries, and of keys or values.
const unsigned QUERY_HALF = QUERIES * 128, QUERY_TILE = 2 * QUERY_HALF, HALF = KEYS * 128, TILE = 2 * HALF;
// Floats per thread of a partial result: its sums, and maximum and sum of two rows.
const int PARTIAL = 68;

struct HopperAttentionArgs {
    TensorMap q[MAX_SEGMENTS], k[MAX_SEGMENTS], v[MAX_SEGMENTS];
    // End row of each segment; values have the keys' segments.
    int query_end[MAX_SEGMENTS], key_end[MAX_SEGMENTS];
    int query_segments, key_segments;
    void *out;
    int queries, keys, heads, kv_heads, mask, a, b;
    float scale;
    // An item is a tile of one head's queries. Query tiles per head, key tiles, items that are split among blocks, key tiles
    // of split items per block, and blocks that get one more.
    int query_tiles, key_tiles, split_items, tiles_per_block, longer_blocks, unused;
    // [block][consumer][PARTIAL][thread], and a ready flag per block and consumer.
    float *partials;
    unsigned *ready;
    // [queries, heads]: the logarithm of each row's sum of exponentials, or null.
    float *lse;
};

#if defined(KILN_EMULATED) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A tile of keys; it never crosses the end of a segment.
struct KeyTile {
    int segment, row;

    // Moves to the first tile from here on with keys of begin..end; false if there is none.
    __device__ __forceinline__ bool find(const HopperAttentionArgs &args, int begin, int end) {
        while (segment < args.key_segments && row < end) {
            int limit = args.key_end[segment], next = row + KEYS < limit ? row + KEYS : limit;
            if (next > begin && row < limit) return true;
            row = next;
            if (next == limit) segment++;
        }
        return false;
    }

    __device__ __forceinline__ bool next(const HopperAttentionArgs &args, int begin, int end) {
        int limit = args.key_end[segment];
        row += KEYS;
        if (row >= limit) {
            row = limit;
            segment++;
        }
        return find(args, begin, end);
    }

    // Whether some keys may be masked. Rows past the segment's end are zeros, and always masked.
    __device__ __forceinline__ bool has_masked(const HopperAttentionArgs &args) const {
        return args.mask != 0 || row + KEYS > args.key_end[segment];
    }

    // The row within its segment.
    __device__ __forceinline__ int row_in_segment(const HopperAttentionArgs &args) const {
        return row - (segment ? args.key_end[segment - 1] : 0);
    }
};

// A range of an item's key tiles.
struct WorkRange {
    int item, first, count;
    // Whether another block has the item's later tiles and merges this partial result, or has its earlier tiles.
    bool stores_partial, merges_partial;
};

// A block's work in order: its share of the split items' key tiles, last item first, then whole items. A share is at least
// one item, so an item is split at most once, and a block waits only for the first work of the previous block.
struct Schedule {
    int begin, at, next_item;

    __device__ __forceinline__ Schedule(const HopperAttentionArgs &args) {
        int block = blockIdx.x;
        begin = block * args.tiles_per_block + (block < args.longer_blocks ? block : args.longer_blocks);
        at = begin + args.tiles_per_block + (block < args.longer_blocks);
        next_item = args.split_items + block;
    }

    __device__ __forceinline__ bool next(const HopperAttentionArgs &args, WorkRange &w) {
        if (at > begin) {
            int start = (at - 1) / args.key_tiles * args.key_tiles, from = start > begin ? start : begin;
            w = {start / args.key_tiles, from - start, at - from, at < start + args.key_tiles, from > start};
            at = from;
            return true;
        }
        w = {next_item, 0, 0x7fffffff, false, false};
        next_item += gridDim.x;
        return w.item < args.query_tiles * args.heads;
    }
};

// An item's queries, and the range of keys that any of them sees.
struct QueryTile {
    int head, segment, tile, first, last, begin, end;

    __device__ __forceinline__ QueryTile(const HopperAttentionArgs &args, int item) {
        head = item / args.query_tiles;
        tile = item % args.query_tiles;
        segment = 0;
        int start = 0;
        while (tile >= (args.query_end[segment] - start + QUERIES - 1) / QUERIES) {
            tile -= (args.query_end[segment] - start + QUERIES - 1) / QUERIES;
            start = args.query_end[segment++];
        }
        int limit = args.query_end[segment];
        first = start + tile * QUERIES;
        last = (first + QUERIES < limit ? first + QUERIES : limit) - 1;
        visible_to_any(args, first, last, begin, end);
    }

    // Finds the first key tile of a work range; false if it has none.
    __device__ __forceinline__ bool first_tile(const HopperAttentionArgs &args, const WorkRange &work, KeyTile &key_tile) const {
        key_tile = {0, 0};
        bool valid = key_tile.find(args, begin, end);
        for (int i = 0; i < work.first; i++) valid = key_tile.next(args, begin, end);
        return valid;
    }
};

struct Softmax {
    float row_max[2], row_sum[2], rescale[2];
};

const float MASKED = -1e38f;

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

// Hands a partial result to the next block.
__device__ __forceinline__ void store_partial(const HopperAttentionArgs &args, int consumer, const float (&o)[64], const Softmax &m) {
    float *to = args.partials + ((long long)blockIdx.x * 2 + consumer) * PARTIAL * 128 + threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < 64; i++) to[i * 128] = o[i];
#pragma unroll
    for (int r = 0; r < 2; r++) to[(64 + r) * 128] = m.row_max[r], to[(66 + r) * 128] = m.row_sum[r];
    fence_gpu();
    named_sync(3 + consumer, 128);
    if (threadIdx.x % 128 == 0) set_flag(args.ready + 2 * blockIdx.x + consumer);
}

// Merges the partial result of the previous block.
__device__ __forceinline__ void merge_partial(const HopperAttentionArgs &args, int consumer, float (&o)[64], Softmax &m, float scale) {
    if (threadIdx.x % 128 == 0) wait_flag(args.ready + 2 * (blockIdx.x - 1) + consumer);
    named_sync(3 + consumer, 128);
    const float *from = args.partials + ((long long)(blockIdx.x - 1) * 2 + consumer) * PARTIAL * 128 + threadIdx.x % 128;
    float own[2], other[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float row_max = load_l2(from + (64 + r) * 128), new_max = fmaxf(row_max, m.row_max[r]);
        other[r] = fast_exp2((row_max - new_max) * scale);
        own[r] = fast_exp2((m.row_max[r] - new_max) * scale);
        m.row_sum[r] = load_l2(from + (66 + r) * 128) * other[r] + m.row_sum[r] * own[r];
        m.row_max[r] = new_max;
    }
#pragma unroll
    for (int i = 0; i < 64; i++) o[i] = load_l2(from + i * 128) * other[i / 2 % 2] + o[i] * own[i / 2 % 2];
}

__device__ __forceinline__ void write_output(const HopperAttentionArgs &args, const QueryTile &query_tile, int query,
                                             const float (&o)[64], Softmax &m) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        m.row_sum[r] += __shfl_xor_sync(0xffffffffu, m.row_sum[r], 1);
        m.row_sum[r] += __shfl_xor_sync(0xffffffffu, m.row_sum[r], 2);
        float factor = 1.0f / m.row_sum[r];
        if (args.lse && lane % 4 == 0 && query + 8 * r <= query_tile.last)
            args.lse[(long long)(query + 8 * r) * args.heads + query_tile.head] = m.row_max[r] * args.scale + logf(m.row_sum[r]);
        bf16 *out = (bf16 *)args.out + (long long)(query + 8 * r) * args.heads * DIM + query_tile.head * DIM + lane % 4 * 8;
        // Exchange pairs among four lanes, so that each stores eight consecutive columns.
#pragma unroll
        for (int j = 0; j < 16; j += 4) {
            float words[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                words[i] = __uint_as_float(round_bf16_pair(o[4 * (j + i) + 2 * r] * factor, o[4 * (j + i) + 2 * r + 1] * factor));
            transpose_quad(words);
            if (query + 8 * r <= query_tile.last) *(float4 *)(out + 8 * j) = make_float4(words[0], words[1], words[2], words[3]);
        }
    }
}

// A double buffer in shared memory with barriers for full and empty stages.
struct Stages {
    unsigned at, full, empty;

    __device__ __forceinline__ void init() const {
        for (int i = 0; i < 2; i++) {
            barrier_init(full + 8 * i, 1);
            // One lane of each consumer warp.
            barrier_init(empty + 8 * i, 8);
        }
    }

    // Loads tile n.
    __device__ __forceinline__ void prefetch(unsigned n, const TensorMap &from, int column, int row) const {
        unsigned done = full + n % 2 * 8, to = at + n % 2 * TILE;
        if (n >= 2) barrier_wait(empty + n % 2 * 8, (n / 2 + 1) % 2);
        barrier_expect(done, TILE);
        tma_load(to, from, done, column, row);
        tma_load(to + HALF, from, done, column + 64, row);
    }

    __device__ __forceinline__ void wait(unsigned n) const { barrier_wait(full + n % 2 * 8, n / 2 % 2); }
    __device__ __forceinline__ void release(unsigned n) const {
        if (threadIdx.x % 32 == 0) barrier_arrive(empty + n % 2 * 8);
    }
    // Low word of tile n's descriptor; `next`: bytes between groups of 64 columns.
    __device__ __forceinline__ unsigned operand(unsigned n, unsigned next) const {
        return uniform(descriptor_low(at + n % 2 * TILE, next));
    }
};

extern "C" __global__ void __launch_bounds__(384, 1) attention_hopper_128(const __grid_constant__ HopperAttentionArgs args) {
    DYNAMIC_SHARED(memory);
    // Swizzled tiles are aligned to 1024 bytes.
    unsigned start = shared_address(memory), base = (start + 1023) & ~1023u;
    unsigned barriers = base + QUERY_TILE + 4 * TILE, q_full = barriers + 64, q_empty = barriers + 72;
    Stages keys = {base + QUERY_TILE, barriers, barriers + 16};
    Stages values = {base + QUERY_TILE + 2 * TILE, barriers + 32, barriers + 48};
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
    KeyTile key_tile;
    // Key tiles and query tiles so far.
    unsigned n = 0, items = 0;
    if (group == 0) {
        decrease_registers<40>();
        if (threadIdx.x == 0) {
            for (; schedule.next(args, work); items++) {
                QueryTile query_tile(args, work.item);
                if (items > 0) barrier_wait(q_empty, (items + 1) % 2);
                barrier_expect(q_full, QUERY_TILE);
                tma_load(base, args.q[query_tile.segment], q_full, query_tile.head * DIM, query_tile.tile * QUERIES);
                tma_load(base + QUERY_HALF, args.q[query_tile.segment], q_full, query_tile.head * DIM + 64, query_tile.tile * QUERIES);
                if (!query_tile.first_tile(args, work, key_tile)) continue;
                // Keys are needed one tile earlier than values.
                int column = query_tile.head / (args.heads / args.kv_heads) * DIM;
                unsigned end = n;
                KeyTile before = key_tile;
                do {
                    keys.prefetch(end, args.k[key_tile.segment], column, key_tile.row_in_segment(args));
                    if (end > n) values.prefetch(end - 1, args.v[before.segment], column, before.row_in_segment(args));
                    before = key_tile;
                    end++;
                } while ((int)(end - n) < work.count && key_tile.next(args, query_tile.begin, query_tile.end));
                values.prefetch(end - 1, args.v[before.segment], column, before.row_in_segment(args));
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
            QueryTile query_tile(args, work.item);
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
                store_partial(args, consumer, o, m);
            } else {
                if (work.merges_partial) merge_partial(args, consumer, o, m, scale);
                write_output(args, query_tile, query, o, m);
            }
        }
    }
}
#endif
