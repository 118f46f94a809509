// What rounds the operands of 8-bit attention, whether queries and keys are normed and rotated already or not.

const int TILE_ROWS = 128, HEAD_WIDTH = 128, ROUND_THREADS = 256;
// Rows that a block reads at once, with 16 lanes for eight columns each, and a thread's rows of a tile.
const int ROWS_AT_ONCE = ROUND_THREADS / 16, ROWS_EACH = TILE_ROWS / ROWS_AT_ONCE;
// Tiles that a block measures.
const int TILES_MEASURED = 4;

// What norms and rotates the heads of each segment's rows.
struct HeadNorms {
    const float *weights[MAX_SEGMENTS], *cosines[MAX_SEGMENTS], *sines[MAX_SEGMENTS];
};

struct RoundAttentionArgs {
    Segments q, k, v;
    // Of queries and keys that come unnormed.
    HeadNorms q_norms, k_norms;
    int queries, keys, heads, kv_heads;
    // [kv_heads][parts of TILES_MEASURED tiles of keys][HEAD_WIDTH]: sums of keys, largest absolute values of values.
    float *sums, *maxima;
    // [queries, heads * HEAD_WIDTH]; [keys, kv_heads * HEAD_WIDTH]; [kv_heads * HEAD_WIDTH, keys], rows of whole tiles.
    signed char *q_out, *k_out;
    unsigned char *v_out;
    // [heads, queries]; [kv_heads, tiles of keys]; [kv_heads, HEAD_WIDTH].
    float *q_scales, *k_scales, *v_scales;
    float eps;
    int unused;
};

// Scale of int8 values. It is never 0: a score that is masked has to stay far below the others.
__device__ __forceinline__ RowScale int8_scale(float largest) {
    largest = max_or_nan(largest, 1e-8f);
    return {127.0f * fast_reciprocal(largest), largest * (1.0f / 127.0f)};
}

__device__ __forceinline__ void store_int8(signed char *to, const float (&v)[8], float inverse) {
    *(u64 *)to = round_int8(v, inverse) | (u64)round_int8(v + 4, inverse) << 32;
}

__device__ __forceinline__ int lane_column() { return threadIdx.x % 16 * 8; }

// A thread's row `i` of a tile.
__device__ __forceinline__ int tile_row(int i) { return ROWS_AT_ONCE * i + threadIdx.x / 16; }

// Eight columns of a head in a thread's rows of a tile, which `row_of` names. Rows past the end are zeros.
template <class F>
__device__ __forceinline__ void load_tile(Vec8<bf16> (&rows)[ROWS_EACH], const Segments &from, int tile, int heads, int head, F row_of) {
    int first = tile * TILE_ROWS, count = from.end[from.count - 1], width = heads * HEAD_WIDTH, column = head * HEAD_WIDTH + lane_column(), segment = 0;
    while (segment + 1 < from.count && first >= from.end[segment]) segment++;
    // Most tiles lie in one segment.
    if (first + TILE_ROWS <= from.end[segment]) {
        int rows_before = segment ? from.end[segment - 1] : 0;
        const bf16 *start = (const bf16 *)from.start[segment] + (long long)(first - rows_before) * width + column;
#pragma unroll
        for (int i = 0; i < ROWS_EACH; i++) rows[i] = load_vec8(start + row_of(i) * width);
        return;
    }
#pragma unroll
    for (int i = 0; i < ROWS_EACH; i++) {
        int row = first + row_of(i);
        rows[i] = {make_uint4(0, 0, 0, 0)};
        if (row < count) rows[i] = load_vec8(segment_row<bf16>(from, row, width) + column);
    }
}

// Adds up what a block's threads have measured of a head, each of eight columns, or finds the largest values; stores the result.
__device__ __forceinline__ void store_measured(const RoundAttentionArgs &args, bool values, int head, const float (&results)[8]) {
    __shared__ float parts[ROWS_AT_ONCE][HEAD_WIDTH];
#pragma unroll
    for (int j = 0; j < 8; j++) parts[threadIdx.x / 16][lane_column() + j] = results[j];
    __syncthreads();
    if (threadIdx.x >= HEAD_WIDTH) return;
    float result = 0.0f;
    for (int i = 0; i < ROWS_AT_ONCE; i++) {
        float part = parts[i][threadIdx.x];
        result = values ? max_or_nan(result, part) : result + part;
    }
    (values ? args.maxima : args.sums)[((long long)head * gridDim.x + blockIdx.x) * HEAD_WIDTH + threadIdx.x] = result;
}

