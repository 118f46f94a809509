//! What to generate: the one request that the command line, the HTTP APIs, jobs and recipes translate into.
//!
//! A request is plain data. Images, LoRAs and other files are named, not read; what a name means is up to the door it
//! came through (`Inputs`). Its JSON is that of `/v1/jobs` and of recipes: a file is its name, or in a
//! recipe an object with its hash.

mod one_or_many;

use std::path::PathBuf;

use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

pub use one_or_many::OneOrMany;

/// What to generate and how. Everything but the prompt may be left to the model.
///
/// Over HTTP, images are given as a data URL or base64, as `input:ID` (see `/v1/inputs`) or as `picture:ID` (one that
/// this server made); LoRAs, models and autoencoders by name.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::Args))]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(default, deny_unknown_fields)]
pub struct Request {
    /// What to show. Several prompts make an image each
    #[cfg_attr(feature = "cli", arg(value_name = "PROMPT"))]
    #[cfg_attr(feature = "schema", schema(value_type = OneOrMany<String>, required = true))]
    #[serde(rename = "prompt", with = "one_or_many", skip_serializing_if = "Vec::is_empty")]
    pub prompts: Vec<String>,

    /// What to avoid, on models with guidance: one text for all prompts, or one for each
    #[cfg_attr(
        feature = "cli",
        arg(
            short,
            long = "negative",
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

    /// The model: a name (`ember`, or one that `kiln models` lists), a folder in diffusers' layout or the Hugging Face
    /// cache's, a file (safetensors or GGUF, the other parts beside it), or a model.toml [default: the recipe's, else
    /// $KILN_MODEL, else ember]
    #[cfg_attr(feature = "cli", arg(short, long, value_name = "MODEL", help_heading = "Model"))]
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<PathBuf>,

    /// LoRA for the transformer, in any trainer's layout, with its weight (1 when absent, may be negative); repeatable
    #[cfg_attr(
        feature = "cli",
        arg(long = "lora", value_name = "FILE[:WEIGHT]", help_heading = "Model", value_parser = LoraRef::parse)
    )]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub loras: Vec<LoraRef>,

    /// Use the modules of a LoRA that fit and say which don't, instead of refusing the file
    #[cfg_attr(feature = "cli", arg(long, help_heading = "Model"))]
    #[cfg_attr(feature = "schema", schema(ignore))]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub lora_partial: bool,

    /// Autoencoder to use instead of the model's: TAEF2, or another FLUX.2 VAE
    #[cfg_attr(feature = "cli", arg(long, value_name = "PATH", help_heading = "Model"))]
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vae: Option<FileRef>,

    /// Width in pixels, rounded down to a multiple of 16 [default: the first reference's, else the model's own: 1024,
    /// Ember's 256]
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

    /// Height in pixels, likewise
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

    /// Images for each prompt [default: 1, or as many as there are seeds]
    #[cfg_attr(
        feature = "cli",
        arg(
            short = 'b', long = "batch", value_name = "N", help_heading = "Image", allow_negative_numbers = true,
            value_parser = at_least::<1>()
        )
    )]
    #[cfg_attr(feature = "schema", schema(minimum = 1))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub n: Option<u32>,

    /// Seed up to 2⁶⁴−1, random when absent; a list (`11,12`) gives each image a generator of its own
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

    /// Prompt embeddings made elsewhere instead of a prompt: safetensors with `prompt_embeds`; not over HTTP
    #[cfg_attr(
        feature = "cli",
        arg(long, value_name = "FILE", help_heading = "Image", conflicts_with = "prompts")
    )]
    #[cfg_attr(feature = "schema", schema(ignore))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub embeds: Option<FileRef>,

    /// Tokens that the prompt is cut or padded to [default: the model's own: 512, Ember's 64]
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

    /// Reference image; repeatable
    #[cfg_attr(
        feature = "cli",
        arg(short = 'r', long = "ref", value_name = "FILE", help_heading = "Images to work from")
    )]
    #[cfg_attr(feature = "schema", schema(value_type = Vec<String>))]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub references: Vec<FileRef>,

    /// Image to start from
    #[cfg_attr(feature = "cli", arg(long, value_name = "FILE", help_heading = "Images to work from"))]
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub init: Option<FileRef>,

    /// Where to change the initial image: white is regenerated, black stays
    #[cfg_attr(feature = "cli", arg(long, value_name = "FILE", help_heading = "Images to work from"))]
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mask: Option<FileRef>,

    /// How much to change the initial image: 0 keeps it, 1 ignores it [default: 0.6, with a mask 0.8]
    #[cfg_attr(
        feature = "cli",
        arg(long, value_name = "F", help_heading = "Images to work from", allow_negative_numbers = true)
    )]
    #[cfg_attr(feature = "schema", schema(minimum = 0, maximum = 1))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub strength: Option<f64>,

    /// Work only on the mask's surroundings, this many pixels around it, and paste the result back
    #[cfg_attr(
        feature = "cli",
        arg(
            long, value_name = "N", help_heading = "Images to work from", allow_negative_numbers = true,
            value_parser = clap::value_parser!(u32).range(0..)
        )
    )]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mask_padding: Option<u32>,

    /// Steps [default: the model's own, else 4 or 50]
    #[cfg_attr(
        feature = "cli",
        arg(
            short, long, value_name = "N", help_heading = "Sampling", allow_negative_numbers = true,
            value_parser = at_least::<1>()
        )
    )]
    #[cfg_attr(feature = "schema", schema(minimum = 1))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steps: Option<u32>,

    /// Guidance, on models that have it [default: the model's own, else 4]
    #[cfg_attr(
        feature = "cli",
        arg(short, long, value_name = "F", help_heading = "Sampling", allow_negative_numbers = true)
    )]
    #[cfg_attr(feature = "schema", schema(minimum = 0))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guidance: Option<f32>,

    /// Noise levels before shifting, falling from 1
    #[cfg_attr(
        feature = "cli",
        arg(
            long, value_name = "A,B,C", value_delimiter = ',', help_heading = "Sampling",
            action = clap::ArgAction::Set, allow_negative_numbers = true
        )
    )]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub sigmas: Vec<f32>,

    /// How the noise levels are spread: as trained, or linspace(1,0,n+1)^(1/rho) [default: shifted]
    #[cfg_attr(feature = "cli", arg(long, value_name = "KIND", help_heading = "Sampling"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub schedule: Option<ScheduleKind>,

    /// Exponent of the power schedule: 1 is even, more stays longer at high noise [default: 2]
    #[cfg_attr(
        feature = "cli",
        arg(long, value_name = "F", help_heading = "Sampling", allow_negative_numbers = true)
    )]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rho: Option<f32>,

    /// Which of torch's generators a seed is for; 16-bit draws on the CPU changed with torch 2.12 [default: cpu]
    #[cfg_attr(feature = "cli", arg(long, value_name = "KIND", help_heading = "Sampling"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rng: Option<Rng>,

    /// Noise to start from instead of a seed: safetensors with `noise` or `latents`; not over HTTP
    #[cfg_attr(
        feature = "cli",
        arg(long, value_name = "FILE", help_heading = "Sampling", conflicts_with = "seed")
    )]
    #[cfg_attr(feature = "schema", schema(ignore))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub noise: Option<FileRef>,

    /// Which image of an earlier request to make again, without the others.
    #[cfg_attr(feature = "cli", arg(skip))]
    #[cfg_attr(feature = "schema", schema(ignore))]
    #[serde(skip)]
    pub part: Option<BatchPart>,

    /// File format of the image.
    #[cfg_attr(feature = "cli", arg(skip))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output_format: Option<OutputFormat>,

    /// JPEG quality.
    #[cfg_attr(feature = "cli", arg(skip))]
    #[cfg_attr(feature = "schema", schema(minimum = 0, maximum = 100))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output_compression: Option<u8>,

    /// How hard PNG files are compressed.
    #[cfg_attr(feature = "cli", arg(skip))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub png: Option<PngEffort>,
}

