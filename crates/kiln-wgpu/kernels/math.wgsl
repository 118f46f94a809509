// Functions whose error is a few units in the last place on every GPU. WGSL's own may be far less exact: the error that it allows
// for `exp(x)` grows with `x`.

// exp(x): x = n · ln 2 + r with ln 2 in two parts, so that r is exact, and a polynomial for exp(r).
fn exact_exp(x: f32) -> f32 {
    let bounded = clamp(x, -150.0, 150.0);
    let n = round(bounded * 1.44269504);
    let r = (bounded - n * 0.693359375) + n * 2.12194440e-4;
    var p = 1.9875691500e-4;
    p = p * r + 1.3981999507e-3;
    p = p * r + 8.3334519073e-3;
    p = p * r + 4.1665795894e-2;
    p = p * r + 1.6666665459e-1;
    p = p * r + 5.0000001201e-1;
    p = p * r * r + r + 1.0;
    // In two steps: the first factor alone may not exist as a number.
    let half = i32(n) >> 1u;
    return p * power_of_two(half) * power_of_two(i32(n) - half);
}

// 2ⁿ for -126 <= n <= 127.
fn power_of_two(n: i32) -> f32 {
    return bitcast<f32>(u32(n + 127) << 23u);
}

// tanh(x): a polynomial near 0, where the quotient would cancel.
fn exact_tanh(x: f32) -> f32 {
    if (abs(x) < 0.625) {
        let z = x * x;
        var p = -5.70498872745e-3;
        p = p * z + 2.06390887954e-2;
        p = p * z - 5.37397155531e-2;
        p = p * z + 1.33314422036e-1;
        p = p * z - 3.33332819422e-1;
        return p * z * x + x;
    }
    let y = 1.0 - 2.0 / (exact_exp(2.0 * min(abs(x), 20.0)) + 1.0);
    return select(y, -y, x < 0.0);
}

// The complementary error function of x >= 0: exp(-x²) times a rational series. x² is split, so that its exponential has no larger
// error than others.
fn exact_erfc(x: f32) -> f32 {
    let z = min(x, 15.0);
    let t = 1.0 / (1.0 + 0.5 * z);
    var p = 0.17087277;
    p = p * t - 0.82215223;
    p = p * t + 1.48851587;
    p = p * t - 1.13520398;
    p = p * t + 0.27886807;
    p = p * t - 0.18628806;
    p = p * t + 0.09678418;
    p = p * t + 0.37409196;
    p = p * t + 1.00002368;
    p = p * t - 1.26551223;
    let high = bitcast<f32>(bitcast<u32>(z) & 0xfffff000u);
    return t * exact_exp(-high * high) * exact_exp((high - z) * (high + z) + p);
}

fn is_nan(x: f32) -> bool {
    return (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u;
}

fn is_finite(x: f32) -> bool {
    return (bitcast<u32>(x) & 0x7f800000u) != 0x7f800000u;
}
