// Convolutions of channels-last pictures, as all kernels take them.

struct Conv {
    const void *x;
    // [n][kh][kw][c], rows `ldw` apart.
    const void *w;
    const float *bias;
    // Added to the result; of the result's type.
    const void *add;
    void *out;
    // From pixel to pixel of x, and from row to row of the others, in elements.
    long long ldx, ldw, ldadd, ldo;
    float alpha;
    int height, width, channels;
    int out_height, out_width, n;
    int kernel_height, kernel_width, stride, top, left;
    // 1: each pixel of x stands for 2 by 2. 2: as `fold_taps_f32` says.
    int upsample;
};

// The pixel of x under tap (ky, kx) at the output pixel that begins at (y, x); -1 in the padding.
__device__ __forceinline__ long long pixel_under(const Conv &t, int y, int x, int tap) {
    y += tap / t.kernel_width;
    x += tap % t.kernel_width;
    if (t.upsample == 1) {
        // Shifting keeps what is below zero below zero.
        y >>= 1;
        x >>= 1;
    }
    bool inside = y >= 0 && y < t.height && x >= 0 && x < t.width;
    return inside ? (long long)y * t.width + x : -1;
}

template <class O> __device__ __forceinline__ void put(const Conv &t, long long m, int n, float sum) {
    sum *= t.alpha;
    if (t.bias) sum += t.bias[n];
    if (t.add) sum += to_float(((const O *)t.add)[m * t.ldadd + n]);
    ((O *)t.out)[m * t.ldo + n] = from_float<O>(sum);
}
