// Hopper instructions (sm_90a): TMA copies that signal mbarriers, and wgmma, the matrix products of a warpgroup (four
// warps) with operands in shared memory. tools/cuda/emulator replaces them on a machine without a GPU.

// An opaque TMA descriptor, encoded by the driver.
struct __align__(64) TensorMap {
    unsigned char bytes[128];
};

// wgmma descriptor of a bf16 matrix in shared memory with 128-byte swizzle: rows of 128 bytes in groups of 8, `stride`
// bytes apart. For MN-major matrices `next` is the distance between groups of 64 columns.
__device__ __forceinline__ u64 matrix_descriptor(unsigned address, unsigned stride, unsigned next) {
    return (u64)1 << 62 | (u64)(stride >> 4) << 32 | (u64)(next >> 4) << 16 | (address & 0x3ffff) >> 4;
}
// The descriptor's low word, and the descriptor for a stride of 1024 bytes: advancing is one addition to the low word.
__device__ __forceinline__ unsigned descriptor_low(unsigned address, unsigned next) { return (next >> 4) << 16 | (address & 0x3ffff) >> 4; }
__device__ __forceinline__ u64 descriptor_from_low(unsigned low) { return (u64)(1u << 30 | 1024 >> 4) << 32 | low; }

// Tells the compiler that a value is the same in all lanes, so that it uses uniform registers.
__device__ __forceinline__ unsigned uniform(unsigned x) { return __shfl_sync(0xffffffffu, x, 0); }

#ifndef KILN_EMULATED
__device__ __forceinline__ void barrier_init(unsigned barrier, unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to TMA.
__device__ __forceinline__ void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void barrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and makes the phase wait for `bytes` bytes of copies, too.
__device__ __forceinline__ void barrier_expect(unsigned barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits for the end of the phase with this parity.
__device__ __forceinline__ void barrier_wait(unsigned barrier, unsigned parity) {
    unsigned done;
    do {
        asm volatile("{\n.reg .pred p;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(barrier), "r"(parity)
                     : "memory");
    } while (!done);
}

// Named barriers, for some of a block's warps.
__device__ __forceinline__ void named_sync(int which, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(which), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int which, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(which), "r"(threads) : "memory");
}

__device__ __forceinline__ void prefetch_map(const TensorMap &map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }

// Starts the copy of a box at these coordinates, innermost first; elements outside the tensor become zeros.
__device__ __forceinline__ void tma_load(unsigned to, const TensorMap &from, unsigned barrier, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
                 "l"(&from), "r"(barrier), "r"(x), "r"(y)
                 : "memory");
}
__device__ __forceinline__ void tma_load(unsigned to, const TensorMap &from, unsigned barrier, int x, int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
        "l"(&from), "r"(barrier), "r"(x), "r"(y), "r"(z)
        : "memory");
}

// Clusters: two blocks on neighbouring multiprocessors that see each other's shared memory.
const int CLUSTER = 2;
// Whether a block can copy into both.
const bool CLUSTER_COPIES = true;
#define CLUSTERS __cluster_dims__(CLUSTER, 1, 1)
__device__ __forceinline__ unsigned cluster_rank() {
    unsigned rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Arrives at the barrier at this place in the shared memory of the cluster's block `rank`.
__device__ __forceinline__ void barrier_arrive_at(unsigned barrier, unsigned rank) {
    asm volatile("{\n.reg .b32 remote;\n"
                 "mapa.shared::cluster.u32 remote, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
                 "r"(rank)
                 : "memory");
}
// tma_load into the same place of both blocks, whose barriers at that place are signalled.
__device__ __forceinline__ void tma_load_both(unsigned to, const TensorMap &from, unsigned barrier, int x, int y, int z) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
                 "l"(&from), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"((unsigned short)3)
                 : "memory");
}

// Starts the copy of a box from shared memory; elements outside the tensor are not written.
__device__ __forceinline__ void tma_store(const TensorMap &to, unsigned from, int x, int y, int z) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&to), "r"(from), "r"(x),
                 "r"(y), "r"(z)
                 : "memory");
}
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until all but the last N of this thread's stores have read shared memory.
template <int N> __device__ __forceinline__ void tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory"); }
// Makes this thread's writes to shared memory visible to TMA.
__device__ __forceinline__ void tma_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// load_matrices from an address in shared memory.
__device__ __forceinline__ void load_matrices(unsigned (&r)[4], unsigned from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from)
                 : "memory");
}

// Stores four 8x8 matrices of 16-bit values; each lane passes the address of one row of one of them.
__device__ __forceinline__ void store_matrices(unsigned to, unsigned a, unsigned b, unsigned c, unsigned d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// Sets a flag; waits for a flag and clears it, so that the next launch finds it cleared.
__device__ __forceinline__ void set_flag(unsigned *flag) { asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(flag) : "memory"); }
__device__ __forceinline__ void wait_flag(unsigned *flag) {
    unsigned raised;
    do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(raised) : "l"(flag) : "memory");
    } while (!raised);
    asm volatile("st.relaxed.gpu.global.u32 [%0], 0;" ::"l"(flag) : "memory");
}
// load_l2 for integers.
__device__ __forceinline__ int load_l2(const int *p) {
    int x;
    asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
}
// Changes the number of registers of a warpgroup's threads.
template <int N> __device__ __forceinline__ void decrease_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> __device__ __forceinline__ void increase_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }

