use kiln_engine::{Model, Part};
use kiln_tensor::DType;
use kiln_weights::WeightSource;

use super::Description;
use crate::failure::Failure;
use crate::models::Found;
use crate::sheet::Sheet;
use crate::values::{bytes, count};

/// A model: its variant, its parts, and what running it takes.
pub(super) fn describe(found: &Found) -> Result<Description, Failure> {
    let model = found.open()?;
    let mut parts = Parts { total: 0, problem: None };
    let t = &model.transformer.config;
    let transformer = parts.describe(
        &model.transformer,
        Sheet::default()
            .with("double_blocks", t.num_layers)
            .with("single_blocks", t.num_single_layers)
            .with("heads", t.num_attention_heads)
            .with("head_dim", t.attention_head_dim)
            .with("dim", t.dim())
            .with("text_dim", t.joint_attention_dim),
    );
    let text_encoder = model.text_encoder.as_ref().map(|part| {
        let c = &part.config;
        let sizes = Sheet::default()
            .with("kind", c.model_type.as_deref().unwrap_or("qwen3"))
            .with("layers", c.num_hidden_layers)
            .with("hidden_size", c.hidden_size)
            .with("heads", c.num_attention_heads)
            .with("key_value_heads", c.num_key_value_heads)
            .with("vocabulary", c.vocab_size);
        parts.describe(part, sizes)
    });
    let vae = model.vae.as_ref().map(|part| {
        let c = &part.config;
        let sizes = Sheet::default()
            .with("channels", &c.block_out_channels)
            .with("decoder_channels", &c.decoder_block_out_channels)
            .with("latent_channels", c.latent_channels);
        parts.describe(part, sizes)
    });
    let (kind, within) = match found {
        Found::BuiltIn => ("model inside the program", "in the program"),
        Found::Named { path, .. } | Found::Path(path) if path.is_file() => {
            ("model in one file", "in the file")
        }
        _ => ("model folder", "in the folder"),
    };
    let tokenizer = match &model.tokenizer {
        Some(files) if !model.searched.is_empty() => files.path.display().to_string(),
        Some(_) => within.to_owned(),
        None => "built into Kiln".to_owned(),
    };
    let sheet = Sheet::default()
        .with("kind", kind)
        .with("path", model.path.display().to_string())
        .with("card", model.card.as_deref().map(str::trim))
        .with("variant", model.variant.to_string())
        .with("default_size", format!("{0}x{0}", model.default_size))
        .with("trained_sides", model.trained_sides().map(|s| format!("{} to {}", s.start(), s.end())))
        .with("default_steps", model.default_steps())
        .with("default_guidance", model.default_guidance())
        .with("tokenizer", tokenizer)
        .with_sheet("transformer", transformer);
    let sheet = with_part(sheet, "text_encoder", text_encoder);
    let sheet = with_part(sheet, "vae", vae).with_sheet("memory", memory(&model, parts.total));
    Ok(Description { sheet, problem: parts.problem })
}

fn with_part(sheet: Sheet, name: &str, part: Option<Sheet>) -> Sheet {
    match part {
        Some(part) => sheet.with_sheet(name, part),
        None => sheet.with(name, "none in this folder"),
    }
}

/// Sums up the parts, and keeps the first problem without giving up on the rest.
struct Parts {
    total: u64,
    problem: Option<Failure>,
}

impl Parts {
    fn describe<C>(&mut self, part: &Part<C>, sizes: Sheet) -> Sheet {
        match part.weights() {
            Ok(source) => {
                self.total += source.bytes();
                sizes.and(amounts(source))
            }
            Err(error) => {
                let sizes = sizes.with("problem", error.to_string());
                self.problem.get_or_insert(error.into());
                sizes
            }
        }
    }
}

/// Files, parameters, dtypes and bytes.
pub(super) fn amounts(source: &WeightSource) -> Sheet {
    let dtypes: Vec<String> = match &source.storages().into_iter().collect::<Vec<_>>()[..] {
        [(only, _)] => vec![(*only).to_owned()],
        several => several.iter().map(|(how, n)| format!("{how} ({})", count(*n))).collect(),
    };
    Sheet::default()
        .with("files", source.files().count())
        .with("tensors", source.names().count())
        .with_amount("parameters", source.parameters(), count(source.parameters()))
        .with("dtypes", dtypes)
        .with("int8_layers", int8_layers(source))
        .with_amount("bytes", source.bytes(), bytes(source.bytes()))
}

/// How many layers are stored as 8-bit rows; `None` when there are none.
fn int8_layers(source: &WeightSource) -> Option<usize> {
    Some(source.names().filter(|name| source.is_int8(name)).count()).filter(|count| *count > 0)
}

/// What is needed beside the weights, which stay mapped from their files.
fn memory(model: &Model, weights: u64) -> Sheet {
    let sides = [model.default_size / 2, model.default_size];
    let weights = Sheet::default().with_amount("weights", weights, bytes(weights));
    sides.into_iter().fold(weights, |sheet, side| {
        let need = model.memory_need([side, side], model.default_tokens(), DType::F32).peak();
        sheet.with_amount(format!("{side}x{side}"), need, format!("{} more", bytes(need)))
    })
}
