// Optimizer steps in f32. The formulas are those of kiln_ops::TrainingBackend.

// The numbers of an AdamW step.
struct AdamWArgs {
    float grad_scale, beta1, beta2, rest1, rest2, keep, step_size, root, eps;
};

__device__ __forceinline__ float adamw_element(const AdamWArgs &args, float param, float grad, float &m, float &v) {
    float g = args.grad_scale * grad;
    m = args.beta1 * m + args.rest1 * g;
    v = args.beta2 * v + args.rest2 * g * g;
    return args.keep * param - args.step_size * m / (sqrtf(v) / args.root + args.eps);
}

extern "C" __global__ void adamw(const __grid_constant__ AdamWArgs args, float *param, const float *grad, float *m, float *v, long long n) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float first = m[i], second = v[i];
    param[i] = adamw_element(args, param[i], grad[i], first, second);
    m[i] = first, v[i] = second;
}

// The code of the nearest of 256 ascending values; of two equally near ones, the smaller.
__device__ __forceinline__ unsigned char nearest_code(const float *book, float value) {
    int low = 0, high = 255;
    while (low < high) {
        int middle = (low + high) / 2;
        if (book[middle] < value)
            low = middle + 1;
        else
            high = middle;
    }
    int below = low > 0 ? low - 1 : 0;
    return (unsigned char)(value - book[below] <= book[low] - value ? below : low);
}

// The largest value of a block of 256 threads.
__device__ __forceinline__ float block_largest(float x) {
    __shared__ float parts[8];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    x = parts[0];
#pragma unroll
    for (int i = 1; i < 8; i++) x = fmaxf(x, parts[i]);
    return x;
}

// Moments in 8 bits: 256 elements share a scale, a block each. `books` has the values of m's codes, then those of v's.
extern "C" __global__ void __launch_bounds__(256) adamw_8bit(const __grid_constant__ AdamWArgs args, float *param, const float *grad, unsigned char *m, float *m_scales,
                                      unsigned char *v, float *v_scales, const float *books, long long n) {
    long long i = (long long)blockIdx.x * 256 + threadIdx.x;
    float first = 0.0f, second = 0.0f;
    if (i < n) {
        first = books[m[i]] * m_scales[blockIdx.x];
        second = books[256 + v[i]] * v_scales[blockIdx.x];
        param[i] = adamw_element(args, param[i], grad[i], first, second);
    }
    float m_scale = block_largest(fabsf(first)), v_scale = block_largest(second);
    if (i < n) {
        m[i] = nearest_code(books, first * (m_scale > 0.0f ? 1.0f / m_scale : 0.0f));
        v[i] = nearest_code(books + 256, second * (v_scale > 0.0f ? 1.0f / v_scale : 0.0f));
    }
    // Every thread has read the old scales before the first barrier of block_largest.
    if (threadIdx.x == 0) m_scales[blockIdx.x] = m_scale, v_scales[blockIdx.x] = v_scale;
}

// The numbers of the first half of a Prodigy step; `first` and `second` are the gradient's weights in the moments.
struct ProdigyArgs {
    float grad_scale, beta1, beta2, beta3, first, second, s_factor;
};

// Moments, and per block the sums of g (start - param) and of |s|.
extern "C" __global__ void prodigy_moments(const __grid_constant__ ProdigyArgs args, const float *param, const float *grad, const float *start,
                                           float *m, float *v, float *s, float *partials, long long n, long long per_block) {
    long long begin = (long long)blockIdx.x * per_block, end = begin + per_block < n ? begin + per_block : n;
    float numerator = 0.0f, denominator = 0.0f;
    for (long long i = begin + threadIdx.x; i < end; i += blockDim.x) {
        float g = args.grad_scale * grad[i];
        numerator += g * (start[i] - param[i]);
        m[i] = args.beta1 * m[i] + args.first * g;
        v[i] = args.beta2 * v[i] + args.second * g * g;
        s[i] = args.beta3 * s[i] + args.s_factor * g;
        denominator += fabsf(s[i]);
    }
    numerator = block_sum(numerator);
    denominator = block_sum(denominator);
    if (threadIdx.x == 0) partials[2 * blockIdx.x] = numerator, partials[2 * blockIdx.x + 1] = denominator;
}

extern "C" __global__ void prodigy_update(float *param, const float *m, const float *v, long long n, float keep, float lr, float eps) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) param[i] = keep * param[i] - lr * m[i] / (sqrtf(v[i]) + eps);
}

// The sum of squares over one range of elements per block.
extern "C" __global__ void sum_squares(const float *x, float *partials, long long n, long long per_block) {
    long long first = (long long)blockIdx.x * per_block, end = first + per_block < n ? first + per_block : n;
    float sum = 0.0f;
    for (long long i = first + threadIdx.x; i < end; i += blockDim.x) sum += x[i] * x[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

// The sums of `columns` interleaved lists of partial sums; one block.
extern "C" __global__ void sum_partials(const float *partials, float *out, int count, int columns) {
    for (int column = 0; column < columns; column++) {
        float sum = 0.0f;
        for (int i = threadIdx.x; i < count; i += blockDim.x) sum += partials[i * columns + column];
        sum = block_sum(sum);
        if (threadIdx.x == 0) out[column] = sum;
    }
}
