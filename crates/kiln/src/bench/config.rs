//! Configurations of the published models, for synthetic weights.

use kiln_family::{Variant, flux2};
use kiln_nn::{text_encoder, transformer, vae};
use serde_json::{Value, json};

use crate::args::SizeArg;

/// The configuration of a model's components.
pub struct ModelConfig {
    pub name: &'static str,
    pub variant: Variant,
    pub transformer: transformer::Config,
    pub text_encoder: text_encoder::Config,
    pub vae: vae::Config,
}

/// The dimensions in which the models differ.
struct Dimensions {
    name: &'static str,
    variant: Variant,
    double_blocks: usize,
    single_blocks: usize,
    heads: usize,
    text_dim: usize,
    text_encoder: Value,
    vae_channels: [usize; 4],
}

fn qwen3(hidden: usize, mlp: usize, heads: [usize; 2], head_dim: usize, vocabulary: usize) -> Value {
    json!({
        "model_type": "qwen3", "hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": 36,
        "num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": head_dim,
        "rms_norm_eps": 1e-6, "vocab_size": vocabulary, "rope_theta": 1e6,
    })
}

fn mistral_small() -> Value {
    json!({
        "model_type": "mistral", "hidden_size": 5120, "intermediate_size": 32_768, "num_hidden_layers": 40,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5,
        "vocab_size": 131_072, "rope_theta": 1e9,
    })
}

fn dimensions(size: SizeArg) -> Dimensions {
    let klein_4b = || Dimensions {
        name: "klein 4B",
        variant: flux2::DISTILLED,
        double_blocks: 5,
        single_blocks: 20,
        heads: 24,
        text_dim: 3 * 2560,
        text_encoder: qwen3(2560, 9728, [32, 8], 128, 151_936),
        vae_channels: [128, 256, 512, 512],
    };
    let klein_9b = || Dimensions {
        name: "klein 9B",
        double_blocks: 8,
        single_blocks: 24,
        heads: 32,
        text_dim: 3 * 4096,
        text_encoder: qwen3(4096, 12_288, [32, 8], 128, 151_936),
        ..klein_4b()
    };
    match size {
        SizeArg::Klein4b => klein_4b(),
        SizeArg::Klein9b => klein_9b(),
        SizeArg::Klein9bKv => Dimensions { name: "klein 9B KV", variant: flux2::KV, ..klein_9b() },
        SizeArg::Dev => Dimensions {
            name: "dev",
            variant: flux2::DEV,
            double_blocks: 8,
            single_blocks: 48,
            heads: 48,
            text_dim: 3 * 5120,
            text_encoder: mistral_small(),
            ..klein_4b()
        },
        SizeArg::Tiny => Dimensions {
            name: "tiny",
            double_blocks: 1,
            single_blocks: 2,
            heads: 1,
            text_dim: 3 * 16,
            text_encoder: qwen3(16, 48, [4, 2], 16, 151_936),
            vae_channels: [32; 4],
            ..klein_4b()
        },
    }
}

impl ModelConfig {
    /// Returns the configuration of a published model. Fails only if a configuration in this file is invalid.
    pub fn new(size: SizeArg) -> Result<ModelConfig, serde_json::Error> {
        let n = dimensions(size);
        let transformer = json!({
            "in_channels": 128, "num_layers": n.double_blocks, "num_single_layers": n.single_blocks,
            "attention_head_dim": 128, "num_attention_heads": n.heads, "joint_attention_dim": n.text_dim,
            "guidance_embeds": n.variant.embeds_guidance(),
        });
        Ok(ModelConfig {
            name: n.name,
            variant: n.variant,
            transformer: serde_json::from_value(transformer)?,
            text_encoder: serde_json::from_value(n.text_encoder)?,
            vae: serde_json::from_value(json!({ "block_out_channels": n.vae_channels }))?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum;

    #[test]
    fn every_config_is_valid_and_its_components_fit() {
        for size in SizeArg::value_variants() {
            let config = ModelConfig::new(*size).unwrap();
            assert_eq!(config.text_encoder.problem(), None, "{}", config.name);
            let text_dim = config.text_encoder.text_dim();
            assert_eq!(text_dim, config.transformer.joint_attention_dim, "{}", config.name);
            assert_eq!(config.vae.token_channels(), config.transformer.in_channels);
        }
    }
}
