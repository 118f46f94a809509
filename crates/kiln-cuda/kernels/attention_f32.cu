// Flash attention in f32 on CUDA cores: 64 queries of one head per block, 128 keys per tile.
// A warp owns 16 queries with their scores, probabilities and sums. A thread owns every second of these queries with 8
// keys, then with as many elements of the head. Keys are loaded in chunks of 16 elements of 128 keys, values in chunks of
// 16 keys, double-buffered. Each tile is summed separately, which is as fast as one long sum and more accurate.
// 4608 tokens, 24 heads of 128 on an H200: 6.8 ms, 38 TFLOP/s (PyTorch 6.0 ms); error against f64 4.7e-7 (PyTorch 7.4e-7).
// 128 queries per block were no faster.

const int QUERIES = 64, KEYS = 128, CHUNK = 16, THREADS = 128, STAGES = 2;
// 4 elements of padding: 8 adjacent rows lie in different banks.
const int KEY_PITCH = CHUNK + 4;
// Probabilities are written 16 of a row and two rows at a time.
const int PROBABILITY_PITCH = KEYS + 16;

__device__ __forceinline__ void add_scaled(float *sums, float factor, const float4 &v) {
    sums[0] += factor * v.x;
    sums[1] += factor * v.y;
    sums[2] += factor * v.z;
    sums[3] += factor * v.w;
}

