//! The choices among a request's values.

use std::str::FromStr;

use kiln_tensor::DType;
use kiln_weights::LoraNaming;
use serde::{Deserialize, Serialize};

use crate::settings::{BETAS, EPS};
use crate::{Optimizer, SigmaSampling};

/// The learning rate after the warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum LearningSchedule {
    /// Stays
    #[default]
    Constant,
    /// Falls to zero at the last step
    Cosine,
}

/// An optimizer with the usual constants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum OptimizerName {
    /// AdamW with 32-bit state
    #[default]
    Adamw,
    /// AdamW with 8-bit state: a quarter of its memory
    Adamw8bit,
    /// Prodigy, which finds the learning rate itself
    Prodigy,
}

impl OptimizerName {
    /// The optimizer with the usual constants.
    pub(super) fn optimizer(self, weight_decay: f32) -> Optimizer {
        let (betas, eps) = (BETAS, EPS);
        match self {
            OptimizerName::Adamw => Optimizer::AdamW { betas, eps, weight_decay },
            OptimizerName::Adamw8bit => Optimizer::AdamW8bit { betas, eps, weight_decay },
            OptimizerName::Prodigy => Optimizer::Prodigy { betas, eps, weight_decay, d0: 1e-6, d_coef: 1.0 },
        }
    }
}

/// When activations are computed twice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum Checkpointing {
    /// If memory would be too small
    #[default]
    Auto,
    /// Always
    On,
    /// Never
    Off,
}

/// The names of a LoRA's keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum LoraLayout {
    /// transformer.*, with PEFT's settings: Kiln, diffusers, ComfyUI
    #[default]
    Diffusers,
    /// diffusion_model.* with Black Forest Labs' names: ai-toolkit, ComfyUI
    Comfyui,
    /// lora_unet_*: kohya's scripts, musubi
    Kohya,
}

impl From<LoraLayout> for LoraNaming {
    fn from(layout: LoraLayout) -> LoraNaming {
        match layout {
            LoraLayout::Diffusers => LoraNaming::Diffusers,
            LoraLayout::Comfyui => LoraNaming::Original,
            LoraLayout::Kohya => LoraNaming::Kohya,
        }
    }
}

/// The data type of a LoRA's file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum SaveDtype {
    /// 16 bits
    #[default]
    Bf16,
    /// 32 bits
    F32,
}

impl From<SaveDtype> for DType {
    fn from(dtype: SaveDtype) -> DType {
        match dtype {
            SaveDtype::Bf16 => DType::BF16,
            SaveDtype::F32 => DType::F32,
        }
    }
}

/// The noise levels of a training: `logit-normal`, `uniform`, or a list.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(untagged)]
pub enum SigmaLevels {
    /// A distribution.
    Named(SigmaDistribution),
    /// Levels above 0 and at most 1, each equally likely.
    List(Vec<f32>),
}

/// A distribution of noise levels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum SigmaDistribution {
    /// Shifted by the number of tokens, as FLUX was trained.
    LogitNormal,
    /// All levels alike.
    Uniform,
}

impl SigmaLevels {
    pub(super) fn sampling(&self) -> SigmaSampling {
        match self {
            SigmaLevels::Named(SigmaDistribution::LogitNormal) => SigmaSampling::default(),
            SigmaLevels::Named(SigmaDistribution::Uniform) => SigmaSampling::Uniform,
            SigmaLevels::List(sigmas) => SigmaSampling::List { sigmas: sigmas.clone() },
        }
    }
}

impl FromStr for SigmaLevels {
    type Err = String;

    fn from_str(text: &str) -> Result<SigmaLevels, String> {
        match text {
            "logit-normal" => Ok(SigmaLevels::Named(SigmaDistribution::LogitNormal)),
            "uniform" => Ok(SigmaLevels::Named(SigmaDistribution::Uniform)),
            list => {
                let levels = list.split(',').map(|level| level.trim().parse().ok()).collect::<Option<_>>();
                levels.map(SigmaLevels::List).ok_or_else(|| {
                    "expected logit-normal, uniform, or levels above 0 and at most 1 such as 0.3,0.6".into()
                })
            }
        }
    }
}

/// What a LoRA should learn: chooses layers, rank, sizes and steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum Preset {
    /// How images look: few layers, which leave the subjects alone
    Style,
    /// A person, an animal or an object: all layers, a high rank, two sizes
    Subject,
    /// All layers, with the defaults
    #[default]
    Full,
}

impl Preset {
    /// All presets.
    pub const ALL: [Preset; 3] = [Preset::Style, Preset::Subject, Preset::Full];
}
