// Implicit GEMM (see conv.cu) in f32 on CUDA cores. Channels and strides are multiples of 4 and pointers aligned to 16
// bytes, so that 16 bytes belong to one tap.
// A thread owns the sums of 8 pixels by COLUMNS channels. Both operands lie in shared memory as rows of DEPTH elements
// along the sum, read four at a time.
// Folded upsampling: in a 3x3 convolution of a 2x upsampled image, two of three taps of a row or column fall on the same
// pixel. The four phases of the output (by parity of row and column) are 2x2 convolutions of the small image with summed
// taps. Sizes are then those of one phase, and the phases' weights follow each other.
// 38 to 43 TFLOP/s on an H200 (cuDNN 27 to 41). 8x8 sums per thread were slower (34), twice the DEPTH no faster.

#include "conv.cuh"

const int DEPTH = 16;
// 4 elements of padding: 8 adjacent rows lie in different banks.
const int PITCH = DEPTH + 4;
const int STAGES = 2;

// [n, 3 x 3, channels] to [4 phases, n, 2 x 2, channels].
extern "C" __global__ void fold_taps_f32(const float *w, float *out, int n, int channels) {
    long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= 16ll * n * channels) return;
    int channel = (int)(at % channels), tap = (int)(at / channels % 4), phase = (int)(at / channels / 4 / n);
    long long row = at / channels / 4 % n;
    float sum = 0.0f;
    for (int ky = 0; ky < 3; ky++)
        for (int kx = 0; kx < 3; kx++)
            // At even positions the first tap falls on the previous pixel, at odd ones the last tap on the next.
            if ((ky + phase / 2 + 1) / 2 == tap / 2 + phase / 2 && (kx + phase % 2 + 1) / 2 == tap % 2 + phase % 2)
                sum += w[(row * 9 + 3 * ky + kx) * channels + channel];
    out[at] = sum;
}

// BLOCK_M pixels by BLOCK_N channels per block; a warp is 32 / LANES_N by LANES_N lanes.
template <int BLOCK_M, int BLOCK_N, int LANES_N, int COLUMNS> __device__ __forceinline__ void conv_f32(const ConvArgs &args) {
    const int LANES_M = 32 / LANES_N, WARPS_N = BLOCK_N / (COLUMNS * LANES_N), WARPS_M = BLOCK_M / (8 * LANES_M);
    const int THREADS = 32 * WARPS_M * WARPS_N, ROWS_M = 4 * BLOCK_M / THREADS, ROWS_N = 4 * BLOCK_N / THREADS;
    const int STAGE = (BLOCK_M + BLOCK_N) * PITCH;
    DYNAMIC_SHARED(memory);
    float *shared = (float *)memory;
    const float *x = (const float *)args.x, *w = (const float *)args.w;
    bool folded = args.upsample == 2;
    int phase = folded ? blockIdx.x % 4 : 0, m0 = (folded ? blockIdx.x / 4 : blockIdx.x) * BLOCK_M, n0 = blockIdx.y * BLOCK_N;
    int pixels = args.out_height * args.out_width;
    w += phase * args.n * args.ldw;
    int taps = args.kernel_height * args.kernel_width;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // Of 16 lanes, adjacent ones read one row of one operand, every second one a row of the other: fewest bank conflicts.
    int pair = lane / 2 % 8, rest = lane % 2 + lane / 16 * 2;
    int lane_m = LANES_M == 8 ? pair : rest, lane_n = LANES_N == 8 ? pair : rest;
    int warp_m = warp % WARPS_M * 8 * LANES_M + lane_m, warp_n = warp / WARPS_M * COLUMNS * LANES_N + lane_n;

    // Every thread copies 16 bytes of some rows, always the same ones, of the next tap and channel.
    int row = threadIdx.x / 4, chunk = 4 * (threadIdx.x % 4), tap = 0, channel = chunk, input_pixels[ROWS_M];
    auto locate_pixels = [&]() {
        for (; channel >= args.channels && tap < taps; tap++) channel -= args.channels;
#pragma unroll
        for (int i = 0; i < ROWS_M; i++) {
            int m = m0 + row + THREADS / 4 * i, y = m / args.out_width, column = m % args.out_width;
            bool valid = m < pixels && tap < taps;
            int top = y * args.stride - args.top + phase / 2, left = column * args.stride - args.left + phase % 2;
            input_pixels[i] = valid ? (int)input_pixel(args, top, left, tap) : -1;
        }
    };
    locate_pixels();
    auto prefetch = [&](int step) {
        float *xs = shared + step % STAGES * STAGE + row * PITCH + chunk, *ws = xs + BLOCK_M * PITCH;
        if (channel >= args.channels) locate_pixels();
#pragma unroll
        for (int i = 0; i < ROWS_M; i++) {
            bool valid = input_pixels[i] >= 0;
            copy_async(xs + THREADS / 4 * i * PITCH, valid ? x + input_pixels[i] * args.ldx + channel : x, valid);
        }
#pragma unroll
        for (int i = 0; i < ROWS_N; i++) {
            int n = n0 + row + THREADS / 4 * i;
            bool valid = n < args.n && tap < taps;
            copy_async(ws + THREADS / 4 * i * PITCH, valid ? w + n * args.ldw + step * DEPTH + chunk : w, valid);
        }
        channel += DEPTH;
    };

    float sums[COLUMNS][8] = {};
    int steps = (taps * args.channels + DEPTH - 1) / DEPTH;
    prefetch(0);
    copy_commit();
    for (int step = 0; step < steps; step++) {
        copy_wait<0>();
        // Also: all threads are done with the stage that is overwritten next.
        __syncthreads();
        if (step + 1 < steps) prefetch(step + 1);
        copy_commit();
        const float *xs = shared + step % STAGES * STAGE + warp_m * PITCH;
        const float *ws = shared + step % STAGES * STAGE + (BLOCK_M + warp_n) * PITCH;
#pragma unroll
        for (int k = 0; k < DEPTH; k += 4) {
            float4 a[8];
#pragma unroll
            for (int i = 0; i < 8; i++) a[i] = *(const float4 *)(xs + LANES_M * i * PITCH + k);
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) multiply_add(sums[j], *(const float4 *)(ws + LANES_N * j * PITCH + k), a);
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int m = m0 + warp_m + LANES_M * i;
        if (m < pixels) {
            long long to = m;
            if (folded) to = (2ll * (m / args.out_width) + phase / 2) * (2 * args.out_width) + 2 * (m % args.out_width) + phase % 2;
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) {
                int n = n0 + warp_n + LANES_N * j;
                if (n < args.n) store_output<float>(args, to, n, sums[j][i]);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(128, 2) conv_f32_128(const __grid_constant__ ConvArgs args) {
    conv_f32<128, 128, 4, 16>(args);
}
extern "C" __global__ void __launch_bounds__(128, 3) conv_f32_64(const __grid_constant__ ConvArgs args) {
    conv_f32<128, 64, 8, 8>(args);
}
// For RGB output.
extern "C" __global__ void __launch_bounds__(128, 3) conv_f32_32(const __grid_constant__ ConvArgs args) {
    conv_f32<256, 32, 4, 8>(args);
}
