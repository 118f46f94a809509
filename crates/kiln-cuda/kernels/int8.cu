// int8 products: activations are quantized with one scale per row, summed exactly and rescaled.

// One block per row; rows are zero-padded to `padded` bytes. Rows with NaN or infinity get a scale of NaN.
template <class T>
__device__ __forceinline__ void quantize(const T *x, signed char *q, float *scales, int cols, int padded) {
    __shared__ float warp_maxes[32];
    x += (long long)blockIdx.x * cols;
    q += (long long)blockIdx.x * padded;
    const float INFINITE = __uint_as_float(0x7f800000u);
    float largest = 0.0f;
    for (int i = threadIdx.x; i < cols; i += blockDim.x) {
        float a = fabsf(to_float(x[i]));
        // A comparison with NaN is false.
        largest = fmaxf(largest, a < INFINITE ? a : INFINITE);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
    if (threadIdx.x % 32 == 0) warp_maxes[threadIdx.x / 32] = largest;
    __syncthreads();
    for (int i = 0; i < blockDim.x / 32; i++) largest = fmaxf(largest, warp_maxes[i]);
    float inverse = 127.0f / largest, scale = largest / 127.0f;
    if (largest == INFINITE) {
        inverse = 0.0f;
        scale = __uint_as_float(0x7fc00000u);
    } else if (largest < 1e-30f) {
        inverse = 0.0f;
        scale = 0.0f;
    }
    for (int i = threadIdx.x; i < padded; i += blockDim.x) {
        float v = i < cols ? rintf(to_float(x[i]) * inverse) : 0.0f;
        // Infinity times 0 is NaN and becomes 0.
        q[i] = v >= -127.0f && v <= 127.0f ? (signed char)v : 0;
    }
    if (threadIdx.x == 0) scales[blockIdx.x] = scale;
}

extern "C" __global__ void quantize_int8_f32(const float *x, signed char *q, float *scales, int cols, int padded) {
    quantize(x, q, scales, cols, padded);
}
extern "C" __global__ void quantize_int8_bf16(const bf16 *x, signed char *q, float *scales, int cols, int padded) {
    quantize(x, q, scales, cols, padded);
}

// 64 rows by 64 outputs per block of 256 threads. The row stride of both, `depth` bytes, is a multiple of 16.
template <class O>
__device__ __forceinline__ void gemm_int8(const signed char *q, const float *q_scales, const signed char *w,
                                             const float *w_scales, const float *bias, const O *add, O *out, int rows, int n,
                                             int depth, long long ldadd, long long ldo) {
    __shared__ int qs[16][68], ws[16][68];
    int m0 = blockIdx.x * 64, n0 = blockIdx.y * 64;
    int load_row = threadIdx.x / 4, load_word = threadIdx.x % 4 * 4;
    int row = threadIdx.x / 16, column = threadIdx.x % 16;
    int sums[4][4] = {};
    for (int k0 = 0; k0 < depth; k0 += 64) {
        int k = k0 + 4 * load_word;
        uint4 a = make_uint4(0, 0, 0, 0), b = a;
        if (k < depth && m0 + load_row < rows) a = *(const uint4 *)(q + (long long)(m0 + load_row) * depth + k);
        if (k < depth && n0 + load_row < n) b = *(const uint4 *)(w + (long long)(n0 + load_row) * depth + k);
        qs[load_word][load_row] = a.x, qs[load_word + 1][load_row] = a.y;
        qs[load_word + 2][load_row] = a.z, qs[load_word + 3][load_row] = a.w;
        ws[load_word][load_row] = b.x, ws[load_word + 1][load_row] = b.y;
        ws[load_word + 2][load_row] = b.z, ws[load_word + 3][load_row] = b.w;
        __syncthreads();
#pragma unroll
        for (int kk = 0; kk < 16; kk++) {
            int left[4], right[4];
#pragma unroll
            for (int i = 0; i < 4; i++) left[i] = qs[kk][4 * row + i], right[i] = ws[kk][4 * column + i];
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) sums[i][j] = __dp4a(left[i], right[j], sums[i][j]);
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int m = m0 + 4 * row + i, c = n0 + 4 * column + j;
            if (m < rows && c < n) {
                float v = (float)sums[i][j] * q_scales[m] * w_scales[c];
                if (bias) v += bias[c];
                if (add) v += to_float(add[m * ldadd + c]);
                out[m * ldo + c] = from_float<O>(v);
            }
        }
}

#define KERNEL(O, name)                                                                                               \
    extern "C" __global__ void __launch_bounds__(256)                                                                 \
        gemm_int8_##name(const signed char *q, const float *q_scales, const signed char *w, const float *w_scales,    \
                            const float *bias, const O *add, O *out, int rows, int n, int depth, long long ldadd,     \
                            long long ldo) {                                                                          \
        gemm_int8(q, q_scales, w, w_scales, bias, add, out, rows, n, depth, ldadd, ldo);                              \
    }

KERNEL(float, f32)
KERNEL(bf16, bf16)
