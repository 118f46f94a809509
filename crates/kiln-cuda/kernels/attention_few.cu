// Attention of few queries with heads of 128, such as that of one token to all before it, bound by reading keys and values.
// A block per query and head. Its half warps take the keys in turn, a lane eight elements of each, and keep KEYS of them in
// flight. Each half warp has its own maximum and sums, which are merged at the end.

const int THREADS = 512, KEYS = 4;

template <class T> __device__ __forceinline__ void attention_few(const AttentionArgs &args) {
    const int GROUPS = THREADS / 16, WARPS = THREADS / 32, DIM = 128;
    __shared__ float maxima[WARPS], totals[WARPS], values[WARPS][DIM];
    int query = blockIdx.x, head = blockIdx.y, group = threadIdx.x / 16, lane = threadIdx.x % 16;
    int kv_width = args.kv_heads * DIM, column = head / (args.heads / args.kv_heads) * DIM + 8 * lane;
    float q[8], sums[8] = {}, largest = -1e38f, total = 0.0f;
    load_vector(segment_row<T>(args.q, query, args.heads * DIM) + head * DIM + 8 * lane, q);
#pragma unroll
    for (int j = 0; j < 8; j++) q[j] *= args.scale * 1.44269504088896341f;
    int low, high;
    visible_keys(args, query, low, high);
    for (int first = low; first < high; first += GROUPS * KEYS) {
        Vec8<T> k[KEYS], v[KEYS];
        float scores[KEYS], x[8];
#pragma unroll
        for (int n = 0; n < KEYS; n++) {
            // Past the end, the first key again: its score is not used.
            int key = first + GROUPS * n + group;
            key = key < high ? key : low;
            k[n] = load_vec8(segment_row<T>(args.k, key, kv_width) + column);
            v[n] = load_vec8(segment_row<T>(args.v, key, kv_width) + column);
        }
        float new_largest = largest;
#pragma unroll
        for (int n = 0; n < KEYS; n++) {
            float score = 0.0f;
            widen(k[n], x);
#pragma unroll
            for (int j = 0; j < 8; j++) score += q[j] * x[j];
#pragma unroll
            for (int step = 8; step > 0; step /= 2) score += __shfl_xor_sync(0xffffffffu, score, step);
            scores[n] = first + GROUPS * n + group < high ? score : -1e38f;
            new_largest = fmaxf(new_largest, scores[n]);
        }
        float rescale = fast_exp2(largest - new_largest);
        largest = new_largest;
        total *= rescale;
#pragma unroll
        for (int j = 0; j < 8; j++) sums[j] *= rescale;
#pragma unroll
        for (int n = 0; n < KEYS; n++) {
            float p = first + GROUPS * n + group < high ? fast_exp2(scores[n] - largest) : 0.0f;
            total += p;
            widen(v[n], x);
#pragma unroll
            for (int j = 0; j < 8; j++) sums[j] += p * x[j];
        }
    }
    // The two halves of a warp, then the warps.
    float warp_largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 16));
    float factor = fast_exp2(largest - warp_largest);
    total *= factor;
    total += __shfl_xor_sync(0xffffffffu, total, 16);
    int warp = threadIdx.x / 32;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        sums[j] *= factor;
        sums[j] += __shfl_xor_sync(0xffffffffu, sums[j], 16);
        if (threadIdx.x % 32 < 16) values[warp][8 * lane + j] = sums[j];
    }
    if (threadIdx.x % 32 == 0) maxima[warp] = warp_largest, totals[warp] = total;
    __syncthreads();
    if (threadIdx.x >= DIM) return;
    float all = maxima[0], sum = 0.0f, value = 0.0f;
    for (int i = 1; i < WARPS; i++) all = fmaxf(all, maxima[i]);
    for (int i = 0; i < WARPS; i++) {
        float share = fast_exp2(maxima[i] - all);
        sum += share * totals[i];
        value += share * values[i][threadIdx.x];
    }
    T *out = (T *)args.out + ((long long)query * args.heads + head) * DIM;
    out[threadIdx.x] = from_float<T>(value / sum);
}

#define KERNEL(T, name)                                                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS) attention_few_##name(const __grid_constant__ AttentionArgs args) { \
        attention_few<T>(args);                                                                                               \
    }

KERNEL(float, f32)
KERNEL(bf16, bf16)
