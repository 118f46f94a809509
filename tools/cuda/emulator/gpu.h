// GPU emulator: enough of CUDA C++ to run Kiln's kernels on one CPU thread.
// A block's threads are fibres. A fibre runs until it waits for its block (__syncthreads) or its warp (shuffles, matrix
// instructions), and continues when all of them have arrived. Asynchronous copies are executed as late as possible, so
// that a missing wait shows. Made for correctness, not for speed.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <vector>

#define KILN_EMULATED
#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)
#define DYNAMIC_SHARED(name) unsigned char *name = emulator::dynamic_shared

typedef unsigned long long u64;

struct float2 {
    float x, y;
};
struct float4 {
    float x, y, z, w;
};
struct uint4 {
    unsigned x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

struct Index {
    unsigned x, y, z;
};
inline Index threadIdx, blockIdx, blockDim, gridDim;

struct bf16;

// A kernel and the sizes of its arguments.
struct Kernel {
    void (*call)(void **arguments);
    std::vector<size_t> sizes;
    int shared = 48 << 10;
};

namespace emulator {

inline unsigned char *dynamic_shared;

struct Copy {
    void *to;
    const void *from;
    int size;
    bool valid;
};

enum State { READY, AT_BARRIER, AT_WARP, DONE };

struct Fibre {
    void *stack = nullptr;
    void *at = nullptr;
    State state = DONE;
    Index index;
    std::deque<std::vector<Copy>> groups;
    std::vector<Copy> open;
};

struct Warp {
    int arrived = 0;
    // Inputs and outputs of each lane in a warp-collective operation.
    uint32_t in[32][8];
    uint32_t out[32][4];
    // All lanes' inputs to the last collective operation.
    uint32_t all[32][8];
};

inline std::vector<Fibre> fibres;
inline std::vector<Warp> warps;
inline int current, at_barrier, alive;
inline void *scheduler;
typedef void (*Body)(void *);
inline Body body;
inline void *body_data;

extern "C" void emulator_switch(void **from, void *to);

inline void yield(State state) {
    Fibre &f = fibres[current];
    f.state = state;
    emulator_switch(&f.at, scheduler);
}

// Warp-collective operation: every lane contributes its words, and the last to arrive computes for all.
template <class F> inline void warp_collective(const uint32_t *words, int count, uint32_t *result, int results, F compute) {
    Warp &w = warps[current / 32];
    int lane = current % 32;
    std::memcpy(w.in[lane], words, 4 * count);
    if (++w.arrived == 32) {
        compute(w);
        w.arrived = 0;
        for (int i = current / 32 * 32; i < current / 32 * 32 + 32; i++)
            if (fibres[i].state == AT_WARP) fibres[i].state = READY;
    } else {
        yield(AT_WARP);
    }
    if (results) std::memcpy(result, w.out[lane], 4 * results);
}

void run_block(int threads, Body body, void *data);

} // namespace emulator

inline void __syncthreads() {
    using namespace emulator;
    if (++at_barrier == alive) {
        at_barrier = 0;
        for (Fibre &f : fibres)
            if (f.state == AT_BARRIER) f.state = READY;
    } else {
        yield(AT_BARRIER);
    }
}

inline unsigned bits_of(float x) {
    unsigned u;
    std::memcpy(&u, &x, 4);
    return u;
}
inline unsigned __float_as_uint(float x) {
    unsigned u;
    std::memcpy(&u, &x, 4);
    return u;
}
inline float __uint_as_float(unsigned u) {
    float x;
    std::memcpy(&x, &u, 4);
    return x;
}

inline float __shfl_xor_sync(unsigned, float x, int mask) {
    uint32_t word = bits_of(x), result;
    emulator::warp_collective(&word, 1, &result, 1, [mask](emulator::Warp &w) {
        for (int i = 0; i < 32; i++) w.out[i][0] = w.in[i ^ mask][0];
    });
    return __uint_as_float(result);
}

inline unsigned __shfl_sync(unsigned, unsigned x, int lane) {
    uint32_t words[2] = {x, (uint32_t)lane}, result;
    emulator::warp_collective(words, 2, &result, 1, [](emulator::Warp &w) {
        for (int i = 0; i < 32; i++) w.out[i][0] = w.in[w.in[i][1]][0];
    });
    return result;
}
inline float __shfl_sync(unsigned mask, float x, int lane) { return __uint_as_float(__shfl_sync(mask, bits_of(x), lane)); }

inline bool any_lane(bool x) {
    uint32_t word = x, result;
    emulator::warp_collective(&word, 1, &result, 1, [](emulator::Warp &w) {
        uint32_t any = 0;
        for (int i = 0; i < 32; i++) any |= w.in[i][0];
        for (int i = 0; i < 32; i++) w.out[i][0] = any;
    });
    return result;
}
inline void opaque(int &) {}

inline void __syncwarp() {
    emulator::warp_collective(nullptr, 0, nullptr, 0, [](emulator::Warp &) {});
}

using std::max;
inline int __float_as_int(float x) { return (int)bits_of(x); }
inline float __int_as_float(int x) { return __uint_as_float((unsigned)x); }
inline int max_of_three(int a, int b, int c) { return std::max(a, std::max(b, c)); }

inline int __dp4a(int a, int b, int sum) {
    for (int i = 0; i < 4; i++) sum += (int)(signed char)(a >> 8 * i) * (int)(signed char)(b >> 8 * i);
    return sum;
}

inline unsigned short float_to_bf16(float x) {
    unsigned u = bits_of(x);
    if (x != x) return 0x7fff;
    return (unsigned short)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
bf16 round_to_bf16(float x);
inline unsigned round_bf16_pair(float low, float high) { return float_to_bf16(low) | (unsigned)float_to_bf16(high) << 16; }
// Rounds to e4m3, ties to even, saturating.
inline unsigned char float_to_e4m3(float x) {
    if (x != x) return 0x7f;
    unsigned sign = bits_of(x) >> 31 << 7;
    float a = std::fabs(x);
    int exponent = std::max(std::ilogb(a), -6);
    if (!(a > 0)) return sign;
    float steps = std::nearbyint(std::ldexp(a, 3 - exponent));
    if (steps == 16) steps = 8, exponent++;
    if (exponent > 8 || (exponent == 8 && steps > 14)) return sign | 0x7e;
    return sign | (steps < 8 ? (unsigned)steps : (unsigned)(exponent + 7) << 3 | ((unsigned)steps - 8));
}
inline unsigned short round_fp8_pair(float low, float high) { return float_to_e4m3(low) | (unsigned)float_to_e4m3(high) << 8; }
inline float half_to_float(unsigned short bits) {
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    float x = exponent == 0    ? std::ldexp((float)fraction, -24)
              : exponent == 31 ? (fraction ? NAN : INFINITY)
                               : std::ldexp((float)(fraction + 1024), exponent - 25);
    return bits & 0x8000 ? -x : x;
}
inline uint4 load_streaming(const uint4 *p) { return *p; }
inline void store_streaming(uint4 *p, uint4 v) { *p = v; }
inline float fast_exp2(float x) { return std::exp2(x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float fast_reciprocal(float x) { return 1.0f / x; }
inline float max_or_nan(float a, float b) { return a != a || b != b ? NAN : std::max(a, b); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
// Bytes of a (0 to 3) and b (4 to 7) as the digits of `order` say, the lowest first.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned order) {
    unsigned long long bytes = (unsigned long long)b << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) result |= (unsigned)(bytes >> 8 * (order >> 4 * i & 7) & 0xff) << 8 * i;
    return result;
}

// Fragment layout as in the PTX manual, mma.m16n8k16 with .bf16.
inline void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    uint32_t words[6] = {a[0], a[1], a[2], a[3], b0, b1}, result[4];
    emulator::warp_collective(words, 6, result, 4, [](emulator::Warp &w) {
        float A[16][16], B[16][8];
        auto half = [](uint32_t word, int which) {
            return __uint_as_float(which ? word & 0xffff0000u : word << 16);
        };
        for (int lane = 0; lane < 32; lane++) {
            int group = lane / 4, in_group = lane % 4;
            for (int i = 0; i < 8; i++) {
                int row = group + (i / 2 % 2) * 8, col = in_group * 2 + i % 2 + (i / 4) * 8;
                A[row][col] = half(w.in[lane][i / 2], i % 2);
            }
            for (int i = 0; i < 4; i++) B[in_group * 2 + i % 2 + (i / 2) * 8][group] = half(w.in[lane][4 + i / 2], i % 2);
        }
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++) {
                int row = lane / 4 + (i / 2) * 8, col = lane % 4 * 2 + i % 2;
                float sum = 0;
                for (int k = 0; k < 16; k++) sum += A[row][k] * B[k][col];
                w.out[lane][i] = bits_of(sum);
            }
    });
    for (int i = 0; i < 4; i++) d[i] += __uint_as_float(result[i]);
}

// Fragment layout as in the PTX manual, mma.m16n8k32 with 8-bit types.
template <class T, class F> inline void mma_bytes(T (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, F value) {
    uint32_t words[6] = {a[0], a[1], a[2], a[3], b0, b1};
    emulator::warp_collective(words, 6, nullptr, 0, [](emulator::Warp &w) { std::memcpy(w.all, w.in, sizeof w.in); });
    const auto &all = emulator::warps[emulator::current / 32].all;
    int lane = threadIdx.x % 32;
    auto byte = [](uint32_t word, int i) { return (unsigned char)(word >> 8 * i); };
    for (int i = 0; i < 4; i++) {
        int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        T sum = T(0);
        for (int k = 0; k < 32; k++) {
            uint32_t left = all[row % 8 * 4 + k % 16 / 4][row / 8 + k / 16 * 2], right = all[column * 4 + k % 16 / 4][4 + k / 16];
            sum += value(byte(left, k % 4)) * value(byte(right, k % 4));
        }
        d[i] += sum;
    }
}

inline void load_matrices_as(unsigned (&r)[4], const void *row, bool transposed) {
    u64 address = (u64)row;
    if (address % 16) std::fprintf(stderr, "emulator: a matrix row is not aligned\n"), std::abort();
    uint32_t words[2] = {(uint32_t)address, (uint32_t)(address >> 32)};
    emulator::warp_collective(words, 2, r, 4, [transposed](emulator::Warp &w) {
        for (int m = 0; m < 4; m++) {
            unsigned short matrix[8][8];
            for (int i = 0; i < 8; i++) {
                u64 at = w.in[8 * m + i][0] | (u64)w.in[8 * m + i][1] << 32;
                std::memcpy(matrix[i], (const void *)at, 16);
            }
            for (int lane = 0; lane < 32; lane++) {
                int i = lane / 4, j = lane % 4 * 2;
                unsigned low = transposed ? matrix[j][i] : matrix[i][j];
                unsigned high = transposed ? matrix[j + 1][i] : matrix[i][j + 1];
                w.out[lane][m] = low | high << 16;
            }
        }
    });
}
inline void load_matrices(unsigned (&r)[4], const bf16 *row) { load_matrices_as(r, row, false); }
inline void load_matrices_transposed(unsigned (&r)[4], const bf16 *row) { load_matrices_as(r, row, true); }

inline void start_copy(void *shared, const void *global, int size, bool valid) {
    if ((u64)shared % size || (valid && (u64)global % size))
        std::fprintf(stderr, "emulator: an asynchronous copy is not aligned\n"), std::abort();
    emulator::fibres[emulator::current].open.push_back({shared, global, size, valid});
}
inline void copy_async(void *shared, const void *global, bool valid) { start_copy(shared, global, 16, valid); }
inline void copy_async_8(void *shared, const void *global, bool valid) { start_copy(shared, global, 8, valid); }
inline void copy_commit() {
    auto &f = emulator::fibres[emulator::current];
    f.groups.push_back(std::move(f.open));
    f.open.clear();
}
template <int N> inline void copy_wait() {
    auto &groups = emulator::fibres[emulator::current].groups;
    for (; groups.size() > N; groups.pop_front())
        for (const auto &c : groups.front()) {
            if (c.valid)
                std::memcpy(c.to, c.from, c.size);
            else
                std::memset(c.to, 0, c.size);
        }
}

// Hopper instructions. Copies and products are executed immediately, so a missing wait does not show.
#define __align__(n) alignas(n)
struct TensorMap;
namespace emulator {
struct Barrier {
    int arrivals, pending, bytes, phase;
};
struct NamedBarrier {
    int arrived = 0, round = 0;
};
inline std::map<unsigned, Barrier> barriers;
inline NamedBarrier named_barriers[16];

inline void complete_phase(Barrier &b) {
    if (b.pending == 0 && b.bytes == 0) b.pending = b.arrivals, b.phase ^= 1;
}
template <class F> inline void spin_until(F done) {
    for (long long tries = 0; !done(); tries++) {
        if (tries == 10000000) std::fprintf(stderr, "emulator: waits for a barrier without end\n"), std::abort();
        yield(READY);
    }
}
int tma_load(unsigned to, const void *map, const int *at);
void tma_store(const void *map, unsigned from, const int *at);
// Swizzle of an address in rows of 128 bytes or less: the 16-byte column is XORed with the number of 128 bytes.
inline unsigned swizzled(unsigned at, unsigned row_bytes = 128) { return at ^ (at >> 7 & (row_bytes / 16 - 1)) << 4; }
inline float shared_bf16(unsigned at) {
    unsigned short bits;
    std::memcpy(&bits, dynamic_shared + swizzled(at), 2);
    unsigned word = (unsigned)bits << 16;
    float x;
    std::memcpy(&x, &word, 4);
    return x;
}
// Element `k` along the sum of row `i` (of column `i` if MN-major).
inline float element(u64 matrix, int i, int k, bool columns) {
    unsigned at = (matrix & 0x3fff) << 4, stride = (matrix >> 32 & 0x3fff) << 4, next = (matrix >> 16 & 0x3fff) << 4;
    if (columns) return shared_bf16(at + i / 64 * next + i % 64 * 2 + k / 8 * stride + k % 8 * 128);
    return shared_bf16(at + i / 8 * stride + i % 8 * 128 + k * 2);
}
// Byte `k` along the sum of row `i`.
inline unsigned char element_byte(u64 matrix, int i, int k) {
    unsigned at = (matrix & 0x3fff) << 4, stride = (matrix >> 32 & 0x3fff) << 4;
    return dynamic_shared[swizzled(at + i / 8 * stride + i % 8 * 128 + k)];
}
} // namespace emulator

inline unsigned shared_address(const void *p) { return (unsigned)((const unsigned char *)p - emulator::dynamic_shared); }
inline void barrier_init(unsigned barrier, unsigned arrivals) {
    emulator::barriers[barrier] = {(int)arrivals, (int)arrivals, 0, 0};
}
inline void barrier_init_fence() {}
inline void barrier_arrive(unsigned barrier) {
    auto &b = emulator::barriers[barrier];
    b.pending--;
    emulator::complete_phase(b);
}
inline void barrier_expect(unsigned barrier, unsigned bytes) {
    emulator::barriers[barrier].bytes += bytes;
    barrier_arrive(barrier);
}
inline void barrier_wait(unsigned barrier, unsigned parity) {
    emulator::spin_until([&] { return emulator::barriers[barrier].phase != (int)parity; });
}
inline void named_arrive(int which, int threads) {
    auto &n = emulator::named_barriers[which];
    if (++n.arrived == threads) n.arrived = 0, n.round++;
}
inline void named_sync(int which, int threads) {
    auto &n = emulator::named_barriers[which];
    int round = n.round;
    named_arrive(which, threads);
    emulator::spin_until([&] { return n.round != round; });
}
inline void tma_load(unsigned to, const TensorMap &from, unsigned barrier, int x, int y, int z = 0) {
    int at[3] = {x, y, z};
    int bytes = emulator::tma_load(to, &from, at);
    auto &b = emulator::barriers[barrier];
    b.bytes -= bytes;
    emulator::complete_phase(b);
}
// The blocks of a cluster run one after the other: each copies for itself what they share, and arrives for both.
const int CLUSTER = 2;
const bool CLUSTER_COPIES = false;
#define CLUSTERS
inline unsigned cluster_rank() { return blockIdx.x % CLUSTER; }
inline void cluster_sync() { __syncthreads(); }
inline void barrier_arrive_at(unsigned barrier, unsigned) { barrier_arrive(barrier); }
inline void tma_load_both(unsigned to, const TensorMap &from, unsigned barrier, int x, int y, int z) { tma_load(to, from, barrier, x, y, z); }
inline void tma_store(const TensorMap &to, unsigned from, int x, int y, int z) {
    int at[3] = {x, y, z};
    emulator::tma_store(&to, from, at);
}
inline void tma_store_commit() {}
template <int N> inline void tma_store_wait_read() {}
inline void tma_fence() {}
inline void prefetch_map(const TensorMap &) {}
inline void load_matrices(unsigned (&r)[4], unsigned from) { load_matrices_as(r, emulator::dynamic_shared + from, false); }
// Each lane's four pairs go to the rows whose addresses the lanes of that matrix passed.
inline void store_matrices(unsigned to, unsigned a, unsigned b, unsigned c, unsigned d) {
    unsigned in[5] = {to, a, b, c, d};
    emulator::warp_collective(in, 5, nullptr, 0, [](emulator::Warp &w) {
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++)
                std::memcpy(emulator::dynamic_shared + w.in[8 * i + lane / 4][0] + lane % 4 * 4, &w.in[lane][1 + i], 4);
    });
}

// Blocks run one after the other: a flag that is not set now never will be.
inline void fence_gpu() {}
inline unsigned atomicAdd(unsigned *p, unsigned n) { return (*p += n) - n; }
inline void set_flag(unsigned *flag) { *flag = 1; }
inline void wait_flag(unsigned *flag) {
    if (!*flag) std::fprintf(stderr, "emulator: waits for a later block\n"), std::abort();
    *flag = 0;
}
inline float load_l2(const float *p) { return *p; }
inline int load_l2(const int *p) { return *p; }
template <int N> inline void decrease_registers() {}
template <int N> inline void increase_registers() {}
inline void wgmma_fence() {}
inline void wgmma_commit() {}
// Products are computed lane by lane: wait for all lanes of the warp.
template <int N> inline void wgmma_wait() { __syncwarp(); }

// A warp's 16 of the 64 rows of a product; `a(i, k)` returns an element of the left operand.
template <int N, class A> inline void warp_product(float (&d)[N / 2], A a, u64 b, bool columns, bool add) {
    float left[16][16];
    for (int i = 0; i < 16; i++)
        for (int k = 0; k < 16; k++) left[i][k] = a(i, k);
    int lane = threadIdx.x % 32;
    for (int i = 0; i < N / 2; i++) {
        int row = lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        float sum = add ? d[i] : 0.0f;
        for (int k = 0; k < 16; k++) sum += left[row][k] * emulator::element(b, column, k, columns);
        d[i] = sum;
    }
}
template <bool A_COLUMNS, bool B_COLUMNS, int S> inline void wgmma_bf16(float (&d)[S], u64 a, u64 b, int add) {
    int first = threadIdx.x / 32 % 4 * 16;
    warp_product<2 * S>(d, [&](int i, int k) { return emulator::element(a, first + i, k, A_COLUMNS); }, b, B_COLUMNS, add);
}
// 32 bytes of each row of both operands.
template <class T, int S, class F> inline void warp_product_bytes(T (&d)[S], u64 a, u64 b, bool add, F value) {
    int lane = threadIdx.x % 32, first = threadIdx.x / 32 % 4 * 16;
    for (int i = 0; i < S; i++) {
        int row = lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        T sum = add ? d[i] : T(0);
        for (int k = 0; k < 32; k++)
            sum += value(emulator::element_byte(a, first + row, k)) * value(emulator::element_byte(b, column, k));
        d[i] = sum;
    }
}
float e4m3_to_float(unsigned char bits);
inline void mma_e4m3(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    mma_bytes(d, a, b0, b1, [](unsigned char x) { return e4m3_to_float(x); });
}
inline void mma_int8(int (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    mma_bytes(d, a, b0, b1, [](unsigned char x) { return (int)(signed char)x; });
}
// Fragment layout as in the PTX manual, mma.m16n8k64 with 4-bit types; scale_vec::4X with selectors of 0: the scales of a row of A
// come from one of the first two lanes of its group of four, those of a column of B from the first. A block's sum is exact.
inline void mma_nvfp4(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, unsigned a_scales, unsigned b_scales) {
    uint32_t words[8] = {a[0], a[1], a[2], a[3], b0, b1, a_scales, b_scales};
    emulator::warp_collective(words, 8, nullptr, 0, [](emulator::Warp &w) { std::memcpy(w.all, w.in, sizeof w.in); });
    const auto &all = emulator::warps[emulator::current / 32].all;
    // Twice the values.
    static const int e2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    int lane = threadIdx.x % 32;
    for (int i = 0; i < 4; i++) {
        int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        for (int block = 0; block < 4; block++) {
            int sum = 0;
            for (int k = 16 * block; k < 16 * block + 16; k++) {
                uint32_t left = all[row % 8 * 4 + k % 32 / 8][row / 8 + k / 32 * 2], right = all[column * 4 + k % 32 / 8][4 + k / 32];
                sum += e2m1[left >> k % 8 * 4 & 15] * e2m1[right >> k % 8 * 4 & 15];
            }
            // Scales have no sign.
            float left_scale = e4m3_to_float(all[row % 8 * 4 + row / 8][6] >> 8 * block & 0x7f);
            float right_scale = e4m3_to_float(all[column * 4][7] >> 8 * block & 0x7f);
            d[i] += 0.25f * (float)sum * left_scale * right_scale;
        }
    }
}
template <int S> inline void wgmma_e4m3(float (&d)[S], u64 a, u64 b, int add) {
    warp_product_bytes(d, a, b, add, [](unsigned char x) { return e4m3_to_float(x); });
}
template <int S> inline void wgmma_int8(int (&d)[S], u64 a, u64 b, int add) {
    warp_product_bytes(d, a, b, add, [](unsigned char x) { return (int)(signed char)x; });
}
// Collects the rows of a matrix from the registers of a warp.
inline void gather_rows(uint32_t (&rows)[16][8], const unsigned (&a)[4]) {
    emulator::warp_collective(a, 4, nullptr, 0, [](emulator::Warp &w) { std::memcpy(w.all, w.in, sizeof w.in); });
    const auto &all = emulator::warps[emulator::current / 32].all;
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++) rows[lane / 4 + i % 2 * 8][lane % 4 + i / 2 * 4] = all[lane][i];
}
inline float row_element(const uint32_t (&rows)[16][8], int i, int k) {
    uint32_t word = rows[i][k / 2];
    return __uint_as_float(k % 2 ? word & 0xffff0000u : word << 16);
}
inline void wgmma_n144_registers(float (&d)[72], const unsigned (&a)[4], u64 b, int add) {
    uint32_t rows[16][8];
    gather_rows(rows, a);
    warp_product<144>(d, [&](int i, int k) { return row_element(rows, i, k); }, b, false, add);
}
// The same for 32 bytes of each row.
template <class T, class F> inline void row_product_bytes(T (&d)[64], const unsigned (&a)[4], u64 b, F value) {
    uint32_t rows[16][8];
    gather_rows(rows, a);
    int lane = threadIdx.x % 32;
    for (int i = 0; i < 64; i++) {
        int row = lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        for (int k = 0; k < 32; k++)
            d[i] += value((unsigned char)(rows[row][k / 4] >> k % 4 * 8)) * value(emulator::element_byte(b, column, k));
    }
}
inline void wgmma_e4m3_registers(float (&d)[64], const unsigned (&a)[4], u64 b) {
    row_product_bytes(d, a, b, [](unsigned char x) { return e4m3_to_float(x); });
}
inline void wgmma_n8(float (&d)[4], u64 a, u64 b, int add) {
    int first = threadIdx.x / 32 % 4 * 16;
    warp_product<8>(d, [&](int i, int k) { return emulator::element(a, first + i, k, false); }, b, false, add);
}
inline void wgmma_n128_registers_mn_major(float (&d)[64], const unsigned (&a)[4], u64 b, int add = 1) {
    uint32_t rows[16][8];
    gather_rows(rows, a);
    warp_product<128>(d, [&](int i, int k) { return row_element(rows, i, k); }, b, true, add);
}
