// Group norm of channels-last images in three launches: moments of ranges of pixels, their merge for each group, and the
// result. Deterministic: nothing depends on the order of blocks.

#include "moments.cuh"

// One block per group and range of pixels; any number of channels.
template <class T>
__device__ __forceinline__ void group_norm_partial(const T *x, float *partials, long long pixels, int channels, int groups,
                                                   int pixels_per_block) {
    long long first = (long long)blockIdx.x * pixels_per_block;
    int count = (int)(pixels - first < pixels_per_block ? pixels - first : pixels_per_block);
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
    if (threadIdx.x == 0) Moments<float>{(float)n, mean, squares}.store(partials, (long long)blockIdx.x * groups + group);
}

const int VECTOR_THREADS = 256, PIXELS_PER_THREAD = 4;

// A thread's part of a chunk, loaded at once: eight channels of up to PIXELS_PER_THREAD pixels, `lanes` pixels apart; with
// WHOLE all of them exist.
template <class T> struct PixelBatch {
    Vec8<T> x[PIXELS_PER_THREAD];
    int count;

    template <bool WHOLE> __device__ __forceinline__ void load(const T *p, int lanes, long long left, int channels) {
        count = WHOLE ? PIXELS_PER_THREAD : 0;
#pragma unroll
        for (int n = 0; n < PIXELS_PER_THREAD; n++) {
            if (WHOLE || n * lanes < left) {
                x[n] = load_vec8(p + n * lanes * channels);
                if (!WHOLE) count = n + 1;
            }
        }
    }
};

// Number of pixels, and moments of eight channels.
struct ChannelMoments {
    float pixels, mean[8], squares[8];

    // Deviations are taken from the batch's own mean, which avoids cancellation.
    template <bool WHOLE, class T> __device__ __forceinline__ void add(const T *p, int lanes, long long left, int channels) {
        PixelBatch<T> batch;
        batch.template load<WHOLE>(p, lanes, left, channels);
        float count = batch.count, inverse = 1.0f / count, v[8], own[8] = {};
#pragma unroll
        for (int n = 0; n < PIXELS_PER_THREAD; n++) {
            if (WHOLE || n < batch.count) {
                widen(batch.x[n], v);
#pragma unroll
                for (int j = 0; j < 8; j++) own[j] += v[j];
            }
        }
#pragma unroll
        for (int j = 0; j < 8; j++) own[j] *= inverse;
#pragma unroll
        for (int n = 0; n < PIXELS_PER_THREAD; n++) {
            if (WHOLE || n < batch.count) {
                widen(batch.x[n], v);
#pragma unroll
                for (int j = 0; j < 8; j++) squares[j] += (v[j] - own[j]) * (v[j] - own[j]);
            }
        }
        float weight = count * fast_reciprocal(pixels + count), other = weight * pixels;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float d = own[j] - mean[j];
            squares[j] += d * other * d;
            mean[j] += d * weight;
        }
        pixels += count;
    }
};

// How a block's threads divide chunks of whole pixels. Channels are a multiple of 8, at most 8 per thread.
struct ThreadLayout {
    int lanes, lane, channel;

    __device__ __forceinline__ ThreadLayout(int channels) {
        int vectors = channels / 8;
        lanes = VECTOR_THREADS / vectors, lane = threadIdx.x / vectors, channel = 8 * (threadIdx.x % vectors);
    }

    // This thread's first pixel of a chunk.
    __device__ __forceinline__ long long first(int chunk) const { return (long long)chunk * PIXELS_PER_THREAD * lanes + lane; }
};

// All groups of every gridDim.x-th chunk, from the image's end: the end was written last and is still cached, and the
// beginning, read last here, is what group_norm_apply_vector needs first.
template <class T>
__device__ __forceinline__ void group_norm_partial_vector(const T *x, float *partials, long long pixels, int chunks, int channels,
                                                 int groups) {
    __shared__ float counts[VECTOR_THREADS], means[8 * VECTOR_THREADS], squares[8 * VECTOR_THREADS];
    ThreadLayout layout(channels);
    int width = channels / groups, lane = layout.lane, lanes = layout.lanes;
    ChannelMoments own = {};
    for (int chunk = chunks - 1 - (int)blockIdx.x; chunk >= 0; chunk -= gridDim.x) {
        long long first = layout.first(chunk), left = lane < lanes ? pixels - first : 0;
        const T *p = x + first * channels + layout.channel;
        if (left > (PIXELS_PER_THREAD - 1) * lanes)
            own.add<true>(p, lanes, left, channels);
        else if (left > 0)
            own.add<false>(p, lanes, left, channels);
    }
    if (lane < lanes) {
        if (layout.channel == 0) counts[lane] = own.pixels;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            means[lane * channels + layout.channel + j] = own.mean[j];
            squares[lane * channels + layout.channel + j] = own.squares[j];
        }
    }
    __syncthreads();
    // Merge the lanes of a channel, then the channels of a group.
    for (int c = threadIdx.x; c < channels; c += VECTOR_THREADS) {
        Moments<float> merged = {counts[0], means[c], squares[c]};
        for (int l = 1; l < lanes; l++) merged.merge({counts[l], means[l * channels + c], squares[l * channels + c]});
        means[c] = merged.mean;
        squares[c] = merged.squares;
    }
    float pixels_here = 0.0f;
    for (int l = 0; l < lanes; l++) pixels_here += counts[l];
    __syncthreads();
    for (int group = threadIdx.x; group < groups; group += VECTOR_THREADS) {
        Moments<float> merged = {};
        for (int c = group * width; c < (group + 1) * width; c++) merged.merge({pixels_here, means[c], squares[c]});
        merged.store(partials, (long long)blockIdx.x * groups + group);
    }
}

