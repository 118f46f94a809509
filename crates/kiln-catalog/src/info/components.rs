//! Describes weight files with one or more components of a model: their naming scheme, how their tensors are stored, and
//! which other components they need.

use std::collections::BTreeMap;
use std::path::Path;

use kiln_engine::{ComponentFile, Model};
use kiln_family::Family;
use kiln_nn::{language_model, text_encoder, transformer, vae};
use kiln_weights::{Component, WeightSource};

use crate::error::Error;
use crate::location::ModelLocation;
use crate::properties::{Description, Properties};

/// Names the kind of a file with components of a model.
pub(super) fn kind(source: &WeightSource) -> String {
    let transformer = source.component(Component::Transformer).ok().flatten();
    let family = transformer.as_ref().unwrap_or(source).family();
    match &source.components()[..] {
        [(Component::Transformer, _)] => format!("{} transformer", family.name),
        [(Component::Vae, _)] => format!("{} autoencoder (VAE)", family.name),
        [(Component::TextEncoder, _)] => "text encoder".into(),
        several => {
            let names: Vec<String> = several.iter().map(|(component, _)| component.to_string()).collect();
            format!("checkpoint with a {}", names.join(", a "))
        }
    }
}

/// Describes all components of a file, and the model that `generate` would make of it.
pub(super) fn details(source: &WeightSource) -> Description {
    let mut described = Description { properties: Properties::default(), problem: None };
    let all = source.components();
    for &(component, naming) in &all {
        let one = match source.component(component) {
            Ok(Some(weights)) => describe_one(component, &weights),
            Ok(None) => continue,
            Err(error) => Description {
                properties: Properties::default().with("problem", error.to_string()),
                problem: Some(Error::engine(error)),
            },
        };
        let properties = Properties::default().with("names", naming).and(one.properties);
        described.problem = described.problem.or(one.problem);
        described.properties = match &all[..] {
            [_] => described.properties.and(properties),
            _ => described.properties.with_group(component.folder(), properties),
        };
    }
    if described.problem.is_none() && all.iter().any(|(component, _)| *component == Component::Transformer) {
        let model = describe_model(source);
        described.properties = described.properties.with_group("model", model.properties);
        described.problem = model.problem;
    }
    described
}

/// Describes the model around a transformer's file: its variant, and where its other components are.
fn describe_model(source: &WeightSource) -> Description {
    let model = match ModelLocation::Path(source.path().to_path_buf()).open() {
        Ok(model) => model,
        Err(error) => {
            let properties = Properties::default().with("problem", error.to_string());
            return Description { properties, problem: Some(error) };
        }
    };
    let place = |path: &Path| path.display().to_string();
    let text_encoder = model.text_encoder.as_ref().map(|c| place(&c.path));
    let vae = model.vae.as_ref().map(|c| place(&c.path));
    let tokenizer = model.tokenizer.as_ref().map(|files| place(&files.path));
    let properties = Properties::default()
        .with("variant", model.described_variant())
        .with("text_encoder", text_encoder.unwrap_or_else(|| absence(&model, Component::TextEncoder)))
        .with("vae", vae.unwrap_or_else(|| absence(&model, Component::Vae)))
        .with("tokenizer", tokenizer.unwrap_or_else(|| "built into Kiln".into()));
    Description { properties, problem: None }
}

fn describe_one(component: Component, weights: &WeightSource) -> Description {
    let (note, problem) = match ComponentFile::open(weights.path(), component) {
        Ok(file) => (file.note, None),
        Err(error) => (None, Some(Error::engine(error))),
    };
    let properties = sizes(component, weights)
        .unwrap_or_default()
        .with("problem", problem.as_ref().map(ToString::to_string))
        .with("note", note)
        .with_group("stored", storage_counts(component, weights));
    Description { properties, problem }
}

