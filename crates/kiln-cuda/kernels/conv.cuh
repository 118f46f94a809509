// Arguments and output of convolutions of channels-last images.

struct ConvArgs {
    const void *x;
    // [n][kh][kw][c], row stride `ldw`.
    const void *w;
    const float *bias;
    // Summand in the result's type, or null.
    const void *add;
    void *out;
    // Strides in elements: between pixels of x, between rows of the others.
    long long ldx, ldw, ldadd, ldo;
    float alpha;
    int height, width, channels;
    int out_height, out_width, n;
    int kernel_height, kernel_width, stride, top, left;
    // 0: none. 1: x is upsampled 2x. 2: the same, with weights folded by fold_taps_f32.
    int upsample;
};

// The pixel of x under a tap, for the output pixel whose window starts at (y, x); -1 in the padding.
__device__ __forceinline__ long long input_pixel(const ConvArgs &args, int y, int x, int tap) {
    y += tap / args.kernel_width;
    x += tap % args.kernel_width;
    if (args.upsample == 1) {
        // The shift keeps negative values negative.
        y >>= 1;
        x >>= 1;
    }
    bool inside = y >= 0 && y < args.height && x >= 0 && x < args.width;
    return inside ? (long long)y * args.width + x : -1;
}

template <class O> __device__ __forceinline__ void store_output(const ConvArgs &args, long long m, int n, float sum) {
    sum *= args.alpha;
    if (args.bias) sum += args.bias[n];
    if (args.add) sum += to_float(((const O *)args.add)[m * args.ldadd + n]);
    ((O *)args.out)[m * args.ldo + n] = from_float<O>(sum);
}
