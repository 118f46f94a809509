// Operands of 8-bit attention, heads of 128: queries and keys in int8, values in e4m3.
// Softmax does not change when a vector is subtracted from all keys: without their mean they need smaller scales. A query has
// its own scale, 128 keys of a head share one, and so do all values of a channel.

#include "e4m3.cuh"
#include "int8.cuh"
#include "row_scale.cuh"

const int ROWS = 128, WIDTH = 128, THREADS = 512;
// Rows that a block reads at once, with 16 lanes for eight columns each.
const int AT_ONCE = THREADS / 16;

struct RoundAttentionArgs {
    Segments q, k, v;
    int queries, keys, heads, kv_heads;
    // [kv_heads][tiles of keys][WIDTH]: sums of keys, largest absolute values of values.
    float *sums, *maxima;
    // [queries, heads * WIDTH]; [keys, kv_heads * WIDTH]; [kv_heads * WIDTH, keys], rows of whole tiles.
    signed char *q_out, *k_out;
    unsigned char *v_out;
    // [heads, queries]; [kv_heads, tiles of keys]; [kv_heads, WIDTH].
    float *q_scales, *k_scales, *v_scales;
};

// Scale of int8 values. It is never 0: a score that is masked has to stay far below the others.
__device__ __forceinline__ RowScale int8_scale(float largest) { return row_scale<127>(fmaxf(largest, 1e-8f)); }

__device__ __forceinline__ void store_int8(signed char *to, const float (&v)[8], float inverse) {
    *(u64 *)to = round_int8(v, inverse) | (u64)round_int8(v + 4, inverse) << 32;
}

__device__ __forceinline__ int lane_column() { return threadIdx.x % 16 * 8; }

// Adds up the columns of all threads; `largest`: takes the largest instead. The result is for 128 threads.
__device__ __forceinline__ float reduce_columns(const float (&v)[8], bool largest) {
    __shared__ float parts[AT_ONCE][WIDTH];
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 8; j++) parts[threadIdx.x / 16][lane_column() + j] = v[j];
    __syncthreads();
    if (threadIdx.x >= WIDTH) return 0.0f;
    float result = parts[0][threadIdx.x];
    for (int i = 1; i < AT_ONCE; i++) {
        float part = parts[i][threadIdx.x];
        result = largest ? fmaxf(result, part) : result + part;
    }
    return result;
}

// A thread's rows of a tile. Rows past the end are zeros.
__device__ __forceinline__ void load_tile(Vec8<bf16> (&rows)[ROWS / AT_ONCE], const Segments &from, int count, int heads, int head) {
    int first = blockIdx.x * ROWS + threadIdx.x / 16;
#pragma unroll
    for (int i = 0; i < ROWS / AT_ONCE; i++) {
        rows[i] = {make_uint4(0, 0, 0, 0)};
        if (first + AT_ONCE * i < count) rows[i] = load_vec8(segment_row<bf16>(from, first + AT_ONCE * i, heads * WIDTH) + head * WIDTH + lane_column());
    }
}

// One block per tile of keys and head, first for keys, then for values.
extern "C" __global__ void __launch_bounds__(THREADS) measure_keys_values(const __grid_constant__ RoundAttentionArgs args) {
    bool values = (int)blockIdx.y >= args.kv_heads;
    int head = blockIdx.y - (values ? args.kv_heads : 0);
    Vec8<bf16> rows[ROWS / AT_ONCE];
    load_tile(rows, values ? args.v : args.k, args.keys, args.kv_heads, head);
    float results[8] = {};
#pragma unroll
    for (int i = 0; i < ROWS / AT_ONCE; i++) {
        float v[8];
        widen(rows[i], v);
#pragma unroll
        for (int j = 0; j < 8; j++) results[j] = values ? fmaxf(results[j], abs_or_infinite(v[j])) : results[j] + v[j];
    }
    float result = reduce_columns(results, values);
    if (threadIdx.x >= WIDTH) return;
    (values ? args.maxima : args.sums)[((long long)head * gridDim.x + blockIdx.x) * WIDTH + threadIdx.x] = result;
}

// Adds up what all tiles have measured of a head's column; `largest`: takes the largest instead.
__device__ __forceinline__ float reduce_tiles(const float *parts, int head, int tiles, int column, bool largest) {
    float result = 0.0f;
    parts += (long long)head * tiles * WIDTH + column;
#pragma unroll 8
    for (int i = 0; i < tiles; i++) {
        float part = parts[i * WIDTH];
        result = largest ? fmaxf(result, part) : result + part;
    }
    return result;
}

