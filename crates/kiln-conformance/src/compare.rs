//! Comparison of results with the reference.

use kiln_tensor::{DType, HostTensor};

/// The allowed error of a result.
///
/// Every element must satisfy `|found - expected| <= relative · |expected| + slack · scale`, where `scale` is the root mean
/// square of the expected row (of the whole tensor if rows are shorter than 16): a sum that happens to cancel is no more
/// exact than its terms. The whole tensor must satisfy `‖found - expected‖ <= l2 · ‖expected‖`, which is much stricter than
/// the bound on an element. `expected` is computed in f64 from exactly the inputs that the backend got, so a tolerance only
/// covers the backend's own rounding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tolerance {
    /// Error of one element relative to itself.
    pub relative: f64,
    /// Error of one element relative to its row.
    pub slack: f64,
    /// Error of the whole tensor. Checked if its norm is spread over at least 32 elements: with fewer, one unlucky rounding
    /// decides.
    pub l2: f64,
}

/// Half a unit in the last place of bf16, relative to the value, at worst.
const BF16_HALF_ULP: f64 = 1.0 / 256.0;

/// Root mean square of that rounding error over many values: 2.3e-3 if all are just above a power of two, plus a margin.
const BF16_L2: f64 = 2.8e-3;

/// Absolute error allowed unless results must be exact: backends may flush subnormals, even intermediate ones.
const FLUSHED_TO_ZERO: f64 = 1e-36;

impl Tolerance {
    /// Equality, for operations that only move or round values.
    pub const EXACT: Tolerance = Tolerance { relative: 0.0, slack: 0.0, l2: 0.0 };

    /// For a few f32 operations per element: about 8 ulp, for a vectorized `exp` or `tanh`.
    pub const ELEMENTWISE: Tolerance = Tolerance { relative: 1e-6, slack: 5e-7, l2: 6e-7 };

    /// For an f32 sum of `terms`, in any order.
    ///
    /// The error of a sequential sum of random terms grows with the square root of their number, by about 2.5e-8 each;
    /// twice that is allowed.
    pub fn sum(terms: usize) -> Self {
        let l2 = 4e-7 + 5e-8 * (terms as f64).sqrt();
        Tolerance { relative: 1e-6, slack: 8.0 * l2, l2 }
    }

    /// For an ill-conditioned calculation, which multiplies f32 errors by `factor`.
    pub fn conditioned(self, factor: f64) -> Self {
        Tolerance { relative: factor * self.relative, slack: factor * self.slack, l2: factor * self.l2 }
    }

    /// For a result that is rounded to `dtype` once.
    pub fn rounded(self, dtype: DType) -> Self {
        match dtype {
            DType::BF16 => {
                Tolerance { relative: self.relative + BF16_HALF_ULP, l2: self.l2 + BF16_L2, ..self }
            }
            _ => self,
        }
    }

    /// As [`Tolerance::rounded`], but with bf16 activations an operand or an intermediate may be rounded too: f32 or f16
    /// weights, attention probabilities, a LoRA's inner activations, a product before its gate, the summed taps of an
    /// upsampling convolution. With f32 activations this is not allowed.
    pub fn rounded_inside(self, dtype: DType) -> Self {
        let once = self.rounded(dtype);
        match dtype {
            DType::BF16 => Tolerance { slack: once.slack + 6.0 * BF16_L2, l2: once.l2 + BF16_L2, ..once },
            _ => once,
        }
    }