/// The most tokens a prompt may be padded to.
pub const MAX_TOKENS: u32 = 32_768;

/// One image of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchPart {
    /// Its number in the batch whose noise one generator draws, from 0.
    pub index: usize,
    /// How many images that batch had.
    pub of: usize,
    /// Which of the embeddings in the file is its prompt, from 0.
    pub row: Option<usize>,
}

/// A file by name, and in a recipe the SHA-256 it had.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FileRef {
    /// A path, or whatever the door takes instead of one.
    pub path: PathBuf,
    /// What the file was when an image was made from it: its SHA-256 in hex, or the fingerprint of weights.
    pub sha256: Option<String>,
}

/// A LoRA and how strongly it acts.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct LoraRef {
    /// Its name, as in `/v1/loras`, or its file.
    #[serde(rename = "name", alias = "path")]
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub path: PathBuf,
    /// Its weight.
    #[serde(default = "one")]
    pub weight: f32,
    /// Fingerprint, in a recipe.
    #[serde(default)]
    #[cfg_attr(feature = "schema", schema(ignore))]
    pub sha256: Option<String>,
}

fn one() -> f32 {
    1.0
}

/// How noise levels are spread over the steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum ScheduleKind {
    /// As the model was trained
    #[default]
    Shifted,
    /// linspace(1,0,n+1)^(1/rho)
    Power,
}

