// Attention of bf16 with heads of 128 for Hopper: flash attention with the products of four warps at once.
//
// A block has 128 queries of one head at a time. One thread brings keys and values, 144 at a time, into two stages; two
// groups of four warps have 64 queries each, in registers. The two groups take turns: while the tensor cores multiply for
// one, the other makes its softmax. A block goes on to other queries without a pause, and where the work does not come out
// even, blocks share the keys of some queries.

const int ROWS = 128, KEYS = 144, DIM = 128, SCORES = KEYS / 2, STEPS = KEYS / 16;
// Bytes of 64 columns, and of all 128: of queries, and of keys or values.
const unsigned QUERY_HALF = ROWS * 128, QUERY_TILE = 2 * QUERY_HALF, HALF = KEYS * 128, TILE = 2 * HALF;
// Numbers that a thread leaves of unfinished work: its sums, and best and total of two rows.
const int LEFT = 68;

struct HopperAttention {
    TensorMap q[MAX_SEGMENTS], k[MAX_SEGMENTS], v[MAX_SEGMENTS];
    // The row past each segment's last; values have the keys' segments.
    int query_end[MAX_SEGMENTS], key_end[MAX_SEGMENTS];
    int query_segments, key_segments;
    void *out;
    int queries, keys, heads, kv_heads, mask, a, b;
    float scale;
    // An item is a tile of one head's queries. How many tiles a head has, how many tiles of keys there are, how many items
    // are shared between blocks, how many key tiles of theirs each block gets, and how many blocks get one more.
    int query_tiles, key_tiles, shared_items, share, longer, unused;
    // [block][group][LEFT][thread], and for each group of each block whether it is there.
    float *left;
    unsigned *ready;
};

#if defined(KILN_EMULATED) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A tile never crosses the end of a segment: which keys come together changes nothing.
struct Place {
    int segment, row;

    // Whether there is a tile here or later with keys of begin..end, and moves there.
    __device__ __forceinline__ bool find(const HopperAttention &t, int begin, int end) {
        while (segment < t.key_segments && row < end) {
            int limit = t.key_end[segment], next = row + KEYS < limit ? row + KEYS : limit;
            if (next > begin && row < limit) return true;
            row = next;
            if (next == limit) segment++;
        }
        return false;
    }

    __device__ __forceinline__ bool next(const HopperAttention &t, int begin, int end) {
        int limit = t.key_end[segment];
        row += KEYS;
        if (row >= limit) {
            row = limit;
            segment++;
        }
        return find(t, begin, end);
    }

    // Whether a query may not see some of the tile's keys; those past the segment's end are zeros that nobody may see.
    __device__ __forceinline__ bool cut(const HopperAttention &t) const { return t.mask != 0 || row + KEYS > t.key_end[segment]; }

    // The row in its own segment.
    __device__ __forceinline__ int inside(const HopperAttention &t) const {
        return row - (segment ? t.key_end[segment - 1] : 0);
    }
};

// Some key tiles of an item.
struct Work {
    int item, first, count;
    // The other key tiles are another block's, which gets this one's sums, or has left its own.
    bool gives, takes;
};

// A block's work in its order: its share of the shared items' key tiles, the last item first, then whole items. A share is
// at least an item, so an item is cut at most once; and a block waits only for what the block before it does first of all.
struct Plan {
    int begin, at, next_item;

    __device__ __forceinline__ Plan(const HopperAttention &t) {
        int block = blockIdx.x;
        begin = block * t.share + (block < t.longer ? block : t.longer);
        at = begin + t.share + (block < t.longer);
        next_item = t.shared_items + block;
    }

    __device__ __forceinline__ bool next(const HopperAttention &t, Work &w) {
        if (at > begin) {
            int start = (at - 1) / t.key_tiles * t.key_tiles, from = start > begin ? start : begin;
            w = {start / t.key_tiles, from - start, at - from, at < start + t.key_tiles, from > start};
            at = from;
            return true;
        }
        w = {next_item, 0, 0x7fffffff, false, false};
        next_item += gridDim.x;
        return w.item < t.query_tiles * t.heads;
    }
};

// An item's queries, and the keys that any of them sees.
struct Queries {
    int head, segment, tile, first, last, begin, end;

