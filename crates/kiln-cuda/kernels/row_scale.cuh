// Quantization of rows with one scale each: reading a row, and its scale.

// Updates `largest` with absolute values; NaN stays.
__device__ __forceinline__ void update_abs_max(float &largest, const float (&v)[8]) {
#pragma unroll
    for (int j = 0; j < 8; j++) largest = max_or_nan(largest, fabsf(v[j]));
}

// A row's scale for dequantization and its inverse for quantization.
struct RowScale {
    float inverse, scale;
};

// The maximum of a warp.
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = max_or_nan(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

// The maximum of a block of WARPS warps; 0 for any number.
template <int WARPS> __device__ __forceinline__ float block_max(float x) {
    __shared__ float parts[WARPS ? WARPS : 32];
    x = warp_max(x);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    int warps = WARPS ? WARPS : blockDim.x / 32;
#pragma unroll
    for (int i = 0; i < warps; i++) x = max_or_nan(x, parts[i]);
    return x;
}

// The scale that maps a row's largest absolute value to LARGEST. Rows with NaN or infinity get a scale of NaN.
template <int LARGEST> __device__ __forceinline__ RowScale row_scale(float largest) {
    if (!(largest < __uint_as_float(0x7f800000u))) return {0.0f, __uint_as_float(0x7fc00000u)};
    if (largest < 1e-30f) return {0.0f, 0.0f};
    return {LARGEST / largest, largest / LARGEST};
}

// A row of two matrices, concatenated by columns; either may have none.
template <class T> struct ConcatenatedRow {
    const T *x, *y;
    int x_cols, cols;
    bool vector;

    __device__ __forceinline__ ConcatenatedRow(const T *x, int x_cols, const T *y, int y_cols, long long row)
        : x(x + row * x_cols), y(y + row * y_cols), x_cols(x_cols), cols(x_cols + y_cols) {
        vector = x_cols % 8 == 0 && y_cols % 8 == 0 && aligned(this->x) && aligned(this->y);
    }

    __device__ __forceinline__ float element(int i) const {
        return i < x_cols ? to_float(x[i]) : i < cols ? to_float(y[i - x_cols]) : 0.0f;
    }

    // Loads eight elements from a multiple of eight on, where rows are whole vectors.
    __device__ __forceinline__ Vec8<T> load_stored(int i) const {
        Vec8<T> stored;
        if (vector && i < cols) stored = load_vec8(i < x_cols ? x + i : y + (i - x_cols));
        return stored;
    }

    // The values of those elements, zeros beyond the row.
    __device__ __forceinline__ void values(int i, const Vec8<T> &stored, float (&v)[8]) const {
        if (vector && i < cols) return widen(stored, v);
        for (int j = 0; j < 8; j++) v[j] = element(i + j);
    }

    __device__ __forceinline__ void load(int i, float (&v)[8]) const { values(i, load_stored(i), v); }
};
