// Implicit GEMM: convolutions of channels-last images as one matrix product whose left operand is never stored; its row m
// is the window of output pixel m. With a 1x1 kernel it is a plain matrix product.

#include "conv.cuh"

// Stores two adjacent channels, together if both exist and are aligned.
template <class O> __device__ __forceinline__ void store_output_pair(const ConvArgs &args, long long m, int n, float a, float b) {
    O *out = (O *)args.out + m * args.ldo + n;
    const O *add = args.add ? (const O *)args.add + m * args.ldadd + n : 0;
    if (n + 1 >= args.n || (((u64)out | (u64)add) & 3) != 0) {
        if (n < args.n) store_output<O>(args, m, n, a);
        if (n + 1 < args.n) store_output<O>(args, m, n + 1, b);
        return;
    }
    a *= args.alpha, b *= args.alpha;
    if (args.bias) a += args.bias[n], b += args.bias[n + 1];
    if (add) {
        float c, d;
        load_pair(add, c, d);
        a += c, b += d;
    }
    store_pair(out, a, b);
}

// Any type and size: 64 pixels by 64 channels per block of 256 threads, f32 sums.
template <class T, class O> __device__ __forceinline__ void conv_plain(const ConvArgs &args) {
    __shared__ float xs[16][68], ws[16][68];
    const T *x = (const T *)args.x, *w = (const T *)args.w;
    long long m0 = (long long)blockIdx.x * 64, pixels = (long long)args.out_height * args.out_width;
    int n0 = blockIdx.y * 64, depth = args.kernel_height * args.kernel_width * args.channels;
    int row = threadIdx.x / 16, column = threadIdx.x % 16;
    float sums[4][4] = {};
    for (int k0 = 0; k0 < depth; k0 += 16) {
        int k = k0 + column, tap = k / args.channels, channel = k % args.channels;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            long long m = m0 + row + 16 * i;
            float v = 0.0f;
            if (k < depth && m < pixels) {
                int y = (int)(m / args.out_width) * args.stride - args.top, c = (int)(m % args.out_width) * args.stride - args.left;
                long long pixel = input_pixel(args, y, c, tap);
                if (pixel >= 0) v = to_float(x[pixel * args.ldx + channel]);
            }
            xs[column][row + 16 * i] = v;
            int n = n0 + row + 16 * i;
            ws[column][row + 16 * i] = k < depth && n < args.n ? to_float(w[n * args.ldw + k]) : 0.0f;
        }
        __syncthreads();
#pragma unroll
        for (int kk = 0; kk < 16; kk++) {
            float a[4], b[4];
#pragma unroll
            for (int i = 0; i < 4; i++) a[i] = xs[kk][4 * row + i], b[i] = ws[kk][4 * column + i];
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) sums[i][j] += a[i] * b[j];
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            long long m = m0 + 4 * row + i;
            int n = n0 + 4 * column + j;
            if (m < pixels && n < args.n) store_output<O>(args, m, n, sums[i][j]);
        }
}

const int BLOCK_M = 128, BLOCK_K = 32, STAGES = 3, THREADS = 256;
// 8 elements of padding: the 8 rows of a matrix lie in different banks.
const int PITCH = BLOCK_K + 8;