    __device__ __forceinline__ Queries(const HopperAttention &t, int item) {
        head = item / t.query_tiles;
        tile = item % t.query_tiles;
        segment = 0;
        int start = 0;
        while (tile >= (t.query_end[segment] - start + ROWS - 1) / ROWS) {
            tile -= (t.query_end[segment] - start + ROWS - 1) / ROWS;
            start = t.query_end[segment++];
        }
        int limit = t.query_end[segment];
        first = start + tile * ROWS;
        last = (first + ROWS < limit ? first + ROWS : limit) - 1;
        seen_by_any(t, first, last, begin, end);
    }

    // The first tile of some work on them, if it has any.
    __device__ __forceinline__ bool first_tile(const HopperAttention &t, const Work &work, Place &p) const {
        p = {0, 0};
        bool there = p.find(t, begin, end);
        for (int i = 0; i < work.first; i++) there = p.next(t, begin, end);
        return there;
    }
};

struct Softmax {
    float best[2], total[2], shrink[2];
};

const float NONE = -1e38f;

// Scores become their exponentials; `shrink` is what earlier sums have to be multiplied with.
__device__ __forceinline__ void exponentials(Softmax &m, float (&s)[SCORES], float scale, bool cut, int first_key,
                                             const int (&low)[2], const int (&high)[2]) {
    int column = first_key + threadIdx.x % 4 * 2;
    if (cut) {
#pragma unroll
        for (int i = 0; i < SCORES; i++) {
            int key = column + i / 4 * 8 + i % 2, r = i / 2 % 2;
            if (key < low[r] || key >= high[r]) s[i] = NONE;
        }
    }
    float base[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float top = m.best[r];
#pragma unroll
        for (int j = 0; j < SCORES / 4; j++) top = fmaxf(top, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
        m.shrink[r] = fast_exp2((m.best[r] - top) * scale);
        m.best[r] = top;
        // A row that has seen nothing yet: every exponential has to be 0, not 1.
        base[r] = cut && top == NONE ? 0.0f : top * scale;
        m.total[r] *= m.shrink[r];
    }
#pragma unroll
    for (int i = 0; i < SCORES; i++) {
        s[i] = fast_exp2(s[i] * scale - base[i / 2 % 2]);
        m.total[i / 2 % 2] += s[i];
    }
}

__device__ __forceinline__ void round_scores(unsigned (&p)[STEPS][4], const float (&s)[SCORES]) {
#pragma unroll
    for (int k = 0; k < STEPS; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) p[k][i] = round_pair(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
}

// A warp's 16 queries, of two swizzled boxes of 64 columns beside each other.
__device__ __forceinline__ void load_queries(unsigned (&q)[8][4], const unsigned char *box) {
    int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 16, chunk = threadIdx.x / 16 % 2;
#pragma unroll
    for (int i = 0; i < 8; i++)
        load_matrices(q[i], (const bf16 *)(box + i / 4 * QUERY_HALF + row * 128 + ((i % 4 * 2 + chunk) ^ row % 8) * 16));
}

// s = q * k.
__device__ __forceinline__ void start_scores(float (&s)[SCORES], const unsigned (&q)[8][4], unsigned k) {
#pragma unroll
    for (int i = 0; i < 8; i++) product_144_rows(s, q[i], matrix_of(k + (i / 4 * HALF + i % 4 * 32) / 16), i > 0);
    product_commit();
}

// o += p * v.
__device__ __forceinline__ void start_values(float (&o)[64], const unsigned (&p)[STEPS][4], unsigned v) {
#pragma unroll
    for (int i = 0; i < STEPS; i++) product_128_columns(o, p[i], matrix_of(v + i * 2048 / 16));
    product_commit();
}

// Leaves unfinished sums to the next block.
__device__ __forceinline__ void leave(const HopperAttention &t, int mine, const float (&o)[64], const Softmax &m) {
    float *to = t.left + ((long long)blockIdx.x * 2 + mine) * LEFT * 128 + threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < 64; i++) to[i * 128] = o[i];
#pragma unroll
    for (int r = 0; r < 2; r++) to[(64 + r) * 128] = m.best[r], to[(66 + r) * 128] = m.total[r];
    publish();
    named_sync(3 + mine, 128);
    if (threadIdx.x % 128 == 0) raise(t.ready + 2 * blockIdx.x + mine);
}

// Adds what the block before has left.
__device__ __forceinline__ void take(const HopperAttention &t, int mine, float (&o)[64], Softmax &m, float scale) {
    if (threadIdx.x % 128 == 0) await(t.ready + 2 * (blockIdx.x - 1) + mine);
    named_sync(3 + mine, 128);
    const float *from = t.left + ((long long)(blockIdx.x - 1) * 2 + mine) * LEFT * 128 + threadIdx.x % 128;
    float own[2], other[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float best = load_fresh(from + (64 + r) * 128), top = fmaxf(best, m.best[r]);
        other[r] = fast_exp2((best - top) * scale);
        own[r] = fast_exp2((m.best[r] - top) * scale);
        m.total[r] = load_fresh(from + (66 + r) * 128) * other[r] + m.total[r] * own[r];
    }
#pragma unroll
    for (int i = 0; i < 64; i++) o[i] = load_fresh(from + i * 128) * other[i / 2 % 2] + o[i] * own[i / 2 % 2];
}

__device__ __forceinline__ void write(const HopperAttention &t, const Queries &rows, int query, const float (&o)[64],
                                      Softmax &m) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        m.total[r] += __shfl_xor_sync(0xffffffffu, m.total[r], 1);
        m.total[r] += __shfl_xor_sync(0xffffffffu, m.total[r], 2);
        float factor = 1.0f / m.total[r];
        bf16 *out = (bf16 *)t.out + (long long)(query + 8 * r) * t.heads * DIM + rows.head * DIM + lane % 4 * 8;
        // Whole vectors: a lane's pairs of four runs of eight columns become its own run.
#pragma unroll
        for (int j = 0; j < 16; j += 4) {
            float words[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                words[i] = __uint_as_float(round_pair(o[4 * (j + i) + 2 * r] * factor, o[4 * (j + i) + 2 * r + 1] * factor));
            exchange(words);
            if (query + 8 * r <= rows.last) *(float4 *)(out + 8 * j) = make_float4(words[0], words[1], words[2], words[3]);
        }
    }
}

