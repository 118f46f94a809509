// The softmax of rows of f32, as bf16 or in their own place; one block of 256 threads a row, whose length is a multiple of 8.

template <class T> __device__ __forceinline__ void softmax_rows(const float *x, T *out, int n) {
    __shared__ float tops[8];
    x += (long long)blockIdx.x * n;
    out += (long long)blockIdx.x * n;
    float v[8], top = -1e38f, total = 0.0f;
    for (int i = 8 * threadIdx.x; i < n; i += 8 * 256) {
        load_vector(x + i, v);
        float most = top;
#pragma unroll
        for (int j = 0; j < 8; j++) most = fmaxf(most, v[j]);
        total *= expf(top - most);
        top = most;
#pragma unroll
        for (int j = 0; j < 8; j++) total += expf(v[j] - top);
    }
    float all = top;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) all = fmaxf(all, __shfl_xor_sync(0xffffffffu, all, step));
    if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = all;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 8; i++) all = fmaxf(all, tops[i]);
    float factor = 1.0f / block_sum(total * expf(top - all));
    for (int i = 8 * threadIdx.x; i < n; i += 8 * 256) {
        load_vector(x + i, v);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = expf(v[j] - all) * factor;
        store_vector(out + i, v);
    }
}

extern "C" __global__ void __launch_bounds__(256) softmax_rows_bf16(const float *x, bf16 *out, int n) {
    softmax_rows(x, out, n);
}
extern "C" __global__ void __launch_bounds__(256) softmax_rows_f32(const float *x, float *out, int n) {
    softmax_rows(x, out, n);
}
