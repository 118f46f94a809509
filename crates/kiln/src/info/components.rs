//! Describes weight files with one or more components of a model: their naming scheme, how their tensors are stored, and
//! which other components they need.

use std::collections::BTreeMap;
use std::path::Path;

use kiln_engine::Variant;
use kiln_model::{text_encoder, transformer, vae};
use kiln_weights::{Component, WeightSource};

use crate::properties::Properties;

/// Names the kind of a file with these components.
pub(super) fn kind(components: &[(Component, &str)]) -> String {
    match components {
        [(Component::Transformer, _)] => "FLUX.2 transformer".into(),
        [(Component::Vae, _)] => "FLUX.2 autoencoder (VAE)".into(),
        [(Component::TextEncoder, _)] => "text encoder".into(),
        several => {
            let names: Vec<String> = several.iter().map(|(component, _)| component.to_string()).collect();
            format!("checkpoint with a {}", names.join(", a "))
        }
    }
}

/// Describes all components of a file.
pub(super) fn details(source: &WeightSource) -> Properties {
    let describe = |&(component, naming): &(Component, &str)| match source.component(component) {
        Ok(Some(weights)) => {
            Properties::default().with("names", naming).and(describe_one(component, &weights, source.path()))
        }
        Ok(None) => Properties::default(),
        Err(error) => Properties::default().with("problem", error.to_string()),
    };
    match &source.components()[..] {
        [only] => describe(only),
        several => several.iter().fold(Properties::default(), |properties, component| {
            let name = component.0.to_string().to_lowercase().replace(' ', "_");
            properties.with_group(name, describe(component))
        }),
    }
}

fn describe_one(component: Component, weights: &WeightSource, path: &Path) -> Properties {
    let properties = match component {
        Component::Transformer => transformer::Config::from_tensors(weights).map(|c| {
            let variant = if c.guidance_embeds { Variant::Dev } else { Variant::from_path(path) };
            let hidden = c.joint_attention_dim / text_encoder::OUTPUT_LAYERS.len();
            Properties::default()
                .with("variant", format!("{variant}{}", if c.guidance_embeds { "" } else { ", by its name" }))
                .with("double_blocks", c.num_layers)
                .with("single_blocks", c.num_single_layers)
                .with("dim", c.dim())
                .with("text_dim", c.joint_attention_dim)
                .with("needs", format!("a {} and a FLUX.2 VAE", text_encoder_name(hidden)))
        }),
        Component::TextEncoder => text_encoder::Config::from_tensors(weights).map(|c| {
            Properties::default()
                .with("layers", c.num_hidden_layers)
                .with("hidden_size", c.hidden_size)
                .with("vocabulary", c.vocab_size)
                .with("goes_with", format!("a transformer with text_dim {}", c.text_dim()))
        }),
        Component::Vae => vae::Config::from_tensors(weights).map(|c| {
            Properties::default()
                .with("channels", &c.block_out_channels)
                .with("decoder_channels", c.decoder_channels())
                .with("latent_channels", c.latent_channels)
        }),
    };
    properties
        .unwrap_or_else(|| Properties::default().with("problem", "required tensors are missing"))
        .with_group("stored", storage_counts(component, weights))
}

fn text_encoder_name(hidden: usize) -> String {
    let name = match hidden {
        2560 => "Qwen3-4B",
        4096 => "Qwen3-8B",
        5120 => "Mistral-Small-3.2-24B",
        _ => "text encoder",
    };
    format!("{name} (hidden size {hidden})")
}

/// Tensor name prefixes and the group they belong to; all other tensors form the group `around`.
const GROUPS: [(Component, &str, &str); 6] = [
    (Component::Transformer, "transformer_blocks.", "double_blocks"),
    (Component::Transformer, "single_transformer_blocks.", "single_blocks"),
    (Component::TextEncoder, "model.layers.", "layers"),
    (Component::TextEncoder, "model.embed_tokens.", "embedding"),
    (Component::Vae, "encoder.", "encoder"),
    (Component::Vae, "decoder.", "decoder"),
];

/// Counts the tensors of each group by storage type.
fn storage_counts(component: Component, weights: &WeightSource) -> Properties {
    let mut counts = BTreeMap::<&str, BTreeMap<&str, usize>>::new();
    for name in weights.names() {
        let group = GROUPS.iter().find(|(c, prefix, _)| *c == component && name.starts_with(prefix));
        let storage = weights.storage_name(name).unwrap_or_default();
        *counts.entry(group.map_or("around", |g| g.2)).or_default().entry(storage).or_default() += 1;
    }
    counts.iter().fold(Properties::default(), |properties, (group, counts)| {
        let text: Vec<String> = counts.iter().map(|(storage, count)| format!("{count} {storage}")).collect();
        properties.with(*group, text.join(", "))
    })
}
