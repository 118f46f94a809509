//! The variants of FLUX.2, their defaults, and how to find out which one a transformer is.

use std::fmt;
use std::path::Path;

use kiln_model::TextEncoderFamily;
use kiln_weights::WeightSource;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// A variant of FLUX.2. The tensors don't show it; `model_index.json`, the file's metadata or its name does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
#[serde(rename_all = "lowercase")]
pub enum Variant {
    /// klein: four steps, no guidance
    Distilled,
    /// klein base: many steps, classifier-free guidance
    Base,
    /// klein KV: distilled, reference images computed once
    Kv,
    /// dev: many steps, guidance is an input of the transformer
    Dev,
}

/// How a model's variant is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VariantSource {
    /// The user, `model.toml`, `model_index.json`, the file's metadata or its tensors say it.
    Stated,
    /// A guess from the name of the file, of the folders above it, or of the file it was converted from.
    Name,
    /// The most usual variant, since nothing says which it is.
    Default,
}

impl VariantSource {
    /// Returns a remark about a variant that is only a guess.
    pub fn remark(self) -> Option<&'static str> {
        match self {
            VariantSource::Stated => None,
            VariantSource::Name => Some("a guess from the file's name; set it with --variant"),
            VariantSource::Default => {
                Some("a guess, since nothing in the file says it; set it with --variant")
            }
        }
    }
}

/// The metadata key of a file's variant.
const KEY: &str = "kiln.variant";
/// The metadata key of a variant that was guessed from the name of the file before a conversion.
const GUESS_KEY: &str = "kiln.variant_guess";

impl Variant {
    const ALL: [Variant; 4] = [Variant::Distilled, Variant::Base, Variant::Kv, Variant::Dev];

    /// Returns its name in options and metadata.
    pub fn name(self) -> &'static str {
        match self {
            Variant::Distilled => "distilled",
            Variant::Base => "base",
            Variant::Kv => "kv",
            Variant::Dev => "dev",
        }
    }

    /// Finds out the variant of a transformer from its tensors, else from its file's metadata, else from its name.
    pub fn of(weights: &WeightSource, has_guidance: bool) -> Result<(Variant, VariantSource)> {
        if has_guidance {
            return Ok((Variant::Dev, VariantSource::Stated));
        }
        for (key, source) in [(KEY, VariantSource::Stated), (GUESS_KEY, VariantSource::Name)] {
            let Some(name) = weights.metadata().get(key) else { continue };
            let unknown = || {
                let names = Variant::ALL.map(Variant::name).join(", ");
                Error::config(weights.path(), format!("its metadata has `{key}` {name:?}, expected {names}"))
            };
            let variant = Variant::ALL.into_iter().find(|variant| variant.name() == name);
            return Ok((variant.ok_or_else(unknown)?, source));
        }
        Ok(match Variant::guess(weights.path()) {
            Some(variant) => (variant, VariantSource::Name),
            None => (Variant::Distilled, VariantSource::Default),
        })
    }

    /// Returns the metadata that tells a converted file's variant; `None` if it is not known.
    pub fn metadata(self, source: VariantSource) -> Option<(String, String)> {
        let key = match source {
            VariantSource::Stated => KEY,
            VariantSource::Name => GUESS_KEY,
            VariantSource::Default => return None,
        };
        Some((key.to_owned(), self.name().to_owned()))
    }

    /// Returns the family of the text encoder that it is trained with.
    pub fn text_encoder_family(self) -> TextEncoderFamily {
        match self {
            Variant::Distilled | Variant::Base | Variant::Kv => TextEncoderFamily::Qwen3,
            Variant::Dev => TextEncoderFamily::Mistral,
        }
    }

    /// Returns the default number of steps.
    pub fn default_steps(self) -> usize {
        match self {
            Variant::Distilled | Variant::Kv => 4,
            Variant::Base | Variant::Dev => 50,
        }
    }

    /// Returns the transformer calls per step: two with classifier-free guidance, which needs a guidance above 1.
    pub fn calls_per_step(self, guidance: Option<f32>) -> usize {
        match self {
            Variant::Base if guidance.is_some_and(|g| g > 1.0) => 2,
            _ => 1,
        }
    }

    /// Returns the default guidance; `None` for variants without guidance.
    pub fn default_guidance(self) -> Option<f32> {
        match self {
            Variant::Distilled | Variant::Kv => None,
            Variant::Base | Variant::Dev => Some(4.0),
        }
    }

    /// Guesses the variant from a path such as `flux-2-klein-base-9b-fp8.safetensors` or `flux-2-klein-9b-kv.gguf`. If
    /// the file's name doesn't say, the folders above it may.
    fn guess(file: &Path) -> Option<Variant> {
        const DEPTH: usize = 4;
        let names = file.iter().rev().take(DEPTH).map(|name| name.to_string_lossy().to_lowercase());
        for name in names {
            let words: Vec<&str> = name.split(|c: char| !c.is_ascii_alphanumeric()).collect();
            if words.contains(&"kv") {
                return Some(Variant::Kv);
            }
            if words.contains(&"base") {
                return Some(Variant::Base);
            }
            if words.contains(&"klein") {
                return Some(Variant::Distilled);
            }
        }
        None
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Variant::Distilled => "klein (distilled)",
            Variant::Base => "klein base",
            Variant::Kv => "klein KV",
            Variant::Dev => "dev",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_name_tells_the_variant() {
        for (name, expected) in [
            ("flux-2-klein-4b.safetensors", Some(Variant::Distilled)),
            ("models/FLUX.2-klein-base-9B-Q4_K_M.gguf", Some(Variant::Base)),
            ("flux-2-klein-9b-kv-fp8.safetensors", Some(Variant::Kv)),
            ("models--bfl--FLUX.2-klein-base-4B/snapshots/0a/model.safetensors", Some(Variant::Base)),
            ("/data/base/flux-2-klein-4b.gguf", Some(Variant::Distilled)),
            ("/data/x.gguf", None),
        ] {
            assert_eq!(Variant::guess(Path::new(name)), expected, "{name}");
        }
    }

    #[test]
    fn metadata_takes_precedence_over_the_name() {
        let open = |metadata: &[(&str, &str)]| {
            let metadata = metadata.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
            let header = br#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#;
            let file = [&(header.len() as u64).to_le_bytes()[..], header, &[0]].concat();
            WeightSource::from_bytes("klein-kv.safetensors", file).unwrap().with_metadata(metadata)
        };
        let of = |metadata: &[(&str, &str)]| Variant::of(&open(metadata), false).unwrap();
        assert_eq!(of(&[]), (Variant::Kv, VariantSource::Name));
        assert_eq!(of(&[(GUESS_KEY, "base")]), (Variant::Base, VariantSource::Name));
        assert_eq!(of(&[(GUESS_KEY, "kv"), (KEY, "distilled")]), (Variant::Distilled, VariantSource::Stated));
        let error = Variant::of(&open(&[(KEY, "schnell")]), false).unwrap_err().to_string();
        assert!(error.contains("klein-kv.safetensors") && error.contains("\"schnell\""), "{error}");
    }
}
