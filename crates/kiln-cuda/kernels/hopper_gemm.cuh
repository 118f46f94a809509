// Matrix products on Hopper with TMA and wgmma: out = alpha * x * w^T + bias + add, in bf16, e4m3 and int8.
// A cluster of two blocks computes tiles of 256 rows by N columns, each block 128 of the rows. In each block a producer
// thread loads 128 bytes of every row of x and half of the rows of w, which goes to both blocks; two consumer warpgroups
// multiply 64 rows each. Clusters are persistent, and where tiles don't divide evenly among them, some are split along
// the sum: a cluster stores the sums of its part, and the one with the tile's last part adds them up, always in the same
// order.
// Of cuBLASLt's speed on an H200, 4608 rows: sums of 3072 0.95 in bf16, 0.87 in fp8; of 12288 and more 1.0. 512 rows: 0.65 to
// 0.95. Without storing results it is 1.0 and 0.98: what is left is a tile's end, when no warpgroup multiplies. No gain: storing
// from registers, 16 bytes a lane; storing between the steps of the next tile (10 % slower, some registers spill); one
// warpgroup a step behind the other.

const int ROWS = 128, BOX = 64;
// Bytes of a row of a box; of 64 rows.
const unsigned LINE = 128, GROUP = 64 * LINE;

struct HopperGemmArgs {
    // x: [k, rows]; w: [k, n, batch]; out: [n, rows, batch], innermost first. Sides that the sum runs down are swapped.
    TensorMap x, w, out;
    const float *bias, *x_scales, *w_scales;
    const void *add;
    void *to;
    long long ldadd, ldo, stride_out;
    float alpha;
    // Dtype of the result and the summand: 0 f32, 1 bf16.
    int bf16_out;
    // Columns of one product; steps of 128 bytes along the sum.
    int rows, n, steps;
    // Tiles along the rows, the columns of one product, and the columns of all; tiles along the rows that follow each other.
    int tiles_m, tiles_n, tiles_all, group;
    // Tiles that are split among clusters, steps of those per cluster, and clusters that get one more.
    int split_tiles, steps_per_cluster, longer_clusters;
    // [block][consumer][sums][thread], and a ready flag per block and consumer.
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

// Shared memory: stages of x and w, results on their way out, barriers.
template <int N> struct GemmMemory {
    static const int STAGES = N == 256 ? 4 : 6;
    static const unsigned X = ROWS * LINE, W = N * LINE, STAGE = X + W;
    unsigned base, results, full, empty;

    __device__ __forceinline__ GemmMemory(unsigned start) {
        base = (start + 1023) & ~1023u;
        results = base + STAGES * STAGE;
        full = results + 4 * GROUP;
        empty = full + 8 * STAGES;
    }
};

// Loads the stages of this block's work. `count` in the loops: stages filled or consumed so far.
template <class Input, int N, bool X_COLUMNS, bool W_COLUMNS>
__device__ __forceinline__ void load_stages(const HopperGemmArgs &args, const GemmMemory<N> &memory) {
    typedef GemmMemory<N> Memory;
    int rank = cluster_rank(), count = 0;
    GemmSchedule schedule(args);
    GemmWork work;
    while (schedule.next(args, work)) {
        GemmTile tile(args, work.tile, N);
        for (int step = 0; step < work.count; step++, count++) {
            int stage = count % Memory::STAGES, k = (work.first + step) * Input::ELEMENTS;
            if (count >= Memory::STAGES) barrier_wait(memory.empty + 8 * stage, (count / Memory::STAGES + 1) % 2);
            unsigned x = memory.base + stage * Memory::STAGE, w = x + Memory::X, done = memory.full + 8 * stage;
            barrier_expect(done, Memory::STAGE);
            if (X_COLUMNS)
                for (int i = 0; i < ROWS / BOX; i++) tma_load(x + i * GROUP, args.x, done, tile.m0 + i * BOX, k);
            else
                tma_load(x, args.x, done, k, tile.m0);
            // Each block loads a half of the columns for both.
            for (int half = 0; half < CLUSTER; half++) {
                if (CLUSTER_COPIES && half != rank) continue;
                unsigned to = w + half * (Memory::W / 2);
                int n = tile.n0 + half * (N / 2);
                if (W_COLUMNS)
                    for (int i = 0; i < N / 2 / BOX; i++) tma_load_both(to + i * GROUP, args.w, done, n + i * BOX, k, tile.batch);
                else
                    tma_load_both(to, args.w, done, k, n, tile.batch);
            }
        }
    }
}

// Stores a part's sums for the cluster that has the tile's last step.
template <class Sum, int S> __device__ __forceinline__ void store_partial(const HopperGemmArgs &args, int consumer, const Sum (&sums)[S]) {
    Sum *to = (Sum *)args.partials + (2ll * blockIdx.x + consumer) * S * 128 + threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < S; i++) to[i * 128] = sums[i];
    fence_gpu();
    named_sync(1 + consumer, 128);
    if (threadIdx.x % 128 == 0) set_flag(args.ready + 2 * blockIdx.x + consumer);
}

