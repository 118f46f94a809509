// Activation functions, by number: 0 none, 1 silu, 2 relu, 3 soft clamp, 4 gelu.
#include math

fn silu(x: f32) -> f32 {
    return x / (1.0 + exact_exp(-x));
}

fn activate(x: f32, f: u32) -> f32 {
    switch f {
        case 1u: { return silu(x); }
        case 2u: { return max(x, 0.0); }
        case 3u: { return 3.0 * exact_tanh(x * 0.33333334); }
        case 4u: {
            let tail = exact_erfc(abs(x) * 0.70710678);
            return 0.5 * x * select(2.0 - tail, tail, x < 0.0);
        }
        default: { return x; }
    }
}
