//! `a * b + c`, rounded once, on processors with the instruction and on those without: what C libraries do there differs (that
//! of mingw-w64 rounds twice), and noise has the same bits everywhere.

/// A way to compute it.
pub(super) trait MulAdd {
    fn mul_add(a: f32, b: f32, c: f32) -> f32;
}

/// One instruction, where the surrounding function is compiled for it.
pub(super) struct Hardware;

impl MulAdd for Hardware {
    #[inline(always)]
    fn mul_add(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }
}

/// In f64, where the product is exact. The sum is rounded to odd, so that rounding it to f32 afterwards loses nothing.
pub(super) struct Software;

impl MulAdd for Software {
    #[inline(always)]
    fn mul_add(a: f32, b: f32, c: f32) -> f32 {
        let (product, c) = (f64::from(a) * f64::from(b), f64::from(c));
        let sum = product + c;
        // What the sum lacks, exactly.
        let of_c = sum - product;
        let error = (product - (sum - of_c)) + (c - of_c);
        let is_even = sum.to_bits() & 1 == 0;
        if !sum.is_finite() || error == 0.0 || !is_even {
            return sum as f32;
        }
        let further = (error > 0.0) == (sum > 0.0);
        f64::from_bits(if further { sum.to_bits() + 1 } else { sum.to_bits() - 1 }) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Some of mingw-w64's are wrong.
    #[cfg(not(windows))]
    #[test]
    fn software_gives_the_bits_of_the_standard_library() {
        let mut state = 1u64;
        let mut draw = |spread: u32| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let exponent = 127 - spread / 2 + (state >> 40) as u32 % spread.max(1);
            f32::from_bits((state >> 8) as u32 & 0x807f_ffff | exponent << 23)
        };
        for spread in [1, 4, 30, 60, 250] {
            for _ in 0..200_000 {
                let (a, b) = (draw(spread), draw(spread));
                // Sums that nearly cancel, too.
                for c in [draw(spread), -(a * b), f32::from_bits((-(a * b)).to_bits() ^ 1), 1e-45, 0.0] {
                    let (found, expected) = (Software::mul_add(a, b, c), a.mul_add(b, c));
                    assert_eq!(found.to_bits(), expected.to_bits(), "{a:e} * {b:e} + {c:e}");
                }
            }
        }
    }

    #[test]
    fn software_rounds_once() {
        // The product lies just above the middle between two values, by less than f64 tells apart.
        let a = 1.0 + f32::EPSILON;
        assert_eq!(Software::mul_add(a, a, 2f32.powi(-60)), 1.0 + 2.0 * f32::EPSILON);
        assert_eq!(
            Software::mul_add(1.0, 1.0 + f32::EPSILON, f32::EPSILON / 2.0 + 2f32.powi(-60)),
            1.0 + 2.0 * f32::EPSILON
        );
        assert_eq!(Software::mul_add(f32::MAX, 2.0, 0.0), f32::INFINITY);
        assert!(Software::mul_add(f32::INFINITY, 0.0, 1.0).is_nan());
    }
}
