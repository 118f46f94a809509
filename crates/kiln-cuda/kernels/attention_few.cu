// Attention of few queries with heads of 128, such as that of one token to all before it, bound by the time until memory
// answers. `splits` blocks per query and head take a share of the keys each. A block's half warps take its keys in turn, a
// lane eight elements of each, with KEYS of them in flight. Every half warp has its own maximum and sums; they are merged
// in the warp, then in the block, and then by the last block that is done.

const int THREADS = 512, KEYS = 6, DIM = 128;

// The merged results of blocks or warps: a maximum, a sum of weights, and this thread's element of the sum of values.
struct Merged {
    float largest, total, value;

    __device__ __forceinline__ void add(float other_largest, float other_total, float other_value) {
        float new_largest = fmaxf(largest, other_largest);
        float a = fast_exp2(largest - new_largest), b = fast_exp2(other_largest - new_largest);
        largest = new_largest;
        total = a * total + b * other_total;
        value = a * value + b * other_value;
    }
};

template <class T>
__device__ __forceinline__ void attention_few(const AttentionArgs &args, float *partials, unsigned *done, int splits) {
    const int GROUPS = THREADS / 16, WARPS = THREADS / 32;
    const float MASKED = -1e38f;
    __shared__ float maxima[WARPS], totals[WARPS], values[WARPS][DIM];
    __shared__ bool last;
    int query = blockIdx.x / splits, split = blockIdx.x % splits, head = blockIdx.y;
    int group = threadIdx.x / 16, lane = threadIdx.x % 16, warp = threadIdx.x / 32;
    int kv_width = args.kv_heads * DIM, column = head / (args.heads / args.kv_heads) * DIM + 8 * lane;
    float q[8], sums[8] = {}, largest = MASKED, total = 0.0f;
    load_vector(segment_row<T>(args.q, query, args.heads * DIM) + head * DIM + 8 * lane, q);
#pragma unroll
    for (int j = 0; j < 8; j++) q[j] *= args.scale * 1.44269504088896341f;
    int low, high;
    visible_keys(args, query, low, high);
    int share = (high - low + splits - 1) / splits;
    low += split * share;
    high = low + share < high ? low + share : high;
    for (int first = low + group; first - group < high; first += GROUPS * KEYS) {
        Vec8<T> k[KEYS], v[KEYS];
        float scores[KEYS], x[8], new_largest = largest;
#pragma unroll
        for (int n = 0; n < KEYS; n++) {
            // Past the end, the first key again: its score is not used.
            int key = first + GROUPS * n < high ? first + GROUPS * n : low;
            k[n] = load_vec8(segment_row<T>(args.k, key, kv_width) + column);
            v[n] = load_vec8(segment_row<T>(args.v, key, kv_width) + column);
        }
#pragma unroll
        for (int n = 0; n < KEYS; n++) {
            float score = 0.0f;
            widen(k[n], x);
#pragma unroll
            for (int j = 0; j < 8; j++) score += q[j] * x[j];
#pragma unroll
            for (int step = 8; step > 0; step /= 2) score += __shfl_xor_sync(0xffffffffu, score, step);
            scores[n] = first + GROUPS * n < high ? score : MASKED;
            new_largest = fmaxf(new_largest, scores[n]);
        }
        float rescale = fast_exp2(largest - new_largest);
        largest = new_largest;
        total *= rescale;
#pragma unroll
        for (int j = 0; j < 8; j++) sums[j] *= rescale;
#pragma unroll
        for (int n = 0; n < KEYS; n++) {
            float p = first + GROUPS * n < high ? fast_exp2(scores[n] - largest) : 0.0f;
            total += p;
            widen(v[n], x);
#pragma unroll
            for (int j = 0; j < 8; j++) sums[j] += p * x[j];
        }
    }
    float warp_largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 16));
    float factor = fast_exp2(largest - warp_largest);
    total *= factor;
    total += __shfl_xor_sync(0xffffffffu, total, 16);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        sums[j] *= factor;
        sums[j] += __shfl_xor_sync(0xffffffffu, sums[j], 16);
        if (threadIdx.x % 32 < 16) values[warp][8 * lane + j] = sums[j];
    }
    if (threadIdx.x % 32 == 0) maxima[warp] = warp_largest, totals[warp] = total;
    __syncthreads();
    int at = threadIdx.x % DIM;
    Merged merged = {maxima[0], totals[0], values[0][at]};
    for (int i = 1; i < WARPS; i++) merged.add(maxima[i], totals[i], values[i][at]);
    int row = query * args.heads + head;
    if (splits > 1) {
        // Of each block: the values, the maximum and the sum.
        const int PARTIAL = DIM + 2;
        partials += (long long)row * splits * PARTIAL;
        if (threadIdx.x < DIM) partials[split * PARTIAL + at] = merged.value;
        if (threadIdx.x == 0) partials[split * PARTIAL + DIM] = merged.largest, partials[split * PARTIAL + DIM + 1] = merged.total;
        fence_gpu();
        __syncthreads();
        if (threadIdx.x == 0) last = atomicAdd(done + row, 1) == splits - 1;
        __syncthreads();
        if (!last) return;
        fence_gpu();
        merged = {MASKED, 0.0f, 0.0f};
        for (int i = 0; i < splits; i++) {
            const float *partial = partials + i * PARTIAL;
            merged.add(load_l2(partial + DIM), load_l2(partial + DIM + 1), load_l2(partial + at));
        }
        // The next launch finds it cleared.
        if (threadIdx.x == 0) done[row] = 0;
    }
    if (threadIdx.x < DIM) ((T *)args.out)[(long long)row * DIM + at] = from_float<T>(merged.value / merged.total);
}

#define KERNEL(T, name)                                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS) attention_few_##name(                                  \
        const __grid_constant__ AttentionArgs args, float *partials, unsigned *done, int splits) {               \
        attention_few<T>(args, partials, done, splits);                                                          \
    }

KERNEL(float, f32)
KERNEL(bf16, bf16)
