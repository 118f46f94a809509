// Group norm of channels-last pictures in three steps: mean and squared deviations of runs of pixels, their union for
// each group, and the result. Nothing depends on which block comes first.

// One block for one group of some pixels: for any number of channels.
template <class T>
__device__ __forceinline__ void group_parts(const T *x, float *parts, long long pixels, int channels, int groups, int run) {
    long long first = (long long)blockIdx.x * run;
    int count = (int)(pixels - first < run ? pixels - first : run);
    int group = blockIdx.y, width = channels / groups, n = count * width;
    x += first * channels + group * width;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += to_float(x[(long long)(i / width) * channels + i % width]);
    float mean = block_sum(sum) / n, squares = 0.0f;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        float d = to_float(x[(long long)(i / width) * channels + i % width]) - mean;
        squares += d * d;
    }
    squares = block_sum(squares);
    if (threadIdx.x == 0) {
        float *part = parts + 2 * ((long long)blockIdx.x * groups + group);
        part[0] = mean;
        part[1] = squares;
    }
}

const int WIDE_THREADS = 256;

// One block for all groups of some pixels: reads whole vectors. Channels are a multiple of 8, at most 8 a thread.
template <class T>
__device__ __forceinline__ void group_parts_wide(const T *x, float *parts, long long pixels, int channels, int groups, int run) {
    __shared__ float sums[8 * WIDE_THREADS], means[8 * WIDE_THREADS];
    long long first = (long long)blockIdx.x * run;
    int count = (int)(pixels - first < run ? pixels - first : run);
    int vectors = channels / 8, lanes = WIDE_THREADS / vectors, width = channels / groups;
    int lane = threadIdx.x / vectors, channel = 8 * (threadIdx.x % vectors);
    x += first * channels;
    float v[8], sum[8] = {};
    if (lane < lanes) {
        for (int p = lane; p < count; p += lanes) {
            load_vector(x + (long long)p * channels + channel, v);
#pragma unroll
            for (int j = 0; j < 8; j++) sum[j] += v[j];
        }
#pragma unroll
        for (int j = 0; j < 8; j++) sums[lane * channels + channel + j] = sum[j];
    }
    __syncthreads();
    for (int group = threadIdx.x; group < groups; group += WIDE_THREADS) {
        float all = 0.0f;
        for (int l = 0; l < lanes; l++)
            for (int c = 0; c < width; c++) all += sums[l * channels + group * width + c];
        means[group] = all / ((float)count * width);
    }
    __syncthreads();
    if (lane < lanes) {
        float mean[8];
#pragma unroll
        for (int j = 0; j < 8; j++) mean[j] = means[(channel + j) / width], sum[j] = 0.0f;
        for (int p = lane; p < count; p += lanes) {
            load_vector(x + (long long)p * channels + channel, v);
#pragma unroll
            for (int j = 0; j < 8; j++) sum[j] += (v[j] - mean[j]) * (v[j] - mean[j]);
        }
#pragma unroll
        for (int j = 0; j < 8; j++) sums[lane * channels + channel + j] = sum[j];
    }
    __syncthreads();
    for (int group = threadIdx.x; group < groups; group += WIDE_THREADS) {
        float all = 0.0f;
        for (int l = 0; l < lanes; l++)
            for (int c = 0; c < width; c++) all += sums[l * channels + group * width + c];
        float *part = parts + 2 * ((long long)blockIdx.x * groups + group);
        part[0] = means[group];
        part[1] = all;
    }
}

const int HELD = 8;

// The same where 256 threads are a whole number of pixels and of groups: a thread holds the same eight channels of HELD pixels,
// which are read once.
template <class T>
__device__ __forceinline__ void group_parts_held(const T *x, float *parts, long long pixels, int channels, int groups, int run) {
    __shared__ float sums[8 * WIDE_THREADS], means[WIDE_THREADS];
    long long first = (long long)blockIdx.x * run;
    int count = (int)(pixels - first < run ? pixels - first : run);
    int vectors = channels / 8, lanes = WIDE_THREADS / vectors, width = channels / groups;
    int lane = threadIdx.x / vectors, channel = 8 * (threadIdx.x % vectors);
    // So many neighbouring threads add up one group.
    int share = WIDE_THREADS / groups, group = threadIdx.x / share, items = lanes * width;
    x += first * channels + channel;
    auto add_up = [&](const float (&sum)[8]) {
#pragma unroll
        for (int j = 0; j < 8; j++) sums[lane * channels + channel + j] = sum[j];
        __syncthreads();
        float all = 0.0f;
        for (int i = threadIdx.x % share; i < items; i += share) all += sums[i / width * channels + group * width + i % width];
        for (int step = share / 2; step > 0; step /= 2) all += __shfl_xor_sync(0xffffffffu, all, step);
        return all;
    };
    float v[HELD][8], sum[8] = {};
#pragma unroll
    for (int n = 0; n < HELD; n++) {
        int p = lane + n * lanes;
        if (p < count) load_vector(x + (long long)p * channels, v[n]);
    }
#pragma unroll
    for (int n = 0; n < HELD; n++) {
        if (lane + n * lanes < count) {
#pragma unroll
            for (int j = 0; j < 8; j++) sum[j] += v[n][j];
        }
    }
    float mean = add_up(sum) / ((float)count * width), own[8];
    if (threadIdx.x % share == 0) means[group] = mean;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 8; j++) own[j] = means[(channel + j) / width], sum[j] = 0.0f;
#pragma unroll
    for (int n = 0; n < HELD; n++) {
        if (lane + n * lanes < count) {
#pragma unroll
            for (int j = 0; j < 8; j++) sum[j] += (v[n][j] - own[j]) * (v[n][j] - own[j]);
        }
    }
    float squares = add_up(sum);
    if (threadIdx.x % share == 0) {
        float *part = parts + 2 * ((long long)blockIdx.x * groups + group);
        part[0] = mean;
        part[1] = squares;
    }
}

