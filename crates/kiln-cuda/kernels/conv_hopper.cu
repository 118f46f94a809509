// Convolutions of channels-last bf16 images on Hopper, KxK kernels with stride 1.
// Persistent blocks compute tiles of pixels by N channels. For 64 channels and one column of the kernel, a producer thread
// loads the pixels under it, K - 1 rows more than the tile, and K weight matrices; the taps of that column multiply the same
// pixels, shifted by a row each. TMA pads with zeros. Either the two consumer warpgroups take turns, each with a tile of eight
// rows by 16 pixels: while one writes its results, the other multiplies. Or they share a tile of 16 rows, which loads a third
// less into shared memory, and is faster for long sums, whose results are few, and where memory is slower than the products.
// For folded 2x upsampling with its four phases see conv_f32.cu.
// No gain: multicast of the weights to two blocks; with two stages it is a third slower.

#include "hopper.cuh"
#include "moments.cuh"

// Pixels in a row of a tile, and rows of a warpgroup.
const int TILE_WIDTH = 16, GROUP_ROWS = 8;
// Channels of whose results the moments are computed, for group norms.
const int MOMENT_CHANNELS = 4;

struct HopperConvArgs {
    TensorMap x, w;
    const float *bias;
    const bf16 *add;
    bf16 *out;
    // [block][n / MOMENT_CHANNELS]: moments of each block's results, or null.
    float *moments;
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

__device__ __forceinline__ void wgmma(float (&d)[64], u64 a, u64 b, int add) { wgmma_bf16<false, false>(d, a, b, add); }
__device__ __forceinline__ void wgmma(float (&d)[4], u64 a, u64 b, int add) { wgmma_n8(d, a, b, add); }

// First channel, phase and first pixel of a tile.
struct OutputTile {
    int n0, phase, y0, x0;

    __device__ __forceinline__ OutputTile(const HopperConvArgs &args, int tile, int columns, int rows) {
        n0 = tile % args.tiles_n * columns, tile /= args.tiles_n;
        phase = tile % args.phases, tile /= args.phases;
        y0 = tile / args.tiles_x * rows, x0 = tile % args.tiles_x * TILE_WIDTH;
    }
};

// Shared memory: stages of pixels and weights, barriers, moments of each consumer warp.
template <int K, int N, bool TURNS> struct ConvMemory {
    static const int ROWS = TURNS ? GROUP_ROWS : 2 * GROUP_ROWS;
    static const unsigned PIXELS = (ROWS + K - 1) * TILE_WIDTH * 128, WEIGHTS = N * 128, STAGE = PIXELS + K * WEIGHTS;
    static const int STAGES = 6 * STAGE <= 208 * 1024 ? 6 : 208 * 1024 / STAGE;
    unsigned base, moments, full, empty;

    __device__ __forceinline__ ConvMemory(unsigned start) {
        base = (start + 1023) & ~1023u;
        full = base + STAGES * STAGE;
        empty = full + 8 * STAGES;
        moments = empty + 8 * STAGES;
    }
};

// Loads the stages of all tiles. `count`: stages filled so far.
template <int K, int N, bool TURNS>
__device__ __forceinline__ void load_stages(const HopperConvArgs &args, const ConvMemory<K, N, TURNS> &memory, int steps) {
    typedef ConvMemory<K, N, TURNS> Memory;
    int count = 0;
    for (int tile = blockIdx.x; tile < args.tiles; tile += gridDim.x) {
        OutputTile output(args, tile, N, Memory::ROWS);
        int top = output.y0 - args.top + output.phase / 2, left = output.x0 - args.left + output.phase % 2;
        for (int step = 0; step < steps; step++, count++) {
            int stage = count % Memory::STAGES, channel = step / K * 64, kx = step % K;
            if (count >= Memory::STAGES) barrier_wait(memory.empty + 8 * stage, (count / Memory::STAGES + 1) % 2);
            unsigned at = memory.base + stage * Memory::STAGE, done = memory.full + 8 * stage;
            barrier_expect(done, Memory::STAGE);
            tma_load(at, args.x, done, channel, left + kx, top);
            for (int ky = 0; ky < K; ky++)
                tma_load(at + Memory::PIXELS + ky * Memory::WEIGHTS, args.w, done, channel, ky * K + kx, output.phase * args.n + output.n0);
        }
    }
}

// What becomes of a warpgroup's sums: sums[m] are of four rows of pixels, a row per warp.
template <int N> struct ConvEnd {
    static const int SUMS = N / 2;
    const HopperConvArgs &args;
    OutputTile output;
    // Of each row of pixels a lane has two.
    long long at[2][2];
    bool inside[2][2];
    // Of the next 32 channels: summands of eight, and the bias of two in each eight.
    Vec8<bf16> add[2][2];
    float bias[4][2];

    __device__ __forceinline__ ConvEnd(const HopperConvArgs &args, const OutputTile &group) : args(args), output(group) {
        int upscale = args.phases == 4 ? 2 : 1;
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                int y = output.y0 + 4 * m + threadIdx.x % 128 / 32, x = output.x0 + threadIdx.x % 32 / 4 + 8 * r;
                inside[m][r] = y < args.height && x < args.width;
                at[m][r] = ((long long)(upscale * y + output.phase / 2) * (upscale * args.width) + upscale * x + output.phase % 2) * args.n;
            }
    }

