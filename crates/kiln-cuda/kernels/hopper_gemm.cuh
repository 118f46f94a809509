// Matrix products on Hopper with TMA and wgmma: out = gate * (alpha * x * w^T + bias) + add, or SwiGLU of x * w^T, in bf16, e4m3 and
// int8.
// A cluster of two blocks computes tiles of 256 rows by N columns, each block 128 of the rows. In each block a producer
// thread loads 128 bytes of every row of x and half of the rows of w, which goes to both blocks. Two consumer warpgroups take
// tiles in turns, so that one stores results while the other multiplies; tiles of 256 columns, whose sums don't fit into the
// registers of one, they multiply together, 64 rows each. Clusters are persistent, and where tiles don't divide evenly among
// them, some are split along the sum: a cluster stores the sums of its share, and the one with the tile's last share adds
// them up, always in the same order.
// Of cuBLASLt's speed on an H200, each product with its fastest tiling: 4096 and more rows 0.98 to 1.06 in bf16, 0.91 to 1.05 in
// fp8 (median 1.0 and 0.98); 512 rows 0.72 to 1.01 and 0.86 to 1.5, the least for sums of 4096 and less. No gain: the left half
// of a tile's columns ending before the right; clusters of 1x2 and 2x2 (of these only 30 run at once); storing from registers;
// one warpgroup a step behind the other.

const int ROWS = 128, BOX = 64;
// Bytes of a row of a box; of 64 rows.
const unsigned LINE = 128, GROUP = 64 * LINE;
// Bytes of shared memory for stages and results.
const unsigned SHARED = 225 << 10;

struct HopperGemmArgs {
    // x: [k, rows]; w: [k, n, batch]; out and add_bf16, where they are of bf16: [n, rows, batch], innermost first. Sides that the sum
    // runs down are swapped. `x_right` has the columns of x from `left_steps` steps on. SwiGLU's w has n rows for gates, then n for
    // what they gate.
    TensorMap x, x_right, w, out, add_bf16;
    const float *bias, *gate, *x_scales, *w_scales;
    const void *add;
    void *to;
    long long ldadd, ldo, stride_out;
    float alpha;
    // Dtype of the result and the summand: 0 f32, 1 bf16.
    int bf16_out;
    // Columns of one product; steps of 128 bytes along the sum.
    int rows, n, steps, left_steps;
    // Tiles along the rows, the columns of one product, and the columns of all; tiles along the rows that follow each other.
    int tiles_m, tiles_n, tiles_all, group;
    // Tiles that are split among clusters, steps of those per cluster, and clusters that get one more.
    int split_tiles, steps_per_cluster, longer_clusters, unused;
    // [block][64 rows][sums][thread], and a ready flag per block and 64 rows.
    void *partials;
    unsigned *ready;
};

#if defined(KILN_EMULATED) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Steps of a tile.
struct GemmWork {
    int tile, first, count;
    // Whether a later cluster has the tile's last step, or this one has, but not the first.
    bool stores_partial, merges_partials;
};

// A cluster's work in order: its share of the split tiles, last tile first, so that what others wait for is computed first;
// then whole tiles.
struct GemmSchedule {
    int begin, at, next_tile;

    __device__ __forceinline__ static int share_begin(const HopperGemmArgs &args, int cluster) {
        return cluster * args.steps_per_cluster + (cluster < args.longer_clusters ? cluster : args.longer_clusters);
    }

    __device__ __forceinline__ GemmSchedule(const HopperGemmArgs &args) {
        int cluster = blockIdx.x / CLUSTER;
        begin = share_begin(args, cluster);
        at = share_begin(args, cluster + 1);
        next_tile = args.split_tiles + cluster;
    }

    __device__ __forceinline__ bool next(const HopperGemmArgs &args, GemmWork &w) {
        if (at > begin) {
            int start = (at - 1) / args.steps * args.steps, from = start > begin ? start : begin;
            bool ends = at == start + args.steps;
            w = {start / args.steps, from - start, at - from, !ends, ends && from > start};
            at = from;
            return true;
        }
        w = {next_tile, 0, args.steps, false, false};
        next_tile += gridDim.x / CLUSTER;
        return w.tile < args.tiles_m * args.tiles_all;
    }

