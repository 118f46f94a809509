// Convolutions of channels-last pictures of bf16 for Hopper, with kernels of K by K pixels and a stride of 1.
//
// A block makes 16 by 16 pixels of N channels, then the next ones, whose data is on its way while the last are written. For 64 channels and one column of the kernel, one thread brings the pixels
// under it, K - 1 rows more than the block has, and K matrices of weights; the taps of that column are products of the same
// pixels, a row further each. What lies outside the picture is zeros by the copy itself.
//
// A picture that is doubled before a 3 by 3 kernel has each pixel under two taps of a row and of a column: the four kinds of
// results, by the parity of their place, are convolutions of the small picture with 2 by 2 taps, sums of the nine.

const int SIDE = 16;

struct HopperConv {
    TensorMap x, w;
    const float *bias;
    const bf16 *add;
    bf16 *out;
    // Height and width are those of one kind of results.
    int channels, height, width, n, top, left, tiles_x, tiles_n, tiles;
    // 4 where the picture is doubled, else 1; the weights of one kind come after the other.
    int kinds;
};

// [n, 3 x 3, channels] to [4 kinds, n, 2 x 2, channels].
extern "C" __global__ void fold_taps(const bf16 *w, bf16 *out, int n, int channels) {
    long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= 16ll * n * channels) return;
    int channel = (int)(at % channels), tap = (int)(at / channels % 4), kind = (int)(at / channels / 4 / n);
    long long row = at / channels / 4 % n;
    float sum = 0.0f;
    for (int ky = 0; ky < 3; ky++)
        for (int kx = 0; kx < 3; kx++)
            // Of an even place the first tap lies on the pixel before, of an odd one the last on the pixel behind.
            if ((ky + kind / 2 + 1) / 2 == tap / 2 + kind / 2 && (kx + kind % 2 + 1) / 2 == tap % 2 + kind % 2)
                sum += to_float(w[(row * 9 + 3 * ky + kx) * channels + channel]);
    out[at] = round_to_bf16(sum);
}

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

// Which pixels and channels are made.
struct Place {
    int n0, kind, y0, x0;

    __device__ __forceinline__ Place(const HopperConv &t, int tile, int columns) {
        n0 = tile % t.tiles_n * columns, tile /= t.tiles_n;
        kind = tile % t.kinds, tile /= t.kinds;
        y0 = tile / t.tiles_x * SIDE, x0 = tile % t.tiles_x * SIDE;
    }
};

template <int K, int N> __device__ __forceinline__ void convolve(const HopperConv &t) {
    const int SUMS = N / 2;
    const unsigned PIXELS = (SIDE + K - 1) * SIDE * 128, WEIGHTS = N * 128, STAGE = PIXELS + K * WEIGHTS;
    const int STAGES = K == 3 && N == 128 ? 2 : 3;
    DYNAMIC_SHARED(memory);
    unsigned base = (shared_address(memory) + 1023) & ~1023u;
    unsigned full = base + STAGES * STAGE, empty = full + 8 * STAGES;
    int group = threadIdx.x / 128;
    int steps = (t.channels + 63) / 64 * K;

    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, 8);
        }
        barrier_publish();
    }
    __syncthreads();

    // How many stages were filled or used before.
    int count = 0;
    if (group == 0) {
        fewer_registers<24>();
        if (threadIdx.x == 0) {
            for (int tile = blockIdx.x; tile < t.tiles; tile += gridDim.x) {
                Place place(t, tile, N);
                int top = place.y0 - t.top + place.kind / 2, left = place.x0 - t.left + place.kind % 2;
                for (int step = 0; step < steps; step++, count++) {
                    int stage = count % STAGES, channel = step / K * 64, kx = step % K;
                    if (count >= STAGES) barrier_wait(empty + 8 * stage, (count / STAGES + 1) % 2);
                    unsigned at = base + stage * STAGE, done = full + 8 * stage;
                    barrier_expect(done, STAGE);
                    copy_box(at, t.x, done, channel, left + kx, top);
                    for (int ky = 0; ky < K; ky++)
                        copy_box(at + PIXELS + ky * WEIGHTS, t.w, done, channel, ky * K + kx, place.kind * t.n + place.n0);
                }
            }
        }
        return;
    }
    more_registers<240>();
    int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    // Each group of warps has eight rows of pixels, four at a time.
    int first = (group - 1) * 8;
    for (int tile = blockIdx.x; tile < t.tiles; tile += gridDim.x) {
        Place place(t, tile, N);
        float sums[2][SUMS];
#pragma unroll
        for (int i = 0; i < 2 * SUMS; i++) sums[i / SUMS][i % SUMS] = 0.0f;
        for (int step = 0; step < steps; step++, count++) {
            int stage = count % STAGES;
            unsigned at = base + stage * STAGE;
            barrier_wait(full + 8 * stage, count / STAGES % 2);
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
        int doubled = t.kinds == 4 ? 2 : 1;
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                int at = 16 * warp + lane / 4 + 8 * r;
                int y = place.y0 + first + 4 * m + at / SIDE, x = place.x0 + at % SIDE;
                bool inside = y < t.height && x < t.width;
                long long pixel =
                    (long long)(doubled * y + place.kind / 2) * (doubled * t.width) + doubled * x + place.kind % 2;
#pragma unroll
                for (int j = 0; j < SUMS / 4; j += 4) {
                    float v[8], even[4], odd[4];
                    if (SUMS == 4) {
                        // One run of eight columns: its first lane gets them all.
#pragma unroll
                        for (int i = 0; i < 4; i++) even[i] = i ? 0.0f : sums[m][2 * r], odd[i] = i ? 0.0f : sums[m][2 * r + 1];
                    } else {
#pragma unroll
                        for (int i = 0; i < 4; i++) {
                            even[i] = sums[m][(4 * (j + i) + 2 * r) % SUMS];
                            odd[i] = sums[m][(4 * (j + i) + 2 * r + 1) % SUMS];
                        }
                    }
                    exchange(even), exchange(odd);
#pragma unroll
                    for (int i = 0; i < 4; i++) v[2 * i] = even[i], v[2 * i + 1] = odd[i];
                    int n = place.n0 + 8 * (j + lane % 4);
                    bool mine = SUMS > 4 || lane % 4 == 0;
                    if (inside && mine && n < t.n) put_eight(t, pixel, n, v);
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
KERNEL(2, 128)
KERNEL(1, 128)
#endif
