// Convolutions of channels-last bf16 images on Hopper, KxK kernels with stride 1.
// Persistent blocks compute tiles of 16x16 pixels by N channels; the next tile is loaded while one is written. For 64
// channels and one column of the kernel, a producer thread loads the pixels under it, K - 1 rows more than the tile, and K
// weight matrices; the taps of that column multiply the same pixels, shifted by a row each. TMA pads with zeros.
// For folded 2x upsampling with its four phases see conv_f32.cu.
// 3x3 on a cold H200, 128x128x512 to 512: 0.104 ms (PyTorch 0.125); 1024x1024x128 to 128: 0.527 ms (0.781).
// No gain: starting a step's products before the previous step's are complete.

#include "hopper.cuh"

const int TILE_SIDE = 16;

struct HopperConvArgs {
    TensorMap x, w;
    const float *bias;
    const bf16 *add;
    bf16 *out;
    // Height and width of one phase of the output.
    int channels, height, width, n, top, left, tiles_x, tiles_n, tiles;
    // 4 for folded upsampling, else 1; the phases' weights follow each other.
    int phases;
};

// [n, 3 x 3, channels] to [4 phases, n, 2 x 2, channels].
extern "C" __global__ void fold_taps(const bf16 *w, bf16 *out, int n, int channels) {
    long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= 16ll * n * channels) return;
    int channel = (int)(at % channels), tap = (int)(at / channels % 4), phase = (int)(at / channels / 4 / n);
    long long row = at / channels / 4 % n;
    float sum = 0.0f;
    for (int ky = 0; ky < 3; ky++)
        for (int kx = 0; kx < 3; kx++)
            // At even positions the first tap falls on the previous pixel, at odd ones the last tap on the next.
            if ((ky + phase / 2 + 1) / 2 == tap / 2 + phase / 2 && (kx + phase % 2 + 1) / 2 == tap % 2 + phase % 2)
                sum += to_float(w[(row * 9 + 3 * ky + kx) * channels + channel]);
    out[at] = round_to_bf16(sum);
}

#if defined(KILN_EMULATED) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ void wgmma(float (&d)[64], u64 a, u64 b, int add) { wgmma_n128(d, a, b, add); }
__device__ __forceinline__ void wgmma(float (&d)[4], u64 a, u64 b, int add) { wgmma_n8(d, a, b, add); }

// Stores eight channels of one pixel with bias and summand.
__device__ __forceinline__ void store_output_vec8(const HopperConvArgs &args, long long pixel, int n, const float (&sums)[8]) {
    bf16 *out = args.out + pixel * args.n + n;
    const bf16 *add = args.add ? args.add + pixel * args.n + n : 0;
    float v[8], a[8];
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = sums[i] + (args.bias && n + i < args.n ? args.bias[n + i] : 0.0f);
    bool vector = args.n % 8 == 0;
    if (add) {
        load8(add, 0, args.n - n, vector, a);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] += a[i];
    }
    store8(out, 0, args.n - n, vector, v);
}

// First channel, phase and first pixel of a tile.
struct OutputTile {
    int n0, phase, y0, x0;

    __device__ __forceinline__ OutputTile(const HopperConvArgs &args, int tile, int columns) {
        n0 = tile % args.tiles_n * columns, tile /= args.tiles_n;
        phase = tile % args.phases, tile /= args.phases;
        y0 = tile / args.tiles_x * TILE_SIDE, x0 = tile % args.tiles_x * TILE_SIDE;
    }
};

