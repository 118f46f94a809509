// Flash attention in bf16 on tensor cores, for heads of at most 128 on all GPUs from Ampere on. Wider heads:
// attention_split.cu.
// Four warps compute 64 or 128 queries of one head. Keys and values pass through one buffer each: a tile of values is
// copied while its keys are multiplied, the next keys while the values are.
// TILES: 16-row tiles of queries per warp. With two, every operand that is read from shared memory is used twice, but the
// queries don't fit into the registers and are read again for every tile of keys. With heads of 128 that takes 64 KB, and
// two blocks need a multiprocessor of 164 KB. With one, the queries stay in registers: 32 KB, three blocks of 100 KB.
// Heads of 128, the kernels for 8.0 on an H200, in TFLOP/s at 4608, 8704 and 1536 tokens of 24 heads: two tiles 351, 361, 246;
// one 307, 321, 261. 8 warps of one tile that copy keys and values together, in padded rows: 192, 197, 140.
// Slower at 4608 tokens: sums scaled at every tile of keys, not only if a maximum rises 335 and 305, the next scores before
// these values 264, 256 queries per block 280 to 288, two tiles of queries in registers 263 to 284, twelve warps 177.

const int WARPS = 4, THREADS = 32 * WARPS, KEYS = 64;

template <int DIM_, int TILES_> struct Shape {
    static const int DIM = DIM_, TILES = TILES_, STEPS = DIM / 16, ROWS = 16 * TILES * WARPS;
    // Elements between rows in shared memory, a power of two.
    static const int PITCH = DIM == 96 ? 128 : DIM;
    static const bool HELD = TILES == 1;

    // Place of 8 elements of a row. The chunk is XORed with the row: the same chunks of 8 rows lie in different banks.
    static __device__ __forceinline__ int place(int row, int chunk) {
        return row * PITCH + 8 * (chunk ^ (PITCH == 32 ? row / 2 % 4 : row % 8));
    }
};

// The rows of one head. The segment that holds them is looked up again when a tile leaves it.
template <class S> struct HeadRows {
    const Segments &from;
    int segment, rows, width, column;

    __device__ __forceinline__ HeadRows(const Segments &from, int rows, int width, int column)
        : from(from), segment(0), rows(rows), width(width), column(column) {}

    // Starts copying rows first..first + ROWS; zeros beyond the last row.
    template <int ROWS> __device__ __forceinline__ void copy(bf16 *to, int first) {
        // A thread's rows are a multiple of eight apart, so that its places are alike.
        const int CHUNKS = S::PITCH / 8, APART = THREADS / CHUNKS;
        int row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
        if (chunk >= S::DIM / 8) return;
        bf16 *target = to + S::place(row, chunk);
        while (segment + 1 < from.count && first >= from.end[segment]) segment++;
        if (first + ROWS <= from.end[segment]) {
            int begin = segment ? from.end[segment - 1] : 0;
            const bf16 *source = (const bf16 *)from.start[segment] + (long long)(first - begin + row) * width + column + 8 * chunk;
            long long step = (long long)APART * width;
#pragma unroll
            for (int i = 0; i < ROWS; i += APART, source += step) copy_async(target + i * S::PITCH, source, true);
            return;
        }
#pragma unroll 1
        for (int i = 0; i < ROWS; i += APART) {
            bool valid = first + row + i < rows;
            const bf16 *source = segment_row<bf16>(from, valid ? first + row + i : 0, width) + column + 8 * chunk;
            copy_async(target + i * S::PITCH, source, valid);
        }
    }
};

