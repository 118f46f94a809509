//! The request: what to generate. The command line, the HTTP APIs, jobs and recipes all translate into it.
//!
//! A request is plain data. Images, LoRAs and other files are named, not read; an
//! [`InputResolver`](crate::InputResolver) gives the names their meaning. Its JSON is that of `/v1/jobs` and of recipes: a
//! file is a name, or in a recipe an object with its path and hash.

mod choices;
mod fields;
mod files;
pub mod finite;
mod one_or_many;
mod parse;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

pub use choices::{DoraRuleName, OutputFormat, PngEffort, Rng, ScheduleKind};
pub use files::{FileRef, LoraRef};
pub use one_or_many::OneOrMany;
pub use parse::cache_threshold;
use parse::random_seed;
#[cfg(feature = "cli")]
use parse::{at_least, seed, upscale_factor};

/// What to generate. Only the prompt is required; everything else has a default.
///
/// Over HTTP, images are given as a data URL, as base64, as `input:ID` (see `/v1/inputs`) or as `image:ID` (an image
/// that this server generated); LoRAs, models and VAEs are given by name.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::Args))]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(default, deny_unknown_fields)]
pub struct Request {
    /// Description of the image; several prompts give an image each
    #[cfg_attr(feature = "cli", arg(value_name = "PROMPT"))]
    #[cfg_attr(feature = "schema", schema(value_type = OneOrMany<String>, required = true))]
    #[serde(rename = "prompt", with = "one_or_many", skip_serializing_if = "Vec::is_empty")]
    pub prompts: Vec<String>,

    /// The prompts before they were rewritten, one for each; kept in the recipe and otherwise not used
    #[cfg_attr(feature = "cli", arg(skip))]
    #[cfg_attr(feature = "schema", schema(value_type = OneOrMany<String>))]
    #[serde(rename = "original_prompt", with = "one_or_many", skip_serializing_if = "Vec::is_empty")]
    pub original_prompts: Vec<String>,

