//! How to find out which variant a transformer is.

use kiln_family::Variant;
use kiln_weights::WeightSource;

use crate::error::{Error, Result};

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
            VariantSource::Name => Some("a guess from the file's name"),
            VariantSource::Default => Some("a guess, since nothing in the file says it"),
        }
    }

    /// Returns the metadata that tells a converted file's variant; `None` if it is not known.
    pub fn metadata(self, variant: Variant) -> Option<(String, String)> {
        let key = match self {
            VariantSource::Stated => Variant::KEY,
            VariantSource::Name => Variant::GUESS_KEY,
            VariantSource::Default => return None,
        };
        Some((key.to_owned(), variant.name.to_owned()))
    }
}

/// Finds out the variant of a transformer from its tensors, else from its file's metadata, else from its name.
pub fn find_variant(weights: &WeightSource, has_guidance: bool) -> Result<(Variant, VariantSource)> {
    let family = weights.family();
    if let Some(variant) = family.variants().find(|variant| has_guidance && variant.embeds_guidance()) {
        return Ok((variant, VariantSource::Stated));
    }
    for (key, source) in [(Variant::KEY, VariantSource::Stated), (Variant::GUESS_KEY, VariantSource::Name)] {
        let Some(name) = weights.metadata().get(key) else { continue };
        let unknown = |_| {
            let names: Vec<&str> = family.variants().map(|variant| variant.name).collect();
            let names = names.join(", ");
            Error::config(weights.path(), format!("its metadata has `{key}` {name:?}, expected {names}"))
        };
        return Ok((name.parse().map_err(unknown)?, source));
    }
    Ok(match family.guess_variant(weights.path()) {
        Some(variant) => (variant, VariantSource::Name),
        None => (family.default_variant(), VariantSource::Default),
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use kiln_family::flux2::{BASE, DISTILLED, FLUX2, KV};

    use super::*;

    #[test]
    fn the_file_name_tells_the_variant() {
        for (name, expected) in [
            ("flux-2-klein-4b.safetensors", Some(DISTILLED)),
            ("models/FLUX.2-klein-base-9B-Q4_K_M.gguf", Some(BASE)),
            ("flux-2-klein-9b-kv-fp8.safetensors", Some(KV)),
            ("models--bfl--FLUX.2-klein-base-4B/snapshots/0a/model.safetensors", Some(BASE)),
            ("/data/base/flux-2-klein-4b.gguf", Some(DISTILLED)),
            ("/data/x.gguf", None),
        ] {
            assert_eq!(FLUX2.guess_variant(Path::new(name)), expected, "{name}");
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
        let of = |metadata: &[(&str, &str)]| find_variant(&open(metadata), false).unwrap();
        assert_eq!(of(&[]), (KV, VariantSource::Name));
        assert_eq!(of(&[(Variant::GUESS_KEY, "base")]), (BASE, VariantSource::Name));
        assert_eq!(
            of(&[(Variant::GUESS_KEY, "kv"), (Variant::KEY, "distilled")]),
            (DISTILLED, VariantSource::Stated)
        );
        let error = find_variant(&open(&[(Variant::KEY, "schnell")]), false).unwrap_err().to_string();
        assert!(error.contains("klein-kv.safetensors") && error.contains("\"schnell\""), "{error}");
    }
}
