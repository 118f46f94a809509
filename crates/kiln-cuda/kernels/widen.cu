// Packed weights written out: eight values a thread, which in every format share a group, and so a scale.

// In the order of the launcher's codes.
enum Format { F32, BF16, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, F8_E4M3, F8_E5M2, NVFP4 };

// A matrix of `cols` columns, its rows `row_bytes` apart, and what its numbers are multiplied with.
struct Packed {
    const unsigned char *data;
    // One a row, or none.
    const float *row_scales;
    // One 8-bit float for 16 columns, row by row, or none.
    const unsigned char *block_scales;
    long long rows, row_bytes;
    int cols, format;
    float scale;
    // Whether the first of two 4-bit floats is in the high half of its byte.
    int high_first;
};

__device__ __forceinline__ float half_at(const unsigned char *p) { return widen_half((unsigned short)(p[0] | p[1] << 8)); }

// Sign, two bits of exponent, one of fraction.
__device__ __forceinline__ float from_e2m1(int code) {
    int exponent = code >> 1 & 3, fraction = code & 1;
    float y = exponent ? (float)((2 + fraction) << exponent) * 0.25f : 0.5f * fraction;
    return code & 8 ? -y : y;
}

// Of a block of 32 values: the low nibbles are the first 16, the high ones the others; a fifth bit lies in a word beside them.
__device__ __forceinline__ void nibbles(const unsigned char *nibble, unsigned fifths, int at, float d, float offset, float m, float (&v)[8]) {
    int shift = at < 16 ? 0 : 4;
    nibble += at % 16;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        int q = nibble[j] >> shift & 15 | (int)(fifths >> (at + j) & 1) << 4;
        v[j] = d * ((float)q - offset) + m;
    }
}

__device__ __forceinline__ unsigned word_at(const unsigned char *p) { return p[0] | p[1] << 8 | p[2] << 16 | (unsigned)p[3] << 24; }

// Scale and minimum of a group of 32: six bits each, of the last four groups two of them above the first four's.
__device__ __forceinline__ void six_bits(const unsigned char *s, int group, float &d, float &m) {
    int scale, minimum;
    if (group < 4) {
        scale = s[group] & 63, minimum = s[group + 4] & 63;
    } else {
        scale = s[group + 4] & 15 | s[group - 4] >> 6 << 4, minimum = s[group + 4] >> 4 | s[group] >> 6 << 4;
    }
    d *= (float)scale;
    m *= (float)minimum;
}

// Eight values of a block of GGUF's, from value `at` on.
__device__ __forceinline__ void read_block(int format, const unsigned char *b, int at, float (&v)[8]) {
    int group = at / 16, side = at / 128;
    switch (format) {
    case Q4_0: return nibbles(b + 2, 0, at, half_at(b), 8.0f, 0.0f, v);
    case Q4_1: return nibbles(b + 4, 0, at, half_at(b), 0.0f, half_at(b + 2), v);
    case Q5_0: return nibbles(b + 6, word_at(b + 2), at, half_at(b), 16.0f, 0.0f, v);
    case Q5_1: return nibbles(b + 8, word_at(b + 4), at, half_at(b), 0.0f, half_at(b + 2), v);
    case Q8_0: {
        float d = half_at(b);
        for (int j = 0; j < 8; j++) v[j] = d * (float)(signed char)b[2 + at + j];
        return;
    }
    case Q2_K: {
        float d = half_at(b + 80) * (float)(b[group] & 15), m = half_at(b + 82) * (float)(b[group] >> 4);
        const unsigned char *q = b + 16 + side * 32 + at % 32;
        int shift = at % 128 / 32 * 2;
        for (int j = 0; j < 8; j++) v[j] = d * (float)(q[j] >> shift & 3) - m;
        return;
    }
    case Q3_K: {
        const unsigned char *s = b + 96, *q = b + 32 + side * 32 + at % 32, *high = b + at % 32;
        int low = group < 8 ? s[group] & 15 : s[group - 8] >> 4, upper = s[8 + group % 4] >> 2 * (group / 4) & 3;
        float d = half_at(b + 108) * (float)((low | upper << 4) - 32);
        int shift = at % 128 / 32 * 2, bit = at / 32;
        for (int j = 0; j < 8; j++) v[j] = d * (float)((q[j] >> shift & 3 | (high[j] >> bit & 1) << 2) - 4);
        return;
    }
    case Q4_K:
    case Q5_K: {
        float d = half_at(b), m = half_at(b + 2);
        int turn = at / 32;
        six_bits(b + 4, turn, d, m);
        const unsigned char *high = b + 16 + at % 32, *q = b + (format == Q4_K ? 16 : 48) + at / 64 * 32 + at % 32;
        for (int j = 0; j < 8; j++) {
            int fifth = format == Q4_K ? 0 : high[j] >> turn & 1;
            v[j] = d * (float)(q[j] >> turn % 2 * 4 & 15 | fifth << 4) - m;
        }
        return;
    }
    case Q6_K: {
        float d = half_at(b + 208) * (float)(signed char)b[192 + group];
        int turn = at % 128 / 32;
        const unsigned char *low = b + side * 64 + turn % 2 * 32 + at % 32, *high = b + 128 + side * 32 + at % 32;
        for (int j = 0; j < 8; j++) v[j] = d * (float)((low[j] >> turn / 2 * 4 & 15 | (high[j] >> 2 * turn & 3) << 4) - 32);
        return;
    }
    }
}

// Values of a row from column `i` on; those behind the last are not read.
__device__ __forceinline__ void read_row(const Packed &w, const unsigned char *row, long long number, int i, float (&v)[8]) {
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
        for (int j = 0; j < count; j++) v[j] = from_e4m3(row[i + j]);
        return;
    case F8_E5M2:
        for (int j = 0; j < count; j++) v[j] = widen_half((unsigned short)(row[i + j] << 8));
        return;
    case NVFP4: {
        float scale = w.block_scales ? from_e4m3(w.block_scales[number * (w.cols / 16) + i / 16]) : 1.0f;
        for (int j = 0; j < 8; j++) {
            unsigned char pair = row[(i + j) / 2];
            v[j] = scale * from_e2m1(j % 2 == w.high_first ? pair & 15 : pair >> 4);
        }
        return;
    }
    case Q2_K:
    case Q3_K:
    case Q4_K:
    case Q5_K:
    case Q6_K: return read_block(w.format, row + i / 256 * (w.row_bytes / (w.cols / 256)), i % 256, v);
    default: return read_block(w.format, row + i / 32 * (w.row_bytes / (w.cols / 32)), i % 32, v);
    }
}

template <class T> __device__ __forceinline__ void widen(const Packed &w, T *out) {
    int chunks = (w.cols + 7) / 8;
    long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= w.rows * chunks) return;
    long long row = at / chunks;
    int i = 8 * (int)(at % chunks);
    float v[8] = {}, scale = w.row_scales ? w.row_scales[row] : w.scale;
    read_row(w, w.data + row * w.row_bytes, row, i, v);
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] *= scale;
    store8(out + row * w.cols, i, w.cols, w.cols % 8 == 0 && aligned(out), v);
}

extern "C" __global__ void widen_f32(Packed w, float *out) { widen(w, out); }
extern "C" __global__ void widen_bf16(Packed w, bf16 *out) { widen(w, out); }