    // Whether there is more work.
    __device__ __forceinline__ bool more(const HopperGemmArgs &args) const {
        return at > begin || next_tile < args.tiles_m * args.tiles_all;
    }
};

// First row of this block, first column, and number of the product.
struct GemmTile {
    int m0, n0, batch;

    GemmTile() = default;

    __device__ __forceinline__ GemmTile(const HopperGemmArgs &args, int tile, int columns) {
        TilePlace place(tile, args.tiles_m, args.tiles_n, args.tiles_all, args.group);
        m0 = (place.row * CLUSTER + (int)cluster_rank()) * ROWS, n0 = place.column * columns, batch = place.batch;
    }
};

// Types of x and w: elements in 128 bytes, whether rows of w have scales, and the type of sums.
struct Bf16Input {
    static const int ELEMENTS = 64;
    static const bool SCALED = false;
    typedef float Sum;
};
struct E4m3Input {
    static const int ELEMENTS = 128;
    static const bool SCALED = true;
    typedef float Sum;
};
struct Int8Input {
    static const int ELEMENTS = 128;
    static const bool SCALED = true;
    typedef int Sum;
};
template <bool X_COLUMNS, bool W_COLUMNS, int S>
__device__ __forceinline__ void multiply(Bf16Input, float (&d)[S], u64 a, u64 b, int add) {
    wgmma_bf16<X_COLUMNS, W_COLUMNS>(d, a, b, add);
}
template <bool, bool, int S> __device__ __forceinline__ void multiply(E4m3Input, float (&d)[S], u64 a, u64 b, int add) {
    wgmma_e4m3(d, a, b, add);
}
template <bool, bool, int S> __device__ __forceinline__ void multiply(Int8Input, int (&d)[S], u64 a, u64 b, int add) {
    wgmma_int8(d, a, b, add);
}

// Who multiplies what of tiles of N columns.
template <int N> struct Consumers {
    // Whether consumers have a tile each, in turns, or 64 rows each of one tile.
    static const bool TURNS = N < 256;
    // Times 64 rows of a consumer, and consumers of a stage.
    static const int PARTS = TURNS ? 2 : 1, OF_STAGE = TURNS ? 1 : 2;
};

// Shared memory: stages of x and w, results on their way out, barriers.
template <int N, bool SWIGLU> struct GemmMemory {
    static const unsigned X = ROWS * LINE, W = N * LINE, STAGE = X + W;
    // Columns of a tile's results, and of a box of them, bytes of its rows, and of all.
    static const int RESULTS = SWIGLU ? N / 2 : N, OUT = RESULTS % 64 == 0 ? 64 : RESULTS % 32 == 0 ? 32 : 16;
    static const unsigned OUT_LINE = 2 * OUT, OUT_BOX = 64 * OUT_LINE;
    static const int STAGES = (SHARED - 4 * OUT_BOX) / STAGE;
    unsigned base, results, full, empty, summands;

    __device__ __forceinline__ GemmMemory(unsigned start) {
        base = (start + 1023) & ~1023u;
        results = base + STAGES * STAGE;
        full = results + 4 * OUT_BOX;
        empty = full + 8 * STAGES;
        summands = empty + 8 * STAGES;
    }
};

