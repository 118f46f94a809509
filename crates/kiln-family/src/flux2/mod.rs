//! Black Forest Labs' FLUX.2: klein in several variants, and dev. Ember, the built-in model, is a small klein.

mod tensor_names;
mod text_encoders;
mod variants;

pub use text_encoders::{MISTRAL, QWEN3};
pub use variants::{BASE, DEV, DISTILLED, KV};

use crate::{Family, Latent, Pipeline};
use variants::{DEV_INFO, KLEIN, KLEIN_BASE, KLEIN_KV};

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
    transformer: &tensor_names::TRANSFORMER,
    related: &[
        ("double_blocks.0.img_mod.lin.weight", "FLUX.1"),
        ("transformer_blocks.0.norm1_context.linear.weight", "FLUX.1"),
        ("joint_blocks.0.x_block.attn.qkv.weight", "Stable Diffusion 3"),
    ],
    related_vaes: &[(16, "FLUX.1"), (4, "Stable Diffusion")],
};