    /// Compares a result with the reference's; the error names the worst element.
    pub fn check(&self, found: &HostTensor, expected: &HostTensor) -> Result<(), String> {
        if found.shape() != expected.shape() {
            return Err(format!("shape {}, expected {}", found.shape(), expected.shape()));
        }
        let width = expected.shape().last().max(1);
        let (Ok(found), Ok(expected)) = (found.to_f32(), expected.to_f32()) else {
            return Err("the result is not of a float type".into());
        };
        let all = rms(&expected);
        let mut worst = (1.0, None);
        for (row, (found, expected)) in found.chunks(width).zip(expected.chunks(width)).enumerate() {
            let scale = if width < 16 { all } else { rms(expected) };
            for (column, (&found, &expected)) in found.iter().zip(expected).enumerate() {
                if found.is_nan() && !expected.is_nan() {
                    return Err(format!("row {row}, column {column} is NaN, expected {expected}"));
                }
                let excess = self.excess(found.into(), expected.into(), scale);
                if excess > worst.0 {
                    worst =
                        (excess, Some(format!("row {row}, column {column}: {found}, expected {expected}")));
                }
            }
        }
        if let (excess, Some(element)) = worst {
            return Err(format!("{element}, {excess:.1} times the tolerance"));
        }
        let error: f64 =
            found.iter().zip(expected.iter()).map(|(&f, &e)| (f64::from(f) - f64::from(e)).powi(2)).sum();
        let l2 = (error / expected.len().max(1) as f64).sqrt();
        if effective_count(&expected) >= 32.0 && l2 > self.l2 * all {
            return Err(format!("relative L2 error {:.3e}, allowed {:.3e}", l2 / all, self.l2));
        }
        Ok(())
    }

    /// The error relative to the allowed one.
    fn excess(&self, found: f64, expected: f64, scale: f64) -> f64 {
        let error = (found - expected).abs();
        let flushed = if *self == Tolerance::EXACT { 0.0 } else { FLUSHED_TO_ZERO };
        let allowed = self.relative * expected.abs() + self.slack * scale + flushed;
        // Equal infinities have a NaN error.
        if found == expected {
            0.0
        } else if allowed == 0.0 || error.is_nan() {
            f64::INFINITY
        } else {
            error / allowed
        }
    }
}

fn rms(values: &[f32]) -> f64 {
    let squares: f64 = values.iter().map(|&v| f64::from(v).powi(2)).sum();
    (squares / values.len().max(1) as f64).sqrt()
}

/// Number of equal elements that would have the same norms: all of them, or close to 1 if one dominates.
fn effective_count(values: &[f32]) -> f64 {
    let power = |n: i32| values.iter().map(|&v| f64::from(v).powi(n)).sum::<f64>();
    power(2).powi(2) / power(4).max(f64::MIN_POSITIVE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(values: &[f32]) -> HostTensor {
        HostTensor::from_f32([1, values.len()], values.to_vec()).unwrap()
    }

    #[test]
    fn one_wrong_element_is_named() {
        let expected = row(&[1.0, 2.0, 4.0]);
        let found = row(&[1.0, 2.001, 4.0]);
        let error = Tolerance::ELEMENTWISE.check(&found, &expected).unwrap_err();
        assert!(error.starts_with("row 0, column 1: 2.001, expected 2,"), "{error}");
        assert_eq!(Tolerance::ELEMENTWISE.check(&expected, &expected), Ok(()));
    }

    #[test]
    fn nan_and_infinity_never_pass() {
        let expected = row(&[1.0, 2.0]);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let loose = Tolerance { relative: 1.0, slack: 1.0, l2: 10.0 };
            assert!(loose.check(&row(&[1.0, bad]), &expected).is_err(), "{bad}");
        }
    }

    #[test]
    fn many_small_errors_fail_the_norm() {
        let expected = row(&[1.0; 64]);
        let tolerance = Tolerance { relative: 1e-3, slack: 0.0, l2: 1e-4 };
        assert!(tolerance.check(&row(&[1.0005; 64]), &expected).unwrap_err().starts_with("relative L2"));
        assert_eq!(tolerance.check(&row(&[1.00005; 64]), &expected), Ok(()));
    }

    #[test]
    fn bf16_allows_one_rounding_but_not_two_units() {
        let tolerance = Tolerance::ELEMENTWISE.rounded(DType::BF16);
        let expected = row(&[1.0039]);
        assert_eq!(tolerance.check(&row(&[1.0078125]), &expected), Ok(()));
        assert!(tolerance.check(&row(&[1.015625]), &expected).is_err());
    }

    #[test]
    fn other_shapes_are_errors() {
        let error = Tolerance::EXACT.check(&row(&[1.0]), &row(&[1.0, 2.0])).unwrap_err();
        assert_eq!(error, "shape [1, 1], expected [1, 2]");
    }
}
