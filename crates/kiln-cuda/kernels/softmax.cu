// Softmax of f32 rows, to bf16 or in place; one block of 256 threads per row, whose length is a multiple of 8.

template <class T> __device__ __forceinline__ void softmax_rows(const float *x, T *out, int n) {
    __shared__ float warp_maxes[8];
    x += (long long)blockIdx.x * n;
    out += (long long)blockIdx.x * n;
    float v[8], thread_max = -1e38f, thread_sum = 0.0f;
    for (int i = 8 * threadIdx.x; i < n; i += 8 * 256) {
        load_vector(x + i, v);
        float new_max = thread_max;
#pragma unroll
        for (int j = 0; j < 8; j++) new_max = fmaxf(new_max, v[j]);
        thread_sum *= expf(thread_max - new_max);
        thread_max = new_max;
#pragma unroll
        for (int j = 0; j < 8; j++) thread_sum += expf(v[j] - thread_max);
    }
    float row_max = thread_max;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) row_max = fmaxf(row_max, __shfl_xor_sync(0xffffffffu, row_max, step));
    if (threadIdx.x % 32 == 0) warp_maxes[threadIdx.x / 32] = row_max;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 8; i++) row_max = fmaxf(row_max, warp_maxes[i]);
    float factor = 1.0f / block_sum(thread_sum * expf(thread_max - row_max));
    for (int i = 8 * threadIdx.x; i < n; i += 8 * 256) {
        load_vector(x + i, v);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = expf(v[j] - row_max) * factor;
        store_vector(out + i, v);
    }
}

extern "C" __global__ void __launch_bounds__(256) softmax_rows_bf16(const float *x, bf16 *out, int n) {
    softmax_rows(x, out, n);
}
extern "C" __global__ void __launch_bounds__(256) softmax_rows_f32(const float *x, float *out, int n) {
    softmax_rows(x, out, n);
}
