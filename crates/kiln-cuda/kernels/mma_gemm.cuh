// Matrix products with mma, for GPUs before Hopper and after it: out = gate * (alpha * x * w^T + bias) + add, or SwiGLU of x * w^T,
// in bf16, e4m3 and int8.
// A block computes 128 rows by 64 * WARPS_N columns, each warp 64 by 64 of them. Steps of 64 bytes of every row of x and w are
// copied into four stages; three are on their way while one is multiplied. Four stages of the widest tile take 96 KB, which
// compute capability 8.6, 8.9 and 12.0 have (99); larger tiles don't fit there.
// On an H200, whose mma is at best about 0.6 of its wgmma: 420 TFLOP/s in bf16 for 4608 x 3072 to 9216 while cold, 360 hot.
// Loading the operands of half a step while the other half is multiplied gained 14 %.

struct MmaGemmArgs {
    // `x_right` has the bytes of x's rows from `left_bytes` on. SwiGLU's w has n rows for gates, then n for what they gate.
    const void *x, *x_right, *w;
    const float *bias, *gate, *x_scales, *w_scales;
    const void *add;
    void *out;
    // Strides of x and w are in bytes.
    long long ldx, ldx_right, ldw, ldadd, ldo, stride_w, stride_out;
    float alpha;
    // Dtype of the result and the summand: 0 f32, 1 bf16.
    int bf16_out;
    // Columns of one product; bytes of a row of x.
    int rows, n, bytes, left_bytes;
    // Tiles along the rows, along the columns of one product, and tiles along the rows that follow each other.
    int tiles_m, tiles_n, group, unused;
};

