//! Files that hold a part of a model, or several: whose names they have, how their layers are stored, what goes with them.

use std::collections::BTreeMap;
use std::path::Path;

use kiln_engine::Variant;
use kiln_model::{text_encoder, transformer, vae};
use kiln_weights::{Component, WeightSource};

use crate::sheet::Sheet;

/// What a file with these parts is called.
pub(super) fn name(parts: &[(Component, &str)]) -> String {
    match parts {
        [(Component::Transformer, _)] => "FLUX.2 transformer".into(),
        [(Component::Vae, _)] => "FLUX.2 autoencoder (VAE)".into(),
        [(Component::TextEncoder, _)] => "text encoder".into(),
        several => {
            let names: Vec<String> = several.iter().map(|(part, _)| part.to_string()).collect();
            format!("checkpoint with a {}", names.join(", a "))
        }
    }
}

/// Everything about the parts of a file.
pub(super) fn details(source: &WeightSource) -> Sheet {
    let parts = source.components();
    let describe = |&(component, naming): &(Component, &str)| match source.component(component) {
        Ok(Some(part)) => Sheet::default().with("names", naming).and(one(component, &part, source.path())),
        Ok(None) => Sheet::default(),
        Err(error) => Sheet::default().with("problem", error.to_string()),
    };
    match &parts[..] {
        [only] => describe(only),
        several => several.iter().fold(Sheet::default(), |sheet, part| {
            sheet.with_sheet(part.0.to_string().to_lowercase().replace(' ', "_"), describe(part))
        }),
    }
}

fn one(component: Component, part: &WeightSource, path: &Path) -> Sheet {
    let sheet = match component {
        Component::Transformer => transformer::Config::from_tensors(part).map(|c| {
            let variant = if c.guidance_embeds { Variant::Dev } else { Variant::by_name(path) };
            let hidden = c.joint_attention_dim / text_encoder::STATES.len();
            Sheet::default()
                .with("variant", format!("{variant}{}", if c.guidance_embeds { "" } else { ", by its name" }))
                .with("double_blocks", c.num_layers)
                .with("single_blocks", c.num_single_layers)
                .with("dim", c.dim())
                .with("text_dim", c.joint_attention_dim)
                .with("needs", format!("a {} and a FLUX.2 VAE", encoder(hidden)))
        }),
        Component::TextEncoder => text_encoder::Config::from_tensors(part).map(|c| {
            Sheet::default()
                .with("layers", c.num_hidden_layers)
                .with("hidden_size", c.hidden_size)
                .with("vocabulary", c.vocab_size)
                .with("goes_with", format!("a transformer of text_dim {}", c.text_dim()))
        }),
        Component::Vae => vae::Config::from_tensors(part).map(|c| {
            Sheet::default()
                .with("channels", &c.block_out_channels)
                .with("decoder_channels", c.decoder_channels())
                .with("latent_channels", c.latent_channels)
        }),
    };
    sheet
        .unwrap_or_else(|| Sheet::default().with("problem", "tensors that every such part has are missing"))
        .with_sheet("stored", groups(component, part))
}

fn encoder(hidden: usize) -> String {
    let name = match hidden {
        2560 => "Qwen3-4B",
        4096 => "Qwen3-8B",
        5120 => "Mistral-Small-3.2-24B",
        _ => "text encoder",
    };
    format!("{name} (hidden size {hidden})")
}

/// Beginnings of names, and what is meant by them; the rest is around them.
const GROUPS: [(Component, &str, &str); 6] = [
    (Component::Transformer, "transformer_blocks.", "double_blocks"),
    (Component::Transformer, "single_transformer_blocks.", "single_blocks"),
    (Component::TextEncoder, "model.layers.", "layers"),
    (Component::TextEncoder, "model.embed_tokens.", "embedding"),
    (Component::Vae, "encoder.", "encoder"),
    (Component::Vae, "decoder.", "decoder"),
];

/// How many tensors of each group are stored how.
fn groups(component: Component, part: &WeightSource) -> Sheet {
    let mut counts = BTreeMap::<&str, BTreeMap<&str, usize>>::new();
    for name in part.names() {
        let group = GROUPS.iter().find(|(c, start, _)| *c == component && name.starts_with(start));
        let how = part.storage(name).unwrap_or_default();
        *counts.entry(group.map_or("around", |g| g.2)).or_default().entry(how).or_default() += 1;
    }
    counts.iter().fold(Sheet::default(), |sheet, (group, counts)| {
        let text: Vec<String> = counts.iter().map(|(how, count)| format!("{count} {how}")).collect();
        sheet.with(*group, text.join(", "))
    })
}
