// Gradients of attention for any type and head dimension: one warp per query and head for dq, one per key and head for dk
// and dv. Probabilities are computed again from the scores and `lse`.

struct AttentionBackwardArgs {
    // `out` is the result of the attention.
    AttentionArgs forward;
    Segments dout;
    // [queries, heads]; delta = sum of dout * out.
    const float *lse;
    float *delta;
    void *dq, *dk, *dv;
};

// A lane's elements of a head, times `factor`; zeros beyond the head.
template <int PER, class T> __device__ __forceinline__ void load_head(float (&v)[PER], const T *row, int dim, float factor) {
#pragma unroll
    for (int i = 0; i < PER; i++) {
        int at = threadIdx.x % 32 + 32 * i;
        v[i] = at < dim ? to_float(row[at]) * factor : 0.0f;
    }
}

template <int PER> __device__ __forceinline__ float warp_dot(const float (&a)[PER], const float (&b)[PER]) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PER; i++) sum += a[i] * b[i];
    return warp_sum(sum);
}

template <int PER, class T> __device__ __forceinline__ void store_head(T *row, const float (&v)[PER], int dim, float factor) {
#pragma unroll
    for (int i = 0; i < PER; i++) {
        int at = threadIdx.x % 32 + 32 * i;
        if (at < dim) row[at] = from_float<T>(v[i] * factor);
    }
}

// PER: elements of a head per lane. Also stores delta.
template <class T, int PER> __device__ __forceinline__ void attention_backward_q(const AttentionBackwardArgs &args) {
    const AttentionArgs &a = args.forward;
    int query = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, head = blockIdx.y, dim = a.head_dim;
    if (query >= a.queries) return;
    int width = a.heads * dim, kv_width = a.kv_heads * dim, kv_column = head / (a.heads / a.kv_heads) * dim;
    long long at = (long long)query * a.heads + head;
    float q[PER], g[PER], k[PER], v[PER], dq[PER] = {};
    load_head(q, segment_row<T>(a.q, query, width) + head * dim, dim, a.scale);
    load_head(g, segment_row<T>(args.dout, query, width) + head * dim, dim, 1.0f);
    load_head(v, (const T *)a.out + at * dim, dim, 1.0f);
    float delta = warp_dot(g, v), lse = args.lse[at];
    if (threadIdx.x % 32 == 0) args.delta[at] = delta;
    int low, high;
    visible_keys(a, query, low, high);
    for (int key = low; key < high; key++) {
        load_head(k, segment_row<T>(a.k, key, kv_width) + kv_column, dim, 1.0f);
        load_head(v, segment_row<T>(a.v, key, kv_width) + kv_column, dim, 1.0f);
        float ds = expf(warp_dot(q, k) - lse) * (warp_dot(g, v) - delta);
#pragma unroll
        for (int i = 0; i < PER; i++) dq[i] += ds * k[i];
    }
    store_head((T *)args.dq + at * dim, dq, dim, a.scale);
}

// After attention_backward_q, which stores delta.
template <class T, int PER> __device__ __forceinline__ void attention_backward_kv(const AttentionBackwardArgs &args) {
    const AttentionArgs &a = args.forward;
    int key = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, kv_head = blockIdx.y, dim = a.head_dim;
    if (key >= a.keys) return;
    int width = a.heads * dim, kv_width = a.kv_heads * dim, group = a.heads / a.kv_heads;
    float q[PER], g[PER], k[PER], v[PER], dk[PER] = {}, dv[PER] = {};
    load_head(k, segment_row<T>(a.k, key, kv_width) + kv_head * dim, dim, a.scale);
    load_head(v, segment_row<T>(a.v, key, kv_width) + kv_head * dim, dim, 1.0f);
    for (int query = 0; query < a.queries; query++) {
        int low, high;
        visible_keys(a, query, low, high);
        if (key < low || key >= high) continue;
        for (int head = kv_head * group; head < (kv_head + 1) * group; head++) {
            long long at = (long long)query * a.heads + head;
            load_head(q, segment_row<T>(a.q, query, width) + head * dim, dim, 1.0f);
            load_head(g, segment_row<T>(args.dout, query, width) + head * dim, dim, 1.0f);
            float p = expf(warp_dot(q, k) - args.lse[at]), ds = p * (warp_dot(g, v) - args.delta[at]);
#pragma unroll
            for (int i = 0; i < PER; i++) dk[i] += ds * q[i], dv[i] += p * g[i];
        }
    }
    long long to = (long long)key * kv_width + kv_head * dim;
    store_head((T *)args.dk + to, dk, dim, a.scale);
    store_head((T *)args.dv + to, dv, dim, 1.0f);
}

// For the kernels on tensor cores: lse / ln 2 by head, infinite past the last query, then the sums of dout * out; `padded` floats
// each. A warp per query and head; dim is even.
extern "C" __global__ void attention_stats(const bf16 *dout, const bf16 *out, const float *lse, float *stats, int queries, int heads,
                                           int dim, int padded) {
    int at = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    int query = at / heads, head = at % heads;
    if (query >= padded) return;
    float sum = 0.0f, a, b, c, d, scaled = __uint_as_float(0x7f800000u);
    if (query < queries) {
        for (int i = 2 * lane; i < dim; i += 64) {
            load_pair(dout + (long long)at * dim + i, a, b), load_pair(out + (long long)at * dim + i, c, d);
            sum += a * c + b * d;
        }
        scaled = lse[at] * 1.44269504088896341f;
    }
    sum = warp_sum(sum);
    if (lane == 0) {
        stats[(long long)2 * head * padded + query] = scaled;
        stats[(long long)(2 * head + 1) * padded + query] = sum;
    }
}

#define KERNEL(T, name, PER)                                                                                          \
    extern "C" __global__ void __launch_bounds__(128)                                                                 \
        attention_backward_q_##name##_##PER(const __grid_constant__ AttentionBackwardArgs args) {                     \
        attention_backward_q<T, PER>(args);                                                                           \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(128)                                                                 \
        attention_backward_kv_##name##_##PER(const __grid_constant__ AttentionBackwardArgs args) {                    \
        attention_backward_kv<T, PER>(args);                                                                          \
    }

KERNEL(float, f32, 4)
KERNEL(float, f32, 16)
KERNEL(bf16, bf16, 4)
KERNEL(bf16, bf16, 16)
