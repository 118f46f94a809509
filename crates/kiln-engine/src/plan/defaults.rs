//! What a request leaves open, filled in for its model; refuses what does not fit the model.

use std::path::PathBuf;

use kiln_nn::schedule::{Schedule, SigmaSpacing};
use kiln_tensor::HostTensor;

use super::contents::Prompt;
use crate::error::{Error, Field, MissingComponent, Result};
use crate::hint;
use crate::inputs::check_finite;
use crate::model::Model;
use crate::request::{Request, ScheduleKind};

/// Default exponent of the power schedule.
pub(super) const RHO: f32 = 2.0;

/// Refuses a model without a component that the request needs, and embeddings that don't fit the model.
pub(super) fn check_components(model: &Model, prompt: &Prompt, request: &Request) -> Result<()> {
    if model.vae.is_none() && request.vae.is_none() {
        return Err(model.missing_component(MissingComponent::Vae));
    }
    let Prompt::Embeddings { prompts, negatives, .. } = prompt else {
        return match model.text_encoder {
            Some(_) => Ok(()),
            None => Err(model.missing_component(MissingComponent::TextEncoder)),
        };
    };
    let (dim, path) =
        (model.transformer.config.joint_attention_dim, request.embeds.as_ref().map(|e| &e.path));
    let path = path.map_or(std::path::Path::new(""), PathBuf::as_path);
    let fits =
        |text: &&HostTensor| matches!(text.shape().dims(), [tokens, last] if *tokens > 0 && *last == dim);
    if let Some(text) = prompts.iter().chain(negatives).find(|text| !fits(text)) {
        let (file, shape) = (path.display(), text.shape());
        let what = format!("`{file}` has prompt embeddings of shape {shape}, expected [tokens, {dim}]");
        return Err(
            Error::request(what).with_hint("they must come from the text encoder that belongs to this model")
        );
    }
    prompts.iter().chain(negatives).try_for_each(|text| check_finite(path, "prompt embeddings", text))
}

/// Rounds width or height down to whole tokens, with a note.
pub(super) fn round_side(model: &Model, name: &str, size: u32, notes: &mut Vec<String>) -> Result<u32> {
    const MAX: u32 = 1 << 20;
    let unit = model.pixels_per_token() as u32;
    let rounded = size / unit * unit;
    if rounded == 0 || size > MAX {
        return Err(Error::value(format!("{name} must be between {unit} and {MAX} pixels, found {size}")));
    }
    if rounded != size {
        notes.push(format!("{name} {size} is rounded down to {rounded}, a multiple of {unit}"));
    }
    Ok(rounded)
}

/// Computes the noise levels for an image of this many tokens.
pub(super) fn schedule(model: &Model, request: &Request, tokens: usize, steps: usize) -> Schedule {
    let custom = Some(&request.sigmas[..]).filter(|sigmas| !sigmas.is_empty());
    Schedule::new(&model.scheduler, spacing(request), tokens, steps, custom)
}

/// Returns how a request spaces its noise levels.
pub(super) fn spacing(request: &Request) -> SigmaSpacing {
    match request.schedule.unwrap_or_default() {
        ScheduleKind::Shifted => SigmaSpacing::Shifted,
        ScheduleKind::Power => SigmaSpacing::Power { rho: request.rho.unwrap_or(RHO) },
    }
}

/// Returns the guidance, and adds notes for values without effect.
pub(super) fn guidance(model: &Model, request: &Request, notes: &mut Vec<String>) -> Option<f32> {
    let variant = model.variant;
    let guidance = model.default_guidance().map(|default| request.guidance.unwrap_or(default));
    if guidance.is_none() && request.guidance.is_some_and(|g| g != 1.0) {
        notes.push(format!("guidance has no effect: {variant} has none"));
    }
    if !request.negative_prompts.is_empty() && variant.calls_per_step(guidance) == 1 {
        let guided = variant.takes_negative_prompt();
        let why = if guided { "it needs a guidance above 1" } else { "this model has no guidance" };
        notes.push(format!("the negative prompt has no effect: {why}"));
    }
    guidance
}

/// Returns the text encoder's layers whose states make up a text token; refuses those that it or the transformer lacks.
pub(super) fn text_layers(model: &Model, request: &Request, notes: &mut Vec<String>) -> Result<Vec<usize>> {
    let layers: Vec<usize> = request.text_layers.iter().map(|layer| *layer as usize).collect();
    if request.embeds.is_some() && !layers.is_empty() {
        notes.push("the text layers have no effect: the prompt is given as embeddings".into());
    }
    let Some(encoder) = &model.text_encoder else { return Ok(Vec::new()) };
    let config = &encoder.config;
    if layers.is_empty() || request.embeds.is_some() {
        return Ok(config.output_layers().to_vec());
    }
    let expected = model.transformer.config.joint_attention_dim / config.hidden_size;
    if layers.len() != expected {
        let what = format!("the transformer takes {expected} text layers, found {}", layers.len());
        return Err(Error::value(what).with_hint(hint![
            "leave out ",
            Field::TextLayers,
            " for the model's own"
        ]));
    }
    if let Some(layer) = layers.iter().find(|layer| **layer > config.num_hidden_layers) {
        let count = config.num_hidden_layers;
        let what = format!("the text encoder has {count} layers, found text layer {layer}");
        return Err(Error::value(what).with_hint("0 is the embedding, 1 the first layer"));
    }
    Ok(layers)
}

/// Returns the threshold of the step cache, `None` if it is off, and adds a note where it has no effect.
pub(super) fn cache(model: &Model, request: &Request, notes: &mut Vec<String>) -> Option<f32> {
    let threshold = request.cache.filter(|threshold| *threshold > 0.0)?;
    let variant = model.variant;
    if variant.is_distilled {
        notes.push(format!("the step cache has no effect: {variant} takes too few steps for it"));
        return None;
    }
    Some(threshold)
}