    /// Negative prompt: what to avoid, on models with guidance; one for all prompts, or one for each
    #[cfg_attr(
        feature = "cli",
        arg(
            short,
            long = "negative",
            alias = "negative-prompt",
            value_name = "TEXT",
            help_heading = "Image",
            allow_hyphen_values = true
        )
    )]
    #[cfg_attr(feature = "schema", schema(value_type = OneOrMany<String>))]
    #[serde(
        rename = "negative_prompt",
        alias = "negative",
        with = "one_or_many",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub negative_prompts: Vec<String>,

    /// Model: a name (`ember`, or one listed by `kiln models`), a folder (diffusers or Hugging Face cache), a file
    /// (safetensors or GGUF, with the other components next to it), or a model.toml [default: the recipe's, else
    /// $KILN_MODEL, else that of `kiln config`, else ember]
    #[cfg_attr(feature = "cli", arg(short, long, value_name = "MODEL", help_heading = "Model"))]
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<PathBuf>,

    /// LoRA for the transformer, from any common trainer, with its weight (default 1, may be negative); repeatable
    #[cfg_attr(
        feature = "cli",
        arg(long = "lora", value_name = "FILE[:WEIGHT]", help_heading = "Model", value_parser = LoraRef::parse)
    )]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub loras: Vec<LoraRef>,

    /// Skip what a LoRA has for layers that the model lacks, with a note, instead of refusing the file
    #[cfg_attr(feature = "cli", arg(long, help_heading = "Model"))]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub lora_partial: bool,

    /// What a weight other than 1 means for a DoRA, and how it is combined with other LoRAs [default: comfyui]
    #[cfg_attr(feature = "cli", arg(long, value_name = "RULE", help_heading = "Model"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dora_rule: Option<DoraRuleName>,

    /// VAE to use instead of the model's: TAEF2, or another FLUX.2 VAE
    #[cfg_attr(feature = "cli", arg(long, value_name = "PATH", help_heading = "Model"))]
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vae: Option<FileRef>,

    /// Width in pixels, rounded down to a multiple of 16 [default: the first reference image's, else the model's: 1024,
    /// Ember 256]
    #[cfg_attr(
        feature = "cli",
        arg(
            short = 'W', long, value_name = "N", help_heading = "Image", allow_negative_numbers = true,
            value_parser = at_least::<16>()
        )
    )]
    #[cfg_attr(feature = "schema", schema(minimum = 16))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub width: Option<u32>,

    /// Height in pixels, rounded down to a multiple of 16 [default: as for the width]
    #[cfg_attr(
        feature = "cli",
        arg(
            short = 'H', long, value_name = "N", help_heading = "Image", allow_negative_numbers = true,
            value_parser = at_least::<16>()
        )
    )]
    #[cfg_attr(feature = "schema", schema(minimum = 16))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub height: Option<u32>,

    /// Number of images per prompt [default: 1, or one per seed]
    #[cfg_attr(
        feature = "cli",
        arg(
            short = 'b', long = "batch", aliases = ["batch-count", "num-images", "num-images-per-prompt"],
            value_name = "N", help_heading = "Image", allow_negative_numbers = true, value_parser = at_least::<1>()
        )
    )]
    #[cfg_attr(feature = "schema", schema(minimum = 1))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub n: Option<u32>,

    /// Seed, from 0 to 2⁶⁴−1: image number i, from 0, gets seed + i, so that it can be generated again alone; a list
    /// (`11,12`) gives each image its own [default: random]
    #[cfg_attr(
        feature = "cli",
        arg(
            short = 'S', long, value_name = "N", value_delimiter = ',', help_heading = "Image",
            action = clap::ArgAction::Set, allow_negative_numbers = true, value_parser = seed
        )
    )]
    #[cfg_attr(feature = "schema", schema(value_type = OneOrMany<u64>))]
    #[serde(with = "one_or_many", skip_serializing_if = "Vec::is_empty")]
    pub seed: Vec<u64>,

    /// Draw the noise of all images with one generator, as diffusers does, instead of giving image i seed + i
    #[cfg_attr(feature = "cli", arg(long, help_heading = "Image", conflicts_with = "noise"))]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub one_generator: bool,

    /// Prompt embeddings to use instead of a prompt: a safetensors file with `prompt_embeds`; not over HTTP
    #[cfg_attr(
        feature = "cli",
        arg(long, value_name = "FILE", help_heading = "Image", conflicts_with = "prompts")
    )]
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub embeds: Option<FileRef>,

    /// Number of tokens that prompts are truncated or padded to [default: the model's: 512, Ember 64]
    #[cfg_attr(
        feature = "cli",
        arg(
            long, value_name = "N", help_heading = "Image", allow_negative_numbers = true,
            value_parser = clap::value_parser!(u32).range(1..=MAX_TOKENS as i64)
        )
    )]
    #[cfg_attr(feature = "schema", schema(minimum = 1, maximum = 32768))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<u32>,

    /// Layers of the text encoder whose states make up a text token, as diffusers' `text_encoder_out_layers` [default:
    /// the model's: 9,18,27, dev 10,20,30]
    #[cfg_attr(
        feature = "cli",
        arg(
            long, value_name = "A,B,C", value_delimiter = ',', help_heading = "Image",
            action = clap::ArgAction::Set, allow_negative_numbers = true, value_parser = at_least::<0>()
        )
    )]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub text_layers: Vec<u32>,

    /// Reference image, to edit or combine as the prompt says; repeatable
    #[cfg_attr(
        feature = "cli",
        arg(
            short = 'r', long = "ref", aliases = ["ref-image", "reference"], value_name = "FILE",
            help_heading = "Input images"
        )
    )]
    #[cfg_attr(feature = "schema", schema(value_type = Vec<String>))]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub references: Vec<FileRef>,

    /// Initial image, to start from instead of noise alone
    #[cfg_attr(
        feature = "cli",
        arg(
            long, aliases = ["init-img", "init-image"], short_alias = 'i', value_name = "FILE",
            help_heading = "Input images"
        )
    )]
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub init: Option<FileRef>,

    /// Mask for the initial image: white areas are regenerated, black areas stay
    #[cfg_attr(feature = "cli", arg(long, value_name = "FILE", help_heading = "Input images"))]
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mask: Option<FileRef>,

    /// How much to change the initial image: 0 keeps it, 1 ignores it [default: 0.6, with a mask 0.8; to upscale 0.35]
    #[cfg_attr(
        feature = "cli",
        arg(long, value_name = "F", help_heading = "Input images", allow_negative_numbers = true)
    )]
    #[cfg_attr(feature = "schema", schema(minimum = 0, maximum = 1))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub strength: Option<f64>,

    /// Generate only the masked region with this many pixels around it, and paste it back
    #[cfg_attr(
        feature = "cli",
        arg(
            long, value_name = "N", help_heading = "Input images", allow_negative_numbers = true,
            value_parser = clap::value_parser!(u32).range(0..)
        )
    )]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mask_padding: Option<u32>,

    /// Enlarge the initial image by 2 or 4 instead of generating one of its own: the model refines it tile by tile
    #[cfg_attr(
        feature = "cli",
        arg(long, value_name = "N", help_heading = "Input images", value_parser = upscale_factor)
    )]
    #[cfg_attr(feature = "schema", schema(minimum = 2, maximum = 4))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub upscale: Option<u32>,

    /// Longest side of the tiles of `upscale`, in pixels [default: the model's size: 1024, Ember 256]
    #[cfg_attr(
        feature = "cli",
        arg(long, value_name = "N", help_heading = "Input images", value_parser = at_least::<64>())
    )]
    #[cfg_attr(feature = "schema", schema(minimum = 64))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tile_size: Option<u32>,

    /// Number of denoising steps [default: the model's: 4 if distilled, else 50]
    #[cfg_attr(
        feature = "cli",
        arg(
            short, long, alias = "num-inference-steps", value_name = "N", help_heading = "Sampling",
            allow_negative_numbers = true, value_parser = at_least::<1>()
        )
    )]
    #[cfg_attr(feature = "schema", schema(minimum = 1))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steps: Option<u32>,

    /// Guidance scale, on models with guidance [default: the model's, usually 4]
    #[cfg_attr(
        feature = "cli",
        arg(
            short, long, aliases = ["cfg-scale", "guidance-scale"], value_name = "F", help_heading = "Sampling",
            allow_negative_numbers = true
        )
    )]
    #[cfg_attr(feature = "schema", schema(minimum = 0))]
    #[serde(deserialize_with = "finite::option", skip_serializing_if = "Option::is_none")]
    pub guidance: Option<f32>,

    /// Step cache, for models with many steps (dev, klein base): reuse what most blocks computed in earlier steps while the
    /// first block's result changes by less than this, from 0 (off) to 1 [default: off; without a value 0.1]
    #[cfg_attr(
        feature = "cli",
        arg(
            long, value_name = "THRESHOLD", help_heading = "Sampling", allow_negative_numbers = true,
            num_args = 0..=1, default_missing_value = DEFAULT_CACHE_TEXT, value_parser = cache_threshold
        )
    )]
    #[cfg_attr(feature = "schema", schema(minimum = 0, maximum = 1))]
    #[serde(deserialize_with = "finite::option", skip_serializing_if = "Option::is_none")]
    pub cache: Option<f32>,

    /// Custom sigmas (noise levels before shifting), decreasing from 1
    #[cfg_attr(
        feature = "cli",
        arg(
            long, value_name = "A,B,C", value_delimiter = ',', help_heading = "Sampling",
            action = clap::ArgAction::Set, allow_negative_numbers = true
        )
    )]
    #[serde(deserialize_with = "finite::list", skip_serializing_if = "Vec::is_empty")]
    pub sigmas: Vec<f32>,

    /// Schedule of the noise levels [default: shifted]
    #[cfg_attr(feature = "cli", arg(long, value_name = "KIND", help_heading = "Sampling"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub schedule: Option<ScheduleKind>,

    /// Exponent of the power schedule: 1 spaces noise levels evenly, more spends longer at high noise [default: 2]
    #[cfg_attr(
        feature = "cli",
        arg(long, value_name = "F", help_heading = "Sampling", allow_negative_numbers = true)
    )]
    #[serde(deserialize_with = "finite::option", skip_serializing_if = "Option::is_none")]
    pub rho: Option<f32>,

    /// Random number generator of PyTorch that the seed is for; 16-bit CPU noise changed after torch 2.11 [default: cpu]
    #[cfg_attr(feature = "cli", arg(long, value_name = "KIND", help_heading = "Sampling"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rng: Option<Rng>,

    /// Noise to use instead of a seed: a safetensors file with `noise` or `latents`; not over HTTP
    #[cfg_attr(
        feature = "cli",
        arg(long, value_name = "FILE", help_heading = "Sampling", conflicts_with = "seed")
    )]
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub noise: Option<FileRef>,

    /// Which image of an earlier batch to generate again, without the others.
    #[cfg_attr(feature = "cli", arg(skip))]
    #[cfg_attr(feature = "schema", schema(ignore))]
    #[serde(skip)]
    pub batch_position: Option<BatchPosition>,

    /// File format of the image.
    #[cfg_attr(feature = "cli", arg(skip))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output_format: Option<OutputFormat>,

    /// Quality of JPEG and WebP, from 0 to 100 [default: 95; without it, WebP is lossless]
    #[cfg_attr(
        feature = "cli",
        arg(
            long = "quality", value_name = "N", help_heading = "Output", allow_negative_numbers = true,
            value_parser = clap::value_parser!(u8).range(0..=100)
        )
    )]
    #[cfg_attr(feature = "schema", schema(minimum = 0, maximum = 100))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output_compression: Option<u8>,

    /// PNG compression: fast, or small files.
    #[cfg_attr(feature = "cli", arg(skip))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub png: Option<PngEffort>,
}

