//! Ember, the small built-in model, and its undistilled variant, on which LoRAs are trained. Absent without the feature
//! `ember`, and in a build from the published crates. Its tensors are views of the program's own bytes, read by the code that
//! reads mapped files.

use kiln_engine::{Model, Vocabulary};

/// The name that selects the built-in model.
pub const NAME: &str = "ember";

/// The name of the undistilled variant, which is stored as its difference from Ember.
pub const BASE: &str = "ember-base";

/// Returns whether a name is that of a built-in model.
pub fn is_built_in(name: &str) -> bool {
    [NAME, BASE].contains(&name) && file().is_some()
}

#[cfg(built_in_ember)]
macro_rules! include_aligned {
    ($name:literal) => {{
        /// Aligned so that tensors, which start at multiples of 8 bytes in the file, are read in place.
        #[repr(C, align(64))]
        struct Aligned<T: ?Sized>(T);

        static FILE: &Aligned<[u8]> =
            &Aligned(*include_bytes!(concat!(env!("KILN_EMBER_FOLDER"), "/", $name)));
        Some(&FILE.0)
    }};
}

/// Returns the words that Ember and Ember base have learned.
#[cfg(built_in_ember)]
pub fn vocabulary() -> Option<Vocabulary> {
    let text = include_str!(concat!(env!("KILN_EMBER_FOLDER"), "/words.toml"));
    Vocabulary::parse(text).ok()
}

/// Returns `None`: this build has no built-in model.
#[cfg(not(built_in_ember))]
pub fn vocabulary() -> Option<Vocabulary> {
    None
}

/// Adds to Ember or Ember base the words that it has learned.
pub(crate) fn with_vocabulary(mut model: Model) -> Model {
    model.vocabulary = vocabulary();
    model
}

/// Returns the packed model, a safetensors file.
#[cfg(built_in_ember)]
pub fn file() -> Option<&'static [u8]> {
    include_aligned!("ember.safetensors")
}

/// Returns the difference of [`BASE`] from [`file()`], a safetensors file.
#[cfg(built_in_ember)]
pub fn base_file() -> Option<&'static [u8]> {
    include_aligned!("ember-base.safetensors")
}

/// Returns `None`: this build has no built-in model.
#[cfg(not(built_in_ember))]
pub fn file() -> Option<&'static [u8]> {
    None
}

/// Returns `None`: this build has no built-in model.
#[cfg(not(built_in_ember))]
pub fn base_file() -> Option<&'static [u8]> {
    None
}

#[cfg(all(test, built_in_ember))]
mod tests {
    use super::*;
    use kiln_weights::WeightSource;

    #[test]
    fn the_vocabulary_has_the_words_of_prompts_that_ember_draws_and_no_others() {
        let vocabulary = vocabulary().unwrap();
        let prompts = [
            include_str!("../../../tools/ember/judge.json"),
            include_str!("../../../tools/ember/prompts.json"),
        ];
        let texts =
            prompts.iter().flat_map(|file| texts(&serde_json::from_str(file).unwrap())).collect::<Vec<_>>();
        assert!(texts.len() > 200, "{}", texts.len());
        // One of them asks for what is no emoji.
        let drawn = |text: &&String| text.is_ascii() && *text != "a yellow submarine";
        for text in texts.iter().filter(drawn) {
            assert_eq!(vocabulary.unknown_words(text), [""; 0], "{text}");
        }
        let examples =
            [&vocabulary.examples, &vocabulary.colours, &vocabulary.styles, &vocabulary.backgrounds];
        for text in examples.into_iter().flatten() {
            assert_eq!(vocabulary.unknown_words(text), [""; 0], "{text}");
        }
        for (prompt, unknown) in [
            ("an astronaut riding a horse", &["riding"][..]),
            ("a photo of a knight in a forest, cinematic lighting", &["knight", "cinematic", "lighting"]),
            ("two happy dogs, please; the wizard's aubergines and their mice", &[]),
            ("a cyberpunk city, trending on artstation", &["cyberpunk", "trending", "artstation"]),
            ("🐱", &["🐱"]),
        ] {
            assert_eq!(vocabulary.unknown_words(prompt), unknown, "{prompt}");
        }
    }

    /// All strings of a value that are prompts.
    fn texts(value: &serde_json::Value) -> Vec<String> {
        match value {
            serde_json::Value::String(text) => vec![text.clone()],
            serde_json::Value::Array(values) => values.iter().flat_map(texts).collect(),
            serde_json::Value::Object(fields) => {
                fields.get("prompt").map_or_else(|| fields.values().flat_map(texts).collect(), texts)
            }
            _ => Vec::new(),
        }
    }

    #[test]
    fn tensors_are_aligned_and_read_in_place() {
        let file = file().unwrap();
        let source = WeightSource::from_bytes(NAME, file).unwrap();
        for name in source.names().filter(|name| name.ends_with(".bias")) {
            let tensor = source.tensor(name).unwrap();
            let bytes = tensor.bytes().as_ptr();
            assert!(file.as_ptr_range().contains(&bytes), "{name} was copied");
            assert_eq!(bytes as usize % tensor.dtype().size(), 0, "{name}");
        }
    }

    #[test]
    fn the_base_is_a_difference_from_this_ember() {
        let delta = WeightSource::from_bytes(BASE, base_file().unwrap()).unwrap();
        assert!(delta.is_delta());
        delta.apply_delta(file().unwrap()).unwrap();
    }
}
