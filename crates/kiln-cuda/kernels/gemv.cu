// Products with up to MAX_ROWS rows, bound by reading the weight: it is read once, as stored.
// A warp computes COLUMNS results and keeps UNROLL vectors of each one's weights in flight, since memory answers late.
// One row on an H200: 4.5 TB/s for 5120 → 65536, 4.1 for 32768 → 5120, 3.4 for 5120 → 6144. Four vectors leave fewer warps
// for the registers and take 10 % longer; launches that overlap (programmatic dependent launch) gain 1 % of a token.

const int MAX_ROWS = 4, COLUMNS = 2, UNROLL = 2;

// Adds the products of `COUNT` vectors, 256 elements apart, of COLUMNS rows of the weight.
template <int COUNT, class X, class W>
__device__ __forceinline__ void multiply_vectors(float (&sums)[COLUMNS][MAX_ROWS], const X *x, long long ldx, int rows,
                                                 const W *const (&w)[COLUMNS], int i) {
    Vec8<W> weights[COUNT][COLUMNS];
#pragma unroll
    for (int n = 0; n < COUNT; n++)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) weights[n][c] = load_vec8_streaming(w[c] + i + 256 * n);
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
#pragma unroll
        for (int r = 0; r < MAX_ROWS; r++) {
            if (r < rows) {
                float a[8], b[8];
                load_vector(x + r * ldx + i + 256 * n, a);
#pragma unroll
                for (int c = 0; c < COLUMNS; c++) {
                    widen(weights[n][c], b);
#pragma unroll
                    for (int j = 0; j < 8; j++) sums[c][r] += a[j] * b[j];
                }
            }
        }
    }
}

template <class X, class W, class O>
__device__ __forceinline__ void gemv(const X *x, long long ldx, const W *w, long long ldw, int rows, int k, int n,
                                     float alpha, const float *bias, const O *add, long long ldadd, O *out, long long ldo) {
    int first = COLUMNS * ((blockIdx.x * blockDim.x + threadIdx.x) / 32), lane = threadIdx.x % 32;
    if (first >= n) return;
    const W *columns[COLUMNS];
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) columns[c] = w + (first + c < n ? first + c : first) * ldw;
    float sums[COLUMNS][MAX_ROWS] = {};
    if (k % 8 == 0 && ldw % 8 == 0 && ldx % 8 == 0 && aligned(w) && aligned(x)) {
        int i = 8 * lane;
        for (; i + 256 * (UNROLL - 1) < k; i += 256 * UNROLL) multiply_vectors<UNROLL>(sums, x, ldx, rows, columns, i);
        for (; i < k; i += 256) multiply_vectors<1>(sums, x, ldx, rows, columns, i);
    } else {
        for (int i = lane; i < k; i += 32)
#pragma unroll
            for (int c = 0; c < COLUMNS; c++)
#pragma unroll
                for (int r = 0; r < MAX_ROWS; r++)
                    if (r < rows) sums[c][r] += to_float(x[r * ldx + i]) * to_float(columns[c][i]);
    }
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
#pragma unroll
        for (int r = 0; r < MAX_ROWS; r++) {
            if (r >= rows) continue;
            float sum = alpha * warp_sum(sums[c][r]);
            int column = first + c;
            if (lane == 0 && column < n) {
                if (bias) sum += bias[column];
                if (add) sum += to_float(add[r * ldadd + column]);
                out[r * ldo + column] = from_float<O>(sum);
            }
        }
    }
}

#define KERNEL(X, W, O, name)                                                                                         \
    extern "C" __global__ void __launch_bounds__(128) gemv_##name(                                                    \
        const X *x, long long ldx, const W *w, long long ldw, int rows, int k, int n, float alpha, const float *bias, \
        const O *add, long long ldadd, O *out, long long ldo) {                                                       \
        gemv(x, ldx, w, ldw, rows, k, n, alpha, bias, add, ldadd, out, ldo);                                          \
    }

KERNEL(float, float, float, f32_f32_f32)
KERNEL(float, bf16, float, f32_bf16_f32)
KERNEL(float, f16, float, f32_f16_f32)
KERNEL(bf16, float, bf16, bf16_f32_bf16)
KERNEL(bf16, bf16, bf16, bf16_bf16_bf16)
KERNEL(bf16, f16, bf16, bf16_f16_bf16)
KERNEL(bf16, float, float, bf16_f32_f32)
KERNEL(bf16, bf16, float, bf16_bf16_f32)
KERNEL(bf16, f16, float, bf16_f16_f32)
