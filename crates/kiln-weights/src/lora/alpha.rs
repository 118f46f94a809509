//! The number in a module's `.alpha` tensor.

use kiln_tensor::DType;

use super::LoraProblem;
use crate::{Error, Result, WeightSource};

/// The number in an `.alpha` tensor.
pub(super) struct Alpha<'k> {
    key: &'k str,
    value: f32,
    /// The largest integer that is certain to be what was cast: the next one, 8 or 16, is also what 9 or 17 becomes.
    exact_to: f32,
}

impl<'k> Alpha<'k> {
    /// Reads the one number in an `.alpha` tensor.
    pub fn read(source: &WeightSource, key: &'k str) -> Result<Alpha<'k>> {
        let problem = |p| Error::Lora { file: source.path().to_owned(), problem: Box::new(p) };
        let tensor = source.tensor(key)?;
        if tensor.numel() != 1 {
            let (key, found) = (key.to_owned(), tensor.shape().clone());
            return Err(problem(LoraProblem::UnexpectedShape { key, found, expected: "one number" }));
        }
        let integer = || tensor.to_i64().ok().and_then(|values| values.first().map(|v| *v as f32));
        let value = match tensor.dtype() {
            DType::I64 | DType::I32 => integer(),
            _ => tensor.to_f32().ok().and_then(|values| values.first().copied()),
        };
        let value = value.ok_or_else(|| {
            let expected = "f32, bf16, f16, f64, fp8, i32 or i64";
            problem(LoraProblem::DType { key: key.to_owned(), dtype: tensor.dtype(), expected })
        })?;
        let exact_to = match source.entry(key) {
            Some((DType::F8E5M2, _)) => 7.0,
            Some((DType::F8E4M3, _)) => 15.0,
            _ => f32::INFINITY,
        };
        Ok(Alpha { key, value, exact_to })
    }

    /// The key of the tensor.
    pub fn key(&self) -> &str {
        self.key
    }

    /// Whether it may be this number, rounded to the type of the tensor.
    pub fn could_be(&self, alpha: f64) -> bool {
        // bf16 has 8 bits, fp8 2 or 3.
        let error = if self.exact_to.is_finite() { 0.25 } else { 1.0 / 128.0 };
        (f64::from(self.value) - alpha).abs() <= alpha.abs() * error
    }

    /// The value, if a scale can be computed from it. Zero means no update to some programs, and no alpha to others.
    pub fn usable(&self) -> Result<f64, LoraProblem> {
        if self.value.is_finite() && self.value != 0.0 {
            return Ok(self.value.into());
        }
        Err(LoraProblem::Alpha { key: self.key.to_owned(), found: self.value })
    }

    /// Whether a cast may have rounded it. If it is still the rank, it was exact.
    pub fn is_doubtful(&self, rank: usize) -> bool {
        let exact = self.value.fract() == 0.0 && self.value.abs() <= self.exact_to;
        self.exact_to.is_finite() && !exact && f64::from(self.value) != rank as f64
    }
}
