// Group norm of channels-last pictures in three steps: mean and squared deviations of runs of pixels, their union for
// each group, and the result. Nothing depends on which block comes first.

// Count, mean and squared deviations of some numbers: what is known of them, and of what they are a part of.
template <class F> struct Moments {
    F n, mean, squares;

    __device__ __forceinline__ void unite(const Moments &other) {
        if (other.n == 0) return;
        F all = n + other.n, d = other.mean - mean, weight = other.n / all;
        squares += other.squares + d * n * (d * weight);
        mean += d * weight;
        n = all;
    }

    __device__ __forceinline__ void put(float *parts, long long at) const {
        parts += 3 * at;
        parts[0] = n, parts[1] = mean, parts[2] = squares;
    }
};

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
    if (threadIdx.x == 0) Moments<float>{(float)n, mean, squares}.put(parts, (long long)blockIdx.x * groups + group);
}

const int WIDE_THREADS = 256, HELD = 4;

// A thread's share of a chunk of pixels, all asked for at once: eight channels of HELD pixels, `lanes` pixels apart, as far as
// there are any; with WHOLE there are.
template <class T> struct Held {
    Eight<T> x[HELD];
    int count;

    template <bool WHOLE> __device__ __forceinline__ void load(const T *p, int lanes, long long left, int channels) {
        count = WHOLE ? HELD : 0;
#pragma unroll
        for (int n = 0; n < HELD; n++) {
            if (WHOLE || n * lanes < left) {
                x[n] = load_eight(p + n * lanes * channels);
                if (!WHOLE) count = n + 1;
            }
        }
    }
};

// Pixels of eight channels: how many, and each channel's mean and squared deviations.
struct Columns {
    float pixels, mean[8], squares[8];

    // Deviations are from the mean of what is held, and so of the size of what is added up.
    template <bool WHOLE, class T> __device__ __forceinline__ void add(const T *p, int lanes, long long left, int channels) {
        Held<T> held;
        held.template load<WHOLE>(p, lanes, left, channels);
        float count = held.count, inverse = 1.0f / count, v[8], own[8] = {};
#pragma unroll
        for (int n = 0; n < HELD; n++) {
            if (WHOLE || n < held.count) {
                widen(held.x[n], v);
#pragma unroll
                for (int j = 0; j < 8; j++) own[j] += v[j];
            }
        }
#pragma unroll
        for (int j = 0; j < 8; j++) own[j] *= inverse;
#pragma unroll
        for (int n = 0; n < HELD; n++) {
            if (WHOLE || n < held.count) {
                widen(held.x[n], v);
#pragma unroll
                for (int j = 0; j < 8; j++) squares[j] += (v[j] - own[j]) * (v[j] - own[j]);
            }
        }
        float weight = count * fast_inverse(pixels + count), other = weight * pixels;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float d = own[j] - mean[j];
            squares[j] += d * other * d;
            mean[j] += d * weight;
        }
        pixels += count;
    }
};

// How the threads of a block share chunks of whole pixels. Channels are a multiple of 8, at most 8 a thread.
struct Share {
    int lanes, lane, channel;

    __device__ __forceinline__ Share(int channels) {
        int vectors = channels / 8;
        lanes = WIDE_THREADS / vectors, lane = threadIdx.x / vectors, channel = 8 * (threadIdx.x % vectors);
    }

    // This thread's first pixel of a chunk.
    __device__ __forceinline__ long long first(int chunk) const { return (long long)chunk * HELD * lanes + lane; }
};

// All groups of every gridDim.x-th chunk. The picture's end comes first: whoever made it has just written that, and its
// beginning, read last, is what group_apply_wide needs first.
template <class T>
__device__ __forceinline__ void group_parts_wide(const T *x, float *parts, long long pixels, int chunks, int channels,
                                                 int groups) {
    __shared__ float counts[WIDE_THREADS], means[8 * WIDE_THREADS], squares[8 * WIDE_THREADS];
    Share share(channels);
    int width = channels / groups, lane = share.lane, lanes = share.lanes;
    Columns own = {};
    for (int chunk = chunks - 1 - (int)blockIdx.x; chunk >= 0; chunk -= gridDim.x) {
        long long first = share.first(chunk), left = lane < lanes ? pixels - first : 0;
        const T *p = x + first * channels + share.channel;
        if (left > (HELD - 1) * lanes)
            own.add<true>(p, lanes, left, channels);
        else if (left > 0)
            own.add<false>(p, lanes, left, channels);
    }
    if (lane < lanes) {
        if (share.channel == 0) counts[lane] = own.pixels;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            means[lane * channels + share.channel + j] = own.mean[j];
            squares[lane * channels + share.channel + j] = own.squares[j];
        }
    }
    __syncthreads();
    // The lanes of a channel, then the channels of a group.
    for (int c = threadIdx.x; c < channels; c += WIDE_THREADS) {
        Moments<float> all = {counts[0], means[c], squares[c]};
        for (int l = 1; l < lanes; l++) all.unite({counts[l], means[l * channels + c], squares[l * channels + c]});
        means[c] = all.mean;
        squares[c] = all.squares;
    }
    float pixels_here = 0.0f;
    for (int l = 0; l < lanes; l++) pixels_here += counts[l];
    __syncthreads();
    for (int group = threadIdx.x; group < groups; group += WIDE_THREADS) {
        Moments<float> all = {};
        for (int c = group * width; c < (group + 1) * width; c++) all.unite({pixels_here, means[c], squares[c]});
        all.put(parts, (long long)blockIdx.x * groups + group);
    }
}

