// Epilogue of matrix products: bias, gate, residual, and rounding of f32 sums. A gate in bf16 needs it: cuBLASLt has no algorithm
// with a factor per column (a vector as alpha).

// residual + gate * (sums + bias); all but the sums are optional. The gate is one row for all rows.
template <class S, class T>
__device__ __forceinline__ void epilogue(const S *sums, const float *bias, const float *gate, const T *residual, T *out,
                                       long long rows, int cols) {
    int chunks = (cols + 7) / 8;
    long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= rows * chunks) return;
    long long row = at / chunks;
    int i = 8 * (int)(at % chunks);
    // Null pointers count as aligned.
    bool vector = cols % 8 == 0 && aligned(sums) && aligned(bias) && aligned(gate) && aligned(residual) && aligned(out);
    float v[8], a[8];
    load8(sums + row * cols, i, cols, vector, v);
    if (bias) {
        load8(bias, i, cols, vector, a);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] += a[j];
    }
    if (gate) {
        load8(gate, i, cols, vector, a);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] *= a[j];
    }
    if (residual) {
        load8(residual + row * cols, i, cols, vector, a);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] += a[j];
    }
    store8(out + row * cols, i, cols, vector, v);
}

#define KERNEL(S, T, name)                                                                                             \
    extern "C" __global__ void epilogue_##name(const S *sums, const float *bias, const float *gate, const T *residual, \
                                             T *out, long long rows, int cols) {                                       \
        epilogue(sums, bias, gate, residual, out, rows, cols);                                                         \
    }

KERNEL(float, float, f32_f32)
KERNEL(float, bf16, f32_bf16)
KERNEL(bf16, bf16, bf16_bf16)

// Scales of a quantized weight's rows, times a gate: the product with them needs no epilogue.
extern "C" __global__ void gate_scales(const float *scales, const float *gate, float *out, int rows) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row < rows) out[row] = scales[row] * gate[row];
}