/// Whose random numbers a seed stands for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Rng {
    /// CPU generator: every f32 pipeline, and 16-bit ones from torch 2.13 on
    #[default]
    Cpu,
    /// CPU generator of a bf16 pipeline up to torch 2.11
    CpuBf16,
    /// CPU generator of an f16 pipeline up to torch 2.11
    CpuF16,
    /// CUDA generator
    Cuda,
}

/// A file format for images.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
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
    /// As `kiln-image` names it.
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

/// How hard PNG files are compressed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum PngEffort {
    /// A few milliseconds an image.
    #[default]
    Fast,
    /// Smaller files, many times slower.
    Small,
}

impl Request {
    /// An image of `prompt` with every choice left to the model.
    pub fn new(prompt: impl Into<String>) -> Request {
        Request { prompts: vec![prompt.into()], ..Request::default() }
    }

    /// Chooses a seed where none is given and none is needed otherwise; whether it did. Short enough to be typed again: torch's
    /// CPU generator looks at 32 bits only.
    pub fn ensure_seed(&mut self) -> Result<bool, String> {
        if !self.seed.is_empty() || self.noise.is_some() {
            return Ok(false);
        }
        let seed = getrandom::u32().map_err(|e| format!("the system has no random numbers: {e}"))?;
        self.seed = vec![seed.into()];
        Ok(true)
    }

    /// Every image file that it names.
    pub fn images(&self) -> impl Iterator<Item = &FileRef> {
        self.references.iter().chain(&self.init).chain(&self.mask)
    }

    /// The same, to be replaced.
    pub fn images_mut(&mut self) -> impl Iterator<Item = &mut FileRef> {
        self.references.iter_mut().chain(&mut self.init).chain(&mut self.mask)
    }

    /// How many images it asks for, where that can be told without its files.
    pub fn image_count(&self) -> usize {
        let prompts = self.prompts.len().max(1);
        match (self.n, self.seed.len()) {
            (Some(n), _) => prompts.saturating_mul(n as usize),
            (None, seeds) => prompts.max(seeds),
        }
    }

    /// How images are encoded.
    pub fn encoding(&self) -> kiln_image::Encoding {
        kiln_image::Encoding {
            format: self.output_format.unwrap_or_default().format(),
            quality: self.output_compression,
            small: self.png == Some(PngEffort::Small),
        }
    }
}

impl From<&str> for FileRef {
    fn from(path: &str) -> FileRef {
        FileRef { path: path.into(), sha256: None }
    }
}

impl From<String> for FileRef {
    fn from(path: String) -> FileRef {
        FileRef { path: path.into(), sha256: None }
    }
}

impl From<PathBuf> for FileRef {
    fn from(path: PathBuf) -> FileRef {
        FileRef { path, sha256: None }
    }
}

impl From<std::ffi::OsString> for FileRef {
    fn from(path: std::ffi::OsString) -> FileRef {
        FileRef { path: path.into(), sha256: None }
    }
}

impl Serialize for FileRef {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let path = self.path.to_string_lossy();
        let Some(sha256) = &self.sha256 else { return serializer.serialize_str(&path) };
        let mut map = serializer.serialize_map(Some(2))?;
        map.serialize_entry("path", &path)?;
        map.serialize_entry("sha256", sha256)?;
        map.end()
    }
}

impl<'de> Deserialize<'de> for FileRef {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<FileRef, D::Error> {
        /// A recipe's file may say more, such as which of its rows was used.
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Named {
            Path(PathBuf),
            Hashed { path: PathBuf, sha256: Option<String> },
        }
        Ok(match Named::deserialize(deserializer)? {
            Named::Path(path) => FileRef { path, sha256: None },
            Named::Hashed { path, sha256 } => FileRef { path, sha256 },
        })
    }
}