// Needed before wgmma that reads registers written by other instructions.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

#define ACCUMULATORS_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define ACCUMULATORS_8(d, i) ACCUMULATORS_4(d, i), ACCUMULATORS_4(d, i + 4)
#define ACCUMULATORS_16(d, i) ACCUMULATORS_8(d, i), ACCUMULATORS_8(d, i + 8)
#define ACCUMULATORS_32(d) ACCUMULATORS_16(d, 0), ACCUMULATORS_16(d, 16)
#define ACCUMULATORS_40(d) ACCUMULATORS_32(d), ACCUMULATORS_8(d, 32)
#define ACCUMULATORS_48(d) ACCUMULATORS_40(d), ACCUMULATORS_8(d, 40)
#define ACCUMULATORS_56(d) ACCUMULATORS_48(d), ACCUMULATORS_8(d, 48)
#define ACCUMULATORS_64(d) ACCUMULATORS_56(d), ACCUMULATORS_8(d, 56)
#define ACCUMULATORS_72(d) ACCUMULATORS_64(d), ACCUMULATORS_8(d, 64)
#define ACCUMULATORS_80(d) ACCUMULATORS_72(d), ACCUMULATORS_8(d, 72)
#define ACCUMULATORS_88(d) ACCUMULATORS_80(d), ACCUMULATORS_8(d, 80)
#define ACCUMULATORS_96(d) ACCUMULATORS_88(d), ACCUMULATORS_8(d, 88)
#define ACCUMULATORS_128(d) ACCUMULATORS_96(d), ACCUMULATORS_16(d, 96), ACCUMULATORS_16(d, 112)
#define INTEGERS_4(d, i) "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3])
#define INTEGERS_8(d, i) INTEGERS_4(d, i), INTEGERS_4(d, i + 4)
#define INTEGERS_16(d, i) INTEGERS_8(d, i), INTEGERS_8(d, i + 8)
#define INTEGERS_32(d) INTEGERS_16(d, 0), INTEGERS_16(d, 16)
#define INTEGERS_40(d) INTEGERS_32(d), INTEGERS_8(d, 32)
#define INTEGERS_48(d) INTEGERS_40(d), INTEGERS_8(d, 40)
#define INTEGERS_56(d) INTEGERS_48(d), INTEGERS_8(d, 48)
#define INTEGERS_64(d) INTEGERS_56(d), INTEGERS_8(d, 56)
#define INTEGERS_72(d) INTEGERS_64(d), INTEGERS_8(d, 64)
#define INTEGERS_80(d) INTEGERS_72(d), INTEGERS_8(d, 72)
#define INTEGERS_88(d) INTEGERS_80(d), INTEGERS_8(d, 80)
#define INTEGERS_96(d) INTEGERS_88(d), INTEGERS_8(d, 88)
#define INTEGERS_128(d) INTEGERS_96(d), INTEGERS_16(d, 96), INTEGERS_16(d, 112)
#define REGISTERS_32 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15" ", " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define REGISTERS_40 REGISTERS_32 ", " "%32, %33, %34, %35, %36, %37, %38, %39"
#define REGISTERS_48 REGISTERS_40 ", " "%40, %41, %42, %43, %44, %45, %46, %47"
#define REGISTERS_56 REGISTERS_48 ", " "%48, %49, %50, %51, %52, %53, %54, %55"
#define REGISTERS_64 REGISTERS_56 ", " "%56, %57, %58, %59, %60, %61, %62, %63"
#define REGISTERS_72 REGISTERS_64 ", " "%64, %65, %66, %67, %68, %69, %70, %71"
#define REGISTERS_80 REGISTERS_72 ", " "%72, %73, %74, %75, %76, %77, %78, %79"
#define REGISTERS_88 REGISTERS_80 ", " "%80, %81, %82, %83, %84, %85, %86, %87"
#define REGISTERS_96 REGISTERS_88 ", " "%88, %89, %90, %91, %92, %93, %94, %95"
#define REGISTERS_128 \
    REGISTERS_96 ", " "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" ", " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// d = a * b (+ d) with 32 bytes of each row of both, which are in shared memory; MN-major where named so. b has N
