//! Describes a model.

use kiln_engine::{Model, ModelComponent};
use kiln_tensor::DType;
use kiln_weights::{Component, WeightSource};

use super::components::{absence, contents};
use crate::error::{Error, Result};
use crate::location::ModelLocation;
use crate::properties::{Description, Properties};
use crate::values::{bytes, count};

/// Describes a model: its variant, its components and the memory it needs.
pub(super) fn describe(location: &ModelLocation) -> Result<Description> {
    let model = location.open()?;
    let mut describer = ComponentDescriber { total: 0, problem: None };
    let t = &model.transformer.config;
    let transformer = describer.describe(
        &model.transformer,
        Properties::default()
            .with("double_blocks", t.num_layers)
            .with("single_blocks", t.num_single_layers)
            .with("heads", t.num_attention_heads)
            .with("head_dim", t.attention_head_dim)
            .with("dim", t.dim())
            .with("text_dim", t.joint_attention_dim),
    );
    let text_encoder = model.text_encoder.as_ref().map(|component| {
        let c = &component.config;
        let sizes = Properties::default()
            .with("kind", c.model_type.as_deref().unwrap_or("qwen3"))
            .with("layers", c.num_hidden_layers)
            .with("text_layers", c.output_layers())
            .with("hidden_size", c.hidden_size)
            .with("heads", c.num_attention_heads)
            .with("key_value_heads", c.num_key_value_heads)
            .with("vocabulary", c.vocab_size);
        let contents = component.weights().ok().map(|weights| contents(c, weights));
        describer.describe(component, sizes.and(contents.unwrap_or_default()))
    });
    let vae = model.vae.as_ref().map(|component| {
        let c = &component.config;
        let sizes = Properties::default()
            .with("channels", &c.block_out_channels)
            .with("decoder_channels", &c.decoder_block_out_channels)
            .with("latent_channels", c.latent_channels);
        describer.describe(component, sizes)
    });
    let (kind, within) = match location {
        ModelLocation::BuiltIn | ModelLocation::BuiltInBase => ("built-in model", "in the program"),
        ModelLocation::Named { path, .. } | ModelLocation::Path(path) if path.is_file() => {
            ("model in one file", "in the file")
        }
        _ => ("model folder", "in the folder"),
    };
    let tokenizer = match &model.tokenizer {
        Some(files) if !model.searched_folders.is_empty() => files.path.display().to_string(),
        Some(_) => within.to_owned(),
        None => "built into Kiln".to_owned(),
    };
    let properties = Properties::default()
        .with("kind", kind)
        .with("path", model.path.display().to_string())
        .with("card", model.card.as_deref().map(str::trim))
        .with("variant", model.described_variant())
        .with("default_size", format!("{0}x{0}", model.default_size))
        .with("trained_sides", model.trained_sides().map(|s| format!("{} to {}", s.start(), s.end())))
        .with("default_steps", model.default_steps())
        .with("default_guidance", model.default_guidance())
        .with("tokenizer", tokenizer)
        .and(vocabulary(&model))
        .with_group("transformer", transformer);
    let properties = with_component(properties, &model, Component::TextEncoder, text_encoder);
    let properties = with_component(properties, &model, Component::Vae, vae)
        .with_group("memory", memory(&model, describer.total));
    Ok(Description { properties, problem: describer.problem })
}

/// Returns what a model that has learned few words draws.
fn vocabulary(model: &Model) -> Properties {
    let Some(vocabulary) = &model.vocabulary else { return Properties::default() };
    let draws = Properties::default()
        .with("subject", &vocabulary.subject)
        .with("examples", &vocabulary.examples)
        .with("colours", &vocabulary.colours)
        .with("styles", &vocabulary.styles)
        .with("backgrounds", &vocabulary.backgrounds)
        .with("words", vocabulary.len());
    Properties::default().with_group("draws", draws)
}

fn with_component(
    properties: Properties,
    model: &Model,
    component: Component,
    described: Option<Properties>,
) -> Properties {
    let name = component.folder();
    match described {
        Some(described) => properties.with_group(name, described),
        None => properties.with(name, absence(model, component)),
    }
}

/// Describes components, adds up their bytes, and keeps the first error without stopping at it.
struct ComponentDescriber {
    total: u64,
    problem: Option<Error>,
}

impl ComponentDescriber {
    fn describe<C>(&mut self, component: &ModelComponent<C>, sizes: Properties) -> Properties {
        match component.weights() {
            Ok(source) => {
                self.total += source.bytes();
                sizes.and(amounts(source)).with("note", component.note())
            }
            Err(error) => {
                let sizes = sizes.with("problem", error.to_string());
                self.problem.get_or_insert(Error::engine(error));
                sizes
            }
        }
    }
}

/// Returns the numbers of files, tensors, parameters and bytes, and the data types.
pub(super) fn amounts(source: &WeightSource) -> Properties {
    let dtypes: Vec<String> = match &source.elements_by_storage().into_iter().collect::<Vec<_>>()[..] {
        [(only, _)] => vec![(*only).to_owned()],
        several => several.iter().map(|(storage, n)| format!("{storage} ({})", count(*n))).collect(),
    };
    Properties::default()
        .with("files", source.files().count())
        .with("tensors", source.names().count())
        .with_amount("parameters", source.parameters(), count(source.parameters()))
        .with("dtypes", dtypes)
        .with("int8_layers", int8_layers(source))
        .with_amount("bytes", source.bytes(), bytes(source.bytes()))
}

/// Counts the layers stored in int8; `None` if there are none.
fn int8_layers(source: &WeightSource) -> Option<usize> {
    Some(source.names().filter(|name| source.is_int8(name)).count()).filter(|count| *count > 0)
}

/// Returns the bytes of the weights, which stay memory-mapped, and the additional memory needed at two image sizes.
fn memory(model: &Model, weights: u64) -> Properties {
    let sides = [model.default_size / 2, model.default_size];
    let weights = Properties::default().with_amount("weights", weights, bytes(weights));
    sides.into_iter().fold(weights, |properties, side| {
        let peak = model.memory_estimate([side, side], model.default_tokens(), DType::F32).peak();
        properties.with_amount(format!("{side}x{side}"), peak, format!("{} more", bytes(peak)))
    })
}
