// Operands of 8-bit attention, heads of 128: queries and keys in int8, values in e4m3.
// Softmax does not change when a vector is subtracted from all keys: without their mean they need smaller scales. A query has
// its own scale, 128 keys of a head share one, and so do all values of a channel.
// 4608 tokens of 24 heads take 35 us on an H200, 3.7 TB/s. More blocks at once, with fewer registers, or 512 threads: 8 % slower.

#include "e4m3.cuh"
#include "int8.cuh"
#include "row_scale.cuh"
#include "tile_rounding.cuh"

// One block per part of the keys and head, first for keys, then for values.
extern "C" __global__ void __launch_bounds__(ROUND_THREADS) measure_keys_values(const __grid_constant__ RoundAttentionArgs args) {
    if ((int)blockIdx.y >= args.kv_heads) return measure_values(args, blockIdx.y - args.kv_heads);
    float results[8] = {};
    for (int tile = blockIdx.x * TILES_MEASURED; tile < (int)(blockIdx.x + 1) * TILES_MEASURED; tile++) {
        Vec8<bf16> rows[ROWS_EACH];
        load_tile(rows, args.k, tile, args.kv_heads, blockIdx.y, tile_row);
#pragma unroll
        for (int i = 0; i < ROWS_EACH; i++) {
            float v[8];
            widen(rows[i], v);
#pragma unroll
            for (int j = 0; j < 8; j++) results[j] += v[j];
        }
    }
    store_measured(args, false, blockIdx.y, results);
}

__device__ __forceinline__ void round_queries(const RoundAttentionArgs &args, int head) {
    Vec8<bf16> rows[ROWS_EACH];
    load_tile(rows, args.q, blockIdx.x, args.heads, head, tile_row);
#pragma unroll
    for (int i = 0; i < ROWS_EACH; i++) {
        int row = blockIdx.x * TILE_ROWS + tile_row(i);
        float v[8], largest = 0.0f;
        widen(rows[i], v);
        update_abs_max(largest, v);
#pragma unroll
        for (int step = 8; step > 0; step /= 2) largest = max_or_nan(largest, __shfl_xor_sync(0xffffffffu, largest, step));
        RowScale scale = int8_scale(largest);
        // Idle lanes stay for the others' shuffles.
        if (row >= args.queries) continue;
        store_int8(args.q_out + ((long long)row * args.heads + head) * HEAD_WIDTH + lane_column(), v, scale.inverse);
        if (threadIdx.x % 16 == 0) args.q_scales[(long long)head * args.queries + row] = scale.scale;
    }
}

__device__ __forceinline__ void round_keys(const RoundAttentionArgs &args, int head, int tiles) {
    __align__(16) __shared__ float means[HEAD_WIDTH];
    Vec8<bf16> rows[ROWS_EACH];
    load_tile(rows, args.k, blockIdx.x, args.kv_heads, head, tile_row);
    if (threadIdx.x < HEAD_WIDTH) means[threadIdx.x] = reduce_parts(args.sums, args, head, false) / args.keys;
    __syncthreads();
    float mean[8], largest = 0.0f;
    load_vector(means + lane_column(), mean);
    auto centered = [&](int i, float (&v)[8]) {
        widen(rows[i], v);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] -= mean[j];
        return (int)blockIdx.x * TILE_ROWS + tile_row(i);
    };
#pragma unroll
    for (int i = 0; i < ROWS_EACH; i++) {
        float v[8];
        if (centered(i, v) < args.keys) update_abs_max(largest, v);
    }
    RowScale scale = int8_scale(block_max<ROUND_THREADS / 32>(largest));
#pragma unroll
    for (int i = 0; i < ROWS_EACH; i++) {
        float v[8];
        int row = centered(i, v);
        if (row < args.keys) store_int8(args.k_out + ((long long)row * args.kv_heads + head) * HEAD_WIDTH + lane_column(), v, scale.inverse);
    }
    if (threadIdx.x == 0) args.k_scales[head * tiles + blockIdx.x] = scale.scale;
}

// One block per tile of rows and head, first for queries, then for keys, then for values.
extern "C" __global__ void __launch_bounds__(ROUND_THREADS, 3) round_attention(const __grid_constant__ RoundAttentionArgs args) {
    int tiles = (args.keys + TILE_ROWS - 1) / TILE_ROWS, head = blockIdx.y - args.heads;
    if (head < 0)
        round_queries(args, blockIdx.y);
    else if ((int)blockIdx.x >= tiles)
        return;
    else if (head < args.kv_heads)
        round_keys(args, head, tiles);
    else
        round_values(args, head - args.kv_heads, tiles);
}
