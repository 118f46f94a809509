// Products with up to MAX_ROWS rows, bound by reading the weight: it is read once, as stored, one warp per output column.

const int MAX_ROWS = 4;

template <class X, class W, class O>
__device__ __forceinline__ void gemv(const X *x, long long ldx, const W *w, long long ldw, int rows, int k, int n,
                                         float alpha, const float *bias, const O *add, long long ldadd, O *out, long long ldo) {
    int column = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (column >= n) return;
    w += column * ldw;
    bool vector = k % 8 == 0 && ldw % 8 == 0 && ldx % 8 == 0 && aligned(w) && aligned(x);
    float sums[MAX_ROWS] = {}, a[8], b[8];
    for (int i = 8 * lane; i < k; i += 256) {
        load8(w, i, k, vector, b);
#pragma unroll
        for (int r = 0; r < MAX_ROWS; r++) {
            if (r < rows) {
                load8(x + r * ldx, i, k, vector, a);
#pragma unroll
                for (int j = 0; j < 8; j++) sums[r] += a[j] * b[j];
            }
        }
    }
#pragma unroll
    for (int r = 0; r < MAX_ROWS; r++) {
        float sum = alpha * warp_sum(sums[r]);
        if (r < rows && lane == 0) {
            if (bias) sum += bias[column];
            if (add) sum += to_float(add[r * ldadd + column]);
            out[r * ldo + column] = from_float<O>(sum);
        }
    }
}

#define KERNEL(X, W, O, name)                                                                                         \
    extern "C" __global__ void gemv_##name(const X *x, long long ldx, const W *w, long long ldw, int rows, int k,     \
                                               int n, float alpha, const float *bias, const O *add, long long ldadd,  \
                                               O *out, long long ldo) {                                               \
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
