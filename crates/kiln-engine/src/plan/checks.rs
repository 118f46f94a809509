//! Checks of a request, and defaults for what it leaves open.

use std::path::PathBuf;

use kiln_nn::schedule::{Schedule, SigmaSpacing};
use kiln_tensor::HostTensor;

use super::contents::Prompt;
use super::upscale;
use crate::error::{Error, Field, MissingComponent, Result};
use crate::inputs::check_finite;
use crate::model::Model;
use crate::noise::MAX_IMAGES;
use crate::request::{DEFAULT_CACHE_THRESHOLD, MAX_TOKENS, Request, ScheduleKind};
use crate::{hint, text};

/// Default exponent of the power schedule.
pub(super) const RHO: f32 = 2.0;

/// Refuses fields that exclude or require each other, before any file is read.
pub(super) fn check_fields(request: &Request) -> Result<()> {
    let needs = |field: Field, other: Field, what: &'static str| {
        Err(Error::value(text![field, " needs ", other]).with_hint(hint!["give ", what, " as ", other]))
    };
    if let Some(field) = empty_file(request) {
        return Err(Error::value(text![field, " needs a file, found an empty name"])
            .with_hint(hint!["name a file"; "leave out ", field]));
    }
    if let Some(lora) = request.loras.iter().find(|lora| !lora.weight.is_finite()) {
        let (path, weight) = (lora.path.display(), lora.weight);
        return Err(Error::value(format!(
            "the weight of the LoRA `{path}` must be a finite number, found {weight}"
        )));
    }
    upscale::check(request)?;
    let (init, mask) = (request.init.is_some(), request.mask.is_some());
    if mask && !init {
        return needs(Field::Mask, Field::Init, "the image that the mask belongs to");
    }
    if request.strength.is_some() && !init {
        return needs(Field::Strength, Field::Init, "the image to start from");
    }
    if request.mask_padding.is_some() && !mask {
        return needs(Field::MaskPadding, Field::Mask, "the area to change");
    }
    if request.rho.is_some() && request.schedule != Some(ScheduleKind::Power) {
        let power = || Field::Schedule.to("power");
        return Err(Error::value(text![Field::Rho, " needs ", power()])
            .with_hint(hint!["choose ", power(); "leave out ", Field::Rho]));
    }
    if let Some(tokens) = request.max_tokens.filter(|tokens| !(1..=MAX_TOKENS).contains(tokens)) {
        let what = format!("the number of text tokens must be between 1 and {MAX_TOKENS}, found {tokens}");
        return Err(Error::value(what));
    }
    if request.embeds.is_some() {
        if !request.negative_prompts.is_empty() {
            return Err(Error::value(text![
                Field::NegativePrompt,
                " and ",
                Field::Embeds,
                " can't be combined"
            ])
            .with_hint("put `negative_prompt_embeds` into the file of embeddings"));
        }
        return Ok(());
    }
    let (prompts, negatives) = (request.prompts.len(), request.negative_prompts.len());
    if prompts == 0 && request.upscale.is_none() {
        return Err(Error::value("no prompt was given").with_hint(
            "describe the image: kiln generate \"a red apple on a blue background\"; `-` reads it from standard input",
        ));
    }
    if negatives > 1 && negatives != prompts.max(1) {
        return Err(Error::value(format!("{negatives} negative prompts were given for {prompts} prompts"))
            .with_hint("give one for all, or one for each prompt"));
    }
    Ok(())
}

/// Returns the first field whose file has an empty name, such as an unset variable of a script.
fn empty_file(request: &Request) -> Option<Field> {
    let one = [
        (Field::Vae, &request.vae),
        (Field::Embeds, &request.embeds),
        (Field::Init, &request.init),
        (Field::Mask, &request.mask),
        (Field::Noise, &request.noise),
    ];
    let one = one.into_iter().flat_map(|(field, file)| file.iter().map(move |file| (field, file)));
    let mut all = one.chain(request.references.iter().map(|file| (Field::References, file)));
    all.find(|(_, file)| file.path.as_os_str().is_empty()).map(|(field, _)| field)
}

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