// Two stages of something in shared memory: where they lie, and barriers that say when one is full and when it is empty.
struct Stages {
    unsigned at, full, empty;

    __device__ __forceinline__ void init() const {
        for (int i = 0; i < 2; i++) {
            barrier_init(full + 8 * i, 1);
            // A lane of each warp that multiplies.
            barrier_init(empty + 8 * i, 8);
        }
    }

    // Brings number n.
    __device__ __forceinline__ void bring(unsigned n, const TensorMap &from, int column, int row) const {
        unsigned done = full + n % 2 * 8, to = at + n % 2 * TILE;
        if (n >= 2) barrier_wait(empty + n % 2 * 8, (n / 2 + 1) % 2);
        barrier_expect(done, TILE);
        copy_box(to, from, done, column, row);
        copy_box(to + HALF, from, done, column + 64, row);
    }

    __device__ __forceinline__ void wait(unsigned n) const { barrier_wait(full + n % 2 * 8, n / 2 % 2); }
    __device__ __forceinline__ void release(unsigned n) const {
        if (threadIdx.x % 32 == 0) barrier_arrive(empty + n % 2 * 8);
    }
    // The low word of number n, whose 64 columns lie `next` bytes before the next 64.
    __device__ __forceinline__ unsigned operand(unsigned n, unsigned next) const {
        return uniform(low_word(at + n % 2 * TILE, next));
    }
};

