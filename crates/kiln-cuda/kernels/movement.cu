// Data movement, and conversion to bytes.

// Copies rows of `width` units into a wider matrix at column `column`.
template <class U>
__device__ __forceinline__ void copy_columns(const U *x, U *out, long long rows, int width, int column, int out_width) {
    long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= rows * width) return;
    long long row = at / width;
    out[row * out_width + column + at % width] = x[at];
}

// [h, w, c] to [h/2, w/2, 4c]; `inverse` is depth to space, with the same h, w and c.
template <class U> __device__ __forceinline__ void space_to_depth(const U *x, U *out, int h, int w, int c, int inverse) {
    long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= (long long)h * w * c) return;
    // Position in [h, w, c].
    int channel = (int)(at % c);
    int column = (int)(at / c % w), row = (int)(at / c / w);
    long long coarse = ((long long)(row / 2) * (w / 2) + column / 2) * 4 * c + 4 * channel + 2 * (row % 2) + column % 2;
    if (inverse)
        out[at] = x[coarse];
    else
        out[coarse] = x[at];
}

// Nearest-neighbour 2x upsampling of [h, w, c]; c counts 16-byte vectors.
extern "C" __global__ void upsample(const uint4 *x, uint4 *out, int h, int w, int c) {
    long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= (long long)h * w * c) return;
    int channel = (int)(at % c);
    long long column = at / c % w, row = at / c / w;
    uint4 value = x[at];
    out += (2 * row * 2 * w + 2 * column) * c + channel;
    out[0] = value;
    out[c] = value;
    out[2 * (long long)w * c] = value;
    out[2 * (long long)w * c + c] = value;
}

// Converts eight values per thread to bytes; `out` is padded to a multiple of 8 bytes.
template <class T> __device__ __forceinline__ void to_bytes(const T *x, unsigned *out, long long n, float scale, float shift) {
    long long i = 8 * ((long long)blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= n) return;
    float v[8];
    load8(x, i, n, i + 8 <= n && aligned(x), v);
    unsigned words[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < 8; j++) {
        // In this order NaN becomes 0.
        float unit = fminf(fmaxf(v[j] * scale + shift, 0.0f), 1.0f);
        words[j / 4] |= (unsigned)rintf(unit * 255.0f) << 8 * (j % 4);
    }
    out[i / 4] = words[0], out[i / 4 + 1] = words[1];
}

extern "C" __global__ void to_bytes_f32(const float *x, unsigned *out, long long n, float scale, float shift) {
    to_bytes(x, out, n, scale, shift);
}

extern "C" __global__ void to_bytes_bf16(const bf16 *x, unsigned *out, long long n, float scale, float shift) {
    to_bytes(x, out, n, scale, shift);
}

#define COPY_COLUMNS(U, name)                                                                                         \
    extern "C" __global__ void copy_columns_##name(const U *x, U *out, long long rows, int width, int column,         \
                                                   int out_width) {                                                   \
        copy_columns(x, out, rows, width, column, out_width);                                                         \
    }
#define SPACE_TO_DEPTH(U, name)                                                                                       \
    extern "C" __global__ void space_to_depth_##name(const U *x, U *out, int h, int w, int c, int inverse) {          \
        space_to_depth(x, out, h, w, c, inverse);                                                                     \
    }

COPY_COLUMNS(unsigned short, 2)
COPY_COLUMNS(unsigned, 4)
COPY_COLUMNS(uint4, 16)
SPACE_TO_DEPTH(unsigned short, 2)
SPACE_TO_DEPTH(unsigned, 4)