/// Returns the number of images per prompt; refuses a list of seeds whose length differs from it.
pub(super) fn images_per_prompt(request: &Request, prompts: usize) -> Result<usize> {
    let seeds = request.seed.len();
    let requested = request.n.map(|n| n as usize);
    if seeds <= 1 || request.noise.is_some() {
        return Ok(requested.unwrap_or(1));
    }
    let per_prompt = requested.unwrap_or((seeds / prompts.max(1)).max(1));
    if per_prompt.checked_mul(prompts) != Some(seeds) {
        let images = per_prompt.saturating_mul(prompts);
        return Err(Error::value(format!("{seeds} seeds were given for {images} images"))
            .with_hint("give one seed for all, or one for each image"));
    }
    Ok(per_prompt)
}

/// Returns the number of images of a request; refuses zero and too many.
pub(super) fn image_count(prompts: usize, per_prompt: usize) -> Result<usize> {
    match prompts.saturating_mul(per_prompt) {
        0 => Err(Error::value("there is nothing to generate: no prompt, or a batch of 0")),
        n if n > MAX_IMAGES => {
            Err(Error::value(format!("{n} images are too many for one request; at most {MAX_IMAGES}"))
                .with_hint("split it into several requests"))
        }
        n => Ok(n),
    }
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

pub(super) fn check_steps(steps: usize) -> Result<()> {
    const MAX: usize = 10_000;
    if steps > MAX {
        return Err(Error::value(format!("{steps} steps are too many; at most {MAX}")));
    }
    Ok(())
}

/// Computes the noise levels for an image of this many tokens.
pub(super) fn schedule(model: &Model, request: &Request, tokens: usize, steps: usize) -> Result<Schedule> {
    check_steps(steps)?;
    let spacing = spacing(request);
    let custom = Some(&request.sigmas[..]).filter(|sigmas| !sigmas.is_empty());
    Ok(Schedule::new(&model.scheduler, spacing, tokens, steps, custom)?)
}

/// Returns how a request spaces its noise levels.
pub(super) fn spacing(request: &Request) -> SigmaSpacing {
    match request.schedule.unwrap_or_default() {
        ScheduleKind::Shifted => SigmaSpacing::Shifted,
        ScheduleKind::Power => SigmaSpacing::Power { rho: request.rho.unwrap_or(RHO) },
    }
}

/// Returns the guidance, and adds notes for values without effect.
pub(super) fn guidance(model: &Model, request: &Request, notes: &mut Vec<String>) -> Result<Option<f32>> {
    let variant = model.variant;
    if let Some(g) = request.guidance.filter(|g| !(g.is_finite() && *g >= 0.0)) {
        return Err(Error::value(format!("guidance must be a number of at least 0, found {g}")));
    }
    let guidance = model.default_guidance().map(|default| request.guidance.unwrap_or(default));
    if guidance.is_none() && request.guidance.is_some_and(|g| g != 1.0) {
        notes.push(format!("guidance has no effect: {variant} has none"));
    }
    if !request.negative_prompts.is_empty() && variant.calls_per_step(guidance) == 1 {
        let guided = variant.takes_negative_prompt();
        let why = if guided { "it needs a guidance above 1" } else { "this model has no guidance" };
        notes.push(format!("the negative prompt has no effect: {why}"));
    }
    Ok(guidance)
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
pub(super) fn cache(model: &Model, request: &Request, notes: &mut Vec<String>) -> Result<Option<f32>> {
    let Some(threshold) = request.cache else { return Ok(None) };
    if !(0.0..=1.0).contains(&threshold) {
        return Err(Error::value(format!(
            "the threshold of the step cache must be a number from 0 to 1, found {threshold}"
        ))
        .with_hint(format!(
            "0 switches it off, {DEFAULT_CACHE_THRESHOLD} is a good start, more is faster and less exact"
        )));
    }
    if threshold == 0.0 {
        return Ok(None);
    }
    let variant = model.variant;
    if variant.is_distilled {
        notes.push(format!("the step cache has no effect: {variant} takes too few steps for it"));
        return Ok(None);
    }
    Ok(Some(threshold))
}
