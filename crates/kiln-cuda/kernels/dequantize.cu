// Dequantization of packed weights: eight values per thread, which share a scale in every format.

#include "e2m1.cuh"

// The launcher's codes.
enum Format {
    F32, BF16, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, F8_E4M3, F8_E5M2, NVFP4, INT8
};

// A packed matrix of `cols` columns with a row stride of `row_bytes`, and its scales.
struct PackedMatrixArgs {
    const unsigned char *data;
    // One per row, or null.
    const float *row_scales;
    // One e4m3 value per 16 columns, rows of `block_bytes` bytes, or null.
    const unsigned char *block_scales;
    // One per tile of `tile_rows` by `tile_cols` values, a multiple of 8, or null. The first row is row `tile_start` of its tile.
    const float *tile_scales;
    long long rows, row_bytes;
    int cols, format;
    float scale;
    // Whether the first of two 4-bit values is in the high nibble.
    int high_first;
    int tile_rows, tile_cols, tile_start, block_bytes;
};

__device__ __forceinline__ float load_half(const unsigned char *p) { return half_to_float((unsigned short)(p[0] | p[1] << 8)); }

// Reads a block of 32 values: low nibbles are the first 16, high nibbles the others; `fifths` holds the fifth bits.
__device__ __forceinline__ void read_nibbles(const unsigned char *nibble, unsigned fifths, int at, float d, float offset, float m,
                                             float (&v)[8]) {
    int shift = at < 16 ? 0 : 4;
    nibble += at % 16;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        int q = nibble[j] >> shift & 15 | (int)(fifths >> (at + j) & 1) << 4;
        v[j] = d * ((float)q - offset) + m;
    }
}

__device__ __forceinline__ unsigned load_word(const unsigned char *p) { return p[0] | p[1] << 8 | p[2] << 16 | (unsigned)p[3] << 24; }

// Scale and minimum of a sub-block of 32, six bits each; the upper two bits of the last four are stored with the first four.
__device__ __forceinline__ void unpack_scale_min(const unsigned char *s, int group, float &d, float &m) {
    int scale, minimum;
    if (group < 4) {
        scale = s[group] & 63, minimum = s[group + 4] & 63;
    } else {
        scale = s[group + 4] & 15 | s[group - 4] >> 6 << 4, minimum = s[group + 4] >> 4 | s[group] >> 6 << 4;
    }
    d *= (float)scale;
    m *= (float)minimum;
}

// The values of IQ4's codes, a byte each: -127, -104, -83, -65, -49, -35, -22, -10, and 1, 13, 25, 38, 53, 69, 89, 113.
__device__ __forceinline__ float iq4_to_float(int code) {
    unsigned long long values = code & 8 ? 0x7159453526190d01ull : 0xf6eaddcfbfad9881ull;
    return (float)(signed char)(values >> 8 * (code & 7));
}

// Reads 32 IQ4 values: low nibbles are the first 16, high nibbles the others.
__device__ __forceinline__ void read_iq4(const unsigned char *nibble, int at, float d, float (&v)[8]) {
    int shift = at < 16 ? 0 : 4;
    nibble += at % 16;
    for (int j = 0; j < 8; j++) v[j] = d * iq4_to_float(nibble[j] >> shift & 15);
}

