// Convolutions of f32 on CUDA cores, as the matrix product that conv.cu describes. Channels and strides are multiples of 4
// and pointers aligned to 16 bytes, so that 16 bytes are always of one tap.
//
// A thread has the sums of 8 pixels by COLUMNS channels. Both operands lie in shared memory as rows of DEPTH places of the sum,
// and a thread reads four places of a row at once.
//
// A picture that is doubled before a 3 by 3 kernel has each pixel under two taps of a row and of a column: the four kinds of
// results, by the parity of their place, are convolutions of the small picture with 2 by 2 taps, sums of the nine. Sizes are
// then those of one kind, and the weights of one kind come after the other.

const int DEPTH = 16;
// Four elements more a row: eight neighbouring rows then lie in different banks.
const int PITCH = DEPTH + 4;
const int STAGES = 2;

// [n, 3 x 3, channels] to [4 kinds, n, 2 x 2, channels].
extern "C" __global__ void fold_taps_f32(const float *w, float *out, int n, int channels) {
    long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= 16ll * n * channels) return;
    int channel = (int)(at % channels), tap = (int)(at / channels % 4), kind = (int)(at / channels / 4 / n);
    long long row = at / channels / 4 % n;
    float sum = 0.0f;
    for (int ky = 0; ky < 3; ky++)
        for (int kx = 0; kx < 3; kx++)
            // Of an even place the first tap lies on the pixel before, of an odd one the last on the pixel behind.
            if ((ky + kind / 2 + 1) / 2 == tap / 2 + kind / 2 && (kx + kind % 2 + 1) / 2 == tap % 2 + kind % 2)
                sum += w[(row * 9 + 3 * ky + kx) * channels + channel];
    out[at] = sum;
}

// BLOCK_M pixels by BLOCK_N channels a block; a warp has LANES_N lanes side by side and 32 / LANES_N below each other.
template <int BLOCK_M, int BLOCK_N, int LANES_N, int COLUMNS> __device__ __forceinline__ void conv_f32(const Conv &t) {
    const int LANES_M = 32 / LANES_N, WARPS_N = BLOCK_N / (COLUMNS * LANES_N), WARPS_M = BLOCK_M / (8 * LANES_M);
    const int THREADS = 32 * WARPS_M * WARPS_N, ROWS_M = 4 * BLOCK_M / THREADS, ROWS_N = 4 * BLOCK_N / THREADS;
    const int STAGE = (BLOCK_M + BLOCK_N) * PITCH;
    DYNAMIC_SHARED(memory);
    float *shared = (float *)memory;
    const float *x = (const float *)t.x, *w = (const float *)t.w;
    bool folded = t.upsample == 2;
    int kind = folded ? blockIdx.x % 4 : 0, m0 = (folded ? blockIdx.x / 4 : blockIdx.x) * BLOCK_M, n0 = blockIdx.y * BLOCK_N;
    int pixels = t.out_height * t.out_width;
    w += kind * t.n * t.ldw;
    int taps = t.kernel_height * t.kernel_width;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // Of 16 lanes, neighbours read one row of one operand, and every second one of the other: a read takes the least time.
    int pair = lane / 2 % 8, rest = lane % 2 + lane / 16 * 2;
    int lane_m = LANES_M == 8 ? pair : rest, lane_n = LANES_N == 8 ? pair : rest;
    int warp_m = warp % WARPS_M * 8 * LANES_M + lane_m, warp_n = warp / WARPS_M * COLUMNS * LANES_N + lane_n;

    // Every thread brings 16 bytes of some rows, always the same ones, for the tap and channel that come next.
    int row = threadIdx.x / 4, chunk = 4 * (threadIdx.x % 4), tap = 0, channel = chunk, under[ROWS_M];
    auto find_pixels = [&]() {
        for (; channel >= t.channels && tap < taps; tap++) channel -= t.channels;
#pragma unroll
        for (int i = 0; i < ROWS_M; i++) {
            int m = m0 + row + THREADS / 4 * i, y = m / t.out_width, column = m % t.out_width;
            bool there = m < pixels && tap < taps;
            int top = y * t.stride - t.top + kind / 2, left = column * t.stride - t.left + kind % 2;
            under[i] = there ? (int)pixel_under(t, top, left, tap) : -1;
        }
    };
    find_pixels();
    auto bring = [&](int step) {
        float *xs = shared + step % STAGES * STAGE + row * PITCH + chunk, *ws = xs + BLOCK_M * PITCH;
        if (channel >= t.channels) find_pixels();
#pragma unroll
        for (int i = 0; i < ROWS_M; i++) {
            bool there = under[i] >= 0;
            copy_async(xs + THREADS / 4 * i * PITCH, there ? x + under[i] * t.ldx + channel : x, there);
        }
#pragma unroll
        for (int i = 0; i < ROWS_N; i++) {
            int n = n0 + row + THREADS / 4 * i;
            bool there = n < t.n && tap < taps;
            copy_async(ws + THREADS / 4 * i * PITCH, there ? w + n * t.ldw + step * DEPTH + chunk : w, there);
        }
        channel += DEPTH;
    };

    float sums[COLUMNS][8] = {};
    int steps = (taps * t.channels + DEPTH - 1) / DEPTH;
    bring(0);
    copy_commit();
    for (int step = 0; step < steps; step++) {
        copy_wait<0>();
        // Also: everybody is done with the stage that is overwritten next.
        __syncthreads();
        if (step + 1 < steps) bring(step + 1);
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
            if (folded) to = (2ll * (m / t.out_width) + kind / 2) * (2 * t.out_width) + 2 * (m % t.out_width) + kind % 2;
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) {
                int n = n0 + warp_n + LANES_N * j;
                if (n < t.n) put<float>(t, to, n, sums[j][i]);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(128, 2) conv_f32_128(const __grid_constant__ Conv t) {
    conv_f32<128, 128, 4, 16>(t);
}
extern "C" __global__ void __launch_bounds__(128, 3) conv_f32_64(const __grid_constant__ Conv t) {
    conv_f32<128, 64, 8, 8>(t);
}
// For pictures themselves.
extern "C" __global__ void __launch_bounds__(128, 3) conv_f32_32(const __grid_constant__ Conv t) {
    conv_f32<256, 32, 4, 8>(t);
}
