//! Fields of a request with a fixed set of values.

use kiln_weights::DoraRule;
use serde::{Deserialize, Serialize};

/// How noise levels are distributed over the steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum ScheduleKind {
    /// As the model was trained: shifted towards high noise for large images
    #[default]
    Shifted,
    /// linspace(1,0,n+1)^(1/rho)
    Power,
}

/// The random number generator of PyTorch whose noise is reproduced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Rng {
    /// CPU generator of an f32 pipeline, or of a 16-bit one since torch 2.13
    #[default]
    Cpu,
    /// CPU generator of a bf16 pipeline up to torch 2.11
    CpuBf16,
    /// CPU generator of an f16 pipeline up to torch 2.11
    CpuF16,
    /// CUDA generator
    Cuda,
}

/// The program whose rule for DoRAs is followed; with a weight of 1 and alone, both are the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum DoraRuleName {
    /// The weight mixes the changed layers with the unchanged ones; several LoRAs add up
    #[cfg_attr(feature = "cli", value(name = "comfyui"))]
    ComfyUi,
    /// The weight scales the update, as in PEFT; a DoRA also rescales what the LoRAs before it changed
    Diffusers,
}

impl From<DoraRuleName> for DoraRule {
    fn from(name: DoraRuleName) -> DoraRule {
        match name {
            DoraRuleName::ComfyUi => DoraRule::ComfyUi,
            DoraRuleName::Diffusers => DoraRule::Diffusers,
        }
    }
}

/// A file format for images.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum OutputFormat {
    /// Lossless.
    #[default]
    Png,
    /// Lossy, small files.
    #[serde(alias = "jpg")]
    Jpeg,
    /// Lossless, smaller and slower than PNG; with a quality lossy, smaller than JPEG.
    Webp,
}

impl OutputFormat {
    /// Returns the format of `kiln-image`.
    pub fn format(self) -> kiln_image::Format {
        match self {
            OutputFormat::Png => kiln_image::Format::Png,
            OutputFormat::Jpeg => kiln_image::Format::Jpeg,
            OutputFormat::Webp => kiln_image::Format::Webp,
        }
    }

    /// Returns its name in the OpenAI API.
    pub fn name(self) -> &'static str {
        match self {
            OutputFormat::Png => "png",
            OutputFormat::Jpeg => "jpeg",
            OutputFormat::Webp => "webp",
        }
    }
}

/// How much effort goes into PNG compression.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum PngEffort {
    /// A few milliseconds per image.
    #[default]
    Fast,
    /// Smaller files, many times slower.
    Small,
}