    // First of the eight channels that a lane stores in group `j` of 32.
    __device__ __forceinline__ int channel(int j) const { return output.n0 + 32 * j + threadIdx.x % 4 * 8; }

    // Loads what is added to a group, which is done a group ahead.
    __device__ __forceinline__ void load_summands(int j) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (args.add && inside[i / 2][i % 2] && channel(j) < args.n) add[i / 2][i % 2] = load_vec8(args.add + at[i / 2][i % 2] + channel(j));
#pragma unroll
        for (int i = 0; i < 8; i++) {
            int n = output.n0 + 32 * j + i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
            bias[i / 2][i % 2] = args.bias && n < args.n ? args.bias[n] : 0.0f;
        }
    }

    // Stores a group's results; `values` and `squares` get the sums over four channels each.
    __device__ __forceinline__ void store(const float (&sums)[2][SUMS], int j, float (&values)[2], float (&squares)[2]) {
        Vec8<bf16> summands[4] = {add[0][0], add[0][1], add[1][0], add[1][1]};
        float b[4][2] = {{bias[0][0], bias[0][1]}, {bias[1][0], bias[1][1]}, {bias[2][0], bias[2][1]}, {bias[3][0], bias[3][1]}};
        if (j + 1 < SUMS / 16) load_summands(j + 1);
        int n = channel(j);
#pragma unroll
        for (int p = 0; p < 4; p++) {
            int m = p / 2, r = p % 2;
            // Pairs of channels are exchanged among four lanes, so that each loads and stores eight channels of a pixel. Of a
            // single group of eight channels, the first lane gets all.
            uint4 x = summands[p].a;
            float words[4] = {__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), __uint_as_float(x.w)};
            if (args.add) transpose_quad(words);
#pragma unroll
            for (int i = 0; i < (SUMS == 4 ? 1 : 4); i++) {
                float low = sums[m][16 * j + 4 * i + 2 * r] + b[i][0], high = sums[m][16 * j + 4 * i + 2 * r + 1] + b[i][1];
                if (args.add) {
                    float add_low, add_high;
                    unpack(__float_as_uint(words[i]), add_low, add_high);
                    low += add_low, high += add_high;
                }
                words[i] = __uint_as_float(round_bf16_pair(low, high));
            }
            transpose_quad(words);
            bool owned = SUMS > 4 || threadIdx.x % 4 == 0;
            if (!inside[m][r] || n >= args.n || !owned) continue;
            Vec8<bf16> rounded = {make_uint4(__float_as_uint(words[0]), __float_as_uint(words[1]), __float_as_uint(words[2]), __float_as_uint(words[3]))};
            float v[8];
            widen(rounded, v);
            if (args.n % 8) {
                store8(args.out + at[m][r], n, args.n, false, v);
                continue;
            }
            store_vec8(args.out + at[m][r] + n, rounded);
#pragma unroll
            for (int i = 0; i < 8; i++) values[i / 4] += v[i], squares[i / 4] += v[i] * v[i];
        }
    }

    // Stores all results, once the first summands are loaded, and adds their moments to those of the warp.
    __device__ __forceinline__ void store(const float (&sums)[2][SUMS], Moments<float> *moments) {
        int lane = threadIdx.x % 32;
        float values[2] = {}, squares[2] = {};
#pragma unroll
        for (int j = 0; j < (SUMS + 15) / 16; j++) {
            float v[2] = {}, s[2] = {};
            store(sums, j, v, s);
            if (!args.moments) continue;
#pragma unroll
            for (int step = 4; step < 32; step *= 2)
#pragma unroll
                for (int i = 0; i < 2; i++) v[i] += __shfl_xor_sync(0xffffffffu, v[i], step), s[i] += __shfl_xor_sync(0xffffffffu, s[i], step);
            // Lane `l` keeps those of the tile's `l`-th eight channels.
            if (lane / 4 == j) values[0] = v[0], values[1] = v[1], squares[0] = s[0], squares[1] = s[1];
        }
        int first = output.n0 + 8 * lane;
        if (!args.moments || lane >= N / 8 || first >= args.n) return;
        int y = output.y0 + threadIdx.x % 128 / 32, columns = args.width - output.x0 < TILE_WIDTH ? args.width - output.x0 : TILE_WIDTH;
        float n = (float)(((y < args.height) + (y + 4 < args.height)) * columns * MOMENT_CHANNELS);
        if (n == 0.0f) return;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float mean = values[i] / n;
            moments[first / MOMENT_CHANNELS + i].merge({n, mean, fmaxf(squares[i] - values[i] * mean, 0.0f)});
        }
    }
};

