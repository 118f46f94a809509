// The first half of attention with wide heads over many keys, on Hopper: exponentials of the scores, and the inverse of each
// row's sum, by which a product with the values is scaled.
// A cluster of two blocks has 256 queries, each block 128, which stay in shared memory. In each block a producer thread
// loads tiles of 256 keys, 64 of their elements at a time, of which a half goes to both blocks; two consumer warpgroups
// have 64 queries each.
// Exponentials are relative to the row's maximum among the first tile's keys. Where later scores are so much larger that the
// sum might overflow, which is rare, what has been stored is scaled down.
// 16384 queries and keys of 512 on an H200: 0.51 ms, and 0.35 ms for the product with the values. No gain: loading keys for
// each block on its own, tiles of 128 keys.

#include "hopper.cuh"

const int QUERIES = 128, KEYS = 256, STAGES = 3;
const unsigned QUERY_BOX = QUERIES * 128, STAGE = KEYS * 128;
// Of a row's sum: 2^64.
const float LIMIT = 18446744073709551616.0f;

struct WideScoresArgs {
    // q: [elements, queries]; k: [elements, keys, 1], innermost first.
    TensorMap q, k;
    // [queries, keys] and [queries].
    bf16 *out;
    float *inverse_sums;
    // Steps of 64 elements.
    int queries, keys, steps;
    float scale;
};

#if defined(KILN_EMULATED) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

struct ScoresMemory {
    unsigned queries, stages, full, empty, queries_full;

    __device__ __forceinline__ ScoresMemory(unsigned start, int steps) {
        queries = (start + 1023) & ~1023u;
        stages = queries + steps * QUERY_BOX;
        full = stages + STAGES * STAGE;
        empty = full + 8 * STAGES;
        queries_full = empty + 8 * STAGES;
    }
};

__device__ __forceinline__ void load_stages(const WideScoresArgs &args, const ScoresMemory &memory) {
    int rank = cluster_rank(), count = 0;
    barrier_expect(memory.queries_full, args.steps * QUERY_BOX);
    for (int i = 0; i < args.steps; i++) tma_load(memory.queries + i * QUERY_BOX, args.q, memory.queries_full, 64 * i, blockIdx.x * QUERIES);
    for (int key = 0; key < args.keys; key += KEYS)
        for (int step = 0; step < args.steps; step++, count++) {
            int stage = count % STAGES;
            if (count >= STAGES) barrier_wait(memory.empty + 8 * stage, (count / STAGES + 1) % 2);
            barrier_expect(memory.full + 8 * stage, STAGE);
            for (int half = 0; half < CLUSTER; half++)
                if (!CLUSTER_COPIES || half == rank)
                    tma_load_both(memory.stages + stage * STAGE + half * (STAGE / 2), args.k, memory.full + 8 * stage, 64 * step,
                                  key + half * (KEYS / 2), 0);
        }
}

// A lane's two rows.
struct ScoreRows {
    const WideScoresArgs &args;
    int row, column;
    // The reference, as a power of two, and this lane's part of the sum.
    float base[2], sum[2];

    __device__ __forceinline__ ScoreRows(const WideScoresArgs &args, int consumer) : args(args), base{-1e38f, -1e38f}, sum{} {
        row = blockIdx.x * QUERIES + 64 * consumer + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
        column = threadIdx.x % 4 * 8;
    }

    __device__ __forceinline__ bf16 *at(int r, int key) const { return args.out + (long long)(row + 8 * r) * args.keys + key + column; }

    // Raises the reference to the tile's maximum, and scales down what this lane has stored before `key`.
    __device__ __forceinline__ void raise(const float (&s)[KEYS / 2], int r, int key, float scale) {
        float top = s[2 * r];
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++) top = fmaxf(top, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2)) * scale;
        if (top <= base[r]) return;
        float factor = fast_exp2(base[r] - top);
        base[r] = top;
        sum[r] *= factor;