__device__ __forceinline__ void round_queries(const RoundAttentionArgs &args, int head) {
    Vec8<bf16> rows[ROWS / AT_ONCE];
    load_tile(rows, args.q, args.queries, args.heads, head);
#pragma unroll
    for (int i = 0; i < ROWS / AT_ONCE; i++) {
        int row = blockIdx.x * ROWS + AT_ONCE * i + threadIdx.x / 16;
        float v[8], largest = 0.0f;
        widen(rows[i], v);
        update_abs_max(largest, v);
#pragma unroll
        for (int step = 8; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
        RowScale scale = int8_scale(largest);
        // Idle lanes stay for the others' shuffles.
        if (row >= args.queries) continue;
        store_int8(args.q_out + ((long long)row * args.heads + head) * WIDTH + lane_column(), v, scale.inverse);
        if (threadIdx.x % 16 == 0) args.q_scales[(long long)head * args.queries + row] = scale.scale;
    }
}

__device__ __forceinline__ void round_keys(const RoundAttentionArgs &args, int head, int tiles) {
    __shared__ float means[WIDTH];
    Vec8<bf16> rows[ROWS / AT_ONCE];
    load_tile(rows, args.k, args.keys, args.kv_heads, head);
    if (threadIdx.x < WIDTH) means[threadIdx.x] = reduce_tiles(args.sums, head, tiles, threadIdx.x, false) / args.keys;
    __syncthreads();
    float mean[8], largest = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; j++) mean[j] = means[lane_column() + j];
    auto centered = [&](int i, float (&v)[8]) {
        widen(rows[i], v);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] -= mean[j];
        return (int)blockIdx.x * ROWS + AT_ONCE * i + threadIdx.x / 16;
    };
#pragma unroll
    for (int i = 0; i < ROWS / AT_ONCE; i++) {
        float v[8];
        if (centered(i, v) < args.keys) update_abs_max(largest, v);
    }
    RowScale scale = int8_scale(block_max<THREADS / 32>(largest));
#pragma unroll
    for (int i = 0; i < ROWS / AT_ONCE; i++) {
        float v[8];
        int row = centered(i, v);
        if (row < args.keys) store_int8(args.k_out + ((long long)row * args.kv_heads + head) * WIDTH + lane_column(), v, scale.inverse);
    }
    if (threadIdx.x == 0) args.k_scales[head * tiles + blockIdx.x] = scale.scale;
}

// Values are stored transposed. Of every 16 keys, the order is 0, 1, 8, 9, 2, 3, 10, 11, ...: the order in which the product's
// left operand has them.
__device__ __forceinline__ void round_values(const RoundAttentionArgs &args, int head, int tiles) {
    __shared__ float inverses[WIDTH];
    __shared__ unsigned words[WIDTH][ROWS / 4 + 1];
    Vec8<bf16> rows[4];
    int word = threadIdx.x / 16;
#pragma unroll
    for (int b = 0; b < 4; b++) {
        int row = blockIdx.x * ROWS + word / 4 * 16 + word % 4 * 2 + b / 2 * 8 + b % 2;
        rows[b] = {make_uint4(0, 0, 0, 0)};
        if (row < args.keys) rows[b] = load_vec8(segment_row<bf16>(args.v, row, args.kv_heads * WIDTH) + head * WIDTH + lane_column());
    }
    if (threadIdx.x < WIDTH) {
        RowScale scale = row_scale<448>(reduce_tiles(args.maxima, head, tiles, threadIdx.x, true));
        inverses[threadIdx.x] = scale.inverse;
        if (blockIdx.x == 0) args.v_scales[head * WIDTH + threadIdx.x] = scale.scale;
    }
    __syncthreads();
    u64 bytes[4];
#pragma unroll
    for (int b = 0; b < 4; b++) {
        float v[8];
        widen(rows[b], v);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] *= inverses[lane_column() + j];
        bytes[b] = round_fp8(v, 1.0f);
    }
#pragma unroll
    for (int j = 0; j < 8; j++) {
        unsigned four = 0;
#pragma unroll
        for (int b = 0; b < 4; b++) four |= (unsigned)(bytes[b] >> 8 * j & 0xff) << 8 * b;
        words[lane_column() + j][word] = four;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < WIDTH * ROWS / 16; i += THREADS) {
        const unsigned *from = words[i / (ROWS / 16)] + i % (ROWS / 16) * 4;
        *(uint4 *)(args.v_out + ((long long)(head * WIDTH + i / (ROWS / 16)) * tiles + blockIdx.x) * ROWS + i % (ROWS / 16) * 16) =
            make_uint4(from[0], from[1], from[2], from[3]);
    }
}

// One block per tile of rows and head, first for queries, then for keys, then for values.
extern "C" __global__ void __launch_bounds__(THREADS) round_attention(const __grid_constant__ RoundAttentionArgs args) {
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
