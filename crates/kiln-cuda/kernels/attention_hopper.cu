// Attention of bf16 with heads of 128 for Hopper: flash attention with the products of four warps at once.
//
// A block has 128 queries of one head. One thread brings keys and values, 128 at a time, into two stages; two groups of
// four warps have 64 queries each. While a group's tensor cores multiply the values of one tile, its other units make the
// softmax of the next; the two groups take turns at the tensor cores.

const int ROWS = 128, DIM = 128;
const unsigned HALF = ROWS * 128, TILE = 2 * HALF;

struct HopperAttention {
    TensorMap q[MAX_SEGMENTS], k[MAX_SEGMENTS], v[MAX_SEGMENTS];
    // The row past each segment's last; values have the keys' segments.
    int query_end[MAX_SEGMENTS], key_end[MAX_SEGMENTS];
    int query_segments, key_segments;
    void *out;
    int queries, keys, heads, kv_heads, mask, a, b;
    float scale;
};

#if defined(KILN_EMULATED) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A tile never crosses the end of a segment: which keys come together changes nothing.
struct Place {
    int segment, row;
};

// Whether there is a tile at or after a place with keys of begin..end, and moves there.
__device__ __forceinline__ bool find_tile(const HopperAttention &t, Place &p, int begin, int end) {
    while (p.segment < t.key_segments && p.row < end) {
        int limit = t.key_end[p.segment], next = p.row + ROWS < limit ? p.row + ROWS : limit;
        if (next > begin && p.row < limit) return true;
        p.row = next;
        if (next == limit) p.segment++;
    }
    return false;
}

__device__ __forceinline__ bool next_tile(const HopperAttention &t, Place &p, int begin, int end) {
    int limit = t.key_end[p.segment];
    p.row += ROWS;
    if (p.row >= limit) {
        p.row = limit;
        p.segment++;
    }
    return find_tile(t, p, begin, end);
}

__device__ __forceinline__ void seen(const HopperAttention &t, int query, int &low, int &high) {
    low = 0;
    high = t.keys;
    if (t.mask == 1) {
        high = query + 1 < t.a ? query + 1 : t.a;
    } else if (t.mask == 2 && query >= t.a && query < t.b) {
        low = t.a;
        high = t.b;
    }
}

struct Softmax {
    float best[2], total[2], shrink[2];
};

const float NONE = -1e38f;

// Scores become their exponentials; `shrink` is what earlier sums have to be multiplied with.
__device__ __forceinline__ void exponentials(Softmax &m, float (&s)[64], float scale, bool cut, int first_key,
                                             const int (&low)[2], const int (&high)[2]) {
    int column = first_key + threadIdx.x % 4 * 2;
    if (cut) {
#pragma unroll
        for (int i = 0; i < 64; i++) {
            int key = column + i / 4 * 8 + i % 2, r = i / 2 % 2;
            if (key < low[r] || key >= high[r]) s[i] = NONE;
        }
    }
    float base[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float top = m.best[r];
#pragma unroll
        for (int j = 0; j < 16; j++) top = fmaxf(top, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
        m.shrink[r] = fast_exp2((m.best[r] - top) * scale);
        m.best[r] = top;
        // A row that has seen nothing yet: every exponential has to be 0, not 1.
        base[r] = cut && top == NONE ? 0.0f : top * scale;
        m.total[r] *= m.shrink[r];
    }
#pragma unroll
    for (int i = 0; i < 64; i++) {
        s[i] = fast_exp2(s[i] * scale - base[i / 2 % 2]);
        m.total[i / 2 % 2] += s[i];
    }
}

__device__ __forceinline__ void round_scores(unsigned (&p)[8][4], const float (&s)[64]) {
#pragma unroll
    for (int k = 0; k < 8; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) p[k][i] = round_pair(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
}

// s = q * k: both are two boxes of 64 columns beside each other.
__device__ __forceinline__ void start_scores(float (&s)[64], unsigned q, unsigned k) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        unsigned at = i / 4 * HALF + i % 4 * 32;
        product_128(s, matrix_at(q + at, 1024, 16), matrix_at(k + at, 1024, 16), i > 0);
    }
    product_commit();
}

// o += p * v.
__device__ __forceinline__ void start_values(float (&o)[64], const unsigned (&p)[8][4], unsigned v) {
#pragma unroll
    for (int i = 0; i < 8; i++) product_128_columns(o, p[i], matrix_at(v + i * 2048, 1024, HALF));
    product_commit();
}

