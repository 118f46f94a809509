// Flash attention in bf16 on tensor cores for heads of 256 and 512, on all GPUs from Ampere on.
// A block processes 16 * ROW_WARPS queries of one head. The head is split among SPLIT warps: each multiplies its part of the
// queries and keys, the partial scores are summed, and each computes its part of the result.

template <int DIM, int SPLIT, int ROW_WARPS, int KEYS> struct TileShape {
    static const int THREADS = 32 * SPLIT * ROW_WARPS;
    static const int QUERIES = 16 * ROW_WARPS;
    // 8 elements of padding: the 8 rows of a matrix lie in different banks.
    static const int PITCH = DIM + 8;
    static const int STAGE = 2 * KEYS * PITCH;
};

// Starts copying rows first..first + ROWS of one head; zeros beyond the last row.
template <int DIM, int ROWS, int THREADS>
__device__ __forceinline__ void copy_rows_async(bf16 *to, const Segments &from, int first, int rows, int width, int column) {
    const int CHUNKS = DIM / 8;
#pragma unroll 2
    for (int i = 0; i < ROWS * CHUNKS; i += THREADS) {
        int at = i + threadIdx.x;
        if (ROWS * CHUNKS % THREADS != 0 && at >= ROWS * CHUNKS) break;
        int row = at / CHUNKS, chunk = at % CHUNKS;
        bool valid = first + row < rows;
        const bf16 *source = segment_row<bf16>(from, valid ? first + row : 0, width) + column + 8 * chunk;
        copy_async(to + row * (DIM + 8) + 8 * chunk, source, valid);
    }
}

