// What the products of Hopper and of mma share: the order of tiles, and values of their ends.

// Place of a tile: tiles down the rows, across the columns of one product, and the product's number. Tiles of a group of rows
// follow each other, so that those at work share rows and columns in L2.
struct TilePlace {
    int row, column, batch;

    // `down`, `across`: tiles along the rows, and along the columns of one product; `all`: along those of all products.
    __device__ __forceinline__ TilePlace(int tile, int down, int across, int all, int group) {
        int first = tile / (group * all) * group, left = down - first;
        int size = left < group ? left : group, within = tile - first * all;
        row = first + within % size;
        column = within / size % across, batch = within / size / across;
    }
};

// Two neighbouring values; `at` is even.
__device__ __forceinline__ void load_values(const void *from, long long at, bool bf16_values, float (&v)[2]) {
    if (bf16_values) {
        load_pair((const bf16 *)from + at, v[0], v[1]);
    } else {
        float2 pair = *(const float2 *)((const float *)from + at);
        v[0] = pair.x, v[1] = pair.y;
    }
}