// Eight values of a GGUF block, from value `at` on.
__device__ __forceinline__ void read_block(int format, const unsigned char *b, int at, float (&v)[8]) {
    int group = at / 16, half = at / 128;
    switch (format) {
    case Q4_0: return read_nibbles(b + 2, 0, at, load_half(b), 8.0f, 0.0f, v);
    case Q4_1: return read_nibbles(b + 4, 0, at, load_half(b), 0.0f, load_half(b + 2), v);
    case Q5_0: return read_nibbles(b + 6, load_word(b + 2), at, load_half(b), 16.0f, 0.0f, v);
    case Q5_1: return read_nibbles(b + 8, load_word(b + 4), at, load_half(b), 0.0f, load_half(b + 2), v);
    case Q8_0: {
        float d = load_half(b);
        for (int j = 0; j < 8; j++) v[j] = d * (float)(signed char)b[2 + at + j];
        return;
    }
    case Q2_K: {
        float d = load_half(b + 80) * (float)(b[group] & 15), m = load_half(b + 82) * (float)(b[group] >> 4);
        const unsigned char *q = b + 16 + half * 32 + at % 32;
        int shift = at % 128 / 32 * 2;
        for (int j = 0; j < 8; j++) v[j] = d * (float)(q[j] >> shift & 3) - m;
        return;
    }
    case Q3_K: {
        const unsigned char *s = b + 96, *q = b + 32 + half * 32 + at % 32, *high = b + at % 32;
        int low = group < 8 ? s[group] & 15 : s[group - 8] >> 4, upper = s[8 + group % 4] >> 2 * (group / 4) & 3;
        float d = load_half(b + 108) * (float)((low | upper << 4) - 32);
        int shift = at % 128 / 32 * 2, bit = at / 32;
        for (int j = 0; j < 8; j++) v[j] = d * (float)((q[j] >> shift & 3 | (high[j] >> bit & 1) << 2) - 4);
        return;
    }
    case Q4_K:
    case Q5_K: {
        float d = load_half(b), m = load_half(b + 2);
        int sub_block = at / 32;
        unpack_scale_min(b + 4, sub_block, d, m);
        const unsigned char *high = b + 16 + at % 32, *q = b + (format == Q4_K ? 16 : 48) + at / 64 * 32 + at % 32;
        for (int j = 0; j < 8; j++) {
            int fifth = format == Q4_K ? 0 : high[j] >> sub_block & 1;
            v[j] = d * (float)(q[j] >> sub_block % 2 * 4 & 15 | fifth << 4) - m;
        }
        return;
    }
    case Q6_K: {
        float d = load_half(b + 208) * (float)(signed char)b[192 + group];
        int sub_block = at % 128 / 32;
        const unsigned char *low = b + half * 64 + sub_block % 2 * 32 + at % 32, *high = b + 128 + half * 32 + at % 32;
        for (int j = 0; j < 8; j++) v[j] = d * (float)((low[j] >> sub_block / 2 * 4 & 15 | (high[j] >> 2 * sub_block & 3) << 4) - 32);
        return;
    }
    case IQ4_NL: return read_iq4(b + 2, at, load_half(b), v);
    case IQ4_XS: {
        int sub_block = at / 32, low = b[4 + sub_block / 2] >> sub_block % 2 * 4 & 15;
        int upper = b[2 + sub_block / 4] >> 2 * (sub_block % 4) & 3;
        return read_iq4(b + 8 + 16 * sub_block, at % 32, load_half(b) * (float)((low | upper << 4) - 32), v);
    }
    }
}

// Eight values of a row from column `i` on; those past the end are not read.
__device__ __forceinline__ void read_row(const PackedMatrixArgs &w, const unsigned char *row, long long number, int i, float (&v)[8]) {
    int count = w.cols - i < 8 ? w.cols - i : 8;
    switch (w.format) {
    case F32:
        for (int j = 0; j < count; j++) v[j] = ((const float *)row)[i + j];
        return;
    case BF16:
        for (int j = 0; j < count; j++) v[j] = to_float(((const bf16 *)row)[i + j]);
        return;
    case F16:
        for (int j = 0; j < count; j++) v[j] = to_float(((const f16 *)row)[i + j]);
        return;
    case F8_E4M3:
        for (int j = 0; j < count; j++) v[j] = e4m3_to_float(row[i + j]);
        return;
    case INT8:
        for (int j = 0; j < count; j++) v[j] = (float)(signed char)row[i + j];
        return;
    case F8_E5M2:
        for (int j = 0; j < count; j++) v[j] = half_to_float((unsigned short)(row[i + j] << 8));
        return;
    case NVFP4: {
        float scale = w.block_scales ? e4m3_to_float(w.block_scales[number * w.block_bytes + i / 16]) : 1.0f;
        for (int j = 0; j < 8; j++) {
            unsigned char pair = row[(i + j) / 2];
            v[j] = scale * e2m1_to_float(j % 2 == w.high_first ? pair & 15 : pair >> 4);
        }
        return;
    }
    case Q2_K:
    case Q3_K:
    case Q4_K:
    case Q5_K:
    case Q6_K:
    case IQ4_XS: return read_block(w.format, row + i / 256 * (w.row_bytes / (w.cols / 256)), i % 256, v);
    default: return read_block(w.format, row + i / 32 * (w.row_bytes / (w.cols / 32)), i % 32, v);
    }
}

template <class T> __device__ __forceinline__ void dequantize(const PackedMatrixArgs &w, T *out) {
    int chunks = (w.cols + 7) / 8;
    long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= w.rows * chunks) return;
    long long row = at / chunks;
    int i = 8 * (int)(at % chunks);
    float v[8] = {}, scale = w.row_scales ? w.row_scales[row] : w.scale;
    if (w.tile_scales) {
        long long down = (row + w.tile_start) / w.tile_rows, across = (w.cols + w.tile_cols - 1) / w.tile_cols;
        scale = w.tile_scales[down * across + i / w.tile_cols];
    }
    read_row(w, w.data + row * w.row_bytes, row, i, v);
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] *= scale;
    store8(out + row * w.cols, i, w.cols, w.cols % 8 == 0 && aligned(out), v);
}

extern "C" __global__ void dequantize_f32(PackedMatrixArgs w, float *out) { dequantize(w, out); }
extern "C" __global__ void dequantize_bf16(PackedMatrixArgs w, bf16 *out) { dequantize(w, out); }