// Loads the stages of this block's work. `count` in the loops: stages filled or consumed so far.
template <class Input, int N, bool X_COLUMNS, bool W_COLUMNS, bool SWIGLU>
__device__ __forceinline__ void load_stages(const HopperGemmArgs &args, const GemmMemory<N, SWIGLU> &memory) {
    typedef GemmMemory<N, SWIGLU> Memory;
    int rank = cluster_rank(), count = 0;
    GemmSchedule schedule(args);
    GemmWork work;
    while (schedule.next(args, work)) {
        GemmTile tile(args, work.tile, Memory::RESULTS);
        for (int step = 0; step < work.count; step++, count++) {
            int stage = count % Memory::STAGES, at = work.first + step, k = at * Input::ELEMENTS;
            if (count >= Memory::STAGES) barrier_wait(memory.empty + 8 * stage, (count / Memory::STAGES + 1) % 2);
            unsigned x = memory.base + stage * Memory::STAGE, w = x + Memory::X, done = memory.full + 8 * stage;
            barrier_expect(done, Memory::STAGE);
            if (X_COLUMNS)
                for (int i = 0; i < ROWS / BOX; i++) tma_load(x + i * GROUP, args.x, done, tile.m0 + i * BOX, k);
            else if (at < args.left_steps)
                tma_load(x, args.x, done, k, tile.m0);
            else
                tma_load(x, args.x_right, done, k - args.left_steps * Input::ELEMENTS, tile.m0);
            // Each block loads a half of the columns for both: with SwiGLU, the gates or what they gate.
            for (int half = 0; half < CLUSTER; half++) {
                if (CLUSTER_COPIES && half != rank) continue;
                if (W_COLUMNS)
                    for (int i = half; i < N / BOX; i += CLUSTER)
                        tma_load_both(w + i * GROUP, args.w, done, tile.n0 + i * BOX, k, tile.batch);
                else
                    tma_load_both(w + half * (Memory::W / 2), args.w, done, k, tile.n0 + half * (SWIGLU ? args.n : N / 2), tile.batch);
            }
        }
    }
}

// Stores the sums of a share's 64 rows for the cluster that has the tile's last step. `part`: which of the block's.
template <class Sum, int S> __device__ __forceinline__ void store_partial(const HopperGemmArgs &args, int part, int barrier, const Sum (&sums)[S]) {
    Sum *to = (Sum *)args.partials + (2ll * blockIdx.x + part) * S * 128 + threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < S; i++) to[i * 128] = sums[i];
    fence_gpu();
    named_sync(barrier, 128);
    if (threadIdx.x % 128 == 0) set_flag(args.ready + 2 * blockIdx.x + part);
}

// Adds the sums of the tile's earlier shares, the latest first.
template <class Sum, int S>
__device__ __forceinline__ void merge_partials(const HopperGemmArgs &args, const GemmWork &work, int part, int barrier, Sum (&sums)[S]) {
    int start = work.tile * args.steps;
    for (int cluster = blockIdx.x / CLUSTER - 1;; cluster--) {
        int block = cluster * CLUSTER + (int)cluster_rank();
        if (threadIdx.x % 128 == 0) wait_flag(args.ready + 2 * block + part);
        named_sync(barrier, 128);
        const Sum *from = (const Sum *)args.partials + (2ll * block + part) * S * 128 + threadIdx.x % 128;
#pragma unroll
        for (int i = 0; i < S; i++) sums[i] += load_l2(from + i * 128);
        if (GemmSchedule::share_begin(args, cluster) <= start) return;
    }
}

