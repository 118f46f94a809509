//! The names of Pebble's tensors in files and in LoRAs.

use crate::{BlockPrefix, Layout, ModuleNames, TransformerNames};

const BLOCKS: &str = "single_transformer_blocks.";

const fn norm(file: &'static str, model: &'static [&'static str]) -> ModuleNames {
    ModuleNames { is_norm: true, ..ModuleNames::new(file, model) }
}

/// Pebble's transformer: single blocks alone.
pub(super) static TRANSFORMER: TransformerNames = TransformerNames {
    class: "PebbleTransformer",
    architecture: "pebble",
    layouts: &[Layout {
        name: "Pebble",
        anchor: "stem.weight",
        modules: &[
            ModuleNames::new("stem", &["x_embedder"]),
            ModuleNames::new("words", &["context_embedder"]),
            ModuleNames::new("clock.first", &["time_guidance_embed.timestep_embedder.linear_1"]),
            ModuleNames::new("clock.second", &["time_guidance_embed.timestep_embedder.linear_2"]),
            ModuleNames::new("sway", &["single_stream_modulation.linear"]),
            ModuleNames::new("grains.#.in", &["single_transformer_blocks.#.attn.to_qkv_mlp_proj"]),
            ModuleNames::new("grains.#.out", &["single_transformer_blocks.#.attn.to_out"]),
            norm("grains.#.query_norm", &["single_transformer_blocks.#.attn.norm_q"]),
            norm("grains.#.key_norm", &["single_transformer_blocks.#.attn.norm_k"]),
            ModuleNames::new("finish.norm", &["norm_out.linear"]),
            ModuleNames::new("finish.out", &["proj_out"]),
        ],
    }],
    lora_blocks: &[
        BlockPrefix { flat: "grains_", model: BLOCKS },
        BlockPrefix { flat: "single_transformer_blocks_", model: BLOCKS },
    ],
    original_words: &["grains_", "stem", "words", "clock_", "sway", "finish_"],
    sensitive: (BLOCKS, &[]),
};
