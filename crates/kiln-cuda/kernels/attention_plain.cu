// Attention for any type and head dimension: one warp per query and head, f32 sums in key order.

// PER: elements of a head per lane.
template <class T, int PER> __device__ __forceinline__ void attention_plain(const AttentionArgs &args) {
    int query = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, head = blockIdx.y, lane = threadIdx.x % 32;
    if (query >= args.queries) return;
    int dim = args.head_dim, kv_head = head / (args.heads / args.kv_heads);
    const T *q_row = segment_row<T>(args.q, query, args.heads * dim) + head * dim;
    float q[PER], sums[PER], row_max = -1e38f, row_sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PER; i++) {
        int at = lane + 32 * i;
        q[i] = at < dim ? to_float(q_row[at]) * args.scale : 0.0f;
        sums[i] = 0.0f;
    }
    int low, high;
    visible_keys(args, query, low, high);
    const int KEYS = 4;
    for (int key = low; key < high; key += KEYS) {
        float score[KEYS];
#pragma unroll
        for (int j = 0; j < KEYS; j++) {
            float dot = 0.0f;
            if (key + j < high) {
                const T *k_row = segment_row<T>(args.k, key + j, args.kv_heads * dim) + kv_head * dim;
#pragma unroll
                for (int i = 0; i < PER; i++) {
                    int at = lane + 32 * i;
                    if (at < dim) dot += q[i] * to_float(k_row[at]);
                }
            }
            score[j] = warp_sum(dot);
        }
        float new_max = row_max;
#pragma unroll
        for (int j = 0; j < KEYS; j++)
            if (key + j < high) new_max = fmaxf(new_max, score[j]);
        float rescale = expf(row_max - new_max);
        row_max = new_max;
        row_sum *= rescale;
#pragma unroll
        for (int i = 0; i < PER; i++) sums[i] *= rescale;
#pragma unroll
        for (int j = 0; j < KEYS; j++) {
            if (key + j < high) {
                float p = expf(score[j] - new_max);
                row_sum += p;
                const T *v_row = segment_row<T>(args.v, key + j, args.kv_heads * dim) + kv_head * dim;
#pragma unroll
                for (int i = 0; i < PER; i++) {
                    int at = lane + 32 * i;
                    if (at < dim) sums[i] += p * to_float(v_row[at]);
                }
            }
        }
    }
    if (args.lse && lane == 0) args.lse[(long long)query * args.heads + head] = row_max + logf(row_sum);
    T *out = (T *)args.out + ((long long)query * args.heads + head) * dim;
#pragma unroll
    for (int i = 0; i < PER; i++) {
        int at = lane + 32 * i;
        if (at < dim) out[at] = from_float<T>(sums[i] / row_sum);
    }
}

#define KERNEL(T, name, PER)                                                                                                       \
    extern "C" __global__ void __launch_bounds__(128) attention_plain_##name##_##PER(const __grid_constant__ AttentionArgs args) { \
        attention_plain<T, PER>(args);                                                                                             \
    }

KERNEL(float, f32, 4)
KERNEL(float, f32, 16)
KERNEL(bf16, bf16, 4)
KERNEL(bf16, bf16, 16)