/// The threshold of the step cache if none is given; see docs/caching.md for what it was chosen from.
pub const DEFAULT_CACHE_THRESHOLD: f32 = 0.1;
/// [`DEFAULT_CACHE_THRESHOLD`] as an option's value.
#[cfg(feature = "cli")]
const DEFAULT_CACHE_TEXT: &str = "0.1";

/// The largest number of tokens that a prompt may be padded to.
pub(crate) const MAX_TOKENS: u32 = 32_768;

/// The position of an image in the batch that it was generated in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchPosition {
    /// Its index among the images whose noise one generator draws, from 0.
    pub index: usize,
    /// The number of these images.
    pub batch: usize,
    /// Index of its prompt in the file of embeddings, from 0.
    pub embeds_row: Option<usize>,
}

impl Request {
    /// Creates a request for an image of `prompt`, with defaults for everything else.
    pub fn new(prompt: impl Into<String>) -> Request {
        Request { prompts: vec![prompt.into()], ..Request::default() }
    }

    /// Chooses a random seed if there is neither a seed nor given noise. Returns whether it did.
    pub fn ensure_seed(&mut self) -> Result<bool, String> {
        if !self.seed.is_empty() || self.noise.is_some() {
            return Ok(false);
        }
        self.seed = vec![random_seed()?];
        Ok(true)
    }

