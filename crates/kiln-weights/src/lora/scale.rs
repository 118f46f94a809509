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

use super::LoraProblem;
use super::adapter_config::{AdapterConfig, ModuleName};
use super::alpha::Alpha;
use super::update::Update;

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
            Some(alpha) if alpha.is_doubtful(rank) => Some(Doubt::Rounded(alpha.key().to_owned())),
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