// The result, from the picture's beginning on.
template <int F, class T>
__device__ __forceinline__ void group_apply_wide(const T *x, const float *stats, const float *weight, const float *bias, T *out,
                                                 long long pixels, int chunks, int channels, int width) {
    Share share(channels);
    if (share.lane >= share.lanes) return;
    float mean[8], factor[8], b[8];
    load_vector(weight + share.channel, factor);
    load_vector(bias + share.channel, b);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        int group = (share.channel + j) / width;
        mean[j] = stats[2 * group], factor[j] *= stats[2 * group + 1];
    }
    for (int chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
        long long first = share.first(chunk);
        if (first >= pixels) return;
        Held<T> held;
        held.template load<false>(x + first * channels + share.channel, share.lanes, pixels - first, channels);
        T *to = out + first * channels + share.channel;
#pragma unroll
        for (int n = 0; n < HELD; n++) {
            if (n < held.count) {
                float v[8];
                widen(held.x[n], v);
#pragma unroll
                for (int j = 0; j < 8; j++) v[j] = activate_as<T>((v[j] - mean[j]) * factor[j] + b[j], F);
                store_vector_passing(to + n * share.lanes * channels, v);
            }
        }
    }
}

const int UNITE_THREADS = 256;

// One block a group.
extern "C" __global__ void group_unite(const float *parts, float *stats, int count, int groups, float eps) {
    __shared__ Moments<double> all[UNITE_THREADS];
    Moments<double> own = {};
    for (int i = threadIdx.x; i < count; i += UNITE_THREADS) {
        const float *part = parts + 3 * ((long long)i * groups + blockIdx.x);
        own.unite({part[0], part[1], part[2]});
    }
    all[threadIdx.x] = own;
    for (int half = UNITE_THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) {
            own.unite(all[threadIdx.x + half]);
            all[threadIdx.x] = own;
        }
    }
    if (threadIdx.x == 0) {
        stats[2 * blockIdx.x] = (float)own.mean;
        stats[2 * blockIdx.x + 1] = (float)(1.0 / sqrt(own.squares / own.n + (double)eps));
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

#define KERNELS(T, name, resident)                                                                                   \
    extern "C" __global__ void group_parts_##name(const T *x, float *parts, long long pixels, int channels,           \
                                                  int groups, int run) {                                             \
        group_parts(x, parts, pixels, channels, groups, run);                                                        \
    }                                                                                                                \
    extern "C" __global__ void group_apply_##name(const T *x, const float *stats, const float *weight,                \
                                                  const float *bias, T *out, long long pixels, int channels,         \
                                                  int width, int f) {                                                \
        group_apply(x, stats, weight, bias, out, pixels, channels, width, f);                                        \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(256, resident) group_parts_wide_##name(                             \
        const T *x, float *parts, long long pixels, int chunks, int channels, int groups) {                          \
        group_parts_wide(x, parts, pixels, chunks, channels, groups);                                                \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(256, resident) group_apply_wide_##name(                             \
        const T *x, const float *stats, const float *weight, const float *bias, T *out, long long pixels,            \
        int chunks, int channels, int width, int f) {                                                                \
        if (f == 0) group_apply_wide<0>(x, stats, weight, bias, out, pixels, chunks, channels, width);               \
        if (f == 1) group_apply_wide<1>(x, stats, weight, bias, out, pixels, chunks, channels, width);               \
        if (f == 2) group_apply_wide<2>(x, stats, weight, bias, out, pixels, chunks, channels, width);               \
        if (f == 3) group_apply_wide<3>(x, stats, weight, bias, out, pixels, chunks, channels, width);               \
    }

KERNELS(float, f32, 2)
KERNELS(bf16, bf16, 4)
