// Attention of f32 on CUDA cores, as two matrix products with the softmax between them: 64 queries of one head a block, 128
// keys at a time, sums in f32.
//
// A warp has 16 queries, so that what it makes of them (scores, probabilities, their sums) is its own. A thread has every
// second one of these and 8 keys, then as many elements of the head. Keys come in pieces of 16 elements of 128 keys, values in
// pieces of 16 keys; one is on its way while the one before is used. What the keys of a tile give is summed up by itself, which
// is as fast as one long sum and more exact.

const int QUERIES = 64, KEYS = 128, PIECE = 16, THREADS = 128, STAGES = 2;
// Four elements more a row: eight neighbouring rows then lie in different banks.
const int KEY_PITCH = PIECE + 4;
// Probabilities are written 16 of a row and two rows at a time.
const int SHARE_PITCH = KEYS + 16;

__device__ __forceinline__ void add_scaled(float *sums, float factor, const float4 &v) {
    sums[0] += factor * v.x;
    sums[1] += factor * v.y;
    sums[2] += factor * v.z;
    sums[3] += factor * v.w;
}

template <int DIM> __device__ __forceinline__ void attention_f32(const Attention &t) {
    // Vectors of a head that a thread sums up; pieces of keys, and of keys and values, of a tile.
    const int VECTORS = DIM / 64, KEY_PIECES = DIM / PIECE, PIECES = KEY_PIECES + KEYS / PIECE;
    const int QUERY_PITCH = DIM + 4, STAGE = KEYS * KEY_PITCH;
    DYNAMIC_SHARED(memory);
    float *queries = (float *)memory, *shares = queries + QUERIES * QUERY_PITCH, *stages = shares + QUERIES * SHARE_PITCH;
    // Where the keys and the values of this tile and of the next begin. Beyond the last key they are the last one's, and unseen.
    const float **rows = (const float **)(stages + STAGES * STAGE);

    int first = blockIdx.x * QUERIES, head = blockIdx.y, kv_head = head / (t.heads / t.kv_heads);
    int last = first + QUERIES - 1 < t.queries ? first + QUERIES - 1 : t.queries - 1;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // Neighbours read one key, or one vector of values, and every second lane one query: a read takes the least time.
    int odd = lane % 2, column = lane / 2;
    int begin, end;
    seen_by_any(t, first, last, begin, end);
    int tiles = (end - begin + KEYS - 1) / KEYS;

    auto find_rows = [&](int tile) {
        int key = begin + tile * KEYS + threadIdx.x, row = key < end ? key : end - 1;
        const float **to = rows + tile % 2 * 2 * KEYS + threadIdx.x;
        to[0] = segment_row<float>(t.k, row, t.kv_heads * DIM) + kv_head * DIM;
        to[KEYS] = segment_row<float>(t.v, row, t.kv_heads * DIM) + kv_head * DIM;
    };
    auto bring = [&](int tile, int piece, int stage) {
        float *to = stages + stage * STAGE;
        // All places are read before the first copy, which would let none of the others pass.
        if (piece < KEY_PIECES) {
            const int STEP = THREADS / 4, COPIES = KEYS / STEP;
            int row = threadIdx.x / 4, at = 4 * (threadIdx.x % 4);
            const float *from[COPIES];
#pragma unroll
            for (int i = 0; i < COPIES; i++) from[i] = rows[tile % 2 * 2 * KEYS + row + STEP * i] + piece * PIECE + at;
#pragma unroll
            for (int i = 0; i < COPIES; i++) copy_async(to + (row + STEP * i) * KEY_PITCH + at, from[i], true);
        } else {
            const int LANES = DIM / 4, STEP = THREADS / LANES, COPIES = PIECE / STEP;
            int row = threadIdx.x / LANES, at = 4 * (threadIdx.x % LANES), key = (piece - KEY_PIECES) * PIECE + row;
            const float *from[COPIES];
#pragma unroll
            for (int i = 0; i < COPIES; i++) from[i] = rows[(tile % 2 * 2 + 1) * KEYS + key + STEP * i] + at;
#pragma unroll
            for (int i = 0; i < COPIES; i++) copy_async(to + (row + STEP * i) * DIM + at, from[i], true);
        }
    };

    for (int i = threadIdx.x; i < QUERIES * DIM / 4; i += THREADS) {
        int row = i / (DIM / 4), at = i % (DIM / 4) * 4;
        bool there = first + row < t.queries;
        const float *from = segment_row<float>(t.q, there ? first + row : 0, t.heads * DIM) + head * DIM + at;
        copy_async(queries + row * QUERY_PITCH + at, from, there);
    }
    find_rows(0);
    __syncthreads();
    bring(0, 0, 0);
    copy_commit();

    const float *my_queries = queries + (16 * warp + odd) * QUERY_PITCH;
    float *my_shares = shares + (16 * warp + odd) * SHARE_PITCH;
    // What no query sees: below every score, and its exponential is zero.
    const float unseen = __uint_as_float(0xff800000u);
    float sums[8][4 * VECTORS] = {}, best[8], shrink[8], total[8] = {};
#pragma unroll
    for (int i = 0; i < 8; i++) best[i] = -1e38f;
    int stage = 0;
    // The next piece is there, and the one after it sets out.
    auto next = [&](int tile, int piece) {
        copy_wait<0>();
        // Also: everybody is done with the stage that is overwritten next.
        __syncthreads();
        if (piece + 1 < PIECES)
            bring(tile, piece + 1, stage ^ 1);
        else if (tile + 1 < tiles)
            bring(tile + 1, 0, stage ^ 1);
        copy_commit();
        const float *here = stages + stage * STAGE;
        stage ^= 1;
        return here;
    };

    for (int tile = 0; tile < tiles; tile++) {
        float scores[8][8] = {};
        for (int piece = 0; piece < KEY_PIECES; piece++) {
            const float *keys = next(tile, piece) + column * KEY_PITCH;
            // Nobody reads these before the next barrier, and those of the tile before are used up.
            if (piece == 0 && tile + 1 < tiles) find_rows(tile + 1);
#pragma unroll
            for (int d = 0; d < PIECE; d += 4) {
                float4 k[8];
#pragma unroll
                for (int j = 0; j < 8; j++) k[j] = *(const float4 *)(keys + 16 * j * KEY_PITCH + d);
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    float4 q = *(const float4 *)(my_queries + 2 * i * QUERY_PITCH + piece * PIECE + d);
                    multiply_add(scores[i], q, k);
                }
            }
        }

        // The probabilities of the tile before have been read by all lanes: barriers came since.
        if (t.mask != 0 || begin + (tile + 1) * KEYS > end) {
            int key = begin + tile * KEYS + column;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                int low, high;
                seen(t, first + 16 * warp + odd + 2 * i, low, high);
#pragma unroll
                for (int j = 0; j < 8; j++)
                    if (key + 16 * j < low || key + 16 * j >= high) scores[i][j] = unseen;
            }
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float top = best[i];
#pragma unroll
            for (int j = 0; j < 8; j++) {
                scores[i][j] *= t.scale;
                top = fmaxf(top, scores[i][j]);
            }
#pragma unroll
            for (int step = 2; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
            shrink[i] = expf(best[i] - top);
            best[i] = top;
            float tile_total = 0.0f;
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float share = expf(scores[i][j] - top);
                tile_total += share;
                my_shares[2 * i * SHARE_PITCH + column + 16 * j] = share;
            }
            total[i] = total[i] * shrink[i] + tile_total;
        }
        __syncwarp();

        float tile_sums[8][4 * VECTORS] = {};
        for (int piece = 0; piece < KEYS / PIECE; piece++) {
            const float *values = next(tile, KEY_PIECES + piece) + 4 * column;
#pragma unroll
            for (int k = 0; k < PIECE; k += 4) {
                float4 v[4][VECTORS];
#pragma unroll
                for (int j = 0; j < 4; j++)
#pragma unroll
                    for (int e = 0; e < VECTORS; e++) v[j][e] = *(const float4 *)(values + (k + j) * DIM + 64 * e);
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    float4 share = *(const float4 *)(my_shares + 2 * i * SHARE_PITCH + piece * PIECE + k);
                    float factors[4] = {share.x, share.y, share.z, share.w};
#pragma unroll
                    for (int j = 0; j < 4; j++)
#pragma unroll
                        for (int e = 0; e < VECTORS; e++) add_scaled(tile_sums[i] + 4 * e, factors[j], v[j][e]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
            for (int e = 0; e < 4 * VECTORS; e++) sums[i][e] = sums[i][e] * shrink[i] + tile_sums[i][e];
    }

#pragma unroll
    for (int i = 0; i < 8; i++) {
#pragma unroll
        for (int step = 2; step < 32; step *= 2) total[i] += __shfl_xor_sync(0xffffffffu, total[i], step);
        int query = first + 16 * warp + odd + 2 * i;
        if (query < t.queries) {
            float *out = (float *)t.out + ((long long)query * t.heads + head) * DIM + 4 * column;
            float factor = 1.0f / total[i];
#pragma unroll
            for (int e = 0; e < VECTORS; e++)
                *(float4 *)(out + 64 * e) = make_float4(sums[i][4 * e] * factor, sums[i][4 * e + 1] * factor,
                                                        sums[i][4 * e + 2] * factor, sums[i][4 * e + 3] * factor);
        }
    }
}

#define KERNEL(DIM)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) attention_f32_##DIM(const __grid_constant__ Attention t) { \
        attention_f32<DIM>(t);                                                                                       \
    }

KERNEL(64)
KERNEL(128)