extern "C" __global__ void __launch_bounds__(384, 1) attention_hopper_128(const __grid_constant__ HopperAttention t) {
    DYNAMIC_SHARED(memory);
    // Swizzled rows begin at multiples of 1024 bytes.
    unsigned start = shared_address(memory), base = (start + 1023) & ~1023u;
    unsigned barriers = base + QUERY_TILE + 4 * TILE, q_full = barriers + 64, q_empty = barriers + 72;
    Stages keys = {base + QUERY_TILE, barriers, barriers + 16};
    Stages values = {base + QUERY_TILE + 2 * TILE, barriers + 32, barriers + 48};
    int group = uniform(threadIdx.x / 128);
    if (threadIdx.x == 0) {
        keys.init(), values.init();
        barrier_init(q_full, 1);
        barrier_init(q_empty, 8);
        barrier_publish();
    }
    __syncthreads();

    Plan plan(t);
    Work work;
    Place p;
    // How many tiles of keys, and how many of queries, came before.
    unsigned n = 0, items = 0;
    if (group == 0) {
        fewer_registers<40>();
        if (threadIdx.x == 0) {
            for (; plan.next(t, work); items++) {
                Queries rows(t, work.item);
                if (items > 0) barrier_wait(q_empty, (items + 1) % 2);
                barrier_expect(q_full, QUERY_TILE);
                copy_box(base, t.q[rows.segment], q_full, rows.head * DIM, rows.tile * ROWS);
                copy_box(base + QUERY_HALF, t.q[rows.segment], q_full, rows.head * DIM + 64, rows.tile * ROWS);
                if (!rows.first_tile(t, work, p)) continue;
                // Keys are needed one tile before the values.
                int column = rows.head / (t.heads / t.kv_heads) * DIM;
                unsigned end = n;
                Place before = p;
                do {
                    keys.bring(end, t.k[p.segment], column, p.inside(t));
                    if (end > n) values.bring(end - 1, t.v[before.segment], column, before.inside(t));
                    before = p;
                    end++;
                } while ((int)(end - n) < work.count && p.next(t, rows.begin, rows.end));
                values.bring(end - 1, t.v[before.segment], column, before.inside(t));
                n = end;
            }
        }
    } else {
        more_registers<232>();
        int mine = group - 1, lane = threadIdx.x % 32;
        float scale = t.scale * 1.44269504088896341f;
        // The first group begins.
        if (mine == 1) named_arrive(1, 256);
        for (; plan.next(t, work); items++) {
            Queries rows(t, work.item);
            int query = rows.first + 64 * mine + threadIdx.x % 128 / 32 * 16 + lane / 4;
            int low[2], high[2];
            seen(t, query, low[0], high[0]);
            seen(t, query + 8, low[1], high[1]);
            float o[64], s[SCORES];
            unsigned q[8][4], rounded[STEPS][4];
            barrier_wait(q_full, items % 2);
            load_queries(q, memory + (base - start) + mine * 8192);
            __syncwarp();
            if (lane == 0) barrier_arrive(q_empty);
#pragma unroll
            for (int i = 0; i < 64; i++) o[i] = 0.0f;
            Softmax m = {{NONE, NONE}, {0.0f, 0.0f}, {1.0f, 1.0f}};
            if (rows.first_tile(t, work, p)) {
                auto soften = [&](bool cut) {
                    int segment_end = t.key_end[p.segment], limit[2];
                    limit[0] = high[0] < segment_end ? high[0] : segment_end;
                    limit[1] = high[1] < segment_end ? high[1] : segment_end;
                    exponentials(m, s, scale, cut, p.row, low, limit);
                };
                unsigned k = keys.operand(n, 16), v;
                // Found out before the wait: after it the tensor cores would wait, too.
                bool cut = p.cut(t);
                keys.wait(n);
                named_sync(1 + mine, 256);
                product_fence();
                start_scores(s, q, k);
                named_arrive(2 - mine, 256);
                product_wait<0>();
                keys.release(n++);
                soften(cut);
                round_scores(rounded, s);
                for (int left = work.count - 1; left > 0 && p.next(t, rows.begin, rows.end); left--, n++) {
                    k = keys.operand(n, 16), v = values.operand(n - 1, HALF);
                    cut = p.cut(t);
                    keys.wait(n);
                    values.wait(n - 1);
                    named_sync(1 + mine, 256);
                    product_fence();
                    start_scores(s, q, k);
                    start_values(o, rounded, v);
                    named_arrive(2 - mine, 256);
                    product_wait<1>();
                    keys.release(n);
                    soften(cut);
                    product_wait<0>();
                    values.release(n - 1);
#pragma unroll
                    for (int i = 0; i < 64; i++) o[i] *= m.shrink[i / 2 % 2];
                    round_scores(rounded, s);
                }
                v = values.operand(n - 1, HALF);
                values.wait(n - 1);
                product_fence();
                start_values(o, rounded, v);
                product_wait<0>();
                values.release(n - 1);
            }
            if (work.gives) {
                leave(t, mine, o, m);
            } else {
                if (work.takes) take(t, mine, o, m, scale);
                write(t, rows, query, o, m);
            }
        }
    }
}
#endif
