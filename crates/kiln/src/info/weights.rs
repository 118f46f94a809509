use std::path::Path;

use kiln_weights::{Lora, WeightSource};

use super::model::amounts;
use super::{Description, parts};
use crate::failure::Failure;
use crate::sheet::Sheet;

/// A weight file, or a folder with one: what is in it and what it seems to be for.
pub(super) fn describe(path: &Path) -> Result<Description, Failure> {
    let source = WeightSource::open(path)?;
    let kind = Kind::of(&source);
    let mut sheet = Sheet::default()
        .with(
            "kind",
            match kind {
                Kind::Parts => parts::name(&source.components()),
                kind => kind.name().to_owned(),
            },
        )
        .with("path", path.display().to_string())
        .with("format", if source.is_gguf() { "GGUF" } else { "safetensors" })
        .and(amounts(&source))
        .and(kind.details(&source));
    if !source.metadata().is_empty() {
        let shown = source.metadata().iter().map(|(key, value)| (key, shorten(value)));
        sheet =
            sheet.with_sheet("metadata", shown.fold(Sheet::default(), |s, (key, value)| s.with(key, value)));
    }
    Ok(Description { sheet, problem: None })
}

/// What gives a LoRA away, whoever wrote it.
const LORA: [&str; 7] = [".lora_A", ".lora_down", ".lora.down", ".lokr_", ".hada_", ".dora_scale", ".oft_"];

/// What tensors are for, as far as their names tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Lora,
    /// Parts of a model.
    Parts,
    Taef2,
    Embeddings,
    Latents,
    Unknown,
}

impl Kind {
    fn of(source: &WeightSource) -> Kind {
        let has = |name: &str| source.contains(name);
        let any = |part: &str| source.names().any(|name| name.contains(part));
        match () {
            () if LORA.iter().any(|part| any(part)) => Kind::Lora,
            () if !source.components().is_empty() => Kind::Parts,
            () if has("decoder.3.pool.0.weight") || has("decoder.layers.2.pool.0.weight") => Kind::Taef2,
            () if any("prompt_embeds") => Kind::Embeddings,
            () if has("latents") || has("noise") => Kind::Latents,
            () => Kind::Unknown,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Kind::Lora => "LoRA",
            Kind::Parts => "part of a model",
            Kind::Taef2 => "TAEF2, a tiny FLUX.2 autoencoder",
            Kind::Embeddings => "prompt embeddings",
            Kind::Latents => "latents",
            Kind::Unknown => "tensors of an unknown kind",
        }
    }

    fn details(self, source: &WeightSource) -> Sheet {
        match self {
            Kind::Lora => lora(source),
            Kind::Parts => parts::details(source),
            Kind::Embeddings | Kind::Latents | Kind::Unknown => {
                let shown = source.names().take(8).filter_map(|name| Some((name, source.entry(name)?)));
                let first = shown.fold(Sheet::default(), |sheet, (name, (dtype, shape))| {
                    sheet.with(name, format!("{dtype} {shape}"))
                });
                Sheet::default().with_sheet("first", first)
            }
            Kind::Taef2 => Sheet::default(),
        }
    }
}

/// Layout, kinds, base, ranks, scales and targets; or why Kiln can't use it.
fn lora(source: &WeightSource) -> Sheet {
    let lora = match Lora::open(source.path()) {
        Ok(lora) => lora,
        Err(error) => return Sheet::default().with("problem", error.to_string()),
    };
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
    let sheet = Sheet::default()
        .with("layout", lora.layouts().iter().map(ToString::to_string).collect::<Vec<_>>())
        .with("kinds", lora.kinds())
        .with("base", lora.base().map_or("unknown".into(), |base| base.to_string()))
        .with("rank", lora.rank())
        .with("ranks", lora.ranks())
        .with("scale", scales)
        .with("modules", lora.modules().count())
        .with("layers", lora.layers().count())
        .with("targets", targets);
    match unused.is_empty() {
        true => sheet,
        false => sheet.with("unused_keys", unused),
    }
}

/// Metadata may hold whole training configurations.
fn shorten(text: &str) -> String {
    const LONGEST: usize = 120;
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}… ({} characters)", &text[..end], text.chars().count()),
        None => text.to_owned(),
    }
}