// What becomes of a tile's sums. Prepared while they are computed, so that the scales are there when they are needed.
template <class Input, int N, bool SWIGLU> struct Epilogue {
    typedef typename Input::Sum Sum;
    typedef GemmMemory<N, SWIGLU> Memory;
    static const int PARTS = Consumers<N>::PARTS;
    const HopperGemmArgs &args;
    GemmTile tile;
    // A tile's boxes of results: an even number, so that each tile begins with the first of the two in shared memory.
    static const int BOXES = PARTS * Memory::RESULTS / Memory::OUT;
    static_assert(BOXES % 2 == 0, "");
    // The barrier of the warpgroup, its two boxes in shared memory, their barriers for summands, and how often each has been waited for.
    int barrier;
    unsigned boxes, summands, waits = 0;
    // A lane's first row and column; it has the rows 8 below and 64 below, too.
    int row, column;
    float x_scales[PARTS][2];
    // Four lanes have the scales of eighths of the columns.
    static const int EIGHTH = (N + 63) / 64;
    float w_scales[EIGHTH][2];

    __device__ __forceinline__ Epilogue(const HopperGemmArgs &args, const Memory &memory, int consumer)
        : args(args), barrier(1 + consumer), boxes(memory.results + consumer * 2 * Memory::OUT_BOX),
          summands(memory.summands + consumer * 16) {}

    __device__ __forceinline__ bool adds_bf16() const { return !SWIGLU && args.add && args.bf16_out; }

    // Starts the copy of a box's summands to where its results will be. One thread does it.
    __device__ __forceinline__ void load_summands(int box, int first) const {
        const int OF_PART = BOXES / PARTS;
        unsigned slot = box % 2;
        barrier_expect(summands + 8 * slot, Memory::OUT_BOX);
        tma_load(boxes + slot * Memory::OUT_BOX, args.add_bf16, summands + 8 * slot, tile.n0 + Memory::OUT * (box % OF_PART),
                 tile.m0 + 64 * (first + box / OF_PART), tile.batch);
    }

    // `first`: the first of the tile's 64 rows.
    __device__ __forceinline__ void prepare(const GemmWork &work, int first) {
        tile = GemmTile(args, work.tile, Memory::RESULTS);
        if (adds_bf16() && !work.stores_partial && threadIdx.x % 128 == 0) {
            tma_store_wait_read<0>();
            load_summands(0, first), load_summands(1, first);
        }
        int lane = threadIdx.x % 32;
        row = tile.m0 + 64 * first + threadIdx.x % 128 / 32 * 16 + lane / 4;
        column = tile.n0 + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < 2 * PARTS; i++)
            x_scales[i / 2][i % 2] = args.alpha * (args.x_scales ? args.x_scales[valid(i / 2, i % 2)] : 1.0f);
#pragma unroll
        for (int i = 0; i < EIGHTH; i++)
            if (Input::SCALED) load_values(args.w_scales, of_all(w_row(lane / 4 * EIGHTH + i)), false, w_scales[i]);
    }

    __device__ __forceinline__ int row_of(int part, int r) const { return row + 64 * part + 8 * r; }
    // Results outside are not stored, so any row will do there.
    __device__ __forceinline__ int valid(int part, int r) const { return row_of(part, r) < args.rows ? row_of(part, r) : 0; }

    // The lane's column in group `j` of eight results. Results outside are not stored, so any column will do there.
    __device__ __forceinline__ int inside(int j) const { return column + 8 * j < args.n ? column + 8 * j : 0; }
    __device__ __forceinline__ long long of_all(int column) const { return (long long)tile.batch * args.n + column; }
    // The row of w that the sums of group `j` are of.
    __device__ __forceinline__ int w_row(int j) const {
        const int GATES = Memory::RESULTS / 8;
        return SWIGLU && j >= GATES ? args.n + inside(j - GATES) : inside(j);
    }

    // The sums of two columns, in both rows, times their scales.
    __device__ __forceinline__ void scaled(const Sum *sums, int part, int j, float (&v)[4]) const {
        float w[2] = {1.0f, 1.0f};
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (Input::SCALED) w[i] = __shfl_sync(0xffffffffu, w_scales[j % EIGHTH][i], j / EIGHTH * 4 + threadIdx.x % 4);
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = (float)sums[4 * j + i] * (x_scales[part][i / 2] * w[i % 2]);
    }

    // The results of group `j`, without a summand.
    template <bool PLAIN> __device__ __forceinline__ void finish(const Sum *sums, int part, int j, float (&v)[4]) const {
        scaled(sums, part, j, v);
        if (SWIGLU) {
            float up[4];
            scaled(sums, part, j + Memory::RESULTS / 8, up);
#pragma unroll
            for (int i = 0; i < 4; i++) v[i] = activate_as<bf16>(v[i], 1) * up[i];
        }
        if (PLAIN) return;
        // Addresses of other groups would take registers of the sums.
        int at = inside(j);
        opaque(at);
        float bias[2] = {0.0f, 0.0f}, gate[2] = {1.0f, 1.0f};
        if (args.bias) load_values(args.bias, of_all(at), false, bias);
        if (args.gate) load_values(args.gate, of_all(at), false, gate);
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = (v[i] + bias[i % 2]) * gate[i % 2];
    }

    // Stores in bf16 through two boxes in shared memory, in which the summands are.
    template <bool PLAIN> __device__ __forceinline__ void store_bf16(const Sum (&sums)[N / 2], int part, int first) {
        const int OUT = Memory::OUT, OF_PART = BOXES / PARTS;
        int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
        bool adds = !PLAIN && adds_bf16();
#pragma unroll
        for (int box = 0; box < OF_PART; box++) {
            int number = part * OF_PART + box;
            unsigned slot = number % 2, to = boxes + slot * Memory::OUT_BOX, line = to + (16 * warp + lane % 16) * Memory::OUT_LINE;
            if (adds) {
                barrier_wait(summands + 8 * slot, waits % 2);
                waits += slot;
            } else {
                // The store before the last has to be done with the memory.
                if (threadIdx.x % 128 == 0) tma_store_wait_read<1>();
                named_sync(barrier, 128);
            }
#pragma unroll
            for (int j = 0; j < OUT / 8; j += 2) {
                // The 16-byte column is XORed with the number of 128 bytes, as TMA expects it.
                unsigned at = line + ((j + lane / 16) ^ lane / (64 / OUT) % (OUT / 8)) * 16, pairs[4];
                if (adds) load_matrices(pairs, at);
                float v[2][4];
#pragma unroll
                for (int i = 0; i < 2; i++) finish<PLAIN>(sums, part, OUT / 8 * box + j + i, v[i]);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float low = v[i / 2][i % 2 * 2], high = v[i / 2][i % 2 * 2 + 1], add[2] = {0.0f, 0.0f};
                    if (adds) unpack(pairs[i], add[0], add[1]);
                    pairs[i] = round_bf16_pair(low + add[0], high + add[1]);
                }
                store_matrices(at, pairs[0], pairs[1], pairs[2], pairs[3]);
            }
            tma_fence();
            named_sync(barrier, 128);
            if (threadIdx.x % 128 == 0) {
                int n = tile.n0 + OUT * box;
                if (n < args.n) tma_store(args.out, to, n, tile.m0 + 64 * (first + part), tile.batch);
                tma_store_commit();
                if (adds && number + 2 < BOXES) {
                    tma_store_wait_read<0>();
                    load_summands(number + 2, first);
                }
            }
        }
    }

    __device__ __forceinline__ void store_f32(const Sum (&sums)[N / 2], int part) const {
        float *out = (float *)args.to + tile.batch * args.stride_out;
#pragma unroll
        for (int j = 0; j < N / 8; j++) {
            float v[4];
            finish<false>(sums, part, j, v);
            int at = column + 8 * j;
            opaque(at);
            if (at >= args.n) continue;
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float add[2] = {0.0f, 0.0f};
                if (args.add) load_values(args.add, tile.batch * args.stride_out + valid(part, r) * args.ldadd + at, false, add);
                if (row_of(part, r) < args.rows)
                    *(float2 *)(out + row_of(part, r) * args.ldo + at) = {v[2 * r] + add[0], v[2 * r + 1] + add[1]};
            }
        }
    }

    // What follows the last product.
    __device__ __forceinline__ void run(const GemmWork &work, int first, Sum (&sums)[PARTS][N / 2]) {
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            if (work.stores_partial) {
                store_partial(args, first + part, barrier, sums[part]);
                continue;
            }
            if (work.merges_partials) merge_partials(args, work, first + part, barrier, sums[part]);
            if (SWIGLU)
                store_bf16<true>(sums[part], part, first);
            else if (!args.bf16_out)
                store_f32(sums[part], part);
            else if (args.bias || args.gate || args.add)
                store_bf16<false>(sums[part], part, first);
            else
                store_bf16<true>(sums[part], part, first);
        }
    }
};

