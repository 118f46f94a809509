// Sums over whole tensors, in a fixed order: blocks sum ranges of elements, then one block sums the blocks.

// The sums of |x - y| and of |y| over one range of elements per block; `per_block` is a multiple of 8.
template <class T>
__device__ __forceinline__ void l1_partial(const T *x, const T *y, float *partials, long long n, long long per_block) {
    long long first = (long long)blockIdx.x * per_block, end = first + per_block < n ? first + per_block : n;
    float difference = 0.0f, size = 0.0f, a[8], b[8];
    for (long long i = first + 8 * threadIdx.x; i < end; i += 8 * blockDim.x) {
        bool vector = i + 8 <= n && aligned(x) && aligned(y);
        load8(x, i, n, vector, a);
        load8(y, i, n, vector, b);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            difference += fabsf(a[j] - b[j]);
            size += fabsf(b[j]);
        }
    }
    difference = block_sum(difference);
    size = block_sum(size);
    if (threadIdx.x == 0) partials[2 * blockIdx.x] = difference, partials[2 * blockIdx.x + 1] = size;
}

extern "C" __global__ void l1_partial_f32(const float *x, const float *y, float *partials, long long n, long long per_block) {
    l1_partial(x, y, partials, n, per_block);
}
extern "C" __global__ void l1_partial_bf16(const bf16 *x, const bf16 *y, float *partials, long long n, long long per_block) {
    l1_partial(x, y, partials, n, per_block);
}

// The quotient of the two sums; one block.
extern "C" __global__ void relative_l1(const float *partials, float *out, int count) {
    float difference = 0.0f, size = 0.0f;
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        difference += partials[2 * i];
        size += partials[2 * i + 1];
    }
    difference = block_sum(difference);
    size = block_sum(size);
    if (threadIdx.x == 0) out[0] = difference == 0.0f ? 0.0f : difference / size;
}
