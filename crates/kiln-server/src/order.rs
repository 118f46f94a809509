//! What a client asks for, in one form for all APIs.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// One order: what to paint and how. Everything but the prompt may be left to the model.
///
/// Pictures to work from are given as a data URL or base64, as `input:ID` (see `/v1/inputs`) or as `picture:ID` (one
/// that this server made). In a stored order they are all inputs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Order {
    /// What to paint.
    #[schema(max_length = 8000, example = "a red apple on a blue background")]
    pub prompt: String,
    /// What to stay away from, on models with guidance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(max_length = 8000)]
    pub negative_prompt: Option<String>,
    /// The model's name, as in `/v1/models`; the server's own choice when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// How many pictures.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub n: Option<u32>,
    /// Width in pixels, rounded down to a multiple of 16.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 16)]
    pub width: Option<u32>,
    /// Height in pixels, likewise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 16)]
    pub height: Option<u32>,
    /// Steps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub steps: Option<u32>,
    /// Guidance, on models that have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 0)]
    pub guidance: Option<f32>,
    /// Seed; a random one when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
    /// LoRAs by name, with their weights.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub loras: Vec<LoraOrder>,
    /// Pictures to look at while painting.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub references: Vec<String>,
    /// A picture to start from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub init: Option<String>,
    /// Where to repaint `init`: white is painted, black stays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mask: Option<String>,
    /// How far to leave `init`, from 0 (not at all) to 1 (forget it).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 0, maximum = 1)]
    pub strength: Option<f64>,
    /// Work only on the mask's surroundings, so many pixels around it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mask_padding: Option<u32>,
    /// The files' format.
    #[serde(default)]
    pub output_format: OutputFormat,
    /// JPEG quality.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 0, maximum = 100)]
    pub output_compression: Option<u8>,
    /// How hard PNG files are squeezed.
    #[serde(default)]
    pub png: PngEffort,
}

/// A LoRA and how strongly it acts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LoraOrder {
    /// Its name, as in `/v1/loras`.
    pub name: String,
    /// Its weight.
    #[serde(default = "one")]
    pub weight: f32,
}

fn one() -> f32 {
    1.0
}

/// A format of picture files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum OutputFormat {
    /// Lossless.
    #[default]
    Png,
    /// Small.
    #[serde(alias = "jpg")]
    Jpeg,
    /// Lossless, smaller and slower than PNG.
    Webp,
}

impl OutputFormat {
    /// As the library of pictures names it.
    pub fn format(self) -> kiln_image::Format {
        match self {
            OutputFormat::Png => kiln_image::Format::Png,
            OutputFormat::Jpeg => kiln_image::Format::Jpeg,
            OutputFormat::Webp => kiln_image::Format::Webp,
        }
    }

    /// As OpenAI names it.
    pub fn name(self) -> &'static str {
        match self {
            OutputFormat::Png => "png",
            OutputFormat::Jpeg => "jpeg",
            OutputFormat::Webp => "webp",
        }
    }
}

/// How hard PNG files are squeezed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum PngEffort {
    /// A few milliseconds a picture.
    #[default]
    Fast,
    /// Smaller files, many times slower.
    Small,
}

impl Order {
    /// The number of pictures.
    pub fn pictures(&self) -> u32 {
        self.n.unwrap_or(1)
    }

    /// Every picture that it names.
    pub fn sources(&self) -> impl Iterator<Item = &String> {
        self.references.iter().chain(&self.init).chain(&self.mask)
    }

    /// How pictures are encoded.
    pub fn encoding(&self) -> kiln_image::Encoding {
        kiln_image::Encoding {
            format: self.output_format.format(),
            quality: self.output_compression,
            small: self.png == PngEffort::Small,
        }
    }
}