// bf16 on tensor cores: BLOCK_M pixels by BLOCK_N channels per block, WARPS_M by 8 / WARPS_M warps. Channels and strides
// are multiples of 8 and pointers aligned to 16 bytes, so that 16 bytes belong to one tap.
template <class O, int BLOCK_N, int WARPS_M> __device__ __forceinline__ void conv_tiles(const ConvArgs &args) {
    const int WARPS_N = 8 / WARPS_M, TILES_M = BLOCK_M / WARPS_M / 16, TILES_N = BLOCK_N / WARPS_N / 8;
    const int STAGE = (BLOCK_M + BLOCK_N) * PITCH;
    DYNAMIC_SHARED(memory);
    bf16 *shared = (bf16 *)memory;
    const bf16 *x = (const bf16 *)args.x, *w = (const bf16 *)args.w;
    long long m0 = (long long)blockIdx.x * BLOCK_M, pixels = (long long)args.out_height * args.out_width;
    int n0 = blockIdx.y * BLOCK_N, depth = args.kernel_height * args.kernel_width * args.channels;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int warp_m = warp % WARPS_M * TILES_M * 16, warp_n = warp / WARPS_M * TILES_N * 8;

    // Every thread copies 16 bytes of two rows of x, always the same rows.
    int chunk = threadIdx.x % 4;
    int begin_y[2], begin_x[2];
    bool within[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        long long m = m0 + threadIdx.x / 4 + 64 * i;
        within[i] = m < pixels;
        begin_y[i] = (int)(m / args.out_width) * args.stride - args.top;
        begin_x[i] = (int)(m % args.out_width) * args.stride - args.left;
    }
    auto prefetch = [&](int step, int stage) {
        bf16 *xs = shared + stage * STAGE, *ws = xs + BLOCK_M * PITCH;
        int k = step * BLOCK_K + 8 * chunk, tap = k / args.channels, channel = k - tap * args.channels;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            long long pixel = within[i] && k < depth ? input_pixel(args, begin_y[i], begin_x[i], tap) : -1;
            const bf16 *from = pixel >= 0 ? x + pixel * args.ldx + channel : x;
            copy_async(xs + (threadIdx.x / 4 + 64 * i) * PITCH + 8 * chunk, from, pixel >= 0);
        }
#pragma unroll
        for (int i = 0; i < (BLOCK_N + 63) / 64; i++) {
            int row = threadIdx.x / 4 + 64 * i;
            if (row < BLOCK_N) {
                bool valid = n0 + row < args.n && k < depth;
                const bf16 *from = valid ? w + (n0 + row) * args.ldw + k : w;
                copy_async(ws + row * PITCH + 8 * chunk, from, valid);
            }
        }
    };

    float sums[TILES_M][TILES_N][4] = {};
    int steps = (depth + BLOCK_K - 1) / BLOCK_K;
#pragma unroll
    for (int step = 0; step < STAGES - 1; step++) {
        if (step < steps) prefetch(step, step);
        copy_commit();
    }
    for (int step = 0; step < steps; step++) {
        copy_wait<STAGES - 2>();
        // Also: all threads are done with the stage that is overwritten next.
        __syncthreads();
        if (step + STAGES - 1 < steps) prefetch(step + STAGES - 1, (step + STAGES - 1) % STAGES);
        copy_commit();
        const bf16 *xs = shared + step % STAGES * STAGE, *ws = xs + BLOCK_M * PITCH;
#pragma unroll
        for (int k = 0; k < BLOCK_K; k += 16) {
            unsigned a[TILES_M][4], b[TILES_N / 2][4];
#pragma unroll
            for (int i = 0; i < TILES_M; i++)
                load_matrices(a[i], xs + (warp_m + 16 * i + lane % 16) * PITCH + k + lane / 16 * 8);
#pragma unroll
            for (int j = 0; j < TILES_N / 2; j++)
                load_matrices(b[j], ws + (warp_n + 16 * j + lane / 16 * 8 + lane % 8) * PITCH + k + lane / 8 % 2 * 8);
#pragma unroll
            for (int i = 0; i < TILES_M; i++)
#pragma unroll
                for (int j = 0; j < TILES_N; j++) mma(sums[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
    }
#pragma unroll
    for (int i = 0; i < TILES_M; i++)
#pragma unroll
        for (int j = 0; j < TILES_N; j++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                long long m = m0 + warp_m + 16 * i + lane / 4 + 8 * r;
                int n = n0 + warp_n + 8 * j + lane % 4 * 2;
                if (m < pixels) store_output_pair<O>(args, m, n, sums[i][j][2 * r], sums[i][j][2 * r + 1]);
            }
}

extern "C" __global__ void __launch_bounds__(256) conv_plain_f32_f32(const __grid_constant__ ConvArgs args) {
    conv_plain<float, float>(args);
}
extern "C" __global__ void __launch_bounds__(256) conv_plain_bf16_bf16(const __grid_constant__ ConvArgs args) {
    conv_plain<bf16, bf16>(args);
}
extern "C" __global__ void __launch_bounds__(256) conv_plain_bf16_f32(const __grid_constant__ ConvArgs args) {
    conv_plain<bf16, float>(args);
}
extern "C" __global__ void __launch_bounds__(THREADS) conv_tiles_bf16_128(const __grid_constant__ ConvArgs args) {
    conv_tiles<bf16, 128, 4>(args);
}
extern "C" __global__ void __launch_bounds__(THREADS) conv_tiles_f32_128(const __grid_constant__ ConvArgs args) {
    conv_tiles<float, 128, 4>(args);
}
extern "C" __global__ void __launch_bounds__(THREADS) conv_tiles_bf16_32(const __grid_constant__ ConvArgs args) {
    conv_tiles<bf16, 32, 8>(args);
}
extern "C" __global__ void __launch_bounds__(THREADS) conv_tiles_f32_32(const __grid_constant__ ConvArgs args) {
    conv_tiles<float, 32, 8>(args);
}