template <class Input, int N, bool X_COLUMNS, bool W_COLUMNS, bool SWIGLU>
__device__ __forceinline__ void multiply_stages(const HopperGemmArgs &args, const GemmMemory<N, SWIGLU> &memory) {
    typedef GemmMemory<N, SWIGLU> Memory;
    const bool TURNS = Consumers<N>::TURNS;
    const int PARTS = Consumers<N>::PARTS;
    int consumer = threadIdx.x / 128 - 1, lane = threadIdx.x % 32, count = 0;
    // The first of a tile's 64 rows that this one multiplies.
    int first = TURNS ? 0 : consumer;
    unsigned x_first = uniform(descriptor_low(memory.base + first * GROUP, GROUP));
    unsigned w_first = uniform(descriptor_low(memory.base + Memory::X, GROUP));
    // Bytes from 32 bytes of the sum to the next.
    const unsigned X_NEXT = X_COLUMNS ? 16 * LINE : 32, W_NEXT = W_COLUMNS ? 16 * LINE : 32;
    auto release = [&](int count) {
        if (lane < CLUSTER) barrier_arrive_at(memory.empty + 8 * (count % Memory::STAGES), lane);
    };
    Epilogue<Input, N, SWIGLU> epilogue(args, memory, consumer);
    GemmSchedule schedule(args);
    GemmWork work;
    for (int item = 0; schedule.next(args, work); item++) {
        if (TURNS && item % 2 != consumer) {
            count += work.count;
            continue;
        }
        // The other one has to have started all its products.
        if (TURNS && item > 0) named_sync(3 + consumer, 256);
        typename Input::Sum sums[PARTS][N / 2];
        for (int step = 0; step < work.count; step++, count++) {
            int stage = count % Memory::STAGES;
            unsigned x = x_first + stage * (Memory::STAGE >> 4), w = w_first + stage * (Memory::STAGE >> 4);
            barrier_wait(memory.full + 8 * stage, count / Memory::STAGES % 2);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 4; k++)
#pragma unroll
                for (int part = 0; part < PARTS; part++)
                    multiply<X_COLUMNS, W_COLUMNS>(Input(), sums[part], descriptor_from_low(x + ((k * X_NEXT + part * GROUP) >> 4)),
                                                   descriptor_from_low(w + (k * W_NEXT >> 4)), step > 0 || k > 0);
            wgmma_commit();
            if (step == 0) {
                epilogue.prepare(work, first);
            } else {
                wgmma_wait<1>();
                release(count - 1);
            }
        }
        if (TURNS && schedule.more(args)) named_arrive(4 - consumer, 256);
        wgmma_wait<0>();
        release(count - 1);
        epilogue.run(work, first, sums);
    }
    if (threadIdx.x % 128 == 0) tma_store_wait_read<0>();
}