template <int DIM> __device__ __forceinline__ void attention_f32(const AttentionArgs &args) {
    // Vectors of a head per thread; chunks of a tile's keys, and of its keys and values.
    const int VECTORS = DIM / 64, KEY_CHUNKS = DIM / CHUNK, CHUNKS = KEY_CHUNKS + KEYS / CHUNK;
    const int QUERY_PITCH = DIM + 4, STAGE = KEYS * KEY_PITCH;
    DYNAMIC_SHARED(memory);
    float *queries = (float *)memory, *probabilities = queries + QUERIES * QUERY_PITCH;
    float *stages = probabilities + QUERIES * PROBABILITY_PITCH;
    // Row addresses of keys and values of this tile and the next. Beyond the last key they repeat it, masked.
    const float **rows = (const float **)(stages + STAGES * STAGE);

    int first = blockIdx.x * QUERIES, head = blockIdx.y, kv_head = head / (args.heads / args.kv_heads);
    int last = first + QUERIES - 1 < args.queries ? first + QUERIES - 1 : args.queries - 1;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // Adjacent lanes read one key, or one vector of values, and every second lane one query: fewest bank conflicts.
    int odd = lane % 2, column = lane / 2;
    int begin, end;
    visible_to_any(args, first, last, begin, end);
    int tiles = (end - begin + KEYS - 1) / KEYS;

    auto locate_rows = [&](int tile) {
        int key = begin + tile * KEYS + threadIdx.x, row = key < end ? key : end - 1;
        const float **to = rows + tile % 2 * 2 * KEYS + threadIdx.x;
        to[0] = segment_row<float>(args.k, row, args.kv_heads * DIM) + kv_head * DIM;
        to[KEYS] = segment_row<float>(args.v, row, args.kv_heads * DIM) + kv_head * DIM;
    };
    auto prefetch = [&](int tile, int chunk, int stage) {
        float *to = stages + stage * STAGE;
        // Read all addresses first: the compiler does not move loads across a copy.
        if (chunk < KEY_CHUNKS) {
            const int STEP = THREADS / 4, COPIES = KEYS / STEP;
            int row = threadIdx.x / 4, at = 4 * (threadIdx.x % 4);
            const float *from[COPIES];
#pragma unroll
            for (int i = 0; i < COPIES; i++) from[i] = rows[tile % 2 * 2 * KEYS + row + STEP * i] + chunk * CHUNK + at;
#pragma unroll
            for (int i = 0; i < COPIES; i++) copy_async(to + (row + STEP * i) * KEY_PITCH + at, from[i], true);
        } else {
            const int LANES = DIM / 4, STEP = THREADS / LANES, COPIES = CHUNK / STEP;
            int row = threadIdx.x / LANES, at = 4 * (threadIdx.x % LANES), key = (chunk - KEY_CHUNKS) * CHUNK + row;
            const float *from[COPIES];
#pragma unroll
            for (int i = 0; i < COPIES; i++) from[i] = rows[(tile % 2 * 2 + 1) * KEYS + key + STEP * i] + at;
#pragma unroll
            for (int i = 0; i < COPIES; i++) copy_async(to + (row + STEP * i) * DIM + at, from[i], true);
        }
    };

    for (int i = threadIdx.x; i < QUERIES * DIM / 4; i += THREADS) {
        int row = i / (DIM / 4), at = i % (DIM / 4) * 4;
        bool valid = first + row < args.queries;
        const float *from = segment_row<float>(args.q, valid ? first + row : 0, args.heads * DIM) + head * DIM + at;
        copy_async(queries + row * QUERY_PITCH + at, from, valid);
    }
    locate_rows(0);
    __syncthreads();
    prefetch(0, 0, 0);
    copy_commit();

    const float *my_queries = queries + (16 * warp + odd) * QUERY_PITCH;
    float *my_probabilities = probabilities + (16 * warp + odd) * PROBABILITY_PITCH;
    // -infinity: below every score, and its exponential is zero.
    const float masked = __uint_as_float(0xff800000u);
    float sums[8][4 * VECTORS] = {}, row_max[8], rescale[8], row_sum[8] = {};
#pragma unroll
    for (int i = 0; i < 8; i++) row_max[i] = -1e38f;
    int stage = 0;
    // Waits for the next chunk and starts loading the one after it.
    auto next_chunk = [&](int tile, int chunk) {
        copy_wait<0>();
        // Also: all threads are done with the stage that is overwritten next.
        __syncthreads();
        if (chunk + 1 < CHUNKS)
            prefetch(tile, chunk + 1, stage ^ 1);
        else if (tile + 1 < tiles)
            prefetch(tile + 1, 0, stage ^ 1);
        copy_commit();
        const float *here = stages + stage * STAGE;
        stage ^= 1;
        return here;
    };

    for (int tile = 0; tile < tiles; tile++) {
        float scores[8][8] = {};
        for (int chunk = 0; chunk < KEY_CHUNKS; chunk++) {
            const float *keys = next_chunk(tile, chunk) + column * KEY_PITCH;
            // Not read before the next barrier; those of the previous tile are no longer needed.
            if (chunk == 0 && tile + 1 < tiles) locate_rows(tile + 1);
#pragma unroll
            for (int d = 0; d < CHUNK; d += 4) {
                float4 k[8];
#pragma unroll
                for (int j = 0; j < 8; j++) k[j] = *(const float4 *)(keys + 16 * j * KEY_PITCH + d);
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    float4 q = *(const float4 *)(my_queries + 2 * i * QUERY_PITCH + chunk * CHUNK + d);
                    multiply_add(scores[i], q, k);
                }
            }
        }

        // All lanes have read the probabilities of the previous tile: there were barriers since.
        if (args.mask != 0 || begin + (tile + 1) * KEYS > end) {
            int key = begin + tile * KEYS + column;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                int low, high;
                visible_keys(args, first + 16 * warp + odd + 2 * i, low, high);
#pragma unroll
                for (int j = 0; j < 8; j++)
                    if (key + 16 * j < low || key + 16 * j >= high) scores[i][j] = masked;
            }
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float new_max = row_max[i];
#pragma unroll
            for (int j = 0; j < 8; j++) {
                scores[i][j] *= args.scale;
                new_max = fmaxf(new_max, scores[i][j]);
            }
#pragma unroll
            for (int step = 2; step < 32; step *= 2) new_max = fmaxf(new_max, __shfl_xor_sync(0xffffffffu, new_max, step));
            rescale[i] = expf(row_max[i] - new_max);
            row_max[i] = new_max;
            float tile_sum = 0.0f;
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float probability = expf(scores[i][j] - new_max);
                tile_sum += probability;
                my_probabilities[2 * i * PROBABILITY_PITCH + column + 16 * j] = probability;
            }
            row_sum[i] = row_sum[i] * rescale[i] + tile_sum;
        }
        __syncwarp();

        float tile_sums[8][4 * VECTORS] = {};
        for (int chunk = 0; chunk < KEYS / CHUNK; chunk++) {
            const float *values = next_chunk(tile, KEY_CHUNKS + chunk) + 4 * column;
#pragma unroll
            for (int k = 0; k < CHUNK; k += 4) {
                float4 v[4][VECTORS];
#pragma unroll
                for (int j = 0; j < 4; j++)
#pragma unroll
                    for (int e = 0; e < VECTORS; e++) v[j][e] = *(const float4 *)(values + (k + j) * DIM + 64 * e);
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    float4 probability = *(const float4 *)(my_probabilities + 2 * i * PROBABILITY_PITCH + chunk * CHUNK + k);
                    float factors[4] = {probability.x, probability.y, probability.z, probability.w};
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
            for (int e = 0; e < 4 * VECTORS; e++) sums[i][e] = sums[i][e] * rescale[i] + tile_sums[i][e];
    }

#pragma unroll
    for (int i = 0; i < 8; i++) {
#pragma unroll
        for (int step = 2; step < 32; step *= 2) row_sum[i] += __shfl_xor_sync(0xffffffffu, row_sum[i], step);
        int query = first + 16 * warp + odd + 2 * i;
        if (query < args.queries) {
            float *out = (float *)args.out + ((long long)query * args.heads + head) * DIM + 4 * column;
            float factor = 1.0f / row_sum[i];
            if (args.lse && column == 0) args.lse[(long long)query * args.heads + head] = row_max[i] + logf(row_sum[i]);
#pragma unroll
            for (int e = 0; e < VECTORS; e++)
                *(float4 *)(out + 64 * e) = make_float4(sums[i][4 * e] * factor, sums[i][4 * e + 1] * factor,
                                                        sums[i][4 * e + 2] * factor, sums[i][4 * e + 3] * factor);
        }
    }
}

#define KERNEL(DIM)                                                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) attention_f32_##DIM(const __grid_constant__ AttentionArgs args) { \
        attention_f32<DIM>(args);                                                                                              \
    }

KERNEL(64)
KERNEL(128)
