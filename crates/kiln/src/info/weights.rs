use std::path::Path;

use kiln_weights::{Lora, WeightSource};

use super::Description;
use super::model::amounts;
use crate::failure::Failure;
use crate::sheet::Sheet;

/// A weight file, or a folder with one: what is in it and what it seems to be for.
pub(super) fn describe(path: &Path) -> Result<Description, Failure> {
    let source = WeightSource::open(path)?;
    let kind = Kind::of(&source);
    let mut sheet = Sheet::default()
        .with("kind", kind.name())
        .with("path", path.display().to_string())
        .with("format", "safetensors")
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
    Transformer,
    TransformerBfl,
    Taef2,
    Vae,
    TextEncoder,
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
            () if any("single_transformer_blocks.") => Kind::Transformer,
            () if any("single_blocks.") && any("double_blocks.") => Kind::TransformerBfl,
            () if has("decoder.3.pool.0.weight") || has("decoder.layers.2.pool.0.weight") => Kind::Taef2,
            () if has("decoder.conv_in.weight") => Kind::Vae,
            () if any("embed_tokens.weight") && any(".self_attn.") => Kind::TextEncoder,
            () if any("prompt_embeds") => Kind::Embeddings,
            () if has("latents") || has("noise") => Kind::Latents,
            () => Kind::Unknown,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Kind::Lora => "LoRA",
            Kind::Transformer => "FLUX.2 transformer",
            Kind::TransformerBfl => "FLUX.2 transformer in Black Forest Labs' layout (not read yet)",
            Kind::Taef2 => "TAEF2, a tiny FLUX.2 autoencoder",
            Kind::Vae => "FLUX.2 autoencoder (VAE)",
            Kind::TextEncoder => "text encoder",
            Kind::Embeddings => "prompt embeddings",
            Kind::Latents => "latents",
            Kind::Unknown => "tensors of an unknown kind",
        }
    }

    fn details(self, source: &WeightSource) -> Sheet {
        match self {
            Kind::Lora => lora(source),
            Kind::Transformer => Sheet::default()
                .with("double_blocks", blocks(source, "transformer_blocks."))
                .with("single_blocks", blocks(source, "single_transformer_blocks."))
                .with("dim", side(source, "x_embedder.weight", 0))
                .with("text_dim", side(source, "context_embedder.weight", 1)),
            Kind::Vae => Sheet::default().with("latent_channels", side(source, "decoder.conv_in.weight", 1)),
            Kind::TextEncoder => Sheet::default()
                .with("layers", blocks(source, "model.layers.").max(blocks(source, "layers.")))
                .with("hidden_size", side(source, "model.embed_tokens.weight", 1)),
            Kind::Embeddings | Kind::Latents | Kind::Unknown => {
                let shown = source.names().take(8).filter_map(|name| Some((name, source.entry(name)?)));
                let first = shown.fold(Sheet::default(), |sheet, (name, (dtype, shape))| {
                    sheet.with(name, format!("{dtype} {shape}"))
                });
                Sheet::default().with_sheet("first", first)
            }
            Kind::Taef2 | Kind::TransformerBfl => Sheet::default(),
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

/// One more than the largest number that follows `prefix`.
fn blocks(source: &WeightSource, prefix: &str) -> usize {
    let numbers =
        source.names().filter_map(|n| n.strip_prefix(prefix)?.split('.').next()?.parse::<usize>().ok());
    numbers.max().map_or(0, |n| n + 1)
}

fn side(source: &WeightSource, name: &str, axis: usize) -> Option<usize> {
    source.entry(name).and_then(|(_, shape)| shape.dims().get(axis).copied())
}

/// Metadata may hold whole training configurations.
fn shorten(text: &str) -> String {
    const LONGEST: usize = 120;
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}… ({} characters)", &text[..end], text.chars().count()),
        None => text.to_owned(),
    }
}