#pragma unroll 1
        for (int first = 0; first < key && row + 8 * r < args.queries; first += 32) {
            float v[8];
            load_vector(at(r, first), v);
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] *= factor;
            store_vector(at(r, first), v);
        }
    }

    __device__ __forceinline__ void store_exponentials(const float (&s)[KEYS / 2], int key, float scale) {
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int j = 0; j < KEYS / 8; j += 4) {
                float words[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float low = fast_exp2(s[4 * (j + i) + 2 * r] * scale - base[r]), high = fast_exp2(s[4 * (j + i) + 2 * r + 1] * scale - base[r]);
                    sum[r] += low + high;
                    words[i] = __uint_as_float(round_bf16_pair(low, high));
                }
                // Exchange pairs among four lanes, so that each stores eight consecutive columns.
                transpose_quad(words);
                if (row + 8 * r < args.queries && key + 8 * j + column < args.keys)
                    store_streaming((uint4 *)at(r, key + 8 * j), make_uint4(__float_as_uint(words[0]), __float_as_uint(words[1]),
                                                                            __float_as_uint(words[2]), __float_as_uint(words[3])));
            }
    }

    // Stores the exponentials of the tile at `key`.
    __device__ __forceinline__ void store(float (&s)[KEYS / 2], int key, float scale) {
        if (key + KEYS > args.keys)
#pragma unroll
            for (int i = 0; i < KEYS / 2; i++)
                if (key + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2 >= args.keys) s[i] = -1e38f;
        float before[2] = {sum[0], sum[1]};
        int scale_bits = __float_as_int(scale);
        for (bool raised = false;; raised = true) {
            // Or all scores would be multiplied ahead of the loop.
            opaque(scale_bits);
            store_exponentials(s, key, __int_as_float(scale_bits));
            // At the first tile there is no reference yet.
            if (raised || !any_lane(sum[0] > LIMIT || sum[1] > LIMIT)) return;
#pragma unroll
            for (int r = 0; r < 2; r++) sum[r] = before[r], raise(s, r, key, scale);
        }
    }

    __device__ __forceinline__ void store_sums() {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 1);
            sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 2);
            if (threadIdx.x % 4 == 0 && row + 8 * r < args.queries) args.inverse_sums[row + 8 * r] = 1.0f / sum[r];
        }
    }
};

__device__ __forceinline__ void multiply_stages(const WideScoresArgs &args, const ScoresMemory &memory) {
    int consumer = threadIdx.x / 128 - 1, lane = threadIdx.x % 32, count = 0;
    unsigned q = uniform(descriptor_low(memory.queries + consumer * 64 * 128, 16)), k = uniform(descriptor_low(memory.stages, 16));
    auto release = [&](int count) {
        if (lane < CLUSTER) barrier_arrive_at(memory.empty + 8 * (count % STAGES), lane);
    };
    ScoreRows rows(args, consumer);
    barrier_wait(memory.queries_full, 0);
    for (int key = 0; key < args.keys; key += KEYS) {
        float s[KEYS / 2];
        for (int step = 0; step < args.steps; step++, count++) {
            barrier_wait(memory.full + 8 * (count % STAGES), count / STAGES % 2);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4; i++)
                wgmma_bf16<false, false>(s, descriptor_from_low(q + (step * QUERY_BOX + 32 * i) / 16),
                                         descriptor_from_low(k + (count % STAGES * STAGE + 32 * i) / 16), step > 0 || i > 0);
            wgmma_commit();
            if (step > 0) {
                wgmma_wait<1>();
                release(count - 1);
            }
        }
        wgmma_wait<0>();
        release(count - 1);
        rows.store(s, key, args.scale * 1.44269504088896341f);
    }
    rows.store_sums();
}

extern "C" CLUSTERS __global__ void __launch_bounds__(384, 1) attention_wide_scores(const __grid_constant__ WideScoresArgs args) {
    DYNAMIC_SHARED(shared);
    ScoresMemory memory(shared_address(shared), args.steps);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(memory.full + 8 * i, 1);
            // All consumer warps of the cluster.
            barrier_init(memory.empty + 8 * i, 8 * CLUSTER);
        }
        barrier_init(memory.queries_full, 1);
        barrier_init_fence();
    }
    cluster_sync();
    if (threadIdx.x < 128) {
        decrease_registers<24>();
        if (threadIdx.x == 0) load_stages(args, memory);
    } else {
        increase_registers<240>();
        multiply_stages(args, memory);
    }
    // The other block may still copy into this one's memory.
    cluster_sync();
}
#endif
