// Count, mean and sum of squared deviations of some values.
template <class F> struct Moments {
    F n, mean, squares;

    __device__ __forceinline__ void merge(const Moments &other) {
        if (other.n == 0) return;
        F merged = n + other.n, d = other.mean - mean, weight = other.n / merged;
        squares += other.squares + d * n * (d * weight);
        mean += d * weight;
        n = merged;
    }

    __device__ __forceinline__ void store(float *partials, long long at) const {
        partials += 3 * at;
        partials[0] = n, partials[1] = mean, partials[2] = squares;
    }
};
