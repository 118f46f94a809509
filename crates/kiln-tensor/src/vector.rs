//! Loops over floats that the compiler vectorizes: this crate is built for speed, those that read files for size. They are
//! never inlined there. Reductions have several independent accumulators.

/// The number of accumulators: a whole number of vectors on every machine.
const LANES: usize = 16;

/// The largest absolute value; 0 for none. NaN is ignored.
#[inline(never)]
pub fn max_abs(x: &[f32]) -> f32 {
    let larger = |max: f32, x: f32| if x.abs() > max { x.abs() } else { max };
    let (whole, rest) = x.as_chunks::<LANES>();
    let mut maxima = [0f32; LANES];
    for chunk in whole {
        for (max, &x) in maxima.iter_mut().zip(chunk) {
            *max = larger(*max, x);
        }
    }
    rest.iter().chain(&maxima).fold(0f32, |max, &x| larger(max, x))
}

/// Sums of the squared differences and of the squared values of `x`.
#[inline(never)]
pub fn squared_sums(x: &[f32], y: &[f32]) -> [f64; 2] {
    let sums = squared_f32_sums(x, y).map(f64::from);
    if sums.iter().all(|sum| sum.is_finite()) {
        return sums;
    }
    // Squares may overflow where the values don't.
    x.iter().zip(y).fold([0.0; 2], |[errors, values], (&x, &y)| {
        let (x, y) = (f64::from(x), f64::from(y));
        [errors + (y - x) * (y - x), values + x * x]
    })
}

/// The largest absolute value; NaN or infinity if there is one.
#[inline(never)]
pub fn max_abs_or_nan(x: &[f32]) -> f32 {
    // Without the sign, the bits of floats are ordered like their values, infinity and NaN above all.
    f32::from_bits(x.iter().fold(0, |max: u32, x| max.max(x.abs().to_bits())))
}

/// The sum of squares, in f64 except within groups of 64, so that long rows lose no precision.
#[inline(never)]
pub fn squared_norm(x: &[f32]) -> f64 {
    x.chunks(64).map(|x| f64::from(x.iter().map(|x| x * x).sum::<f32>())).sum()
}

/// Adds the squares of `x` to `sums`.
#[inline(never)]
pub fn add_squares(sums: &mut [f64], x: &[f32]) {
    sums.iter_mut().zip(x).for_each(|(sum, x)| *sum += f64::from(*x).powi(2));
}

/// `out += factor · x`.
#[inline(never)]
pub fn add_scaled(out: &mut [f32], factor: f32, x: &[f32]) {
    out.iter_mut().zip(x).for_each(|(out, x)| *out += factor * x);
}

/// `out += x · y`, element by element.
#[inline(never)]
pub fn add_product(out: &mut [f32], x: &[f32], y: &[f32]) {
    out.iter_mut().zip(x.iter().zip(y)).for_each(|(out, (x, y))| *out += x * y);
}

/// `out *= factor`.
#[inline(never)]
pub fn scale(out: &mut [f32], factor: f32) {
    out.iter_mut().for_each(|out| *out *= factor);
}

/// `out *= factor + x`, element by element.
#[inline(never)]
pub fn scale_each(out: &mut [f32], factor: f32, x: &[f32]) {
    out.iter_mut().zip(x).for_each(|(out, x)| *out *= factor + x);
}

fn squared_f32_sums(x: &[f32], y: &[f32]) -> [f32; 2] {
    let (mut errors, mut values) = ([0f32; LANES], [0f32; LANES]);
    let ((x, x_rest), (y, y_rest)) = (x.as_chunks::<LANES>(), y.as_chunks::<LANES>());
    let mut add = |x: &[f32], y: &[f32]| {
        for (((error, value), x), y) in errors.iter_mut().zip(&mut values).zip(x).zip(y) {
            *error += (y - x) * (y - x);
            *value += x * x;
        }
    };
    x.iter().zip(y).for_each(|(x, y)| add(x, y));
    add(x_rest, y_rest);
    [errors, values].map(|lanes| lanes.iter().sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_counts_for_any_length() {
        for count in [0, 1, 15, 16, 17, 40] {
            let x: Vec<f32> = (0..count).map(|i| -(i as f32)).collect();
            let y = vec![1.0; count];
            assert_eq!(max_abs(&x), count.saturating_sub(1) as f32);
            let squares = |x: f32| [f64::from((1.0 - x) * (1.0 - x)), f64::from(x * x)];
            let [error, value] =
                x.iter().map(|&x| squares(x)).fold([0.0; 2], |[e, v], s| [e + s[0], v + s[1]]);
            assert_eq!(squared_sums(&x, &y), [error, value], "{count}");
        }
        assert_eq!(max_abs(&[f32::NAN, -2.0, f32::NAN]), 2.0);
        assert!(max_abs_or_nan(&[f32::INFINITY, f32::NAN, -2.0]).is_nan() && max_abs_or_nan(&[]) == 0.0);
        assert_eq!(max_abs_or_nan(&[1.0, -2.0]), 2.0);
        assert_eq!(squared_sums(&[2f32.powi(100)], &[0.0]), [2f64.powi(200); 2], "more than f32 holds");
    }
}