// The largest values of this block's part of the keys.
__device__ __forceinline__ void measure_values(const RoundAttentionArgs &args, int head) {
    float results[8] = {};
    for (int tile = blockIdx.x * TILES_MEASURED; tile < (int)(blockIdx.x + 1) * TILES_MEASURED; tile++) {
        Vec8<bf16> rows[ROWS_EACH];
        load_tile(rows, args.v, tile, args.kv_heads, head, tile_row);
#pragma unroll
        for (int i = 0; i < ROWS_EACH; i++) {
            float v[8];
            widen(rows[i], v);
#pragma unroll
            for (int j = 0; j < 8; j++) results[j] = max_or_nan(results[j], fabsf(v[j]));
        }
    }
    store_measured(args, true, head, results);
}

// What all parts have measured of a head's column: its sum; `largest`: the largest value.
__device__ __forceinline__ float reduce_parts(const float *measured, const RoundAttentionArgs &args, int head, bool largest) {
    int parts = (args.keys + TILES_MEASURED * TILE_ROWS - 1) / (TILES_MEASURED * TILE_ROWS);
    measured += (long long)head * parts * HEAD_WIDTH + threadIdx.x;
    float result = 0.0f;
#pragma unroll 8
    for (int i = 0; i < parts; i++) {
        float part = measured[i * HEAD_WIDTH];
        result = largest ? max_or_nan(result, part) : result + part;
    }
    return result;
}

// Values are stored transposed. Of every 16 keys, the order is 0, 1, 8, 9, 2, 3, 10, 11, ...: the order in which the product's
// left operand has them.
__device__ __forceinline__ void round_values(const RoundAttentionArgs &args, int head, int tiles) {
    __align__(16) __shared__ float inverses[HEAD_WIDTH];
    // Four words of a column lie together. They are XORed with the column, so that few stores meet in a bank.
    __align__(16) __shared__ unsigned words[HEAD_WIDTH][TILE_ROWS / 4];
    auto place = [](int column, int four) { return (four ^ column / 8 % 8) * 4; };
    // A thread's words of four rows.
    auto word = [](int i) { return threadIdx.x / 16 + ROWS_AT_ONCE * i; };
    Vec8<bf16> rows[ROWS_EACH];
    load_tile(rows, args.v, blockIdx.x, args.kv_heads, head,
              [&](int i) { return word(i / 4) / 4 * 16 + word(i / 4) % 4 * 2 + i % 4 / 2 * 8 + i % 2; });
    if (threadIdx.x < HEAD_WIDTH) {
        RowScale scale = row_scale<448>(reduce_parts(args.maxima, args, head, true));
        inverses[threadIdx.x] = scale.inverse;
        if (blockIdx.x == 0) args.v_scales[head * HEAD_WIDTH + threadIdx.x] = scale.scale;
    }
    __syncthreads();
    float inverse[8];
    load_vector(inverses + lane_column(), inverse);
#pragma unroll
    for (int i = 0; i < ROWS_EACH; i += 4) {
        float v[4][8];
#pragma unroll
        for (int b = 0; b < 4; b++) widen(rows[i + b], v[b]);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            unsigned low = round_fp8_pair(v[0][j] * inverse[j], v[1][j] * inverse[j]);
            unsigned high = round_fp8_pair(v[2][j] * inverse[j], v[3][j] * inverse[j]);
            words[lane_column() + j][place(lane_column(), word(i / 4) / 4) + word(i / 4) % 4] = low | high << 16;
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = threadIdx.x; i < HEAD_WIDTH * TILE_ROWS / 16; i += ROUND_THREADS) {
        int column = i / (TILE_ROWS / 16), four = i % (TILE_ROWS / 16);
        *(uint4 *)(args.v_out + ((long long)(head * HEAD_WIDTH + column) * tiles + blockIdx.x) * TILE_ROWS + four * 16) =
            *(const uint4 *)&words[column][place(column, four)];
    }
}
