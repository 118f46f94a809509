// Attention of bf16 on tensor cores, keys a tile at a time, the softmax corrected as larger scores come (flash attention).
//
// A block has 16 * ROW_WARPS queries of one head. Heads wider than 128 are shared by SPLIT warps: each multiplies its part
// of the queries with its part of the keys, the partial scores are added up, and each makes its part of the result.

template <int DIM, int SPLIT, int ROW_WARPS, int KEYS> struct Shape {
    static const int THREADS = 32 * SPLIT * ROW_WARPS;
    static const int QUERIES = 16 * ROW_WARPS;
    // Eight elements more a row: the eight rows of a matrix then lie in different banks.
    static const int PITCH = DIM + 8;
    static const int STAGE = 2 * KEYS * PITCH;
};

// Rows first..first + ROWS of one head; zeros beyond the last row.
template <int DIM, int ROWS, int THREADS>
__device__ __forceinline__ void bring_rows(bf16 *to, const Segments &from, int first, int rows, int width, int column) {
    const int CHUNKS = DIM / 8;
#pragma unroll 2
    for (int i = 0; i < ROWS * CHUNKS; i += THREADS) {
        int at = i + threadIdx.x;
        if (ROWS * CHUNKS % THREADS != 0 && at >= ROWS * CHUNKS) break;
        int row = at / CHUNKS, chunk = at % CHUNKS;
        bool there = first + row < rows;
        const bf16 *source = segment_row<bf16>(from, there ? first + row : 0, width) + column + 8 * chunk;
        copy_async(to + row * (DIM + 8) + 8 * chunk, source, there);
    }
}

