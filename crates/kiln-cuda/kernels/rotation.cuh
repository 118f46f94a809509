// Rotation of rows by ConvRot's Hadamard matrix, in groups of 16, 64 or 256 columns (1: none). Additions
// are in the order of kiln-tensor's Rotation, so that results have the same bits.
//
// A warp has 256 columns, a lane eight of them in registers. A step multiplies by the matrix of four at one base-4 digit of the
// column. Of the digit's two bits one is a register's and one is a lane's, so that a step exchanges one value of two:
// (a, b, c, d) become (a + b) ± (c - d) in the first lane and (c + d) ± (a - b) in the second. For the digits whose bits are
// both of the lane, the third bit of the register changes places with one of them first, at the same price.

// The column of a lane's first four values, relative to the warp's, and the distance of the other four.
struct RotatedPlace {
    int first, apart;

    __device__ __forceinline__ RotatedPlace(int lane, int group) {
        first = 8 * lane, apart = 4;
        if (group >= 64) first = (lane & 1) << 3 | (lane & 2) << 1 | (lane & 28) << 3, apart = 16;
        if (group == 256) first = (lane & 1) << 3 | (lane & 2) << 1 | (lane & 4) << 3 | (lane & 8) << 1 | (lane & 16) << 3, apart = 64;
    }
};

// The step of the digit whose lower bit is the register's third.
__device__ __forceinline__ void rotate_step(float (&v)[8], int lane_bit) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float sum = v[j] + v[j + 4], other = __shfl_xor_sync(0xffffffffu, v[j] - v[j + 4], lane_bit);
        v[j] = sum + other, v[j + 4] = sum - other;
    }
}

// Exchanges the register's third bit with one of the lane.
__device__ __forceinline__ void exchange(float (&v)[8], int lane_bit) {
    bool upper = threadIdx.x & lane_bit;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float other = __shfl_xor_sync(0xffffffffu, upper ? v[j] : v[j + 4], lane_bit);
        if (upper)
            v[j] = other;
        else
            v[j + 4] = other;
    }
}

// Rotates a warp's columns, without the division by the group's root; all lanes take part. The values are then where
// RotatedPlace says.
__device__ __forceinline__ void rotate(float (&v)[8], int group) {
    if (group == 1) return;
#pragma unroll
    for (int j = 0; j < 8; j += 4) {
        float sums[2] = {v[j] + v[j + 1], v[j + 2] + v[j + 3]}, differences[2] = {v[j] - v[j + 1], v[j + 2] - v[j + 3]};
        v[j] = sums[0] + differences[1], v[j + 1] = sums[0] - differences[1];
        v[j + 2] = sums[1] + differences[0], v[j + 3] = sums[1] - differences[0];
    }
    rotate_step(v, 1);
    if (group == 16) return;
    exchange(v, 2);
    rotate_step(v, 4);
    if (group == 64) return;
    exchange(v, 8);
    rotate_step(v, 16);
}

// One over the root of a group's size.
__device__ __forceinline__ float rotation_factor(int group) {
    return group == 256 ? 0.0625f : group == 64 ? 0.125f : group == 16 ? 0.25f : 1.0f;
}

// Stores a lane's values of a row of `padded` bytes; the warp has the columns from `column` on.
__device__ __forceinline__ void store_int8(signed char *q, int column, const RotatedPlace &place, int padded, const float (&v)[8],
                                           float inverse) {
    int i = column + place.first;
    if (i < padded) *(unsigned *)(q + i) = round_int8(v, inverse);
    if (i + place.apart < padded) *(unsigned *)(q + i + place.apart) = round_int8(v + 4, inverse);
}