// columns, and a thread S of the sums.
#define WGMMA(N, S, A, B, ADD, A_MAJOR, B_MAJOR, REGISTERS, FLOATS, INTEGERS) \
    template <bool A_COLUMNS, bool B_COLUMNS> __device__ __forceinline__ void wgmma_bf16(float (&d)[S], u64 a, u64 b, int add) { \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ADD ", 0;\n" \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" REGISTERS "}, " A ", " B ", p, 1, 1, " A_MAJOR \
                     ", " B_MAJOR ";\n}" \
                     : FLOATS \
                     : "l"(a), "l"(b), "r"(add), "n"(A_COLUMNS), "n"(B_COLUMNS)); \
    } \
    __device__ __forceinline__ void wgmma_e4m3(float (&d)[S], u64 a, u64 b, int add) { \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ADD ", 0;\n" \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" REGISTERS "}, " A ", " B ", p, 1, 1;\n}" \
                     : FLOATS \
                     : "l"(a), "l"(b), "r"(add)); \
    } \
    __device__ __forceinline__ void wgmma_int8(int (&d)[S], u64 a, u64 b, int add) { \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ADD ", 0;\n" \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k32.s32.s8.s8 {" REGISTERS "}, " A ", " B ", p;\n}" \
                     : INTEGERS \
                     : "l"(a), "l"(b), "r"(add)); \
    }
WGMMA(256, 128, "%128", "%129", "%130", "%131", "%132", REGISTERS_128, ACCUMULATORS_128(d), INTEGERS_128(d))
WGMMA(192, 96, "%96", "%97", "%98", "%99", "%100", REGISTERS_96, ACCUMULATORS_96(d), INTEGERS_96(d))
WGMMA(176, 88, "%88", "%89", "%90", "%91", "%92", REGISTERS_88, ACCUMULATORS_88(d), INTEGERS_88(d))
WGMMA(160, 80, "%80", "%81", "%82", "%83", "%84", REGISTERS_80, ACCUMULATORS_80(d), INTEGERS_80(d))
WGMMA(144, 72, "%72", "%73", "%74", "%75", "%76", REGISTERS_72, ACCUMULATORS_72(d), INTEGERS_72(d))
WGMMA(128, 64, "%64", "%65", "%66", "%67", "%68", REGISTERS_64, ACCUMULATORS_64(d), INTEGERS_64(d))
WGMMA(112, 56, "%56", "%57", "%58", "%59", "%60", REGISTERS_56, ACCUMULATORS_56(d), INTEGERS_56(d))
WGMMA(96, 48, "%48", "%49", "%50", "%51", "%52", REGISTERS_48, ACCUMULATORS_48(d), INTEGERS_48(d))
WGMMA(80, 40, "%40", "%41", "%42", "%43", "%44", REGISTERS_40, ACCUMULATORS_40(d), INTEGERS_40(d))
WGMMA(64, 32, "%32", "%33", "%34", "%35", "%36", REGISTERS_32, ACCUMULATORS_32(d), INTEGERS_32(d))
#undef WGMMA

// d = a * b (+ d): a 64x16, b 16x8, both K-major in shared memory.
__device__ __forceinline__ void wgmma_n8(float (&d)[4], u64 a, u64 b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, p, 1, 1, 0, 0;\n}"
                 : ACCUMULATORS_4(d, 0)
                 : "l"(a), "l"(b), "r"(add));
}

// d = a * b (+ d): a 64x16 in registers, b 16x144 K-major in shared memory.
__device__ __forceinline__ void wgmma_n144_registers(float (&d)[72], const unsigned (&a)[4], u64 b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %77, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n144k16.f32.bf16.bf16 {" REGISTERS_64
                 ", %64, %65, %66, %67, %68, %69, %70, %71}, {%72, %73, %74, %75}, %76, p, 1, 1, 0;\n}"
                 : ACCUMULATORS_64(d), ACCUMULATORS_4(d, 64), ACCUMULATORS_4(d, 68)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

// d += a * b: a 64x32 in registers, b 32x128 K-major in shared memory, both of bytes.
__device__ __forceinline__ void wgmma_e4m3_registers(float (&d)[64], const unsigned (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" REGISTERS_64 "}, {%64, %65, %66, %67}, %68, 1, 1, 1;"
                 : ACCUMULATORS_64(d)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// d += a * b: a 64x16 in registers, b 16x128 MN-major in shared memory.
__device__ __forceinline__ void wgmma_n128_registers_mn_major(float (&d)[64], const unsigned (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" REGISTERS_64 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                 : ACCUMULATORS_64(d)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
// The same, d = a * b unless `add`.
__device__ __forceinline__ void wgmma_n128_registers_mn_major(float (&d)[64], const unsigned (&a)[4], u64 b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" REGISTERS_64 "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}"
                 : ACCUMULATORS_64(d)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

__device__ __forceinline__ int max_of_three(int a, int b, int c) { return __vimax3_s32(a, b, c); }
#endif

// Transposes 4x4 values among four adjacent lanes: lane t gets element t of each.
__device__ __forceinline__ void transpose_quad(float (&v)[4]) {
#pragma unroll
    for (int mask = 1; mask <= 2; mask++) {
        bool upper = threadIdx.x & mask;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i & mask) continue;
            float got = __shfl_xor_sync(0xffffffffu, upper ? v[i] : v[i | mask], mask);
            (upper ? v[i] : v[i | mask]) = got;
        }
    }
}
