//! The variants of a family.

use std::fmt;
use std::ops::Deref;
use std::str::FromStr;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::{Family, TextEncoder, published, variants};

/// A variant of a family: [`VariantInfo`] by reference. The tensors rarely show it; `model_index.json`, the file's metadata
/// or its name does. In options, metadata and recipes it is its name.
#[derive(Clone, Copy)]
pub struct Variant(&'static VariantInfo);

/// What is known of a variant.
pub struct VariantInfo {
    /// The family it belongs to.
    pub family: &'static Family,
    /// Its name in options and metadata; no other variant of any family has it.
    pub name: &'static str,
    /// Its name in messages.
    pub title: &'static str,
    /// What it is, in the help text.
    pub summary: &'static str,
    /// The text encoder that it is trained with.
    pub text_encoder: &'static TextEncoder,
    /// How it is guided.
    pub guidance: Guidance,
    /// Default number of steps.
    pub steps: usize,
    /// Whether it is distilled to few steps: it can't be trained, and caching steps doesn't pay off.
    pub is_distilled: bool,
    /// Whether reference images are computed once, in the first step, and their keys and values cached.
    pub caches_references: bool,
}

/// How a variant is guided, with the default value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Guidance {
    /// Not at all.
    None,
    /// Classifier-free: a second call of the transformer with the negative prompt, if guidance is above 1.
    ClassifierFree(f32),
    /// Guidance is an input of the transformer.
    Input(f32),
}

impl VariantInfo {
    /// Returns the transformer calls per step: two with classifier-free guidance, which needs a guidance above 1.
    pub fn calls_per_step(&self, guidance: Option<f32>) -> usize {
        if self.takes_negative_prompt() && guidance.is_some_and(|g| g > 1.0) { 2 } else { 1 }
    }

    /// Returns the default guidance; `None` for variants without guidance.
    pub fn default_guidance(&self) -> Option<f32> {
        match self.guidance {
            Guidance::None => None,
            Guidance::ClassifierFree(value) | Guidance::Input(value) => Some(value),
        }
    }

    /// Returns whether a negative prompt has an effect, given enough guidance.
    pub fn takes_negative_prompt(&self) -> bool {
        matches!(self.guidance, Guidance::ClassifierFree(_))
    }

    /// Returns whether guidance is an input of the transformer, which then has tensors for it.
    pub fn embeds_guidance(&self) -> bool {
        matches!(self.guidance, Guidance::Input(_))
    }
}

impl Variant {
    /// The metadata key of a file's variant.
    pub const KEY: &str = "kiln.variant";
    /// The metadata key of a variant that was guessed from the name of the file before a conversion.
    pub const GUESS_KEY: &str = "kiln.variant_guess";

    /// The variant that `info` describes.
    pub const fn new(info: &'static VariantInfo) -> Variant {
        Variant(info)
    }
}

impl Deref for Variant {
    type Target = VariantInfo;

    fn deref(&self) -> &VariantInfo {
        self.0
    }
}

impl PartialEq for Variant {
    fn eq(&self, other: &Variant) -> bool {
        self.name == other.name
    }
}

impl Eq for Variant {}

impl fmt::Debug for VariantInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl fmt::Debug for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.title)
    }
}

impl FromStr for Variant {
    type Err = String;

    fn from_str(name: &str) -> Result<Variant, String> {
        variants().find(|variant| variant.name == name).ok_or_else(|| {
            let offered = published().flat_map(Family::variants);
            let names: Vec<&str> = offered.map(|variant| variant.name).collect();
            format!("unknown variant `{name}`, expected one of `{}`", names.join("`, `"))
        })
    }
}

impl Serialize for Variant {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name)
    }
}

impl<'de> Deserialize<'de> for Variant {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Variant, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}