    /// Returns the first field with a number that is not finite, and the number.
    pub fn not_finite(&self) -> Option<(&'static str, f64)> {
        let numbers = [("guidance", self.guidance), ("cache", self.cache), ("rho", self.rho)];
        let numbers = numbers.into_iter().filter_map(|(field, number)| Some((field, f64::from(number?))));
        let strength = self.strength.map(|number| ("strength", number));
        let sigmas = self.sigmas.iter().map(|number| ("sigmas", f64::from(*number)));
        let loras = self.loras.iter().map(|lora| ("loras", f64::from(lora.weight)));
        numbers.chain(strength).chain(sigmas).chain(loras).find(|(_, number)| !number.is_finite())
    }

    /// Iterates over the image files it names.
    pub fn images(&self) -> impl Iterator<Item = &FileRef> {
        self.references.iter().chain(&self.init).chain(&self.mask)
    }

    /// Iterates mutably over the image files it names.
    pub fn images_mut(&mut self) -> impl Iterator<Item = &mut FileRef> {
        self.references.iter_mut().chain(&mut self.init).chain(&mut self.mask)
    }

    /// Returns the seed of each of `images` images: from the list, or one more than that of the image before.
    pub fn seeds(&self, images: usize) -> Vec<u64> {
        match &self.seed[..] {
            [] => (0..images as u64).collect(),
            &[first] => (0..images as u64).map(|i| first.wrapping_add(i)).collect(),
            list => list.to_vec(),
        }
    }

