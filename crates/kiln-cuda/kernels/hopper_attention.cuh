// What the attention kernels of Hopper share: the order of their work, the keys of a tile, partial results and the output.
// A block processes the queries of one head in tiles, of which each of its consumer warpgroups has 64. Blocks are persistent,
// and where items don't divide evenly among them, some items are split along the keys.

const int HEAD_DIM = 128;
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
    // Of 8-bit operands: scales of [heads, queries], of [kv_heads, key_tiles], and of [kv_heads, HEAD_DIM].
    const float *q_scales, *k_scales, *v_scales;
};

#if defined(KILN_EMULATED) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A tile of keys; it never crosses the end of a segment.
template <int KEYS> struct KeyTile {
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
template <int CONSUMERS> struct QueryTile {
    static const int ROWS = 64 * CONSUMERS;
    int head, segment, tile, first, last, begin, end;

    __device__ __forceinline__ QueryTile(const HopperAttentionArgs &args, int item) {
        head = item / args.query_tiles;
        tile = item % args.query_tiles;
        segment = 0;
        int start = 0;
        while (tile >= (args.query_end[segment] - start + ROWS - 1) / ROWS) {
            tile -= (args.query_end[segment] - start + ROWS - 1) / ROWS;
            start = args.query_end[segment++];
        }
        int limit = args.query_end[segment];
        first = start + tile * ROWS;
        last = (first + ROWS < limit ? first + ROWS : limit) - 1;
        visible_to_any(args, first, last, begin, end);
    }

    // Finds the first key tile of a work range; false if it has none.
    template <int KEYS>
    __device__ __forceinline__ bool first_tile(const HopperAttentionArgs &args, const WorkRange &work, KeyTile<KEYS> &key_tile) const {
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

// Hands a partial result to the next block.
template <int CONSUMERS>
__device__ __forceinline__ void store_partial(const HopperAttentionArgs &args, int consumer, const float (&o)[64], const Softmax &m) {
    float *to = args.partials + ((long long)blockIdx.x * CONSUMERS + consumer) * PARTIAL * 128 + threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < 64; i++) to[i * 128] = o[i];
#pragma unroll
    for (int r = 0; r < 2; r++) to[(64 + r) * 128] = m.row_max[r], to[(66 + r) * 128] = m.row_sum[r];
    fence_gpu();
    named_sync(3 + consumer, 128);
    if (threadIdx.x % 128 == 0) set_flag(args.ready + CONSUMERS * blockIdx.x + consumer);
}

// Merges the partial result of the previous block. `scale` makes powers of two of the maxima.
template <int CONSUMERS>
__device__ __forceinline__ void merge_partial(const HopperAttentionArgs &args, int consumer, float (&o)[64], Softmax &m, float scale) {
    if (threadIdx.x % 128 == 0) wait_flag(args.ready + CONSUMERS * (blockIdx.x - 1) + consumer);
    named_sync(3 + consumer, 128);
    const float *from = args.partials + ((long long)(blockIdx.x - 1) * CONSUMERS + consumer) * PARTIAL * 128 + threadIdx.x % 128;
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

template <int CONSUMERS>
__device__ __forceinline__ void write_output(const HopperAttentionArgs &args, const QueryTile<CONSUMERS> &query_tile, int query,
                                             const float (&o)[64], Softmax &m) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        m.row_sum[r] += __shfl_xor_sync(0xffffffffu, m.row_sum[r], 1);
        m.row_sum[r] += __shfl_xor_sync(0xffffffffu, m.row_sum[r], 2);
        float factor = 1.0f / m.row_sum[r];
        if (args.lse && lane % 4 == 0 && query + 8 * r <= query_tile.last)
            args.lse[(long long)(query + 8 * r) * args.heads + query_tile.head] = m.row_max[r] * args.scale + logf(m.row_sum[r]);
        bf16 *out = (bf16 *)args.out + (long long)(query + 8 * r) * args.heads * HEAD_DIM + query_tile.head * HEAD_DIM + lane % 4 * 8;
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

// DEPTH tiles of BYTES bytes in shared memory, with barriers for full and empty ones.
template <int BYTES, int DEPTH, int CONSUMERS> struct Stages {
    unsigned at, full, empty;

    __device__ __forceinline__ void init() const {
        for (int i = 0; i < DEPTH; i++) {
            barrier_init(full + 8 * i, 1);
            // One lane of each consumer warp.
            barrier_init(empty + 8 * i, 4 * CONSUMERS);
        }
    }

    // The place of tile n once it is empty; its copies signal `barrier`.
    __device__ __forceinline__ unsigned begin(unsigned n, unsigned &barrier) const {
        barrier = full + n % DEPTH * 8;
        if (n >= DEPTH) barrier_wait(empty + n % DEPTH * 8, (n / DEPTH + 1) % 2);
        barrier_expect(barrier, BYTES);
        return at + n % DEPTH * BYTES;
    }

    __device__ __forceinline__ void wait(unsigned n) const { barrier_wait(full + n % DEPTH * 8, n / DEPTH % 2); }
    __device__ __forceinline__ void release(unsigned n) const {
        if (threadIdx.x % 32 == 0) barrier_arrive(empty + n % DEPTH * 8);
    }
    // Low word of tile n's descriptor; `next`: bytes between groups of 64 columns.
    __device__ __forceinline__ unsigned operand(unsigned n, unsigned next) const {
        return uniform(descriptor_low(at + n % DEPTH * BYTES, next));
    }
};
#endif