// What a warp has computed: weighted sums of values, and each row's maximum and sum of exponentials.
template <class S> struct WarpState {
    static const int TILES = S::TILES, PITCH = S::PITCH, STEPS = S::STEPS;
    typedef float Scores[TILES][KEYS / 8][4];
    // Exponentials of a tile of keys, rounded.
    typedef unsigned Weights[KEYS / 16][TILES][4];
    float sums[TILES][S::DIM / 8][4];
    float row_max[TILES][2], row_sum[TILES][2];
    unsigned held[S::HELD ? STEPS : 1][TILES][4];
    float scale;
    // Places of this lane's rows of the first 16 columns.
    int q_at, k_at, v_at;

    __device__ __forceinline__ WarpState(float scale) : scale(scale * 1.44269504088896341f) {
        int warp = threadIdx.x / 32;
        int lane = threadIdx.x % 32;
        q_at = S::place(16 * TILES * warp + lane % 16, lane / 16);
        k_at = S::place(lane / 16 * 8 + lane % 8, lane / 8 % 2);
        v_at = S::place(lane % 16, lane / 16);
#pragma unroll
        for (int t = 0; t < TILES; t++) {
#pragma unroll
            for (int j = 0; j < S::DIM / 8; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) sums[t][j][e] = 0.0f;
            // Below every score, and finite: exponentials of masked scores are 0 even in a row that has seen no key yet.
#pragma unroll
            for (int r = 0; r < 2; r++) row_max[t][r] = -3e38f, row_sum[t][r] = 0.0f;
        }
    }

    // The query of row r of a tile, of the two rows of this lane.
    __device__ __forceinline__ int query(int tile, int r) const {
        return 16 * (TILES * (threadIdx.x / 32) + tile) + threadIdx.x % 32 / 4 + 8 * r;
    }

    __device__ __forceinline__ void load_queries(unsigned (&a)[TILES][4], const bf16 *queries, int step) {
#pragma unroll
        for (int t = 0; t < TILES; t++) load_matrices(a[t], queries + (q_at ^ 16 * step) + 16 * t * PITCH);
    }

    __device__ __forceinline__ void hold_queries(const bf16 *queries) {
#pragma unroll
        for (int k = 0; k < STEPS; k++) load_queries(held[k], queries, k);
    }

    // Computes the scores of a tile. Operands are loaded one product ahead.
    __device__ __forceinline__ void multiply_keys(Scores &scores, const bf16 *queries, const bf16 *keys) {
        const int GROUPS = KEYS / 16, LOADS = STEPS * GROUPS;
        unsigned b[2][4], a[2][TILES][4];
        opaque(q_at), opaque(k_at);
        auto load = [&](int i) { load_matrices(b[i % 2], keys + (k_at ^ 16 * (i / GROUPS)) + 16 * (i % GROUPS) * PITCH); };
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) scores[t][j][e] = 0.0f;
        if (!S::HELD) load_queries(a[0], queries, 0);
        load(0);
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            int k = i / GROUPS, j = i % GROUPS;
            if (i + 1 < LOADS) load(i + 1);
            if (!S::HELD && j == 0 && k + 1 < STEPS) load_queries(a[(k + 1) % 2], queries, k + 1);
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                const unsigned (&x)[4] = S::HELD ? held[S::HELD ? k : 0][t] : a[k % 2][t];
                mma(scores[t][2 * j], x, b[i % 2][0], b[i % 2][1]);
                mma(scores[t][2 * j + 1], x, b[i % 2][2], b[i % 2][3]);
            }
        }
    }

    // Masks the scores of keys from `first_key` on that a row does not see. `first`: the block's first query.
    __device__ __forceinline__ void mask(Scores &scores, const AttentionArgs &args, int first, int first_key) {
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            int low[2], high[2];
#pragma unroll
            for (int r = 0; r < 2; r++) visible_keys(args, first + query(t, r), low[r], high[r]);
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    int key = first_key + 8 * j + threadIdx.x % 4 * 2 + e % 2;
                    if (key < low[e / 2] || key >= high[e / 2]) scores[t][j][e] = __uint_as_float(0xff800000u);
                }
        }
    }

    // Raises the rows' maxima to those of a tile, and scales the sums to them. Mostly no row's maximum rises, and all
    // factors would be 1.
    __device__ __forceinline__ void raise_maxima(const Scores &scores) {
        float maximum[TILES][2];
        bool rises = false;
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float x = row_max[t][r];
#pragma unroll
                for (int j = 0; j < KEYS / 8; j++) x = fmaxf(x, fmaxf(scores[t][j][2 * r], scores[t][j][2 * r + 1]));
                // A row of scores lies in four adjacent lanes.
                x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
                x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
                maximum[t][r] = x;
                rises |= x > row_max[t][r];
            }
        if (!any_lane(rises)) return;
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float rescale = fast_exp2((row_max[t][r] - maximum[t][r]) * scale);
                row_max[t][r] = maximum[t][r];
                row_sum[t][r] *= rescale;