template <class Input, int N, bool X_COLUMNS, bool W_COLUMNS, bool SWIGLU = false>
__device__ __forceinline__ void gemm_hopper(const HopperGemmArgs &args) {
    typedef GemmMemory<N, SWIGLU> Memory;
    DYNAMIC_SHARED(shared);
    Memory memory(shared_address(shared));
    if (threadIdx.x == 0) {
        for (int i = 0; i < Memory::STAGES; i++) {
            barrier_init(memory.full + 8 * i, 1);
            // The warps that multiply it, in all blocks.
            barrier_init(memory.empty + 8 * i, 4 * Consumers<N>::OF_STAGE * CLUSTER);
        }
        for (int i = 0; i < 4; i++) barrier_init(memory.summands + 8 * i, 1);
        barrier_init_fence();
        prefetch_map(args.x), prefetch_map(args.x_right), prefetch_map(args.w), prefetch_map(args.out);
    }
    cluster_sync();
    if (threadIdx.x < 128) {
        decrease_registers<24>();
        if (threadIdx.x == 0) load_stages<Input, N, X_COLUMNS, W_COLUMNS>(args, memory);
    } else {
        increase_registers<240>();
        multiply_stages<Input, N, X_COLUMNS, W_COLUMNS>(args, memory);
    }
    // The other block may still copy into this one's memory.
    cluster_sync();
}
#endif
