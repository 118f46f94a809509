//! Pebble, a family for the tests: single-stream, one text layer, a token of 8×8 pixels and 8 channels. No model of it was
//! ever trained; `tools/golden/pebble.py` makes one of random weights.

mod tensor_names;
mod text_encoder;

use crate::{Family, Guidance, Latent, Pipeline, Shift, VariantInfo};
use text_encoder::PEBBLE_TEXT;

/// Pebble.
pub static PEBBLE: Family = Family {
    name: "Pebble",
    variants: &[&VARIANT],
    pipelines: &[Pipeline::new("PebblePipeline", None, &VARIANT)],
    file_words: &[("pebble", &VARIANT)],
    latent: Latent { scale: 8, patch: 1, channels: 8 },
    full_size: 64,
    positions: 4096,
    shift: Shift {
        at_10_steps: [0.0001, 1.5],
        at_200_steps: [0.0002, 0.5],
        max_tokens: 4000.0,
        training: [[64.0, 0.5], [4096.0, 1.0]],
    },
    transformer: &tensor_names::TRANSFORMER,
    related: &[],
    related_vaes: &[],
    models: &[],
    repository_word: "pebble",
    components_of: &[],
    widths: &[],
};

static VARIANT: VariantInfo = VariantInfo {
    name: "pebble",
    title: "Pebble",
    summary: "Pebble: random weights for the tests",
    text_encoder: &PEBBLE_TEXT,
    guidance: Guidance::ClassifierFree(3.0),
    steps: 3,
    is_distilled: false,
    caches_references: false,
};