template <int K, int N> __device__ __forceinline__ void conv_hopper(const HopperConvArgs &args) {
    const int SUMS = N / 2;
    const unsigned PIXELS = (TILE_SIDE + K - 1) * TILE_SIDE * 128, WEIGHTS = N * 128, STAGE = PIXELS + K * WEIGHTS;
    const int STAGES = K == 3 && N == 128 ? 2 : 3;
    DYNAMIC_SHARED(memory);
    unsigned base = (shared_address(memory) + 1023) & ~1023u;
    unsigned full = base + STAGES * STAGE, empty = full + 8 * STAGES;
    int group = threadIdx.x / 128;
    int steps = (args.channels + 63) / 64 * K;

    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, 8);
        }
        barrier_init_fence();
    }
    __syncthreads();

    // Stages filled or consumed so far.
    int count = 0;
    if (group == 0) {
        decrease_registers<24>();
        if (threadIdx.x == 0) {
            for (int tile = blockIdx.x; tile < args.tiles; tile += gridDim.x) {
                OutputTile output(args, tile, N);
                int top = output.y0 - args.top + output.phase / 2, left = output.x0 - args.left + output.phase % 2;
                for (int step = 0; step < steps; step++, count++) {
                    int stage = count % STAGES, channel = step / K * 64, kx = step % K;
                    if (count >= STAGES) barrier_wait(empty + 8 * stage, (count / STAGES + 1) % 2);
                    unsigned at = base + stage * STAGE, done = full + 8 * stage;
                    barrier_expect(done, STAGE);
                    tma_load(at, args.x, done, channel, left + kx, top);
                    for (int ky = 0; ky < K; ky++)
                        tma_load(at + PIXELS + ky * WEIGHTS, args.w, done, channel, ky * K + kx, output.phase * args.n + output.n0);
                }
            }
        }
        return;
    }
    increase_registers<240>();
    int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    // Each consumer warpgroup has eight rows of pixels, four at a time.
    int first = (group - 1) * 8;
    for (int tile = blockIdx.x; tile < args.tiles; tile += gridDim.x) {
        OutputTile output(args, tile, N);
        float sums[2][SUMS];
#pragma unroll
        for (int i = 0; i < 2 * SUMS; i++) sums[i / SUMS][i % SUMS] = 0.0f;
        for (int step = 0; step < steps; step++, count++) {
            int stage = count % STAGES;
            unsigned at = base + stage * STAGE;
            barrier_wait(full + 8 * stage, count / STAGES % 2);
            wgmma_fence();
#pragma unroll
            for (int ky = 0; ky < K; ky++)
#pragma unroll
                for (int k = 0; k < 4; k++)
#pragma unroll
                    for (int m = 0; m < 2; m++)
                        wgmma(sums[m], matrix_descriptor(at + (first + 4 * m + ky) * TILE_SIDE * 128 + 32 * k, 1024, 16),
                                matrix_descriptor(at + PIXELS + ky * WEIGHTS + 32 * k, 1024, 16), 1);
            wgmma_commit();
            wgmma_wait<0>();
            if (lane == 0) barrier_arrive(empty + 8 * stage);
        }
        int upscale = args.phases == 4 ? 2 : 1;
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                int at = 16 * warp + lane / 4 + 8 * r;
                int y = output.y0 + first + 4 * m + at / TILE_SIDE, x = output.x0 + at % TILE_SIDE;
                bool inside = y < args.height && x < args.width;
                long long pixel =
                    (long long)(upscale * y + output.phase / 2) * (upscale * args.width) + upscale * x + output.phase % 2;
#pragma unroll
                for (int j = 0; j < SUMS / 4; j += 4) {
                    float v[8], even[4], odd[4];
                    if (SUMS == 4) {
                        // A single group of eight columns: its first lane gets them all.
#pragma unroll
                        for (int i = 0; i < 4; i++) even[i] = i ? 0.0f : sums[m][2 * r], odd[i] = i ? 0.0f : sums[m][2 * r + 1];
                    } else {
#pragma unroll
                        for (int i = 0; i < 4; i++) {
                            even[i] = sums[m][(4 * (j + i) + 2 * r) % SUMS];
                            odd[i] = sums[m][(4 * (j + i) + 2 * r + 1) % SUMS];
                        }
                    }
                    transpose_quad(even), transpose_quad(odd);
#pragma unroll
                    for (int i = 0; i < 4; i++) v[2 * i] = even[i], v[2 * i + 1] = odd[i];
                    int n = output.n0 + 8 * (j + lane % 4);
                    bool owns_outputs = SUMS > 4 || lane % 4 == 0;
                    if (inside && owns_outputs && n < args.n) store_output_vec8(args, pixel, n, v);
                }
            }
    }
}

#define KERNEL(K, N)                                                                                                          \
    extern "C" __global__ void __launch_bounds__(384, 1) conv_hopper_##K##_##N(const __grid_constant__ HopperConvArgs args) { \
        conv_hopper<K, N>(args);                                                                                              \
    }

KERNEL(3, 128)
KERNEL(3, 8)
KERNEL(2, 128)
KERNEL(1, 128)
#endif