#ifndef KILN_EMULATED
// d += a * b: a 16x32, b 32x8 bytes; fragments as those of 16-bit values of half the number.
__device__ __forceinline__ void mma_e4m3(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if __CUDA_ARCH__ >= 890
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}
__device__ __forceinline__ void mma_int8(int (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

// Types of x and w: whether rows of both have scales, and the type of sums.
struct MmaBf16 {
    static const bool SCALED = false;
    typedef float Sum;
};
struct MmaE4m3 {
    static const bool SCALED = true;
    typedef float Sum;
};
struct MmaInt8 {
    static const bool SCALED = true;
    typedef int Sum;
};
__device__ __forceinline__ void multiply(MmaBf16, float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) { mma(d, a, b0, b1); }
__device__ __forceinline__ void multiply(MmaE4m3, float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) { mma_e4m3(d, a, b0, b1); }
__device__ __forceinline__ void multiply(MmaInt8, int (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) { mma_int8(d, a, b0, b1); }

const int MMA_ROWS = 128, MMA_STAGES = 4, MMA_LINE = 64;

// Place of 16 bytes of a line. The column is XORed with the pair of lines, so that eight lines' columns are in different banks.
__device__ __forceinline__ int mma_place(int line, int column) { return line * MMA_LINE + (column ^ line / 2 % 4) * 16; }

template <int WARPS_N, bool SWIGLU = false> struct MmaTile {
    static const int COLUMNS = 64 * WARPS_N, THREADS = 64 * WARPS_N, LINES = MMA_ROWS + COLUMNS, STAGE = LINES * MMA_LINE;
    static const int RESULTS = SWIGLU ? COLUMNS / 2 : COLUMNS;
    int m0, n0, batch;

    __device__ __forceinline__ MmaTile(const MmaGemmArgs &args) {
        TilePlace place(blockIdx.x, args.tiles_m, args.tiles_n, gridDim.x / args.tiles_m, args.group);
        m0 = place.row * MMA_ROWS, n0 = place.column * RESULTS, batch = place.batch;
    }
};

// What a thread copies of every step: 16 bytes of some lines of x and w. With SwiGLU, 32 lines of w with gates are followed by those
// that they gate, so that a warp has both.
template <int WARPS_N, bool SWIGLU = false> struct MmaCopies {
    typedef MmaTile<WARPS_N, SWIGLU> Tile;
    static const int LINES_APART = Tile::THREADS / 4;
    const unsigned char *x, *w;
    long long ldx;
    int m, n, byte, place;

    __device__ __forceinline__ MmaCopies(const MmaGemmArgs &args, const Tile &tile) {
        int line = threadIdx.x / 4, column = threadIdx.x % 4;
        m = tile.m0 + line, n = tile.n0 + (SWIGLU ? line % 32 : line), byte = column * 16, place = mma_place(line, column);
        x = (const unsigned char *)args.x + m * args.ldx + byte, ldx = args.ldx;
        long long w_row = SWIGLU && line >= 32 ? n + args.n : n;
        w = (const unsigned char *)args.w + tile.batch * args.stride_w + w_row * args.ldw + byte;
    }

    // Starts the copies of the next step into a stage; lines and bytes outside are zeros.
    __device__ __forceinline__ void next(const MmaGemmArgs &args, unsigned char *stage) {
        bool inside = byte < args.bytes;
        if (byte - byte % MMA_LINE == args.left_bytes)
            x = (const unsigned char *)args.x_right + m * args.ldx_right + byte % MMA_LINE, ldx = args.ldx_right;
        // Lines are a multiple of eight apart, so their places are alike.
#pragma unroll
        for (int i = 0; i < MMA_ROWS / LINES_APART; i++) {
            bool valid = inside && m + i * LINES_APART < args.rows;
            copy_async(stage + place + i * LINES_APART * MMA_LINE, valid ? x + i * LINES_APART * ldx : (const unsigned char *)args.x, valid);
        }
#pragma unroll
        for (int i = 0; i < Tile::COLUMNS / LINES_APART; i++) {
            // Columns of the result to this line's. Where a thread's lines are 32 apart, every other one is gated.
            int columns = SWIGLU ? i * LINES_APART / 64 * 32 : i * LINES_APART;
            bool gated = SWIGLU && LINES_APART == 32 && i % 2;
            bool valid = inside && n + columns < args.n;
            copy_async(stage + place + (MMA_ROWS + i * LINES_APART) * MMA_LINE,
                       valid ? w + (columns + (gated ? args.n : 0)) * args.ldw : (const unsigned char *)args.w, valid);
        }
        copy_commit();
        x += MMA_LINE, w += MMA_LINE, byte += MMA_LINE;
    }
};

// The operands of 64 by 64 results for half a step.
struct MmaFragments {
    unsigned a[4][4], b[4][4];

    // `x` and `w`: places of this lane's first line of each in the stage.
    __device__ __forceinline__ void load(const unsigned char *stage, int x, int w, int half) {
#pragma unroll
        for (int i = 0; i < 4; i++) load_matrices(a[i], (const bf16 *)(stage + (x ^ 32 * half) + 16 * i * MMA_LINE));
#pragma unroll
        for (int i = 0; i < 4; i++) load_matrices(b[i], (const bf16 *)(stage + (w ^ 32 * half) + 16 * i * MMA_LINE));
    }

    template <class Input> __device__ __forceinline__ void multiply_into(Input, typename Input::Sum (&sums)[4][8][4]) const {
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 8; j++) multiply(Input(), sums[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    }
};

// The sums of two neighbouring rows of w with a row of x, times their scales.
template <class Input>
__device__ __forceinline__ void scale_sums(const MmaGemmArgs &args, int row, long long w_row, const typename Input::Sum *sums, float (&v)[2]) {
    float scale = args.alpha, w[2] = {1.0f, 1.0f};
    if (Input::SCALED) {
        scale *= args.x_scales[row];
        load_values(args.w_scales, w_row, false, w);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) v[i] = (float)sums[i] * (scale * w[i]);
}

// Stores two neighbouring results of a row.
template <class Input>
__device__ __forceinline__ void store_results(const MmaGemmArgs &args, int batch, int row, int column, const typename Input::Sum *sums) {
    if (row >= args.rows || column >= args.n) return;
    long long of_all = (long long)batch * args.n + column;
    float v[2], bias[2] = {0.0f, 0.0f}, gate[2] = {1.0f, 1.0f}, add[2] = {0.0f, 0.0f};
    scale_sums<Input>(args, row, of_all, sums, v);
    if (args.bias) load_values(args.bias, of_all, false, bias);
    if (args.gate) load_values(args.gate, of_all, false, gate);
    if (args.add) load_values(args.add, batch * args.stride_out + row * args.ldadd + column, args.bf16_out, add);
#pragma unroll
    for (int i = 0; i < 2; i++) v[i] = (v[i] + bias[i]) * gate[i] + add[i];
    long long to = batch * args.stride_out + row * args.ldo + column;
    if (args.bf16_out)
        *(unsigned *)((bf16 *)args.out + to) = round_bf16_pair(v[0], v[1]);
    else
        *(float2 *)((float *)args.out + to) = {v[0], v[1]};
}

// Stores SwiGLU of the sums for two neighbouring results.
template <class Input>
__device__ __forceinline__ void store_swiglu(const MmaGemmArgs &args, int row, int column, const typename Input::Sum *gates,
                                             const typename Input::Sum *gated) {
    if (row >= args.rows || column >= args.n) return;
    float v[2], up[2];
    scale_sums<Input>(args, row, column, gates, v);
    scale_sums<Input>(args, row, args.n + column, gated, up);
#pragma unroll
    for (int i = 0; i < 2; i++) v[i] = activate_as<bf16>(v[i], 1) * up[i];
    *(unsigned *)((bf16 *)args.out + row * args.ldo + column) = round_bf16_pair(v[0], v[1]);
}

template <class Input, int WARPS_N, bool SWIGLU = false> __device__ __forceinline__ void gemm_mma(const MmaGemmArgs &args) {
    typedef MmaTile<WARPS_N, SWIGLU> Tile;
    DYNAMIC_SHARED(memory);
    Tile tile(args);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int warp_m = warp % 2 * 64, warp_n = warp / 2 * 64;
    int x = mma_place(warp_m + lane % 16, lane / 16);
    int w = mma_place(MMA_ROWS + warp_n + lane / 16 * 8 + lane % 8, lane / 8 % 2);
    int steps = (args.bytes + MMA_LINE - 1) / MMA_LINE;
    MmaCopies<WARPS_N, SWIGLU> copies(args, tile);
    // Copies past the end are zeros, and complete at once.
#pragma unroll
    for (int stage = 0; stage < MMA_STAGES - 1; stage++) copies.next(args, memory + stage * Tile::STAGE);
    typename Input::Sum sums[4][8][4];
#pragma unroll
    for (int i = 0; i < 4 * 8 * 4; i++) sums[i / 32][i / 4 % 8][i % 4] = 0;
    copy_wait<MMA_STAGES - 2>();
    __syncthreads();
    MmaFragments first, second;
    first.load(memory, x, w, 0);
    for (int step = 0; step < steps; step++) {
        // The stage that the last step has read.
        copies.next(args, memory + (step + MMA_STAGES - 1) % MMA_STAGES * Tile::STAGE);
        second.load(memory + step % MMA_STAGES * Tile::STAGE, x, w, 1);
        first.multiply_into(Input(), sums);
        copy_wait<MMA_STAGES - 2>();
        __syncthreads();
        first.load(memory + (step + 1) % MMA_STAGES * Tile::STAGE, x, w, 0);
        second.multiply_into(Input(), sums);
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < (SWIGLU ? 4 : 8); j++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                int row = tile.m0 + warp_m + 16 * i + 8 * r + lane / 4, column = tile.n0 + 8 * j + lane % 4 * 2;
                if (SWIGLU)
                    store_swiglu<Input>(args, row, column + warp_n / 2, sums[i][j] + 2 * r, sums[i][j % 4 + 4] + 2 * r);
                else
                    store_results<Input>(args, tile.batch, row, column + warp_n, sums[i][j] + 2 * r);
            }
}
