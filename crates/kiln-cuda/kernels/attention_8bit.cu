// Operands of 8-bit attention, heads of 128: queries and keys in int8, values in e4m3.
// Softmax does not change when a vector is subtracted from all keys: without their mean they need smaller scales. A query has
// its own scale, 128 keys of a head share one, and so do all values of a channel.
// 4608 tokens of 24 heads take 35 us on an H200, 3.7 TB/s. More blocks at once, with fewer registers, or 512 threads: 8 % slower.
// A mean of every fourth key saves 3 us of 81 for norm, rotation, measuring and rounding. Norm and rotation in here would save 20,
// but queries and keys would have to come unnormed.

#include "e4m3.cuh"
#include "int8.cuh"
#include "row_scale.cuh"

const int ROWS = 128, WIDTH = 128, THREADS = 256;
// Rows that a block reads at once, with 16 lanes for eight columns each, and a thread's rows of a tile.
const int AT_ONCE = THREADS / 16, EACH = ROWS / AT_ONCE;
// Tiles that a block measures.
const int MEASURED = 4;

struct RoundAttentionArgs {
    Segments q, k, v;
    int queries, keys, heads, kv_heads;
    // [kv_heads][parts of MEASURED tiles of keys][WIDTH]: sums of keys, largest absolute values of values.
    float *sums, *maxima;
    // [queries, heads * WIDTH]; [keys, kv_heads * WIDTH]; [kv_heads * WIDTH, keys], rows of whole tiles.
    signed char *q_out, *k_out;
    unsigned char *v_out;
    // [heads, queries]; [kv_heads, tiles of keys]; [kv_heads, WIDTH].
    float *q_scales, *k_scales, *v_scales;
};

// Scale of int8 values. It is never 0: a score that is masked has to stay far below the others.
__device__ __forceinline__ RowScale int8_scale(float largest) {
    largest = max_or_nan(largest, 1e-8f);
    return {127.0f * fast_reciprocal(largest), largest * (1.0f / 127.0f)};
}

__device__ __forceinline__ void store_int8(signed char *to, const float (&v)[8], float inverse) {
    *(u64 *)to = round_int8(v, inverse) | (u64)round_int8(v + 4, inverse) << 32;
}

__device__ __forceinline__ int lane_column() { return threadIdx.x % 16 * 8; }

// A thread's row `i` of a tile.
__device__ __forceinline__ int tile_row(int i) { return AT_ONCE * i + threadIdx.x / 16; }

// Eight columns of a head in a thread's rows of a tile, which `row_of` names. Rows past the end are zeros.
template <class F>
__device__ __forceinline__ void load_tile(Vec8<bf16> (&rows)[EACH], const Segments &from, int tile, int heads, int head, F row_of) {
    int first = tile * ROWS, count = from.end[from.count - 1], width = heads * WIDTH, column = head * WIDTH + lane_column(), segment = 0;
    while (segment + 1 < from.count && first >= from.end[segment]) segment++;
    // Most tiles lie in one segment.
    if (first + ROWS <= from.end[segment]) {
        int rows_before = segment ? from.end[segment - 1] : 0;
        const bf16 *start = (const bf16 *)from.start[segment] + (long long)(first - rows_before) * width + column;
#pragma unroll
        for (int i = 0; i < EACH; i++) rows[i] = load_vec8(start + row_of(i) * width);
        return;
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int row = first + row_of(i);
        rows[i] = {make_uint4(0, 0, 0, 0)};
        if (row < count) rows[i] = load_vec8(segment_row<bf16>(from, row, width) + column);
    }
}

// One block per part of the keys and head, first for keys, then for values.
extern "C" __global__ void __launch_bounds__(THREADS) measure_keys_values(const __grid_constant__ RoundAttentionArgs args) {
    __shared__ float parts[AT_ONCE][WIDTH];
    bool values = (int)blockIdx.y >= args.kv_heads;
    int head = blockIdx.y - (values ? args.kv_heads : 0);
    float results[8] = {};
    for (int tile = blockIdx.x * MEASURED; tile < (int)(blockIdx.x + 1) * MEASURED; tile++) {
        Vec8<bf16> rows[EACH];
        load_tile(rows, values ? args.v : args.k, tile, args.kv_heads, head, tile_row);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            float v[8];
            widen(rows[i], v);
#pragma unroll
            for (int j = 0; j < 8; j++) results[j] = values ? max_or_nan(results[j], fabsf(v[j])) : results[j] + v[j];
        }
    }
#pragma unroll
    for (int j = 0; j < 8; j++) parts[threadIdx.x / 16][lane_column() + j] = results[j];
    __syncthreads();
    if (threadIdx.x >= WIDTH) return;
    float result = 0.0f;
    for (int i = 0; i < AT_ONCE; i++) {
        float part = parts[i][threadIdx.x];
        result = values ? max_or_nan(result, part) : result + part;
    }
    (values ? args.maxima : args.sums)[((long long)head * gridDim.x + blockIdx.x) * WIDTH + threadIdx.x] = result;
}

// What all parts have measured of a head's column: its mean; `largest`: the largest value.
__device__ __forceinline__ float reduce_parts(const float *measured, const RoundAttentionArgs &args, int head, bool largest) {
    int parts = (args.keys + MEASURED * ROWS - 1) / (MEASURED * ROWS);
    measured += (long long)head * parts * WIDTH + threadIdx.x;
    float result = 0.0f;
#pragma unroll 8
    for (int i = 0; i < parts; i++) {
        float part = measured[i * WIDTH];
        result = largest ? max_or_nan(result, part) : result + part;
    }
    return largest ? result : result / args.keys;
}

