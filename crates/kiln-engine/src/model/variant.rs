//! The variants of FLUX.2 and their defaults.

use std::fmt;
use std::path::Path;

use serde::{Deserialize, Serialize};

/// A variant of FLUX.2. The tensors don't show it; `model_index.json` or the file's name does.
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
    /// dev: guidance is an input of the transformer, prompts are given as embeddings
    Dev,
}

impl Variant {
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
    /// the file's name doesn't say, the folders above it do.
    pub fn from_path(file: &Path) -> Variant {
        const DEPTH: usize = 4;
        let names = file.iter().rev().take(DEPTH).map(|name| name.to_string_lossy().to_lowercase());
        for name in names {
            let words: Vec<&str> = name.split(|c: char| !c.is_ascii_alphanumeric()).collect();
            if words.contains(&"kv") {
                return Variant::Kv;
            }
            if words.contains(&"base") {
                return Variant::Base;
            }
            if words.contains(&"klein") {
                return Variant::Distilled;
            }
        }
        Variant::Distilled
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
            ("flux-2-klein-4b.safetensors", Variant::Distilled),
            ("models/FLUX.2-klein-base-9B-Q4_K_M.gguf", Variant::Base),
            ("flux-2-klein-9b-kv-fp8.safetensors", Variant::Kv),
            ("models--bfl--FLUX.2-klein-base-4B/snapshots/0a/model.safetensors", Variant::Base),
            ("/data/base/flux-2-klein-4b.gguf", Variant::Distilled),
            ("/data/x.gguf", Variant::Distilled),
        ] {
            assert_eq!(Variant::from_path(Path::new(name)), expected, "{name}");
        }
    }
}
