// Attention of any type and any head, one warp a query and head, sums in f32 and in the order of the keys.

// PER elements of a head for each lane.
template <class T, int PER> __device__ __forceinline__ void attention_plain(const Attention &t) {
    int query = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, head = blockIdx.y, lane = threadIdx.x % 32;
    if (query >= t.queries) return;
    int dim = t.head_dim, kv_head = head / (t.heads / t.kv_heads);
    const T *q_row = segment_row<T>(t.q, query, t.heads * dim) + head * dim;
    float q[PER], sums[PER], best = -1e38f, total = 0.0f;
#pragma unroll
    for (int i = 0; i < PER; i++) {
        int at = lane + 32 * i;
        q[i] = at < dim ? to_float(q_row[at]) * t.scale : 0.0f;
        sums[i] = 0.0f;
    }
    int low, high;
    seen(t, query, low, high);
    const int KEYS = 4;
    for (int key = low; key < high; key += KEYS) {
        float score[KEYS];
#pragma unroll
        for (int j = 0; j < KEYS; j++) {
            float dot = 0.0f;
            if (key + j < high) {
                const T *k_row = segment_row<T>(t.k, key + j, t.kv_heads * dim) + kv_head * dim;
#pragma unroll
                for (int i = 0; i < PER; i++) {
                    int at = lane + 32 * i;
                    if (at < dim) dot += q[i] * to_float(k_row[at]);
                }
            }
            score[j] = warp_sum(dot);
        }
        float top = best;
#pragma unroll
        for (int j = 0; j < KEYS; j++)
            if (key + j < high) top = fmaxf(top, score[j]);
        float shrink = expf(best - top);
        best = top;
        total *= shrink;
#pragma unroll
        for (int i = 0; i < PER; i++) sums[i] *= shrink;
#pragma unroll
        for (int j = 0; j < KEYS; j++) {
            if (key + j < high) {
                float p = expf(score[j] - top);
                total += p;
                const T *v_row = segment_row<T>(t.v, key + j, t.kv_heads * dim) + kv_head * dim;
#pragma unroll
                for (int i = 0; i < PER; i++) {
                    int at = lane + 32 * i;
                    if (at < dim) sums[i] += p * to_float(v_row[at]);
                }
            }
        }
    }
    T *out = (T *)t.out + ((long long)query * t.heads + head) * dim;
#pragma unroll
    for (int i = 0; i < PER; i++) {
        int at = lane + 32 * i;
        if (at < dim) out[at] = from_float<T>(sums[i] / total);
    }
}

#define KERNEL(T, name, PER)                                                                                         \
    extern "C" __global__ void __launch_bounds__(128) attention_plain_##name##_##PER(const __grid_constant__ Attention t) { \
        attention_plain<T, PER>(t);                                                                                  \
    }

KERNEL(float, f32, 4)
KERNEL(float, f32, 16)
KERNEL(bf16, bf16, 4)
KERNEL(bf16, bf16, 16)