impl Serialize for LoraRef {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let path = self.path.to_string_lossy();
        let mut map = serializer.serialize_map(None)?;
        match &self.sha256 {
            None => map.serialize_entry("name", &path)?,
            Some(sha256) => {
                map.serialize_entry("path", &path)?;
                map.serialize_entry("sha256", sha256)?;
            }
        }
        map.serialize_entry("weight", &self.weight)?;
        map.end()
    }
}

impl LoraRef {
    /// `FILE[:WEIGHT]`. What follows the last colon is a weight only when it is a number, and the whole is not itself a
    /// file: names may contain colons, and drives do. Behind the name of a file it can't be anything else.
    pub fn parse(text: &str) -> Result<LoraRef, String> {
        use std::path::Path;
        let of = |path: &str, weight| LoraRef { path: path.into(), weight, sha256: None };
        let weight = |number: &str| number.parse::<f32>().ok().filter(|w| w.is_finite());
        Ok(match text.rsplit_once(':') {
            _ if text.is_empty() => return Err("expected a file".into()),
            Some((path, number)) if !path.is_empty() && !Path::new(text).exists() => match weight(number) {
                Some(weight) => of(path, weight),
                None if Path::new(path).is_file() => {
                    return Err(format!(
                        "`{path}` is followed by `{number}`, expected a finite number as its weight"
                    ));
                }
                None => of(text, 1.0),
            },
            _ => of(text, 1.0),
        })
    }
}

/// A whole number that is not too small, and a message that says so of negative numbers, too.
#[cfg(feature = "cli")]
fn at_least<const MIN: u32>() -> clap::builder::ValueParser {
    clap::builder::ValueParser::new(|text: &str| match text.parse::<u64>() {
        Ok(n) if n >= MIN.into() => {
            u32::try_from(n).map_err(|_| format!("expected a whole number of at most {}", u32::MAX))
        }
        _ => Err(format!("expected a whole number of at least {MIN}")),
    })
}

#[cfg(feature = "cli")]
fn seed(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("expected a whole number from 0 to {}", u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lora(text: &str) -> (String, f32) {
        let lora = LoraRef::parse(text).unwrap();
        (lora.path.display().to_string(), lora.weight)
    }

    #[test]
    fn a_lora_weight_is_what_follows_the_last_colon_if_it_is_a_number() {
        assert_eq!(lora("ink.safetensors"), ("ink.safetensors".into(), 1.0));
        assert_eq!(lora("ink.safetensors:0.5"), ("ink.safetensors".into(), 0.5));
        assert_eq!(lora("ink.safetensors:-1"), ("ink.safetensors".into(), -1.0));
        assert_eq!(lora(r"C:\ink.safetensors"), (r"C:\ink.safetensors".into(), 1.0));
        assert_eq!(lora(r"C:\ink.safetensors:2e-1"), (r"C:\ink.safetensors".into(), 0.2));
        assert_eq!(lora("a:b:3"), ("a:b".into(), 3.0));
        assert_eq!(lora("ink:nan"), ("ink:nan".into(), 1.0));
        assert_eq!(lora(":3"), (":3".into(), 1.0));
        assert!(LoraRef::parse("").is_err());
    }

    #[test]
    fn a_file_whose_name_ends_like_a_weight_is_that_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ink:2");
        std::fs::write(&path, b"").unwrap();
        assert_eq!(lora(path.to_str().unwrap()), (path.display().to_string(), 1.0));
    }

    #[test]
    fn a_weight_that_is_no_number_is_refused_behind_the_name_of_a_file() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for wrong in ["nan", "inf", "abc", ""] {
            let message = LoraRef::parse(&format!("{}:{wrong}", file.path().display())).unwrap_err();
            assert!(message.contains(&format!("`{wrong}`, expected a finite number")), "{message}");
        }
    }

    #[test]
    fn one_prompt_and_one_seed_are_written_as_they_are_and_read_either_way() {
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
    fn a_misspelt_field_is_refused_by_name() {
        let error = serde_json::from_str::<Request>(r#"{"prompt":"a","widht":64}"#).unwrap_err().to_string();
        assert!(error.contains("unknown field `widht`"), "{error}");
    }
}