fn sizes(component: Component, weights: &WeightSource) -> Option<Properties> {
    match component {
        Component::Transformer => transformer::Config::from_tensors(weights).map(|c| {
            Properties::default()
                .with("double_blocks", c.num_layers)
                .with("single_blocks", c.num_single_layers)
                .with("dim", c.dim())
                .with("text_dim", c.joint_attention_dim)
                .with("needs", {
                    let family = weights.family();
                    let encoder = text_encoder_name(family, c.joint_attention_dim);
                    format!("a {encoder} and a {} VAE", family.name)
                })
        }),
        Component::TextEncoder => text_encoder::Config::from_tensors(weights).map(|c| {
            Properties::default()
                .with("family", c.encoder().name)
                .with("layers", c.num_hidden_layers)
                .with("text_layers", c.output_layers())
                .with("hidden_size", c.hidden_size)
                .with("vocabulary", c.vocab_size)
                .with("goes_with", format!("a transformer with text_dim {}", c.text_dim()))
                .and(contents(&c, weights))
        }),
        Component::Vae => vae::Config::from_tensors(weights).map(|c| {
            Properties::default()
                .with("channels", &c.block_out_channels)
                .with("decoder_channels", c.decoder_channels())
                .with("latent_channels", c.latent_channels)
        }),
    }
}

/// What a text encoder's file has beside the layers that encode prompts.
pub(super) fn contents(config: &text_encoder::Config, weights: &WeightSource) -> Properties {
    if !config.encoder().embeds_tokenizer {
        return Properties::default();
    }
    let tokenizer = if weights.contains("tekken_model") {
        "in the file (tekken)"
    } else if weights.metadata().contains_key("tokenizer.ggml.tokens") {
        "in the file (GGUF)"
    } else {
        "not in the file"
    };
    let has_vision = weights.names().any(|name| name.starts_with("vision_tower."));
    let upsampling = match language_model::problem(weights, config) {
        Some(problem) => format!("no: {problem}"),
        None if has_vision => "yes, with images".into(),
        None => "yes, without images".into(),
    };
    let rotary = weights.has_interleaved_rotary().then_some("interleaved, as llama.cpp writes them");
    Properties::default()
        .with("embedded_tokenizer", tokenizer)
        .with("vision_tower", has_vision)
        .with("prompt_upsampling", upsampling)
        .with("rotary_rows", rotary)
}

/// Names the text encoder of a family whose states side by side are this wide.
fn text_encoder_name(family: &'static Family, text_dim: usize) -> String {
    let published = family.text_encoders().into_iter().flat_map(|encoder| {
        let states = encoder.layers.len();
        encoder.sizes.iter().map(move |(hidden, name)| (states * hidden, *hidden, *name))
    });
    let usual = family.default_variant().text_encoder;
    let other = (text_dim, text_dim / usual.layers.len(), "text encoder");
    let (_, hidden, name) = published.into_iter().find(|(dim, ..)| *dim == text_dim).unwrap_or(other);
    format!("{name} (hidden size {hidden})")
}

/// Tensor name prefixes and the group they belong to; all other tensors form the group `around`.
const GROUPS: [(Component, &str, &str); 9] = [
    (Component::Transformer, "transformer_blocks.", "double_blocks"),
    (Component::Transformer, "single_transformer_blocks.", "single_blocks"),
    (Component::TextEncoder, "model.layers.", "layers"),
    (Component::TextEncoder, "model.embed_tokens.", "embedding"),
    (Component::TextEncoder, "lm_head.", "head"),
    (Component::TextEncoder, "vision_tower.", "vision_tower"),
    (Component::TextEncoder, "multi_modal_projector.", "projector"),
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

/// Says why a model has no such component, and what to do about it.
pub(super) fn absence(model: &Model, component: Component) -> String {
    let option = format!("--{}", component.folder().replace('_', "-"));
    if let Some(files) = model.candidates(component) {
        let files: Vec<String> = files.iter().map(|file| format!("`{}`", file.display())).collect();
        return format!("none: several files could be it: {}; name one with {option}", files.join(", "));
    }
    match &model.searched_folders[..] {
        [] => "none in this folder".into(),
        folders => {
            let folders: Vec<String> =
                folders.iter().map(|folder| format!("`{}`", folder.display())).collect();
            let unusable: String = model.unusable.iter().map(|reason| format!("; {reason}")).collect();
            format!("none in {}; give one with {option}{unusable}", folders.join(", "))
        }
    }
}