// Adds the sums of the tile's earlier parts, the latest first.
template <class Sum, int S>
__device__ __forceinline__ void merge_partials(const HopperGemmArgs &args, const GemmWork &work, int consumer, Sum (&sums)[S]) {
    int start = work.tile * args.steps;
    for (int cluster = blockIdx.x / CLUSTER - 1;; cluster--) {
        int block = cluster * CLUSTER + (int)cluster_rank();
        if (threadIdx.x % 128 == 0) wait_flag(args.ready + 2 * block + consumer);
        named_sync(1 + consumer, 128);
        const Sum *from = (const Sum *)args.partials + (2ll * block + consumer) * S * 128 + threadIdx.x % 128;
#pragma unroll
        for (int i = 0; i < S; i++) sums[i] += load_l2(from + i * 128);
        if (GemmSchedule::share_begin(args, cluster) <= start) return;
    }
}

// What becomes of a tile's sums. Prepared while they are computed, so that the scales are there when they are needed.
template <class Input, int N> struct Epilogue {
    typedef typename Input::Sum Sum;
    const HopperGemmArgs &args;
    GemmTile tile;
    // A lane's first row and column; it has the row 8 below, too.
    int row, column;
    float x_scales[2];
    // Four lanes have the scales of eighths of the columns.
    static const int EIGHTH = N / 64;
    float w_scales[EIGHTH][2];

    __device__ __forceinline__ Epilogue(const HopperGemmArgs &args) : args(args) {}

    __device__ __forceinline__ void prepare(int number, int consumer) {
        tile = GemmTile(args, number, N);
        int lane = threadIdx.x % 32;
        row = tile.m0 + 64 * consumer + threadIdx.x % 128 / 32 * 16 + lane / 4;
        column = tile.n0 + lane % 4 * 2;
#pragma unroll
        for (int r = 0; r < 2; r++)
            x_scales[r] = args.alpha * (args.x_scales ? args.x_scales[row + 8 * r < args.rows ? row + 8 * r : 0] : 1.0f);
#pragma unroll
        for (int i = 0; i < EIGHTH; i++)
            if (Input::SCALED) load_values(args.w_scales, of_all(inside(lane / 4 * EIGHTH + i)), false, w_scales[i]);
    }

    // The lane's column in group `j` of eight columns. Results outside are not stored, so any column will do there.
    __device__ __forceinline__ int inside(int j) const { return column + 8 * j < args.n ? column + 8 * j : 0; }
    __device__ __forceinline__ long long of_all(int column) const { return (long long)tile.batch * args.n + column; }

    // The results of two columns, in both rows, from the sums of group `j`.
    template <bool PLAIN> __device__ __forceinline__ void finish(const Sum *sums, int j, float (&v)[4]) const {
        float w[2] = {1.0f, 1.0f};
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (Input::SCALED) w[i] = __shfl_sync(0xffffffffu, w_scales[j % EIGHTH][i], j / EIGHTH * 4 + threadIdx.x % 4);
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = (float)sums[4 * j + i] * (x_scales[i / 2] * w[i % 2]);
        if (PLAIN) return;
        float bias[2] = {0.0f, 0.0f};
        if (args.bias) load_values(args.bias, of_all(inside(j)), false, bias);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float add[2] = {0.0f, 0.0f};
            long long from = row + 8 * r < args.rows ? row + 8 * r : 0;
            if (args.add) load_values(args.add, tile.batch * args.stride_out + from * args.ldadd + inside(j), args.bf16_out, add);
#pragma unroll
            for (int i = 0; i < 2; i++) v[2 * r + i] += bias[i] + add[i];
        }
    }

    // Stores in bf16 through two boxes in shared memory.
    template <bool PLAIN> __device__ __forceinline__ void store_bf16(const Sum (&sums)[N / 2], int consumer, unsigned boxes) const {
        int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
        unsigned line = boxes + (16 * warp + lane % 16) * LINE;
#pragma unroll
        for (int box = 0; box < N / BOX; box++) {
            // The store before the last has to be done with the memory.
            if (threadIdx.x % 128 == 0) tma_store_wait_read<1>();
            named_sync(1 + consumer, 128);
#pragma unroll
            for (int j = 0; j < 8; j += 2) {
                float v[2][4];
                finish<PLAIN>(sums, 8 * box + j, v[0]);
                finish<PLAIN>(sums, 8 * box + j + 1, v[1]);
                // The 16-byte column is XORed with the row, as TMA expects it.
                unsigned place = (j + lane / 16) ^ lane % 8;
                store_matrices(line + box % 2 * GROUP + place * 16, round_bf16_pair(v[0][0], v[0][1]), round_bf16_pair(v[0][2], v[0][3]),
                               round_bf16_pair(v[1][0], v[1][1]), round_bf16_pair(v[1][2], v[1][3]));
            }
            tma_fence();
            named_sync(1 + consumer, 128);
            if (threadIdx.x % 128 == 0) {
                if (tile.n0 + BOX * box < args.n)
                    tma_store(args.out, boxes + box % 2 * GROUP, tile.n0 + BOX * box, tile.m0 + 64 * consumer, tile.batch);
                tma_store_commit();
            }
        }
    }

    __device__ __forceinline__ void store_f32(const Sum (&sums)[N / 2]) const {
        float *out = (float *)args.to + tile.batch * args.stride_out;
#pragma unroll
        for (int j = 0; j < N / 8; j++) {
            float v[4];
            finish<false>(sums, j, v);
#pragma unroll
            for (int r = 0; r < 2; r++)
                if (row + 8 * r < args.rows && column + 8 * j < args.n)
                    *(float2 *)(out + (row + 8 * r) * args.ldo + column + 8 * j) = {v[2 * r], v[2 * r + 1]};
        }
    }
};