template <int K, int N, bool TURNS>
__device__ __forceinline__ void multiply_stages(const HopperConvArgs &args, const ConvMemory<K, N, TURNS> &memory, int steps,
                                                Moments<float> *moments) {
    typedef ConvMemory<K, N, TURNS> Memory;
    int consumer = threadIdx.x / 128 - 1, lane = threadIdx.x % 32, blocks = gridDim.x;
    auto release = [&](int count) {
        if (lane == 0) barrier_arrive(memory.empty + 8 * (count % Memory::STAGES));
    };
    int first_row = TURNS ? 0 : consumer * GROUP_ROWS, turn = TURNS ? consumer : 0, others = TURNS ? 1 : 0;
    // Stages before the next one of this warpgroup.
    int count = turn * steps;
    for (int tile = blockIdx.x + turn * blocks; tile < args.tiles; tile += (1 + others) * blocks, count += others * steps) {
        float sums[2][N / 2];
        // A barrier's parity tells only a stage's next use from its last, so the other one's stages must have been filled.
        if (TURNS && tile >= blocks) named_sync(1 + consumer, 256);
        for (int step = 0; step < steps; step++, count++) {
            int stage = count % Memory::STAGES;
            unsigned pixels = memory.base + stage * Memory::STAGE, weights = pixels + Memory::PIXELS;
            barrier_wait(memory.full + 8 * stage, count / Memory::STAGES % 2);
            if (TURNS && step == steps - 1 && tile + blocks < args.tiles) named_arrive(2 - consumer, 256);
            wgmma_fence();
#pragma unroll
            for (int ky = 0; ky < K; ky++)
#pragma unroll
                for (int k = 0; k < 4; k++)
#pragma unroll
                    for (int m = 0; m < 2; m++)
                        wgmma(sums[m], matrix_descriptor(pixels + (first_row + 4 * m + ky) * TILE_WIDTH * 128 + 32 * k, 1024, 16),
                              matrix_descriptor(weights + ky * Memory::WEIGHTS + 32 * k, 1024, 16), step > 0 || ky > 0 || k > 0);
            wgmma_commit();
            // A warpgroup that multiplies alone has to start a step before the previous one is complete.
            if (!TURNS) {
                wgmma_wait<0>();
                release(count);
            } else if (step > 0) {
                wgmma_wait<1>();
                release(count - 1);
            }
        }
        OutputTile output(args, tile, N, Memory::ROWS);
        output.y0 += first_row;
        ConvEnd<N> end(args, output);
        end.load_summands(0);
        wgmma_wait<0>();
        if (TURNS) release(count - 1);
        end.store(sums, moments);
    }
}

template <int K, int N, bool TURNS> __device__ __forceinline__ void conv_hopper(const HopperConvArgs &args) {
    DYNAMIC_SHARED(shared);
    typedef ConvMemory<K, N, TURNS> Memory;
    unsigned start = shared_address(shared);
    Memory memory(start);
    Moments<float> *moments = (Moments<float> *)(shared + (memory.moments - start));
    int steps = (args.channels + 63) / 64 * K, parts = args.moments ? args.n / MOMENT_CHANNELS : 0;

    if (threadIdx.x == 0) {
        for (int i = 0; i < Memory::STAGES; i++) {
            barrier_init(memory.full + 8 * i, 1);
            // The warps that multiply a stage.
            barrier_init(memory.empty + 8 * i, TURNS ? 4 : 8);
        }
        barrier_init_fence();
    }
    for (int i = threadIdx.x; i < 8 * parts; i += 384) moments[i] = {};
    __syncthreads();
    if (threadIdx.x < 128) {
        decrease_registers<24>();
        if (threadIdx.x == 0) load_stages<K, N, TURNS>(args, memory, steps);
    } else {
        increase_registers<240>();
        int warp = threadIdx.x / 32 - 4;
        multiply_stages<K, N, TURNS>(args, memory, steps, moments + warp * parts);
        named_sync(3, 256);
        for (int part = threadIdx.x - 128; part < parts; part += 256) {
            Moments<float> merged = moments[part];
            for (int i = 1; i < 8; i++) merged.merge(moments[i * parts + part]);
            merged.store(args.moments, (long long)blockIdx.x * parts + part);
        }
    }
}

#define KERNEL(NAME, K, N, TURNS)                                                                                            \
    extern "C" __global__ void __launch_bounds__(384, 1) NAME(const __grid_constant__ HopperConvArgs args) { \
        conv_hopper<K, N, TURNS>(args);                                                                               \
    }

KERNEL(conv_hopper_3_128, 3, 128, true)
KERNEL(conv_hopper_3_128_long, 3, 128, false)
KERNEL(conv_hopper_3_8, 3, 8, false)
KERNEL(conv_hopper_2_128, 2, 128, true)
KERNEL(conv_hopper_1_128, 1, 128, false)
#endif