#pragma unroll
                for (int j = 0; j < S::DIM / 8; j++) sums[t][j][2 * r] *= rescale, sums[t][j][2 * r + 1] *= rescale;
            }
    }

    __device__ __forceinline__ void exponentials(Weights &weights, const Scores &scores) {
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++)
#pragma unroll
            for (int t = 0; t < TILES; t++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    int r = e % 2;
                    const float *s = scores[t][2 * k + e / 2] + 2 * r;
                    float base = row_max[t][r] * scale;
                    float x = fast_exp2(s[0] * scale - base), y = fast_exp2(s[1] * scale - base);
                    row_sum[t][r] += x;
                    row_sum[t][r] += y;
                    weights[k][t][e] = round_bf16_pair(x, y);
                }
    }

    // Adds the weighted values of a tile.
    __device__ __forceinline__ void multiply_values(const Weights &weights, const bf16 *values) {
        const int LOADS = KEYS / 16 * STEPS;
        unsigned b[2][4];
        opaque(v_at);
        auto load = [&](int i) {
            load_matrices_transposed(b[i % 2], values + (v_at ^ 16 * (i % STEPS)) + 16 * (i / STEPS) * PITCH);
        };
        load(0);
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            int k = i / STEPS, j = i % STEPS;
            if (i + 1 < LOADS) load(i + 1);
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                mma(sums[t][2 * j], weights[k][t], b[i % 2][0], b[i % 2][1]);
                mma(sums[t][2 * j + 1], weights[k][t], b[i % 2][2], b[i % 2][3]);
            }
        }
    }

    __device__ __forceinline__ void store(const AttentionArgs &args, int first, int head) {
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float sum = row_sum[t][r];
                sum += __shfl_xor_sync(0xffffffffu, sum, 1);
                sum += __shfl_xor_sync(0xffffffffu, sum, 2);
                int row = first + query(t, r);
                if (row >= args.queries) continue;
                float factor = 1.0f / sum;
                long long at = (long long)row * args.heads + head;
                if (args.lse && threadIdx.x % 4 == 0) args.lse[at] = row_max[t][r] * args.scale + logf(sum);
                bf16 *out = (bf16 *)args.out + at * S::DIM + threadIdx.x % 4 * 2;
#pragma unroll
                for (int j = 0; j < S::DIM / 8; j++)
                    *(unsigned *)(out + 8 * j) = round_bf16_pair(sums[t][j][2 * r] * factor, sums[t][j][2 * r + 1] * factor);
            }
    }
};

template <class S> __device__ __forceinline__ void attention(const AttentionArgs &args) {
    DYNAMIC_SHARED(memory);
    // Queries that are held in registers get there through the memory of keys and values.
    bf16 *queries = (bf16 *)memory, *keys = queries + (S::HELD ? 0 : S::ROWS * S::PITCH), *values = keys + KEYS * S::PITCH;
    // Under a causal mask the last queries see the most keys: they start first.
    int block = args.mask == 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    int first = block * S::ROWS, head = blockIdx.y, kv_head = head / (args.heads / args.kv_heads);
    HeadRows<S> q(args.q, args.queries, args.heads * S::DIM, head * S::DIM);
    HeadRows<S> k(args.k, args.keys, args.kv_heads * S::DIM, kv_head * S::DIM);
    HeadRows<S> v(args.v, args.keys, args.kv_heads * S::DIM, kv_head * S::DIM);
    q.template copy<S::ROWS>(queries, first);
    copy_commit();

    int last = first + S::ROWS < args.queries ? first + S::ROWS - 1 : args.queries - 1;
    int begin, end, all_begin, all_end;
    visible_to_any(args, first, last, begin, end);
    visible_to_all(args, first, last, all_begin, all_end);
    begin -= begin % KEYS;

    WarpState<S> state(args.scale);
    if (S::HELD) {
        copy_wait<0>();
        __syncthreads();
        state.hold_queries(queries);
        __syncthreads();
    }
    if (begin < end) k.template copy<KEYS>(keys, begin);
    copy_commit();
    for (int key = begin; key < end; key += KEYS) {
        copy_wait<0>();
        __syncthreads();
        v.template copy<KEYS>(values, key);
        copy_commit();
        typename WarpState<S>::Scores scores;
        state.multiply_keys(scores, queries, keys);
        copy_wait<0>();
        __syncthreads();
        if (key + KEYS < end) k.template copy<KEYS>(keys, key + KEYS);
        copy_commit();
        if (key < all_begin || key + KEYS > all_end) state.mask(scores, args, first, key);
        state.raise_maxima(scores);
        typename WarpState<S>::Weights weights;
        state.exponentials(weights, scores);
        state.multiply_values(weights, values);
    }
    state.store(args, first, head);
}

#define KERNEL(NAME, DIM, TILES, BLOCKS)                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) NAME(const __grid_constant__ AttentionArgs args) {  \
        attention<Shape<DIM, TILES>>(args);                                                                           \
    }

// The launcher has the same constants. BLOCKS: resident per multiprocessor.
KERNEL(attention_32, 32, 1, 4)
KERNEL(attention_64, 64, 1, 4)
KERNEL(attention_96, 96, 1, 3)
KERNEL(attention_128, 128, 1, 3)
KERNEL(attention_128_large, 128, 2, 2)