__device__ __forceinline__ void round_queries(const RoundAttentionArgs &args, int head) {
    Vec8<bf16> rows[EACH];
    load_tile(rows, args.q, blockIdx.x, args.heads, head, tile_row);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int row = blockIdx.x * ROWS + tile_row(i);
        float v[8], largest = 0.0f;
        widen(rows[i], v);
        update_abs_max(largest, v);
#pragma unroll
        for (int step = 8; step > 0; step /= 2) largest = max_or_nan(largest, __shfl_xor_sync(0xffffffffu, largest, step));
        RowScale scale = int8_scale(largest);
        // Idle lanes stay for the others' shuffles.
        if (row >= args.queries) continue;
        store_int8(args.q_out + ((long long)row * args.heads + head) * WIDTH + lane_column(), v, scale.inverse);
        if (threadIdx.x % 16 == 0) args.q_scales[(long long)head * args.queries + row] = scale.scale;
    }
}

__device__ __forceinline__ void round_keys(const RoundAttentionArgs &args, int head, int tiles) {
    __align__(16) __shared__ float means[WIDTH];
    Vec8<bf16> rows[EACH];
    load_tile(rows, args.k, blockIdx.x, args.kv_heads, head, tile_row);
    if (threadIdx.x < WIDTH) means[threadIdx.x] = reduce_parts(args.sums, args, head, false);
    __syncthreads();
    float mean[8], largest = 0.0f;
    load_vector(means + lane_column(), mean);
    auto centered = [&](int i, float (&v)[8]) {
        widen(rows[i], v);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] -= mean[j];
        return (int)blockIdx.x * ROWS + tile_row(i);
    };
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        float v[8];
        if (centered(i, v) < args.keys) update_abs_max(largest, v);
    }
    RowScale scale = int8_scale(block_max<THREADS / 32>(largest));
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        float v[8];
        int row = centered(i, v);
        if (row < args.keys) store_int8(args.k_out + ((long long)row * args.kv_heads + head) * WIDTH + lane_column(), v, scale.inverse);
    }
    if (threadIdx.x == 0) args.k_scales[head * tiles + blockIdx.x] = scale.scale;
}

// Values are stored transposed. Of every 16 keys, the order is 0, 1, 8, 9, 2, 3, 10, 11, ...: the order in which the product's
// left operand has them.
__device__ __forceinline__ void round_values(const RoundAttentionArgs &args, int head, int tiles) {
    __align__(16) __shared__ float inverses[WIDTH];
    // Four words of a column lie together. They are XORed with the column, so that few stores meet in a bank.
    __align__(16) __shared__ unsigned words[WIDTH][ROWS / 4];
    auto place = [](int column, int four) { return (four ^ column / 8 % 8) * 4; };
    // A thread's words of four rows.
    auto word = [](int i) { return threadIdx.x / 16 + AT_ONCE * i; };
    Vec8<bf16> rows[EACH];
    load_tile(rows, args.v, blockIdx.x, args.kv_heads, head,
              [&](int i) { return word(i / 4) / 4 * 16 + word(i / 4) % 4 * 2 + i % 4 / 2 * 8 + i % 2; });
    if (threadIdx.x < WIDTH) {
        RowScale scale = row_scale<448>(reduce_parts(args.maxima, args, head, true));
        inverses[threadIdx.x] = scale.inverse;
        if (blockIdx.x == 0) args.v_scales[head * WIDTH + threadIdx.x] = scale.scale;
    }
    __syncthreads();
    float inverse[8];
    load_vector(inverses + lane_column(), inverse);
#pragma unroll
    for (int i = 0; i < EACH; i += 4) {
        float v[4][8];
#pragma unroll
        for (int b = 0; b < 4; b++) widen(rows[i + b], v[b]);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            unsigned low = round_fp8_pair(v[0][j] * inverse[j], v[1][j] * inverse[j]);
            unsigned high = round_fp8_pair(v[2][j] * inverse[j], v[3][j] * inverse[j]);
            words[lane_column() + j][place(lane_column(), word(i / 4) / 4) + word(i / 4) % 4] = low | high << 16;
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = threadIdx.x; i < WIDTH * ROWS / 16; i += THREADS) {
        int column = i / (ROWS / 16), four = i % (ROWS / 16);
        *(uint4 *)(args.v_out + ((long long)(head * WIDTH + column) * tiles + blockIdx.x) * ROWS + four * 16) =
            *(const uint4 *)&words[column][place(column, four)];
    }
}

// One block per tile of rows and head, first for queries, then for keys, then for values.
extern "C" __global__ void __launch_bounds__(THREADS, 3) round_attention(const __grid_constant__ RoundAttentionArgs args) {
    int tiles = (args.keys + ROWS - 1) / ROWS, head = blockIdx.y - args.heads;
    if (head < 0)
        round_queries(args, blockIdx.y);
    else if ((int)blockIdx.x >= tiles)
        return;
    else if (head < args.kv_heads)
        round_keys(args, head, tiles);
    else
        round_values(args, head - args.kv_heads, tiles);
}
