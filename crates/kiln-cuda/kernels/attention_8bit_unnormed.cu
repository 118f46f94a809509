// The operands of 8-bit attention from queries and keys that are neither normed nor rotated: both are done on the way, in pairs of
// neighbours. 4608 tokens of 24 heads take 61 us on an H200; norm and rotation in a kernel of their own, 81.

#include "e4m3.cuh"
#include "int8.cuh"
#include "row_scale.cuh"
#include "rope.cuh"
#include "tile_rounding.cuh"

// One of so many keys is enough for their mean.
const int SAMPLED = 8;
// Heads of a query that share its angles.
const int SHARED_HEADS = 4;

// A row's segment, and its number there.
struct RowPlace {
    int segment, row;

    __device__ __forceinline__ RowPlace(const Segments &s, int at) {
        segment = 0;
        while (segment + 1 < s.count && at >= s.end[segment]) segment++;
        row = at - (segment ? s.end[segment - 1] : 0);
    }

    __device__ __forceinline__ Vec8<bf16> load(const Segments &s, int heads, int head) const {
        return load_vec8((const bf16 *)s.start[segment] + ((long long)row * heads + head) * HEAD_WIDTH + lane_column());
    }

    __device__ __forceinline__ WeightedAngles angles(const HeadNorms &norms) const {
        const int ANGLES = HEAD_WIDTH / 2;
        return WeightedAngles(norms.weights[segment], norms.cosines[segment] + row * ANGLES, norms.sines[segment] + row * ANGLES);
    }
};

// One block per part of the keys and head, first for keys, then for values.
extern "C" __global__ void __launch_bounds__(ROUND_THREADS) measure_unnormed(const __grid_constant__ RoundAttentionArgs args) {
    if ((int)blockIdx.y >= args.kv_heads) return measure_values(args, blockIdx.y - args.kv_heads);
    float results[8] = {};
#pragma unroll
    for (int i = 0; i < TILES_MEASURED * ROWS_EACH / SAMPLED; i++) {
        int row = blockIdx.x * TILES_MEASURED * TILE_ROWS + SAMPLED * tile_row(i);
        // Idle lanes stay for the others' shuffles.
        RowPlace place(args.k, row < args.keys ? row : 0);
        float v[8];
        widen(place.load(args.k, args.kv_heads, blockIdx.y), v);
        float factor = place.angles(args.k_norms).rotate(v, args.eps);
        if (row >= args.keys) factor = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; j++) results[j] += factor * v[j];
    }
    store_measured(args, false, blockIdx.y, results);
}

__device__ __forceinline__ void round_queries(const RoundAttentionArgs &args, int first) {
#pragma unroll 2
    for (int i = 0; i < ROWS_EACH; i++) {
        int row = blockIdx.x * TILE_ROWS + tile_row(i);
        RowPlace place(args.q, row < args.queries ? row : 0);
        Vec8<bf16> heads[SHARED_HEADS];
#pragma unroll
        for (int h = 0; h < SHARED_HEADS; h++) heads[h] = place.load(args.q, args.heads, first + h < args.heads ? first + h : 0);
        WeightedAngles angles = place.angles(args.q_norms);
#pragma unroll
        for (int h = 0; h < SHARED_HEADS; h++) {
            float v[8], largest = 0.0f;
            widen(heads[h], v);
            // The norm's factor changes nothing but the scale.
            float factor = angles.rotate(v, args.eps);
            update_abs_max(largest, v);
#pragma unroll
            for (int step = 8; step > 0; step /= 2) largest = max_or_nan(largest, __shfl_xor_sync(0xffffffffu, largest, step));
            RowScale scale = int8_scale(largest);
            if (row >= args.queries || first + h >= args.heads) continue;
            store_int8(args.q_out + ((long long)row * args.heads + first + h) * HEAD_WIDTH + lane_column(), v, scale.inverse);
            if (threadIdx.x % 16 == 0) args.q_scales[(long long)(first + h) * args.queries + row] = factor * scale.scale;
        }
    }
}

__device__ __forceinline__ void round_keys(const RoundAttentionArgs &args, int head, int tiles) {
    __align__(16) __shared__ float means[HEAD_WIDTH];
    auto row = [&](int i) { return (int)blockIdx.x * TILE_ROWS + tile_row(i); };
    auto place = [&](int i) { return RowPlace(args.k, row(i) < args.keys ? row(i) : 0); };
    Vec8<bf16> rows[ROWS_EACH];
#pragma unroll
    for (int i = 0; i < ROWS_EACH; i++) rows[i] = place(i).load(args.k, args.kv_heads, head);
    int sampled = (args.keys + SAMPLED - 1) / SAMPLED;
    if (threadIdx.x < HEAD_WIDTH) means[threadIdx.x] = reduce_parts(args.sums, args, head, false) / sampled;
    __syncthreads();
    float mean[8], largest = 0.0f;
    load_vector(means + lane_column(), mean);
#pragma unroll
    for (int i = 0; i < ROWS_EACH; i++) {
        float v[8];
        widen(rows[i], v);
        float factor = place(i).angles(args.k_norms).rotate(v, args.eps);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = factor * v[j] - mean[j];
        if (row(i) < args.keys) update_abs_max(largest, v);
        rows[i] = narrow<bf16>(v);
    }
    RowScale scale = int8_scale(block_max<ROUND_THREADS / 32>(largest));
#pragma unroll
    for (int i = 0; i < ROWS_EACH; i++) {
        float v[8];
        widen(rows[i], v);
        if (row(i) < args.keys)
            store_int8(args.k_out + ((long long)row(i) * args.kv_heads + head) * HEAD_WIDTH + lane_column(), v, scale.inverse);
    }
    if (threadIdx.x == 0) args.k_scales[head * tiles + blockIdx.x] = scale.scale;
}

// One block per tile of rows and SHARED_HEADS heads of queries; then per tile and head of keys; then of values.
extern "C" __global__ void __launch_bounds__(ROUND_THREADS, 4) round_unnormed(const __grid_constant__ RoundAttentionArgs args) {
    int tiles = (args.keys + TILE_ROWS - 1) / TILE_ROWS, groups = (args.heads + SHARED_HEADS - 1) / SHARED_HEADS, head = blockIdx.y - groups;
    if (head < 0)
        round_queries(args, blockIdx.y * SHARED_HEADS);
    else if ((int)blockIdx.x >= tiles)
        return;
    else if (head < args.kv_heads)
        round_keys(args, head, tiles);
    else
        round_values(args, head - args.kv_heads, tiles);
}