// And the result, in the same way.
template <class T>
__device__ __forceinline__ void group_apply_held(const T *x, const float *stats, const float *weight, const float *bias, T *out,
                                                 long long pixels, int channels, int width, int run, int f) {
    long long first = (long long)blockIdx.x * run;
    int count = (int)(pixels - first < run ? pixels - first : run);
    int vectors = channels / 8, lanes = WIDE_THREADS / vectors;
    int lane = threadIdx.x / vectors, channel = 8 * (threadIdx.x % vectors);
    x += first * channels + channel;
    out += first * channels + channel;
    float v[HELD][8], mean[8], factor[8], a[8], b[8];
#pragma unroll
    for (int n = 0; n < HELD; n++) {
        int p = lane + n * lanes;
        if (p < count) load_vector(x + (long long)p * channels, v[n]);
    }
    load_vector(weight + channel, a);
    load_vector(bias + channel, b);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        int group = (channel + j) / width;
        mean[j] = stats[2 * group], factor[j] = stats[2 * group + 1];
    }
#pragma unroll
    for (int n = 0; n < HELD; n++) {
        int p = lane + n * lanes;
        if (p < count) {
#pragma unroll
            for (int j = 0; j < 8; j++) v[n][j] = activate_as<T>((v[n][j] - mean[j]) * factor[j] * a[j] + b[j], f);
            store_vector(out + (long long)p * channels, v[n]);
        }
    }
}

// The union of two sets of numbers, each with its count, mean and squared deviations.
__device__ __forceinline__ void unite(double &n, double &mean, double &squares, double n2, double mean2, double squares2) {
    if (n2 == 0.0) return;
    double all = n + n2, d = mean2 - mean;
    squares += squares2 + d * d * n * n2 / all;
    mean += d * n2 / all;
    n = all;
}

const int UNITE_THREADS = 256;

// One block a group.
extern "C" __global__ void group_unite(const float *parts, float *stats, int runs, long long pixels, int run, int width,
                                       int groups, float eps) {
    __shared__ double all[3 * UNITE_THREADS];
    double n = 0.0, mean = 0.0, squares = 0.0;
    for (int r = threadIdx.x; r < runs; r += UNITE_THREADS) {
        long long left = pixels - (long long)r * run;
        const float *part = parts + 2 * ((long long)r * groups + blockIdx.x);
        unite(n, mean, squares, (double)((left < run ? left : run) * width), part[0], part[1]);
    }
    all[3 * threadIdx.x] = n;
    all[3 * threadIdx.x + 1] = mean;
    all[3 * threadIdx.x + 2] = squares;
    for (int half = UNITE_THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) {
            const double *other = all + 3 * (threadIdx.x + half);
            unite(n, mean, squares, other[0], other[1], other[2]);
            all[3 * threadIdx.x] = n;
            all[3 * threadIdx.x + 1] = mean;
            all[3 * threadIdx.x + 2] = squares;
        }
    }
    if (threadIdx.x == 0) {
        stats[2 * blockIdx.x] = (float)mean;
        stats[2 * blockIdx.x + 1] = (float)(1.0 / sqrt(squares / n + (double)eps));
    }
}

template <class T>
__device__ __forceinline__ void group_apply(const T *x, const float *stats, const float *weight, const float *bias, T *out,
                                            long long pixels, int channels, int width, int f) {
    int chunks = (channels + 7) / 8;
    long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= pixels * chunks) return;
    long long pixel = at / chunks;
    int i = 8 * (int)(at % chunks);
    bool vector = channels % 8 == 0 && aligned(x) && aligned(out) && aligned(weight) && aligned(bias);
    float v[8], a[8], b[8];
    load8(x + pixel * channels, i, channels, vector, v);
    load8(weight, i, channels, vector, a);
    load8(bias, i, channels, vector, b);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        if (i + j < channels) {
            int group = (i + j) / width;
            v[j] = activate((v[j] - stats[2 * group]) * stats[2 * group + 1] * a[j] + b[j], f);
        }
    }
    store8(out + pixel * channels, i, channels, vector, v);
}

#define KERNELS(T, name)                                                                                             \
    extern "C" __global__ void group_parts_##name(const T *x, float *parts, long long pixels, int channels,           \
                                                  int groups, int run) {                                             \
        group_parts(x, parts, pixels, channels, groups, run);                                                        \
    }                                                                                                                \
    extern "C" __global__ void group_parts_wide_##name(const T *x, float *parts, long long pixels, int channels,      \
                                                       int groups, int run) {                                        \
        group_parts_wide(x, parts, pixels, channels, groups, run);                                                   \
    }                                                                                                                \
    extern "C" __global__ void group_apply_##name(const T *x, const float *stats, const float *weight,                \
                                                  const float *bias, T *out, long long pixels, int channels,         \
                                                  int width, int f) {                                                \
        group_apply(x, stats, weight, bias, out, pixels, channels, width, f);                                        \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(256) group_parts_held_##name(                                       \
        const T *x, float *parts, long long pixels, int channels, int groups, int run) {                             \
        group_parts_held(x, parts, pixels, channels, groups, run);                                                   \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(256) group_apply_held_##name(                                       \
        const T *x, const float *stats, const float *weight, const float *bias, T *out, long long pixels,            \
        int channels, int width, int run, int f) {                                                                   \
        group_apply_held(x, stats, weight, bias, out, pixels, channels, width, run, f);                              \
    }

KERNELS(float, f32)
KERNELS(bf16, bf16)
