//! The scale of a module's update: alpha / rank.
//!
//! Alpha is in the module's `.alpha` tensor, else in PEFT's adapter config; a file without either has scale 1. An update
//! without a rank (a difference, or a LoKr of two full factors) has scale 1 whatever its alpha: trainers set alpha to a
//! rank that they don't use, in ai-toolkit 9999999999, which is infinite in f16. Only PEFT scales such a LoKr, by its config.
//!
//! A LoKr with a rank is multiplied by alpha / rank once, as by all that train and read it, with two exceptions in LyCORIS.
//! It merges with the square, which nobody trains with. And before version 4 it trained without the scale if the model's
//! layers were quantized; the file does not tell, so [`notes`] does.

use std::collections::BTreeSet;

use kiln_tensor::DType;

use super::LoraProblem;
use super::adapter_config::{AdapterConfig, ModuleName};
use super::update::Update;
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
    fn is_doubtful(&self, rank: usize) -> bool {
        let exact = self.value.fract() == 0.0 && self.value.abs() <= self.exact_to;
        self.exact_to.is_finite() && !exact && f64::from(self.value) != rank as f64
    }
}

/// The scale of one module.
#[derive(Debug)]
pub(super) struct Scale {
    pub value: f64,
    doubt: Option<Doubt>,
}

/// Why a scale may not be the one that was trained with.
#[derive(Debug)]
enum Doubt {
    /// LyCORIS may have trained without it.
    Lokr,
    /// The alpha in this key is rounded.
    Rounded(String),
}

impl Scale {
    pub fn new(
        config: Option<&AdapterConfig>,
        module: ModuleName<'_>,
        update: &Update,
        alpha: Option<Alpha<'_>>,
    ) -> Result<Scale, LoraProblem> {
        let Some(rank) = update.rank() else {
            let config = config.filter(|_| matches!(update, Update::Kron { .. }));
            let value = config.map_or(Ok(1.0), |config| config.scale(module, update, None))?;
            return Ok(Scale { value: in_range(module, value)?, doubt: None });
        };
        let given = alpha.as_ref().map(Alpha::usable).transpose()?;
        let value = match config {
            Some(config) => config.scale(module, update, alpha.as_ref())?,
            None => given.map_or(1.0, |alpha| alpha / rank as f64),
        };
        let doubt = match alpha {
            Some(alpha) if alpha.is_doubtful(rank) => Some(Doubt::Rounded(alpha.key.to_owned())),
            Some(_) if matches!(update, Update::Kron { .. }) && value != 1.0 => Some(Doubt::Lokr),
            _ => None,
        };
        Ok(Scale { value: in_range(module, value)?, doubt })
    }
}

/// Rejects a scale that is infinite or zero as f32.
fn in_range(module: ModuleName<'_>, scale: f64) -> Result<f64, LoraProblem> {
    if (scale as f32).is_finite() && scale as f32 != 0.0 {
        return Ok(scale);
    }
    Err(LoraProblem::Scale { module: module.name.to_owned(), found: scale })
}

/// What the scales of a file's modules leave open.
pub(super) fn notes<'s>(scales: impl Iterator<Item = &'s Scale>) -> Vec<String> {
    let (mut lokr, mut rounded) = (BTreeSet::new(), Vec::new());
    for Scale { value, doubt } in scales {
        match doubt {
            Some(Doubt::Lokr) => {
                lokr.insert(format!("{value}"));
            }
            Some(Doubt::Rounded(key)) => rounded.push(key),
            None => {}
        }
    }
    let lokr = (!lokr.is_empty()).then(|| {
        let scales: Vec<String> = lokr.into_iter().collect();
        format!(
            "its LoKr is scaled by alpha / rank ({}); LyCORIS before version 4 trained quantized models without \
             this scale, so divide the weight by it if the effect is wrong",
            scales.join(", ")
        )
    });
    let rounded = rounded.first().map(|key| format!("`{key}` is fp8, which may have rounded it"));
    lokr.into_iter().chain(rounded).collect()
}
