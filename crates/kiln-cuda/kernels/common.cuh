// Shared by all kernels. No toolkit header is included: NVRTC would need its path.
// PTX instructions are wrapped here, and nowhere else but in hopper.cuh, e4m3.cuh, mma_gemm.cuh and gemm_mma_nvfp4.cu, so that
// tools/cuda/emulator can replace them on a machine without a GPU.

#ifndef KILN_EMULATED
typedef unsigned long long u64;
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#endif

struct bf16 {
    unsigned short bits;
};

struct f16 {
    unsigned short bits;
};

#ifndef KILN_EMULATED
__device__ __forceinline__ bf16 round_to_bf16(float x) {
    bf16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

// Rounds two values into one register, `low` in the lower half.
__device__ __forceinline__ unsigned round_bf16_pair(float low, float high) {
    unsigned y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

__device__ __forceinline__ float half_to_float(unsigned short bits) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
    return y;
}

// 2^x with a relative error of about 2^-22.
__device__ __forceinline__ float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / x with an error of 1 ulp.
__device__ __forceinline__ float fast_reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The larger value, or NaN if one of them is.
__device__ __forceinline__ float max_or_nan(float a, float b) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

// d += a * b: a 16x16 row-major, b 16x8, both bf16 fragments of a warp.
__device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ unsigned shared_address(const void *p) {
    return (unsigned)__cvta_generic_to_shared(p);
}

// Loads four 8x8 bf16 matrices; each lane passes one row of one of them.
__device__ __forceinline__ void load_matrices(unsigned (&r)[4], const bf16 *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void load_matrices_transposed(unsigned (&r)[4], const bf16 *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// Starts a copy of 16 bytes into shared memory; writes zeros if not `valid`.
__device__ __forceinline__ void copy_async(void *shared, const void *global, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
                 "r"(valid ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Load of 16 bytes that are constant and read once, past the L1 cache.
__device__ __forceinline__ uint4 load_streaming(const uint4 *p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

// Streaming store of 16 bytes that are not read again soon, to keep other data in the cache.
__device__ __forceinline__ void store_streaming(uint4 *p, uint4 v) {
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// Orders this thread's writes before its later ones, for other blocks.
__device__ __forceinline__ void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Loads from L2, bypassing this multiprocessor's L1, which may be stale.
__device__ __forceinline__ float load_l2(const float *p) {
    float x;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(p) : "memory");
    return x;
}

// Waits until at most the N latest groups are in flight.
template <int N> __device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Keeps the compiler from computing what follows from `x` ahead of a loop, and holding it in registers.
__device__ __forceinline__ void opaque(int &x) { asm volatile("" : "+r"(x)); }

// Whether it is true in any lane of the warp.
__device__ __forceinline__ bool any_lane(bool x) { return __any_sync(0xffffffffu, x); }
#endif

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }
__device__ __forceinline__ float to_float(f16 x) { return half_to_float(x.bits); }

// 4 exponent bits, 3 mantissa bits; all ones is NaN.
__device__ __forceinline__ float e4m3_to_float(unsigned char bits) {
    if ((bits & 0x7f) == 0x7f) return __uint_as_float(0x7fc00000u);
    // The exponent biases differ by 120; subnormals come out right, too.
    float y = __uint_as_float((unsigned)(bits & 0x7f) << 20) * __uint_as_float((120 + 127) << 23);
    return bits & 0x80 ? -y : y;
}

template <class T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ bf16 from_float<bf16>(float x) { return round_to_bf16(x); }

__device__ __forceinline__ bool aligned(const void *p) { return ((u64)p & 15) == 0; }

__device__ __forceinline__ void unpack(unsigned pair, float &low, float &high) {
    low = __uint_as_float(pair << 16);
    high = __uint_as_float(pair & 0xffff0000u);
}

// Eight elements as stored, which takes fewer registers than eight floats.
template <class T> struct Vec8;
template <> struct Vec8<float> {
    float4 a, b;
};
template <> struct Vec8<bf16> {
    uint4 a;
};
template <> struct Vec8<f16> {
    uint4 a;
};

__device__ __forceinline__ void widen(const Vec8<float> &x, float (&v)[8]) {
    v[0] = x.a.x, v[1] = x.a.y, v[2] = x.a.z, v[3] = x.a.w;
    v[4] = x.b.x, v[5] = x.b.y, v[6] = x.b.z, v[7] = x.b.w;
}

__device__ __forceinline__ void widen(const Vec8<bf16> &x, float (&v)[8]) {
    unpack(x.a.x, v[0], v[1]), unpack(x.a.y, v[2], v[3]), unpack(x.a.z, v[4], v[5]), unpack(x.a.w, v[6], v[7]);
}

__device__ __forceinline__ void widen(const Vec8<f16> &x, float (&v)[8]) {
    unsigned words[4] = {x.a.x, x.a.y, x.a.z, x.a.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        v[2 * i] = half_to_float((unsigned short)(words[i] & 0xffff));
        v[2 * i + 1] = half_to_float((unsigned short)(words[i] >> 16));
    }
}

// `p` is aligned to 16 bytes.
__device__ __forceinline__ Vec8<float> load_vec8(const float *p) { return {((const float4 *)p)[0], ((const float4 *)p)[1]}; }
template <class T> __device__ __forceinline__ Vec8<T> load_vec8(const T *p) { return {*(const uint4 *)p}; }

// The same for constants that are read once.
template <class T> __device__ __forceinline__ Vec8<T> load_vec8_streaming(const T *p) {
    return {load_streaming((const uint4 *)p)};
}
template <> __device__ __forceinline__ Vec8<float> load_vec8_streaming(const float *p) {
    uint4 a = load_streaming((const uint4 *)p), b = load_streaming((const uint4 *)p + 1);
    return {make_float4(__uint_as_float(a.x), __uint_as_float(a.y), __uint_as_float(a.z), __uint_as_float(a.w)),
            make_float4(__uint_as_float(b.x), __uint_as_float(b.y), __uint_as_float(b.z), __uint_as_float(b.w))};
}

// Eight elements as floats; `p` is aligned to 16 bytes.
template <class T> __device__ __forceinline__ void load_vector(const T *p, float (&v)[8]) { widen(load_vec8(p), v); }

// Rounds to the stored type.
template <class T> __device__ __forceinline__ Vec8<T> narrow(const float (&v)[8]);
template <> __device__ __forceinline__ Vec8<float> narrow<float>(const float (&v)[8]) {
    return {make_float4(v[0], v[1], v[2], v[3]), make_float4(v[4], v[5], v[6], v[7])};
}
template <> __device__ __forceinline__ Vec8<bf16> narrow<bf16>(const float (&v)[8]) {
    return {make_uint4(round_bf16_pair(v[0], v[1]), round_bf16_pair(v[2], v[3]), round_bf16_pair(v[4], v[5]),
                       round_bf16_pair(v[6], v[7]))};
}

__device__ __forceinline__ void store_vec8(float *p, const Vec8<float> &x) {
    ((float4 *)p)[0] = x.a;
    ((float4 *)p)[1] = x.b;
}
__device__ __forceinline__ void store_vec8(bf16 *p, const Vec8<bf16> &x) { *(uint4 *)p = x.a; }

template <class T> __device__ __forceinline__ void store_vector(T *p, const float (&v)[8]) { store_vec8(p, narrow<T>(v)); }

__device__ __forceinline__ void store_vector_streaming(float *p, const float (&v)[8]) {
    for (int i = 0; i < 8; i += 4)
        store_streaming((uint4 *)(p + i), make_uint4(__float_as_uint(v[i]), __float_as_uint(v[i + 1]),
                                                   __float_as_uint(v[i + 2]), __float_as_uint(v[i + 3])));
}

__device__ __forceinline__ void store_vector_streaming(bf16 *p, const float (&v)[8]) {
    store_streaming((uint4 *)p, narrow<bf16>(v).a);
}

// Two adjacent elements; bf16 pairs are aligned to 4 bytes.
__device__ __forceinline__ void load_pair(const float *p, float &a, float &b) { a = p[0], b = p[1]; }
__device__ __forceinline__ void load_pair(const bf16 *p, float &a, float &b) { unpack(*(const unsigned *)p, a, b); }
__device__ __forceinline__ void store_pair(float *p, float a, float b) { p[0] = a, p[1] = b; }
__device__ __forceinline__ void store_pair(bf16 *p, float a, float b) { *(unsigned *)p = round_bf16_pair(a, b); }

// Elements i..i+8 of n, zeros beyond; `vector`: p and n allow whole vectors.
template <class T> __device__ __forceinline__ void load8(const T *p, long long i, long long n, bool vector, float (&v)[8]) {
    if (vector) return load_vector(p + i, v);
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = i + j < n ? to_float(p[i + j]) : 0.0f;
}

template <class T> __device__ __forceinline__ void store8(T *p, long long i, long long n, bool vector, const float (&v)[8]) {
    if (vector) return store_vector(p + i, v);
#pragma unroll
    for (int j = 0; j < 8; j++)
        if (i + j < n) p[i + j] = from_float<T>(v[j]);
}

// Adds four terms to eight sums of one row of a product.
__device__ __forceinline__ void multiply_add(float (&sums)[8], const float4 &a, const float4 (&b)[8]) {
#pragma unroll
    for (int j = 0; j < 8; j++) sums[j] += a.x * b[j].x;
#pragma unroll
    for (int j = 0; j < 8; j++) sums[j] += a.y * b[j].y;
#pragma unroll
    for (int j = 0; j < 8; j++) sums[j] += a.z * b[j].z;
#pragma unroll
    for (int j = 0; j < 8; j++) sums[j] += a.w * b[j].w;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

// The sum over the block, in a fixed order, returned to every thread. The block consists of whole warps.
__device__ __forceinline__ float block_sum(float x) {
    __shared__ float parts[32];
    x = warp_sum(x);
    // Threads may still be reading the parts of the previous sum.
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0.0f;
    for (int i = 0; i < blockDim.x / 32; i++) sum += parts[i];
    return sum;
}

// Activations; the codes are those of the launchers: 1 SiLU, 2 ReLU, 3 soft clamp, 4 GELU.
__device__ __forceinline__ float activate(float x, int f) {
    if (f == 1) return x / (1.0f + expf(-x));
    if (f == 2) return x > 0.0f ? x : 0.0f;
    if (f == 3) return 3.0f * tanhf(x / 3.0f);
    if (f == 4) return 0.5f * x * erfcf(-0.707106781186547524f * x);
    return x;
}

// The same for a result of type T: bf16 does not need the last bits.
template <class T> __device__ __forceinline__ float activate_as(float x, int f) { return activate(x, f); }
template <> __device__ __forceinline__ float activate_as<bf16>(float x, int f) {
    return f == 1 ? x * fast_reciprocal(1.0f + fast_exp2(-1.44269504088896341f * x)) : activate(x, f);
}

// Matrices of one width, stacked by rows.
const int MAX_SEGMENTS = 8;

struct Segments {
    const void *start[MAX_SEGMENTS];
    // End row of each segment.
    int end[MAX_SEGMENTS];
    int count;
    int unused;
};

// Pointer to the first element of a row.
template <class T> __device__ __forceinline__ const T *segment_row(const Segments &s, int row, int width) {
    const void *start = s.start[0];
    int first = 0;
#pragma unroll
    for (int i = 1; i < MAX_SEGMENTS; i++) {
        if (i < s.count && row >= s.end[i - 1]) {
            start = s.start[i];
            first = s.end[i - 1];
        }
    }
    return (const T *)start + (long long)(row - first) * width;
}

struct AttentionArgs {
    Segments q, k, v;
    void *out;
    int queries, keys, heads, kv_heads, head_dim;
    // 0: none; 1: causal with `a` valid keys; 2: rows a..b only see each other.
    int mask, a, b;
    float scale;
    int unused;
    // [queries, heads]: the logarithm of each row's sum of exponentials, or null.
    float *lse;
};

// The keys low..high that a query sees; always one range.
template <class A> __device__ __forceinline__ void visible_keys(const A &args, int query, int &low, int &high) {
    low = 0;
    high = args.keys;
    if (args.mask == 1) {
        high = query + 1 < args.a ? query + 1 : args.a;
    } else if (args.mask == 2 && query >= args.a && query < args.b) {
        low = args.a;
        high = args.b;
    }
}

// The keys that any of the queries first..=last sees.
template <class A> __device__ __forceinline__ void visible_to_any(const A &args, int first, int last, int &begin, int &end) {
    begin = 0;
    end = args.keys;
    if (args.mask == 1) {
        end = last + 1 < args.a ? last + 1 : args.a;
    } else if (args.mask == 2 && first >= args.a && last < args.b) {
        begin = args.a;
        end = args.b;
    }
}

// The keys that all of the queries first..=last see.
template <class A> __device__ __forceinline__ void visible_to_all(const A &args, int first, int last, int &begin, int &end) {
    begin = 0;
    end = args.keys;
    if (args.mask == 1) {
        end = first + 1 < args.a ? first + 1 : args.a;
    } else if (args.mask == 2 && last >= args.a && first < args.b) {
        begin = args.a;
        end = args.b;
    }
}