extern "C" __global__ void __launch_bounds__(384, 1) attention_hopper_128(const __grid_constant__ HopperAttention t) {
    DYNAMIC_SHARED(memory);
    // Swizzled rows begin at multiples of 1024 bytes.
    unsigned base = (shared_address(memory) + 1023) & ~1023u;
    unsigned q_at = base, k_at = base + TILE, v_at = base + 3 * TILE, barriers = base + 5 * TILE;
    unsigned q_full = barriers, k_full = barriers + 8, v_full = barriers + 24, k_empty = barriers + 40, v_empty = barriers + 56;
    int group = threadIdx.x / 128, head = blockIdx.y;

    int tile = blockIdx.x, q_segment = 0, q_start = 0;
    while (tile >= (t.query_end[q_segment] - q_start + ROWS - 1) / ROWS) {
        tile -= (t.query_end[q_segment] - q_start + ROWS - 1) / ROWS;
        q_start = t.query_end[q_segment++];
    }
    int first = q_start + tile * ROWS, q_limit = t.query_end[q_segment];
    int last = (first + ROWS < q_limit ? first + ROWS : q_limit) - 1;
    // Keys that any query of this block sees.
    int begin = 0, end = t.keys;
    if (t.mask == 1) {
        end = last + 1 < t.a ? last + 1 : t.a;
    } else if (t.mask == 2 && first >= t.a && last < t.b) {
        begin = t.a;
        end = t.b;
    }

    if (threadIdx.x == 0) {
        barrier_init(q_full, 1);
        for (int i = 0; i < 2; i++) {
            barrier_init(k_full + 8 * i, 1);
            barrier_init(v_full + 8 * i, 1);
            // A lane of each warp that multiplies.
            barrier_init(k_empty + 8 * i, 8);
            barrier_init(v_empty + 8 * i, 8);
        }
        barrier_publish();
    }
    __syncthreads();

    if (group == 0) {
        fewer_registers<24>();
        if (threadIdx.x == 0) {
            int column = head / (t.heads / t.kv_heads) * DIM;
            barrier_expect(q_full, TILE);
            copy_box(q_at, t.q[q_segment], q_full, head * DIM, tile * ROWS);
            copy_box(q_at + HALF, t.q[q_segment], q_full, head * DIM + 64, tile * ROWS);
            Place p = {0, 0};
            int n = 0;
            for (bool there = find_tile(t, p, begin, end); there; there = next_tile(t, p, begin, end), n++) {
                int stage = n % 2, row = p.row - (p.segment ? t.key_end[p.segment - 1] : 0);
                if (n >= 2) barrier_wait(k_empty + 8 * stage, (n / 2 + 1) % 2);
                unsigned full = k_full + 8 * stage, to = k_at + stage * TILE;
                barrier_expect(full, TILE);
                copy_box(to, t.k[p.segment], full, column, row);
                copy_box(to + HALF, t.k[p.segment], full, column + 64, row);
                if (n >= 2) barrier_wait(v_empty + 8 * stage, (n / 2 + 1) % 2);
                full = v_full + 8 * stage, to = v_at + stage * TILE;
                barrier_expect(full, TILE);
                copy_box(to, t.v[p.segment], full, column, row);
                copy_box(to + HALF, t.v[p.segment], full, column + 64, row);
            }
        }
    } else {
        more_registers<240>();
        int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
        int mine = group - 1, query = first + 64 * mine + 16 * warp + lane / 4;
        q_at += mine * 8192;
        int low[2], high[2];
        seen(t, query, low[0], high[0]);
        seen(t, query + 8, low[1], high[1]);
        float o[64], s[64];
        unsigned p[8][4];
#pragma unroll
        for (int i = 0; i < 64; i++) o[i] = 0.0f;
        Softmax m = {{NONE, NONE}, {0.0f, 0.0f}, {1.0f, 1.0f}};
        float scale = t.scale * 1.44269504088896341f;
        Place place = {0, 0};
        bool there = find_tile(t, place, begin, end);
        // Keys past a segment's end are zeros that nobody may see.
        auto masked = [&](int (&limit)[2]) {
            int segment_end = t.key_end[place.segment];
            limit[0] = high[0] < segment_end ? high[0] : segment_end;
            limit[1] = high[1] < segment_end ? high[1] : segment_end;
            return t.mask != 0 || place.row + ROWS > segment_end;
        };
        if (there) {
            int limit[2], n = 1;
            // The first group begins.
            if (mine == 1) named_arrive(1, 256);
            barrier_wait(q_full, 0);
            barrier_wait(k_full, 0);
            named_sync(1 + mine, 256);
            product_fence();
            start_scores(s, q_at, k_at);
            named_arrive(2 - mine, 256);
            product_wait<0>();
            if (lane == 0) barrier_arrive(k_empty);
            bool cut = masked(limit);
            exponentials(m, s, scale, cut, place.row, low, limit);
            round_scores(p, s);
            while (next_tile(t, place, begin, end)) {
                int stage = n % 2, before = 1 - stage;
                barrier_wait(k_full + 8 * stage, n / 2 % 2);
                named_sync(1 + mine, 256);
                product_fence();
                start_scores(s, q_at, k_at + stage * TILE);
                barrier_wait(v_full + 8 * before, (n - 1) / 2 % 2);
                start_values(o, p, v_at + before * TILE);
                named_arrive(2 - mine, 256);
                product_wait<1>();
                if (lane == 0) barrier_arrive(k_empty + 8 * stage);
                cut = masked(limit);
                exponentials(m, s, scale, cut, place.row, low, limit);
                product_wait<0>();
                if (lane == 0) barrier_arrive(v_empty + 8 * before);
#pragma unroll
                for (int i = 0; i < 64; i++) o[i] *= m.shrink[i / 2 % 2];
                round_scores(p, s);
                n++;
            }
            barrier_wait(v_full + 8 * ((n - 1) % 2), (n - 1) / 2 % 2);
            product_fence();
            start_values(o, p, v_at + (n - 1) % 2 * TILE);
            product_wait<0>();
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            m.total[r] += __shfl_xor_sync(0xffffffffu, m.total[r], 1);
            m.total[r] += __shfl_xor_sync(0xffffffffu, m.total[r], 2);
            float factor = 1.0f / m.total[r];
            bf16 *out = (bf16 *)t.out + (long long)(query + 8 * r) * t.heads * DIM + head * DIM + lane % 4 * 8;
            // Whole vectors: a lane's pairs of four runs of eight columns become its own run.
#pragma unroll
            for (int j = 0; j < 16; j += 4) {
                float words[4];
#pragma unroll
                for (int i = 0; i < 4; i++)
                    words[i] = __uint_as_float(round_pair(o[4 * (j + i) + 2 * r] * factor, o[4 * (j + i) + 2 * r + 1] * factor));
                exchange(words);
                if (query + 8 * r <= last) *(float4 *)(out + 8 * j) = make_float4(words[0], words[1], words[2], words[3]);
            }
        }
    }
}
#endif
