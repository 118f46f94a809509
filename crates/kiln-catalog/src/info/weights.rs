//! Describes a weight file: a component, a LoRA, embeddings or latents.

use std::path::Path;

use kiln_weights::{Lora, WeightSource};

use super::components;
use super::model::amounts;
use crate::error::{Error, Result};
use crate::properties::{Description, Properties};

pub(super) fn describe(path: &Path) -> Result<Description> {
    let source = WeightSource::open(path).map_err(Error::engine)?;
    let kind = FileKind::detect(&source);
    let details = kind.details(&source);
    let mut properties = Properties::default()
        .with(
            "kind",
            match kind {
                FileKind::Components => components::kind(&source),
                kind => kind.name().to_owned(),
            },
        )
        .with("path", path.display().to_string())
        .with("format", if source.is_gguf() { "GGUF" } else { "safetensors" })
        .and(amounts(&source))
        .and(details.properties);
    if !source.metadata().is_empty() {
        let mut metadata = Properties::verbatim();
        for (key, value) in source.metadata() {
            metadata = metadata.with(key, shorten(value));
        }
        properties = properties.with_group("metadata", metadata);
    }
    Ok(Description { properties, problem: details.problem })
}

/// The kind of a weight file, judged by its tensor names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FileKind {
    Lora,
    /// Components of a model.
    Components,
    Taef2,
    Embeddings,
    Latents,
    Unknown,
}

impl FileKind {
    fn detect(source: &WeightSource) -> FileKind {
        let has = |name: &str| source.contains(name);
        let any = |part: &str| source.names().any(|name| name.contains(part));
        if Lora::is_lora(source) {
            FileKind::Lora
        } else if !source.components().is_empty() {
            FileKind::Components
        } else if has("decoder.3.pool.0.weight") || has("decoder.layers.2.pool.0.weight") {
            FileKind::Taef2
        } else if any("prompt_embeds") {
            FileKind::Embeddings
        } else if has("latents") || has("noise") {
            FileKind::Latents
        } else {
            FileKind::Unknown
        }
    }

    fn name(self) -> &'static str {
        match self {
            FileKind::Lora => "LoRA",
            FileKind::Components => "component of a model",
            FileKind::Taef2 => "TAEF2, a tiny FLUX.2 autoencoder",
            FileKind::Embeddings => "prompt embeddings",
            FileKind::Latents => "latents",
            FileKind::Unknown => "tensors of an unknown kind",
        }
    }

    fn details(self, source: &WeightSource) -> Description {
        let properties = match self {
            FileKind::Lora => return lora(source),
            FileKind::Components => return components::details(source),
            FileKind::Embeddings | FileKind::Latents | FileKind::Unknown => {
                let shown = source.names().take(8).filter_map(|name| Some((name, source.entry(name)?)));
                let first = shown.fold(Properties::verbatim(), |properties, (name, (dtype, shape))| {
                    properties.with(name, format!("{dtype} {shape}"))
                });
                Properties::default().with_group("first", first)
            }
            FileKind::Taef2 => Properties::default(),
        };
        Description { properties, problem: None }
    }
}

/// Describes a LoRA, and why `generate` refuses it if it does.
fn lora(source: &WeightSource) -> Description {
    let (properties, problem) = match Lora::open(source.path()) {
        Ok(lora) => (lora_properties(&lora), lora.problem()),
        Err(error) => (Properties::default(), Some(error)),
    };
    let properties = match &problem {
        Some(problem) => properties.with("problem", problem.to_string()),
        None => properties,
    };
    Description { properties, problem: problem.map(Error::engine) }
}

fn lora_properties(lora: &Lora) -> Properties {
    let mut scales: Vec<f64> = lora.modules().filter_map(|m| lora.scale(m)).collect();
    scales.sort_by(f64::total_cmp);
    scales.dedup();
    // `to_out.0` ends in a number.
    let target =
        |layer: &'_ str| layer.rsplit('.').find(|part| part.parse::<usize>().is_err()).map(str::to_owned);
    let mut targets: Vec<String> = lora.layers().filter_map(target).collect();
    targets.sort_unstable();
    targets.dedup();
    let unused: Vec<&str> = lora.unused_keys().collect();
    let properties = Properties::default()
        .with("layout", lora.layouts().iter().map(ToString::to_string).collect::<Vec<_>>())
        .with("kinds", lora.kinds())
        .with("base", lora.base().map_or("unknown".into(), |base| base.to_string()))
        .with("rank", lora.rank())
        .with("ranks", lora.ranks())
        .with("scale", scales)
        .with("modules", lora.modules().count())
        .with("layers", lora.layers().count())
        .with("targets", targets);
    let properties = if unused.is_empty() { properties } else { properties.with("unused_keys", unused) };
    let notes = lora.notes();
    if notes.is_empty() { properties } else { properties.with("notes", notes) }
}

/// Shortens a metadata value, which may be a whole training configuration.
fn shorten(text: &str) -> String {
    const MAX_CHARS: usize = 120;
    match text.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{}… ({} characters)", &text[..end], text.chars().count()),
        None => text.to_owned(),
    }
}
