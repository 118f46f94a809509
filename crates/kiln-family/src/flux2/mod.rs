//! Black Forest Labs' FLUX.2: klein in several variants, and dev. Ember, the built-in model, is a small klein.

mod models;
mod tensor_names;
mod text_encoders;
mod variants;

pub use text_encoders::{MISTRAL, QWEN3};

use crate::{Family, Latent, Pipeline, Shift, Variant};
use variants::{DEV_INFO, KLEIN, KLEIN_BASE, KLEIN_KV};

/// klein.
pub const DISTILLED: Variant = Variant::new(&FLUX2, &KLEIN);
/// klein base.
pub const BASE: Variant = Variant::new(&FLUX2, &KLEIN_BASE);
/// klein KV.
pub const KV: Variant = Variant::new(&FLUX2, &KLEIN_KV);
/// dev.
pub const DEV: Variant = Variant::new(&FLUX2, &DEV_INFO);

/// FLUX.2.
pub static FLUX2: Family = Family {
    name: "FLUX.2",
    variants: &[&KLEIN, &KLEIN_BASE, &KLEIN_KV, &DEV_INFO],
    pipelines: &[
        Pipeline::new("Flux2KleinPipeline", Some(true), &KLEIN),
        Pipeline::new("Flux2KleinInpaintPipeline", Some(true), &KLEIN),
        Pipeline::new("Flux2KleinPipeline", None, &KLEIN_BASE),
        Pipeline::new("Flux2KleinInpaintPipeline", None, &KLEIN_BASE),
        Pipeline::new("Flux2KleinKVPipeline", None, &KLEIN_KV),
        Pipeline::new("Flux2Pipeline", None, &DEV_INFO),
    ],
    file_words: &[("kv", &KLEIN_KV), ("base", &KLEIN_BASE), ("klein", &KLEIN)],
    latent: Latent { scale: 8, patch: 2, channels: 32 },
    full_size: 1024,
    positions: 52_000,
    shift: Shift {
        at_10_steps: [8.73809524e-05, 1.89833333],
        at_200_steps: [0.00016927, 0.45666666],
        max_tokens: 4300.0,
        training: [[256.0, 0.5], [4096.0, 1.15]],
    },
    transformer: &tensor_names::TRANSFORMER,
    related: &[
        ("double_blocks.0.img_mod.lin.weight", "FLUX.1"),
        ("transformer_blocks.0.norm1_context.linear.weight", "FLUX.1"),
        ("joint_blocks.0.x_block.attn.qkv.weight", "Stable Diffusion 3"),
    ],
    related_vaes: &[(16, "FLUX.1"), (4, "Stable Diffusion")],
    models: &models::MODELS,
    repository_word: "flux2",
    components_of: &[(3 * 2560, "klein-4b"), (3 * 4096, "klein-9b"), (3 * 5120, "dev-encoder")],
    widths: &[(3072, "klein 4B"), (4096, "klein 9B"), (6144, "dev")],
};
