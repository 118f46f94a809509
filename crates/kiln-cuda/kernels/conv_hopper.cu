// Convolutions of channels-last pictures of bf16 for Hopper, with kernels of K by K pixels and a stride of 1.
//
// A block makes 16 by 16 pixels of N channels. For 64 channels and one column of the kernel, one thread brings the pixels
// under it, K - 1 rows more than the block has, and K matrices of weights; the taps of that column are products of the same
// pixels, a row further each. What lies outside the picture is zeros by the copy itself.

const int SIDE = 16;

struct HopperConv {
    TensorMap x, w;
    const float *bias;
    const bf16 *add;
    bf16 *out;
    int channels, height, width, n, top, left, tiles_x, tiles_n;
};

#if defined(KILN_EMULATED) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ void product(float (&d)[64], u64 a, u64 b, int add) { product_128(d, a, b, add); }
__device__ __forceinline__ void product(float (&d)[4], u64 a, u64 b, int add) { product_8(d, a, b, add); }

// Eight channels of one pixel, with what is added to them.
__device__ __forceinline__ void put_eight(const HopperConv &t, long long pixel, int n, const float (&sums)[8]) {
    bf16 *out = t.out + pixel * t.n + n;
    const bf16 *add = t.add ? t.add + pixel * t.n + n : 0;
    float v[8], a[8];
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = sums[i] + (t.bias && n + i < t.n ? t.bias[n + i] : 0.0f);
    bool vector = t.n % 8 == 0;
    if (add) {
        load8(add, 0, t.n - n, vector, a);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] += a[i];
    }
    store8(out, 0, t.n - n, vector, v);
}

template <int K, int N> __device__ __forceinline__ void convolve(const HopperConv &t) {
    const int SUMS = N / 2;
    const unsigned PIXELS = (SIDE + K - 1) * SIDE * 128, WEIGHTS = N * 128, STAGE = PIXELS + K * WEIGHTS;
    const int STAGES = 2;
    DYNAMIC_SHARED(memory);
    unsigned base = (shared_address(memory) + 1023) & ~1023u;
    unsigned full = base + STAGES * STAGE, empty = full + 8 * STAGES;
    int group = threadIdx.x / 128;
    int tile = blockIdx.x / t.tiles_n, n0 = blockIdx.x % t.tiles_n * N;
    int y0 = tile / t.tiles_x * SIDE, x0 = tile % t.tiles_x * SIDE;
    int steps = (t.channels + 63) / 64 * K;

    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, 8);
        }
        barrier_publish();
    }
    __syncthreads();

    if (group == 0) {
        fewer_registers<24>();
        if (threadIdx.x == 0) {
            for (int step = 0; step < steps; step++) {
                int stage = step % STAGES, channel = step / K * 64, kx = step % K;
                if (step >= STAGES) barrier_wait(empty + 8 * stage, (step / STAGES + 1) % 2);
                unsigned at = base + stage * STAGE, done = full + 8 * stage;
                barrier_expect(done, STAGE);
                copy_box(at, t.x, done, channel, x0 + kx - t.left, y0 - t.top);
                for (int ky = 0; ky < K; ky++)
                    copy_box(at + PIXELS + ky * WEIGHTS, t.w, done, channel, ky * K + kx, n0);
            }
        }
    } else {
        more_registers<240>();
        int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
        // Each group of warps has eight rows of pixels, four at a time.
        int first = (group - 1) * 8;
        float sums[2][SUMS];
#pragma unroll
        for (int i = 0; i < 2 * SUMS; i++) sums[i / SUMS][i % SUMS] = 0.0f;
        for (int step = 0; step < steps; step++) {
            int stage = step % STAGES;
            unsigned at = base + stage * STAGE;
            barrier_wait(full + 8 * stage, step / STAGES % 2);
            product_fence();
#pragma unroll
            for (int ky = 0; ky < K; ky++)
#pragma unroll
                for (int k = 0; k < 4; k++)
#pragma unroll
                    for (int m = 0; m < 2; m++)
                        product(sums[m], matrix_at(at + (first + 4 * m + ky) * SIDE * 128 + 32 * k, 1024, 16),
                                matrix_at(at + PIXELS + ky * WEIGHTS + 32 * k, 1024, 16), 1);
            product_commit();
            product_wait<0>();
            if (lane == 0) barrier_arrive(empty + 8 * stage);
        }
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                int place = 16 * warp + lane / 4 + 8 * r;
                int y = y0 + first + 4 * m + place / SIDE, x = x0 + place % SIDE;
                bool inside = y < t.height && x < t.width;
                long long pixel = (long long)y * t.width + x;
#pragma unroll
                for (int j = 0; j < SUMS / 4; j += 4) {
                    float v[8];
                    if (SUMS == 4) {
                        // One run of eight columns: its first lane gets them all.
                        float even[4] = {sums[m][2 * r]}, odd[4] = {sums[m][2 * r + 1]};
                        exchange(even), exchange(odd);
#pragma unroll
                        for (int i = 0; i < 4; i++) v[2 * i] = even[i], v[2 * i + 1] = odd[i];
                        if (inside && lane % 4 == 0 && n0 < t.n) put_eight(t, pixel, n0, v);
                    } else {
                        float even[4], odd[4];
#pragma unroll
                        for (int i = 0; i < 4; i++) {
                            even[i] = sums[m][(4 * (j + i) + 2 * r) % SUMS];
                            odd[i] = sums[m][(4 * (j + i) + 2 * r + 1) % SUMS];
                        }
                        exchange(even), exchange(odd);
#pragma unroll
                        for (int i = 0; i < 4; i++) v[2 * i] = even[i], v[2 * i + 1] = odd[i];
                        int n = n0 + 8 * (j + lane % 4);
                        if (inside && n < t.n) put_eight(t, pixel, n, v);
                    }
                }
            }
    }
}

#define KERNEL(K, N)                                                                                                 \
    extern "C" __global__ void __launch_bounds__(384, 1) conv_hopper_##K##_##N(const __grid_constant__ HopperConv t) { \
        convolve<K, N>(t);                                                                                           \
    }

KERNEL(3, 128)
KERNEL(3, 8)
KERNEL(1, 128)
#endif