// The result, from the image's beginning on, or `backward` from its end, whichever was read or written last.
template <int F, class T>
__device__ __forceinline__ void group_norm_apply_vector(const T *x, const float *stats, const float *weight, const float *bias, T *out,
                                                 long long pixels, int chunks, int channels, int width, int backward) {
    ThreadLayout layout(channels);
    if (layout.lane >= layout.lanes) return;
    float mean[8], factor[8], b[8];
    load_vector(weight + layout.channel, factor);
    load_vector(bias + layout.channel, b);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        int group = (layout.channel + j) / width;
        mean[j] = stats[2 * group], factor[j] *= stats[2 * group + 1];
    }
    for (int i = blockIdx.x; i < chunks; i += gridDim.x) {
        long long first = layout.first(backward ? chunks - 1 - i : i);
        if (first >= pixels) continue;
        PixelBatch<T> batch;
        batch.template load<false>(x + first * channels + layout.channel, layout.lanes, pixels - first, channels);
        T *to = out + first * channels + layout.channel;
#pragma unroll
        for (int n = 0; n < PIXELS_PER_THREAD; n++) {
            if (n < batch.count) {
                float v[8];
                widen(batch.x[n], v);
#pragma unroll
                for (int j = 0; j < 8; j++) v[j] = activate_as<T>((v[j] - mean[j]) * factor[j] + b[j], F);
                store_vector_streaming(to + n * layout.lanes * channels, v);
            }
        }
    }
}

const int MERGE_THREADS = 256;

// One block per group, whose channels have `parts` partial results each of `count` times.
extern "C" __global__ void group_norm_merge(const float *partials, float *stats, int count, int groups, int parts, float eps) {
    __shared__ Moments<double> merged[MERGE_THREADS];
    Moments<double> own = {};
    for (int i = threadIdx.x; i < count * parts; i += MERGE_THREADS) {
        const float *partial = partials + 3 * (((long long)(i / parts) * groups + blockIdx.x) * parts + i % parts);
        own.merge({partial[0], partial[1], partial[2]});
    }
    merged[threadIdx.x] = own;
    for (int half = MERGE_THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) {
            own.merge(merged[threadIdx.x + half]);
            merged[threadIdx.x] = own;
        }
    }
    if (threadIdx.x == 0) {
        stats[2 * blockIdx.x] = (float)own.mean;
        stats[2 * blockIdx.x + 1] = (float)(1.0 / sqrt(own.squares / own.n + (double)eps));
    }
}

template <class T>
__device__ __forceinline__ void group_norm_apply(const T *x, const float *stats, const float *weight, const float *bias, T *out,
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

#define KERNELS(T, name, resident)                                                                                    \
    extern "C" __global__ void group_norm_partial_##name(const T *x, float *partials, long long pixels, int channels, \
                                                  int groups, int pixels_per_block) {                                 \
        group_norm_partial(x, partials, pixels, channels, groups, pixels_per_block);                                  \
    }                                                                                                                 \
    extern "C" __global__ void group_norm_apply_##name(const T *x, const float *stats, const float *weight,           \
                                                  const float *bias, T *out, long long pixels, int channels,          \
                                                  int width, int f) {                                                 \
        group_norm_apply(x, stats, weight, bias, out, pixels, channels, width, f);                                    \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(256, resident) group_norm_partial_vector_##name(                     \
        const T *x, float *partials, long long pixels, int chunks, int channels, int groups) {                        \
        group_norm_partial_vector(x, partials, pixels, chunks, channels, groups);                                     \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(256, resident) group_norm_apply_vector_##name(                       \
        const T *x, const float *stats, const float *weight, const float *bias, T *out, long long pixels,             \
        int chunks, int channels, int width, int backward, int f) {                                                   \
        if (f == 0) group_norm_apply_vector<0>(x, stats, weight, bias, out, pixels, chunks, channels, width, backward); \
        if (f == 1) group_norm_apply_vector<1>(x, stats, weight, bias, out, pixels, chunks, channels, width, backward); \
        if (f == 2) group_norm_apply_vector<2>(x, stats, weight, bias, out, pixels, chunks, channels, width, backward); \
        if (f == 3) group_norm_apply_vector<3>(x, stats, weight, bias, out, pixels, chunks, channels, width, backward); \
        if (f == 4) group_norm_apply_vector<4>(x, stats, weight, bias, out, pixels, chunks, channels, width, backward); \
    }

KERNELS(float, f32, 2)
KERNELS(bf16, bf16, 4)
