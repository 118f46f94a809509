// Optimizer steps in f32, one launch for all tensors. The formulas are those of kiln_ops::TrainingBackend.

// The addresses of a tensor, of its gradient and of its state, in the order of the kernel's own list.
struct TensorAddresses {
    void *at[6];
    long long n;
    // The first block that works on the tensor, which has `per_block` elements per block.
    long long first_block;
};

// The elements of a block: `begin` to `end` of `tensor`.
struct Share {
    const TensorAddresses &tensor;
    long long begin, end;
    template <class T> __device__ __forceinline__ T *at(int i) const { return (T *)tensor.at[i]; }
};

__device__ __forceinline__ Share share(const TensorAddresses *tensors, int count, int per_block) {
    int low = 0, high = count - 1;
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (tensors[middle].first_block <= blockIdx.x)
            low = middle;
        else
            high = middle - 1;
    }
    const TensorAddresses &tensor = tensors[low];
    long long begin = (blockIdx.x - tensor.first_block) * per_block;
    return {tensor, begin, begin + per_block < tensor.n ? begin + per_block : tensor.n};
}

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

// Parameter, gradient, both moments.
extern "C" __global__ void adamw(const __grid_constant__ AdamWArgs args, const TensorAddresses *tensors, int count, int per_block) {
    Share s = share(tensors, count, per_block);
    float *param = s.at<float>(0), *m = s.at<float>(2), *v = s.at<float>(3);
    const float *grad = s.at<float>(1);
    for (long long i = s.begin + threadIdx.x; i < s.end; i += blockDim.x) {
        float first = m[i], second = v[i];
        param[i] = adamw_element(args, param[i], grad[i], first, second);
        m[i] = first, v[i] = second;
    }
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

// Parameter, gradient, codes and scales of the first moment, and of the second. 256 elements share a scale, a block each.
// `books` has the values of m's codes, then those of v's.
extern "C" __global__ void __launch_bounds__(256) adamw_8bit(const __grid_constant__ AdamWArgs args, const TensorAddresses *tensors,
                                                             int count, const float *books) {
    Share s = share(tensors, count, 256);
    float *param = s.at<float>(0), *m_scale = s.at<float>(3) + s.begin / 256, *v_scale = s.at<float>(5) + s.begin / 256;
    const float *grad = s.at<float>(1);
    unsigned char *m = s.at<unsigned char>(2), *v = s.at<unsigned char>(4);
    long long i = s.begin + threadIdx.x;
    float first = 0.0f, second = 0.0f;
    if (i < s.end) {
        first = books[m[i]] * *m_scale;
        second = books[256 + v[i]] * *v_scale;
        param[i] = adamw_element(args, param[i], grad[i], first, second);
    }
    float m_largest = block_largest(fabsf(first)), v_largest = block_largest(second);
    if (i < s.end) {
        m[i] = nearest_code(books, first / (m_largest > 0.0f ? m_largest : 1.0f));
        unsigned char code = nearest_code(books + 256, second / (v_largest > 0.0f ? v_largest : 1.0f));
        // A second moment that is not 0 never becomes 0, which the next step would divide by.
        v[i] = code == 0 && second > 0.0f ? 1 : code;
    }
    // Every thread has read the old scales before the first barrier of block_largest.
    if (threadIdx.x == 0) *m_scale = m_largest, *v_scale = v_largest;
}

// The numbers of the first half of a Prodigy step; `first` and `second` are the gradient's weights in the moments.
struct ProdigyArgs {
    float grad_scale, beta1, beta2, beta3, first, second, s_factor;
};

// Parameter, gradient, start, both moments, s. Moments, and per block the sums of g (start - param) and of |s|.
extern "C" __global__ void prodigy_moments(const __grid_constant__ ProdigyArgs args, const TensorAddresses *tensors, int count,
                                           int per_block, float *partials) {
    Share s = share(tensors, count, per_block);
    const float *param = s.at<float>(0), *grad = s.at<float>(1), *start = s.at<float>(2);
    float *m = s.at<float>(3), *v = s.at<float>(4), *sum = s.at<float>(5);
    float numerator = 0.0f, denominator = 0.0f;
    for (long long i = s.begin + threadIdx.x; i < s.end; i += blockDim.x) {
        float g = args.grad_scale * grad[i];
        numerator += g * (start[i] - param[i]);
        m[i] = args.beta1 * m[i] + args.first * g;
        v[i] = args.beta2 * v[i] + args.second * g * g;
        sum[i] = args.beta3 * sum[i] + args.s_factor * g;
        denominator += fabsf(sum[i]);
    }
    numerator = block_sum(numerator);
    denominator = block_sum(denominator);
    if (threadIdx.x == 0) partials[2 * blockIdx.x] = numerator, partials[2 * blockIdx.x + 1] = denominator;
}

// Parameter, both moments.
extern "C" __global__ void prodigy_update(const TensorAddresses *tensors, int count, int per_block, float keep, float lr, float eps) {
    Share s = share(tensors, count, per_block);
    float *param = s.at<float>(0);
    const float *m = s.at<float>(1), *v = s.at<float>(2);
    for (long long i = s.begin + threadIdx.x; i < s.end; i += blockDim.x) param[i] = keep * param[i] - lr * m[i] / (sqrtf(v[i]) + eps);
}

// The sum of squares of every block's elements.
extern "C" __global__ void sum_squares(const TensorAddresses *tensors, int count, int per_block, float *partials) {
    Share s = share(tensors, count, per_block);
    const float *x = s.at<float>(0);
    float sum = 0.0f;
    for (long long i = s.begin + threadIdx.x; i < s.end; i += blockDim.x) sum += x[i] * x[i];
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
