// Products of nvfp4 matrices (e2m1, an e4m3 scale per 16 columns) with a scale per row, on compute capability 12.0 and 12.1: of
// all GPUs with fp4, only these have it in mma (10.0 and 10.3 have it in tcgen05 alone).
// The frame is that of mma_gemm.cuh: 64 bytes of a line are 128 values, and the scales of their eight blocks are copied beside
// them. With these, four stages of the widest tile don't fit 99 KB, so there are three.

#include "gemm.cuh"
#include "mma_gemm.cuh"

struct Nvfp4GemmArgs {
    // `bytes` is a multiple of 64.
    MmaGemmArgs product;
    // Scales of blocks, in rows of `bytes` / 8 bytes.
    const unsigned char *x_blocks, *w_blocks;
};

#ifndef KILN_EMULATED
// d += a * b: a 16x64, b 64x8 e2m1; fragments as those of bytes of half the number. Each lane passes the scales of four blocks, one
// in a byte, the first in the lowest: `a_scales` of row lane / 4 + lane % 2 * 8, `b_scales` of column lane / 4.
__device__ __forceinline__ void mma_nvfp4(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, unsigned a_scales,
                                          unsigned b_scales) {
    asm volatile(
        "mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3}, %10, {0, 0}, %11, {0, 0};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(a_scales), "r"(b_scales));
}

// Starts a copy of 8 bytes into shared memory; writes zeros if not `valid`.
__device__ __forceinline__ void copy_async_8(void *shared, const void *global, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(valid ? 8 : 0)
                 : "memory");
}
#endif

struct MmaNvfp4 {
    static const bool SCALED = true;
    typedef float Sum;
};

const int NVFP4_STAGES = 3, NVFP4_SCALES = 8;

// Starts the copies of the scales of a step into a stage.
template <class Tile>
__device__ __forceinline__ void copy_scales(const Nvfp4GemmArgs &args, const Tile &tile, int step, unsigned char *stage) {
    int row_bytes = args.product.bytes / MMA_LINE * NVFP4_SCALES, byte = step * NVFP4_SCALES;
    for (int line = threadIdx.x; line < Tile::LINES; line += Tile::THREADS) {
        bool of_x = line < MMA_ROWS;
        int row = of_x ? tile.m0 + line : tile.n0 + line - MMA_ROWS;
        bool valid = byte < row_bytes && row < (of_x ? args.product.rows : args.product.n);
        const unsigned char *from = of_x ? args.x_blocks : args.w_blocks;
        copy_async_8(stage + line * NVFP4_SCALES, valid ? from + (long long)row * row_bytes + byte : from, valid);
    }
}

template <int WARPS_N> __device__ __forceinline__ void gemm_nvfp4(const Nvfp4GemmArgs &all) {
    typedef MmaTile<WARPS_N> Tile;
    const MmaGemmArgs &args = all.product;
    const int SCALES_STAGE = Tile::LINES * NVFP4_SCALES;
    DYNAMIC_SHARED(memory);
    unsigned char *scales = memory + NVFP4_STAGES * Tile::STAGE;
    Tile tile(args);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int warp_m = warp % 2 * 64, warp_n = warp / 2 * 64;
    int x = mma_place(warp_m + lane % 16, lane / 16);
    int w = mma_place(MMA_ROWS + warp_n + lane / 16 * 8 + lane % 8, lane / 8 % 2);
    int x_scales = (warp_m + lane / 4 + lane % 2 * 8) * NVFP4_SCALES;
    int w_scales = (MMA_ROWS + warp_n + lane / 4) * NVFP4_SCALES;
    MmaCopies<WARPS_N> copies(args, tile);
    // Scales are in the group of their values. Copies past the end are zeros.
    auto copy_step = [&](int step) {
        int stage = step % NVFP4_STAGES;
        copy_scales(all, tile, step, scales + stage * SCALES_STAGE);
        copies.next(args, memory + stage * Tile::STAGE);
    };
    for (int step = 0; step < NVFP4_STAGES - 1; step++) copy_step(step);
    float sums[4][8][4];
#pragma unroll
    for (int i = 0; i < 4 * 8 * 4; i++) sums[i / 32][i / 4 % 8][i % 4] = 0.0f;
    auto multiply_half = [&](const MmaFragments &f, const unsigned char *from) {
        unsigned a[4], b[8];
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = *(const unsigned *)(from + x_scales + 16 * i * NVFP4_SCALES);
#pragma unroll
        for (int j = 0; j < 8; j++) b[j] = *(const unsigned *)(from + w_scales + 8 * j * NVFP4_SCALES);
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 8; j++) mma_nvfp4(sums[i][j], f.a[i], f.b[j / 2][j % 2 * 2], f.b[j / 2][j % 2 * 2 + 1], a[i], b[j]);
    };
    int steps = args.bytes / MMA_LINE;
    for (int step = 0; step < steps; step++) {
        copy_wait<NVFP4_STAGES - 2>();
        // All warps have also read the stage of the step before, which is filled next.
        __syncthreads();
        copy_step(step + NVFP4_STAGES - 1);
        int stage = step % NVFP4_STAGES;
        MmaFragments first, second;
        first.load(memory + stage * Tile::STAGE, x, w, 0);
        second.load(memory + stage * Tile::STAGE, x, w, 1);
        multiply_half(first, scales + stage * SCALES_STAGE);
        multiply_half(second, scales + stage * SCALES_STAGE + NVFP4_SCALES / 2);
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int r = 0; r < 2; r++)
                store_results<MmaNvfp4>(args, tile.batch, tile.m0 + warp_m + 16 * i + 8 * r + lane / 4,
                                        tile.n0 + warp_n + 8 * j + lane % 4 * 2, sums[i][j] + 2 * r);
}

#define KERNEL(NAME, WARPS_N)                                                                                         \
    extern "C" __global__ void __launch_bounds__(64 * WARPS_N) NAME(const __grid_constant__ Nvfp4GemmArgs args) {     \
        gemm_nvfp4<WARPS_N>(args);                                                                                    \
    }

KERNEL(gemm_mma_nvfp4_256, 4)
KERNEL(gemm_mma_nvfp4_128, 2)