template <int DIM, int SPLIT, int ROW_WARPS, int KEYS> __device__ __forceinline__ void attend(const Attention &t) {
    typedef Shape<DIM, SPLIT, ROW_WARPS, KEYS> S;
    const int PITCH = S::PITCH, PART = DIM / SPLIT, KEY_TILES = KEYS / 8, DIM_TILES = PART / 8;
    DYNAMIC_SHARED(memory);
    bf16 *shared = (bf16 *)memory;
    float *partial = (float *)(shared + 2 * S::STAGE);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int row_warp = warp % ROW_WARPS, part = warp / ROW_WARPS;
    int first = blockIdx.x * S::QUERIES, head = blockIdx.y;
    int q_width = t.heads * DIM, kv_width = t.kv_heads * DIM, kv_column = head / (t.heads / t.kv_heads) * DIM;

    // The queries pass through the place of the keys into registers.
    bring_rows<DIM, S::QUERIES, S::THREADS>(shared, t.q, first, t.queries, q_width, head * DIM);
    copy_commit();
    copy_wait<0>();
    __syncthreads();
    unsigned q[PART / 16][4];
#pragma unroll
    for (int k = 0; k < PART / 16; k++)
        load_matrices(q[k], shared + (16 * row_warp + lane % 16) * PITCH + PART * part + 16 * k + lane / 16 * 8);
    __syncthreads();

    // Keys that any query of this block sees, and those that every one does.
    int low[2], high[2];
#pragma unroll
    for (int r = 0; r < 2; r++) seen(t, first + 16 * row_warp + lane / 4 + 8 * r, low[r], high[r]);
    int last = first + S::QUERIES < t.queries ? first + S::QUERIES - 1 : t.queries - 1;
    int begin, end;
    seen_by_any(t, first, last, begin, end);
    int first_tile = begin / KEYS, tiles = (end + KEYS - 1) / KEYS;

    auto bring = [&](int tile, int stage) {
        bf16 *keys = shared + stage * S::STAGE;
        bring_rows<DIM, KEYS, S::THREADS>(keys, t.k, tile * KEYS, t.keys, kv_width, kv_column);
        bring_rows<DIM, KEYS, S::THREADS>(keys + KEYS * PITCH, t.v, tile * KEYS, t.keys, kv_width, kv_column);
    };

    const float NONE = -1e38f;
    float best[2] = {NONE, NONE}, total[2] = {0.0f, 0.0f};
    float sums[DIM_TILES][4] = {};
    float scale = t.scale * 1.44269504088896341f;
    bring(first_tile, 0);
    copy_commit();
    for (int tile = first_tile; tile < tiles; tile++) {
        int stage = (tile - first_tile) % 2;
        if (tile + 1 < tiles) bring(tile + 1, 1 - stage);
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
        if (SPLIT > 1) {
            // One slot a thread: what a lane adds up comes from the same lane of the other warps.
            const int SLOT = 4 * KEY_TILES;
            float *mine = partial + (warp * SLOT) * 32 + lane;
#pragma unroll
            for (int j = 0; j < SLOT; j++) mine[32 * j] = scores[j / 4][j % 4];
            __syncthreads();
#pragma unroll
            for (int j = 0; j < SLOT; j++) {
                float sum = 0.0f;
#pragma unroll
                for (int p = 0; p < SPLIT; p++) sum += partial[((p * ROW_WARPS + row_warp) * SLOT + j) * 32 + lane];
                scores[j / 4][j % 4] = sum;
            }
        }

        // Only the last tile, and tiles under a mask, hold keys that some query does not see.
        bool cut = t.mask != 0 || (tile + 1) * KEYS > t.keys;
        if (cut) {
#pragma unroll
            for (int j = 0; j < KEY_TILES; j++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    int key = tile * KEYS + 8 * j + lane % 4 * 2 + e % 2;
                    if (key < low[e / 2] || key >= high[e / 2]) scores[j][e] = NONE;
                }
            }
        }
        // The whole row of a score lies in four neighbouring lanes.
        float base[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float top = best[r];
#pragma unroll
            for (int j = 0; j < KEY_TILES; j++) top = fmaxf(top, fmaxf(scores[j][2 * r], scores[j][2 * r + 1]));
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
            float shrink = fast_exp2((best[r] - top) * scale);
            best[r] = top;
            base[r] = top * scale;
            total[r] *= shrink;
#pragma unroll
            for (int j = 0; j < DIM_TILES; j++) sums[j][2 * r] *= shrink, sums[j][2 * r + 1] *= shrink;
        }
#pragma unroll
        for (int j = 0; j < KEY_TILES; j++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float p = fast_exp2(scores[j][e] * scale - base[e / 2]);
                // Where a row has seen nothing yet, the largest score is NONE too, and p would be 1.
                if (cut && scores[j][e] == NONE) p = 0.0f;
                scores[j][e] = p;
                total[e / 2] += p;
            }
        }
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) {
            unsigned p[4] = {
                round_pair(scores[2 * k][0], scores[2 * k][1]),
                round_pair(scores[2 * k][2], scores[2 * k][3]),
                round_pair(scores[2 * k + 1][0], scores[2 * k + 1][1]),
                round_pair(scores[2 * k + 1][2], scores[2 * k + 1][3]),
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
        total[r] += __shfl_xor_sync(0xffffffffu, total[r], 1);
        total[r] += __shfl_xor_sync(0xffffffffu, total[r], 2);
        int query = first + 16 * row_warp + lane / 4 + 8 * r;
        if (query < t.queries) {
            float factor = 1.0f / total[r];
            bf16 *out = (bf16 *)t.out + (long long)query * q_width + head * DIM + PART * part + lane % 4 * 2;
#pragma unroll
            for (int j = 0; j < DIM_TILES; j++)
                *(unsigned *)(out + 8 * j) = round_pair(sums[j][2 * r] * factor, sums[j][2 * r + 1] * factor);
        }
    }
}

#define KERNEL(DIM, SPLIT, ROW_WARPS, KEYS, BLOCKS)                                                                  \
    extern "C" __global__ void __launch_bounds__(32 * SPLIT * ROW_WARPS, BLOCKS)                                     \
        attention_##DIM(const __grid_constant__ Attention t) {                                                       \
        attend<DIM, SPLIT, ROW_WARPS, KEYS>(t);                                                                      \
    }

// The launcher knows these numbers too, but for the last: how many blocks should fit a multiprocessor's registers.
KERNEL(32, 1, 4, 64, 4)
KERNEL(64, 1, 4, 64, 3)
KERNEL(96, 1, 4, 64, 3)
KERNEL(128, 1, 8, 64, 1)
KERNEL(256, 2, 4, 32, 1)
KERNEL(512, 4, 2, 16, 1)
