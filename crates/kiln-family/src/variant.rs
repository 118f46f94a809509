//! The variants of a family.

use std::fmt;
use std::ops::Deref;
use std::path::Path;
use std::str::FromStr;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::{FAMILIES, Family, Pipeline, VariantInfo, published, variants};

/// A variant of a family, with what is known of it ([`VariantInfo`]). The tensors rarely show it; `model_index.json`, the file's metadata
/// or its name does. In options, metadata and recipes it is its name.
#[derive(Clone, Copy)]
pub struct Variant {
    /// The family it belongs to.
    pub family: &'static Family,
    info: &'static VariantInfo,
}

impl Variant {
    /// The metadata key of a file's variant.
    pub const KEY: &str = "kiln.variant";
    /// The metadata key of a variant that was guessed from the name of the file before a conversion.
    pub const GUESS_KEY: &str = "kiln.variant_guess";

    /// The variant of `family` that `info` describes.
    pub const fn new(family: &'static Family, info: &'static VariantInfo) -> Variant {
        Variant { family, info }
    }
}

impl Family {
    /// Returns its variants.
    pub fn variants(&'static self) -> impl Iterator<Item = Variant> {
        self.variants.iter().map(move |info| Variant::new(self, info))
    }

    /// Returns the variant that is assumed where nothing says which it is.
    pub fn default_variant(&'static self) -> Variant {
        Variant::new(self, self.variants[0])
    }

    /// Returns the variant of a `model_index.json` with this `_class_name` and `is_distilled`.
    pub fn of_pipeline(class: &str, is_distilled: Option<bool>) -> Option<Variant> {
        let matches = |pipeline: &&Pipeline| {
            pipeline.class == class && pipeline.is_distilled.is_none_or(|stated| is_distilled == Some(stated))
        };
        let variant = |family: &&'static Family| {
            family.pipelines.iter().find(matches).map(|pipeline| Variant::new(family, pipeline.variant))
        };
        FAMILIES.iter().find_map(variant)
    }

    /// Guesses the variant from a path such as `flux-2-klein-base-9b-fp8.safetensors`. If the file's name doesn't say, the
    /// folders above it may.
    pub fn guess_variant(&'static self, file: &Path) -> Option<Variant> {
        const DEPTH: usize = 4;
        let names = file.iter().rev().take(DEPTH).map(|name| name.to_string_lossy().to_lowercase());
        for name in names {
            let words: Vec<&str> = name.split(|c: char| !c.is_ascii_alphanumeric()).collect();
            if let Some((_, variant)) = self.file_words.iter().find(|(word, _)| words.contains(word)) {
                return Some(Variant::new(self, variant));
            }
        }
        None
    }
}

impl Deref for Variant {
    type Target = VariantInfo;

    fn deref(&self) -> &VariantInfo {
        self.info
    }
}

impl PartialEq for Variant {
    fn eq(&self, other: &Variant) -> bool {
        self.name == other.name
    }
}

impl Eq for Variant {}

impl fmt::Debug for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.info.fmt(f)
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