template <int DIM, int SPLIT, int ROW_WARPS, int KEYS> __device__ __forceinline__ void attention_tiled(const AttentionArgs &args) {
    typedef TileShape<DIM, SPLIT, ROW_WARPS, KEYS> S;
    const int PITCH = S::PITCH, PART = DIM / SPLIT, KEY_TILES = KEYS / 8, DIM_TILES = PART / 8;
    DYNAMIC_SHARED(memory);
    bf16 *shared = (bf16 *)memory;
    float *partial = (float *)(shared + 2 * S::STAGE);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int row_warp = warp % ROW_WARPS, part = warp / ROW_WARPS;
    int first = blockIdx.x * S::QUERIES, head = blockIdx.y;
    int q_width = args.heads * DIM, kv_width = args.kv_heads * DIM, kv_column = head / (args.heads / args.kv_heads) * DIM;

    // Load the queries into registers, through the memory of the keys.
    copy_rows_async<DIM, S::QUERIES, S::THREADS>(shared, args.q, first, args.queries, q_width, head * DIM);
    copy_commit();
    copy_wait<0>();
    __syncthreads();
    unsigned q[PART / 16][4];
#pragma unroll
    for (int k = 0; k < PART / 16; k++)
        load_matrices(q[k], shared + (16 * row_warp + lane % 16) * PITCH + PART * part + 16 * k + lane / 16 * 8);
    __syncthreads();

    // Keys that each of the thread's two queries sees, and keys that any query of the block sees.
    int low[2], high[2];
#pragma unroll
    for (int r = 0; r < 2; r++) visible_keys(args, first + 16 * row_warp + lane / 4 + 8 * r, low[r], high[r]);
    int last = first + S::QUERIES < args.queries ? first + S::QUERIES - 1 : args.queries - 1;
    int begin, end;
    visible_to_any(args, first, last, begin, end);
    int first_tile = begin / KEYS, tiles = (end + KEYS - 1) / KEYS;

    auto prefetch = [&](int tile, int stage) {
        bf16 *keys = shared + stage * S::STAGE;
        copy_rows_async<DIM, KEYS, S::THREADS>(keys, args.k, tile * KEYS, args.keys, kv_width, kv_column);
        copy_rows_async<DIM, KEYS, S::THREADS>(keys + KEYS * PITCH, args.v, tile * KEYS, args.keys, kv_width, kv_column);
    };

    const float MASKED = -1e38f;
    float row_max[2] = {MASKED, MASKED}, row_sum[2] = {0.0f, 0.0f};
    float sums[DIM_TILES][4] = {};
    float scale = args.scale * 1.44269504088896341f;
    prefetch(first_tile, 0);
    copy_commit();
    for (int tile = first_tile; tile < tiles; tile++) {
        int stage = (tile - first_tile) % 2;
        if (tile + 1 < tiles) prefetch(tile + 1, 1 - stage);
        copy_commit();
        copy_wait<1>();
        __syncthreads();
        const bf16 *keys = shared + stage * S::STAGE, *values = keys + KEYS * PITCH;

        float scores[KEY_TILES][4] = {};
#pragma unroll
        for (int k = 0; k < PART / 16; k++) {
#pragma unroll
            for (int j = 0; j < KEY_TILES / 2; j++) {
                unsigned b[4];
                load_matrices(b, keys + (16 * j + lane / 16 * 8 + lane % 8) * PITCH + PART * part + 16 * k +
                                     lane / 8 % 2 * 8);
                mma(scores[2 * j], q[k], b[0], b[1]);
                mma(scores[2 * j + 1], q[k], b[2], b[3]);
            }
        }
        // One slot per thread: a lane sums the values of the same lane of the other warps.
        const int SLOT = 4 * KEY_TILES;
        float *slots = partial + (warp * SLOT) * 32 + lane;
#pragma unroll
        for (int j = 0; j < SLOT; j++) slots[32 * j] = scores[j / 4][j % 4];
        __syncthreads();
#pragma unroll
        for (int j = 0; j < SLOT; j++) {
            float sum = 0.0f;
#pragma unroll
            for (int p = 0; p < SPLIT; p++) sum += partial[((p * ROW_WARPS + row_warp) * SLOT + j) * 32 + lane];
            scores[j / 4][j % 4] = sum;
        }

        // Only the last tile, and tiles under a mask, contain keys that some query does not see.
        bool has_masked = args.mask != 0 || (tile + 1) * KEYS > args.keys;
        if (has_masked) {
#pragma unroll
            for (int j = 0; j < KEY_TILES; j++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    int key = tile * KEYS + 8 * j + lane % 4 * 2 + e % 2;
                    if (key < low[e / 2] || key >= high[e / 2]) scores[j][e] = MASKED;
                }
            }
        }
        // A row of scores lies in four adjacent lanes.
        float base[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float new_max = row_max[r];
#pragma unroll
            for (int j = 0; j < KEY_TILES; j++) new_max = fmaxf(new_max, fmaxf(scores[j][2 * r], scores[j][2 * r + 1]));
            new_max = fmaxf(new_max, __shfl_xor_sync(0xffffffffu, new_max, 1));
            new_max = fmaxf(new_max, __shfl_xor_sync(0xffffffffu, new_max, 2));
            float rescale = fast_exp2((row_max[r] - new_max) * scale);
            row_max[r] = new_max;
            base[r] = new_max * scale;
            row_sum[r] *= rescale;
#pragma unroll
            for (int j = 0; j < DIM_TILES; j++) sums[j][2 * r] *= rescale, sums[j][2 * r + 1] *= rescale;
        }
#pragma unroll
        for (int j = 0; j < KEY_TILES; j++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float p = fast_exp2(scores[j][e] * scale - base[e / 2]);
                // If a row has seen no key yet, its maximum is MASKED, too, and p would be 1.
                if (has_masked && scores[j][e] == MASKED) p = 0.0f;
                scores[j][e] = p;
                row_sum[e / 2] += p;
            }
        }
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) {
            unsigned p[4] = {
                round_bf16_pair(scores[2 * k][0], scores[2 * k][1]),
                round_bf16_pair(scores[2 * k][2], scores[2 * k][3]),
                round_bf16_pair(scores[2 * k + 1][0], scores[2 * k + 1][1]),
                round_bf16_pair(scores[2 * k + 1][2], scores[2 * k + 1][3]),
            };
#pragma unroll
            for (int j = 0; j < DIM_TILES / 2; j++) {
                unsigned b[4];
                load_matrices_transposed(b, values + (16 * k + lane % 16) * PITCH + PART * part + 16 * j + lane / 16 * 8);
                mma(sums[2 * j], p, b[0], b[1]);
                mma(sums[2 * j + 1], p, b[2], b[3]);
            }
        }
        __syncthreads();
    }

#pragma unroll
    for (int r = 0; r < 2; r++) {
        row_sum[r] += __shfl_xor_sync(0xffffffffu, row_sum[r], 1);
        row_sum[r] += __shfl_xor_sync(0xffffffffu, row_sum[r], 2);
        int query = first + 16 * row_warp + lane / 4 + 8 * r;
        if (query < args.queries) {
            float factor = 1.0f / row_sum[r];
            if (args.lse && part == 0 && lane % 4 == 0)
                args.lse[(long long)query * args.heads + head] = row_max[r] * args.scale + logf(row_sum[r]);
            bf16 *out = (bf16 *)args.out + (long long)query * q_width + head * DIM + PART * part + lane % 4 * 2;
#pragma unroll
            for (int j = 0; j < DIM_TILES; j++)
                *(unsigned *)(out + 8 * j) = round_bf16_pair(sums[j][2 * r] * factor, sums[j][2 * r + 1] * factor);
        }
    }
}

#define KERNEL(DIM, SPLIT, ROW_WARPS, KEYS, BLOCKS)                                                                   \
    extern "C" __global__ void __launch_bounds__(32 * SPLIT * ROW_WARPS, BLOCKS)                                      \
        attention_##DIM(const __grid_constant__ AttentionArgs args) {                                                 \
        attention_tiled<DIM, SPLIT, ROW_WARPS, KEYS>(args);                                                           \
    }

// The launcher has the same constants, except the last: resident blocks per multiprocessor.
KERNEL(256, 2, 4, 32, 1)
KERNEL(512, 4, 2, 16, 1)