    /// Returns the number of images, as far as it is known without reading files.
    pub fn image_count(&self) -> usize {
        let prompts = self.prompts.len().max(1);
        match (self.n, self.seed.len()) {
            (Some(n), _) => prompts.saturating_mul(n as usize),
            (None, seeds) => prompts.max(seeds),
        }
    }

    /// Returns how much of the image a model makes: references are only looked at, pixels of an initial image go into it.
    pub fn ai_source(&self) -> kiln_image::AiSource {
        match self.init {
            Some(_) => kiln_image::AiSource::Composite,
            None => kiln_image::AiSource::Generated,
        }
    }

    /// Returns how image files are encoded.
    pub fn encoding(&self) -> kiln_image::Encoding {
        kiln_image::Encoding {
            format: self.output_format.unwrap_or_default().format(),
            quality: self.output_compression,
            small: self.png == Some(PngEffort::Small),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn single_prompts_and_seeds_are_written_plain_and_read_plain_or_as_lists() {
        let request = Request { seed: vec![u64::MAX], ..Request::new("a fox") };
        let json = serde_json::to_string(&request).unwrap();
        assert_eq!(json, r#"{"prompt":"a fox","seed":18446744073709551615}"#);
        assert_eq!(serde_json::from_str::<Request>(&json).unwrap(), request);
        let two: Request =
            serde_json::from_str(r#"{"prompt":["a","b"],"negative":"c","seed":[1,2]}"#).unwrap();
        assert_eq!((two.prompts.len(), two.seed.len()), (2, 2));
        assert_eq!(two.negative_prompts, ["c"]);
    }

    #[test]
    fn files_are_names_and_in_recipes_objects_with_their_hash() {
        let json = r#"{"prompt":"a","loras":[{"name":"ink","weight":0.5}],"references":["input:1"]}"#;
        let request: Request = serde_json::from_str(json).unwrap();
        assert_eq!(serde_json::to_string(&request).unwrap(), json);
        let json = r#"{"prompt":"a","loras":[{"path":"/i","sha256":"aa","weight":1.0}],"references":[{"path":"/r","sha256":"bb"}]}"#;
        let request: Request = serde_json::from_str(json).unwrap();
        assert_eq!(request.references[0].sha256.as_deref(), Some("bb"));
        assert_eq!(serde_json::to_string(&request).unwrap(), json);
    }

    #[test]
    fn numbers_that_f32_can_not_hold_are_refused() {
        for (json, number) in [
            (r#"{"guidance":1e99}"#, "1e99"),
            (r#"{"guidance":-1e300}"#, "-1e300"),
            (r#"{"cache":1e40}"#, "1e40"),
            (r#"{"rho":1e39}"#, "1e39"),
            (r#"{"sigmas":[1,1e50]}"#, "1e50"),
            (r#"{"loras":[{"name":"ink","weight":1e99}]}"#, "1e99"),
        ] {
            let error = serde_json::from_str::<Request>(json).unwrap_err().to_string();
            assert!(error.contains(&format!("the number {number} is out of range")), "{error}");
        }
        let json = r#"{"guidance":3e38,"sigmas":[1.0,0.5],"loras":[{"name":"a","weight":-2.0}]}"#;
        let request: Request = serde_json::from_str(json).unwrap();
        assert_eq!((request.guidance, request.sigmas.len(), request.loras[0].weight), (Some(3e38), 2, -2.0));
        assert_eq!(serde_json::from_str::<Request>(r#"{"guidance":null}"#).unwrap().guidance, None);
    }

    #[test]
    fn the_rule_for_doras_has_the_names_of_programs() {
        let request: Request = serde_json::from_str(r#"{"dora_rule":"diffusers"}"#).unwrap();
        assert_eq!(serde_json::to_string(&request).unwrap(), r#"{"dora_rule":"diffusers"}"#);
        let error = serde_json::from_str::<Request>(r#"{"dora_rule":"a1111"}"#).unwrap_err().to_string();
        assert!(error.contains("comfyui") && error.contains("diffusers"), "{error}");
    }

    #[test]
    fn a_misspelt_field_is_refused_by_name() {
        let error = serde_json::from_str::<Request>(r#"{"prompt":"a","widht":64}"#).unwrap_err().to_string();
        assert!(error.contains("unknown field `widht`"), "{error}");
    }
}