template <class Input, int N, bool X_COLUMNS, bool W_COLUMNS>
__device__ __forceinline__ void multiply_stages(const HopperGemmArgs &args, const GemmMemory<N> &memory) {
    typedef GemmMemory<N> Memory;
    int consumer = threadIdx.x / 128 - 1, lane = threadIdx.x % 32, count = 0;
    unsigned x_first = uniform(descriptor_low(memory.base + consumer * GROUP, GROUP));
    unsigned w_first = uniform(descriptor_low(memory.base + Memory::X, GROUP));
    // Bytes from 32 bytes of the sum to the next.
    const unsigned X_NEXT = X_COLUMNS ? 16 * LINE : 32, W_NEXT = W_COLUMNS ? 16 * LINE : 32;
    auto release = [&](int count) {
        if (lane < CLUSTER) barrier_arrive_at(memory.empty + 8 * (count % Memory::STAGES), lane);
    };
    unsigned boxes = memory.results + consumer * 2 * GROUP;
    GemmSchedule schedule(args);
    GemmWork work;
    while (schedule.next(args, work)) {
        Epilogue<Input, N> epilogue(args);
        typename Input::Sum sums[N / 2];
        for (int step = 0; step < work.count; step++, count++) {
            int stage = count % Memory::STAGES;
            unsigned x = x_first + stage * (Memory::STAGE >> 4), w = w_first + stage * (Memory::STAGE >> 4);
            barrier_wait(memory.full + 8 * stage, count / Memory::STAGES % 2);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 4; k++)
                multiply<X_COLUMNS, W_COLUMNS>(Input(), sums, descriptor_from_low(x + k * (X_NEXT >> 4)),
                                               descriptor_from_low(w + k * (W_NEXT >> 4)), step > 0 || k > 0);
            wgmma_commit();
            if (step == 0) {
                epilogue.prepare(work.tile, consumer);
            } else {
                wgmma_wait<1>();
                release(count - 1);
            }
        }
        wgmma_wait<0>();
        release(count - 1);
        if (work.stores_partial) {
            store_partial(args, consumer, sums);
            continue;
        }
        if (work.merges_partials) merge_partials(args, work, consumer, sums);
        if (!args.bf16_out)
            epilogue.store_f32(sums);
        else if (args.bias || args.add)
            epilogue.template store_bf16<false>(sums, consumer, boxes);
        else
            epilogue.template store_bf16<true>(sums, consumer, boxes);
    }
    if (threadIdx.x % 128 == 0) tma_store_wait_read<0>();
}

template <class Input, int N, bool X_COLUMNS, bool W_COLUMNS> __device__ __forceinline__ void gemm_hopper(const HopperGemmArgs &args) {
    DYNAMIC_SHARED(shared);
    GemmMemory<N> memory(shared_address(shared));
    if (threadIdx.x == 0) {
        for (int i = 0; i < GemmMemory<N>::STAGES; i++) {
            barrier_init(memory.full + 8 * i, 1);
            // All consumer warps of the cluster.
            barrier_init(memory.empty + 8 * i, 8 * CLUSTER);
        }
        barrier_init_fence();
        prefetch_map(args.x), prefetch_map(args.w), prefetch_map(args.out);
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
