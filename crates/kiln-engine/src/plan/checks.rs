//! Checks of a request alone, before a model is opened or a file is read. Servers add their limits to them.

use std::fmt::Display;
use std::ops::RangeInclusive;

use kiln_base::plural;

use super::upscale;
use crate::error::{Error, Field, Result};
use crate::noise::MAX_IMAGES;
use crate::request::{DEFAULT_CACHE_THRESHOLD, MAX_TOKENS, Request, ScheduleKind};
use crate::{hint, text};

const MAX_STEPS: u32 = 10_000;

/// Refuses values out of their range, and fields that exclude or require each other. What depends on the model or on a file
/// is checked by [`Plan::new`](super::Plan::new).
pub fn check_request(request: &Request) -> Result<()> {
    let needs = |field: Field, other: Field, what: &'static str| {
        Err(Error::value(text![field, " needs ", other]).with_hint(hint!["give ", what, " as ", other]))
    };
    if let Some(field) = empty_file(request) {
        return Err(Error::value(text![field, " needs a file, found an empty name"])
            .with_hint(hint!["name a file"; "leave out ", field]));
    }
    if let Some(lora) = request.loras.iter().find(|lora| !lora.weight.is_finite()) {
        let what = format!(": the weight of `{}` must be a finite number", lora.path.display());
        return Err(Error::value(text![Field::Loras, what, format!(", found {}", lora.weight)]));
    }
    upscale::check(request)?;
    check_ranges(request)?;
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
    check_counts(request)
}

/// Refuses a value out of its range; NaN is in none.
pub fn check_range<T: PartialOrd + Display>(
    field: Field,
    value: Option<T>,
    range: RangeInclusive<T>,
) -> Result<()> {
    match value.filter(|value| !range.contains(value)) {
        None => Ok(()),
        Some(found) => {
            let (min, max) = (range.start(), range.end());
            Err(Error::value(text![field, format!(" must be between {min} and {max}, found {found}")]))
        }
    }
}

fn check_ranges(request: &Request) -> Result<()> {
    let refuse = |field: Field, range: &str, found: f32| {
        Err(Error::value(text![field, format!(" must be {range}, found {found}")]))
    };
    if request.n == Some(0) {
        return Err(Error::value(text![Field::N, " must be at least 1, found 0"]));
    }
    check_range(Field::Steps, request.steps, 1..=MAX_STEPS)?;
    check_range(Field::MaxTokens, request.max_tokens, 1..=MAX_TOKENS)?;
    check_range(Field::TileSize, request.tile_size, upscale::TILE_SIDES)?;
    check_range(Field::OutputCompression, request.output_compression, 0..=100)?;
    check_range(Field::Strength, request.strength, 0.0..=1.0)?;
    check_range(Field::Cache, request.cache, 0.0..=1.0).map_err(|error| {
        error.with_hint(format!(
            "0 switches the step cache off, {DEFAULT_CACHE_THRESHOLD} is a good start, more is faster and less exact"
        ))
    })?;
    if let Some(found) = request.guidance.filter(|g| !(g.is_finite() && *g >= 0.0)) {
        return refuse(Field::Guidance, "a number of at least 0", found);
    }
    if let Some(found) = request.rho.filter(|rho| !(rho.is_finite() && *rho > 0.0)) {
        return refuse(Field::Rho, "above 0", found);
    }
    check_sigmas(&request.sigmas)
}

/// Refuses noise levels that are no schedule.
fn check_sigmas(sigmas: &[f32]) -> Result<()> {
    let refuse = |what: String| Err(Error::value(text![Field::Sigmas, what]));
    if let Some(found) = sigmas.iter().find(|sigma| !(**sigma > 0.0 && **sigma <= 1.0)) {
        return refuse(format!(" must be above 0 and at most 1, found {found}"));
    }
    if sigmas.windows(2).any(|pair| pair[1] >= pair[0]) {
        return refuse(" must be strictly decreasing".into());
    }
    match sigmas.len() {
        count if count > MAX_STEPS as usize => {
            refuse(format!(" must have at most {MAX_STEPS} values, found {count}"))
        }
        _ => Ok(()),
    }
}

/// Refuses prompts, negative prompts and seeds whose numbers don't fit together.
fn check_counts(request: &Request) -> Result<()> {
    let (prompts, negatives) = (request.prompts.len(), request.negative_prompts.len());
    if prompts == 0 && request.upscale.is_none() {
        return Err(Error::value(text![Field::Prompt, " is missing"])
            .with_hint(hint!["describe the image: ", Field::Prompt.to("a red apple on a blue background")]));
    }
    if negatives > 1 && negatives != prompts.max(1) {
        return Err(Error::value(text![
            format!("found {negatives} values of "),
            Field::NegativePrompt,
            format!(" for {}", plural(prompts, "prompt"))
        ])
        .with_hint("give one for all, or one for each prompt"));
    }
    let prompts = prompts.max(1);
    image_count(prompts, images_per_prompt(request, prompts)?).map(drop)
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

/// Returns the number of images per prompt; refuses a list of seeds whose length differs from it.
pub(super) fn images_per_prompt(request: &Request, prompts: usize) -> Result<usize> {
    let seeds = request.seed.len();
    let requested = request.n.map(|n| n as usize);
    if seeds <= 1 || request.noise.is_some() {
        return Ok(requested.unwrap_or(1));
    }
    let per_prompt = requested.unwrap_or((seeds / prompts.max(1)).max(1));
    if per_prompt.checked_mul(prompts) != Some(seeds) {
        let images = format!(" for {}", plural(per_prompt.saturating_mul(prompts), "image"));
        return Err(Error::value(text![format!("found {seeds} values of "), Field::Seed, images])
            .with_hint("give one for all, or one for each image"));
    }
    Ok(per_prompt)
}

/// Returns the number of images of a request; refuses zero and too many.
pub(super) fn image_count(prompts: usize, per_prompt: usize) -> Result<usize> {
    match prompts.saturating_mul(per_prompt) {
        0 => Err(Error::value("there is nothing to generate: no prompt")),
        n if n > MAX_IMAGES => {
            Err(Error::value(format!("{n} images are too many for one request; at most {MAX_IMAGES}"))
                .with_hint("split it into several requests"))
        }
        n => Ok(n),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the field that the error names first.
    fn refused(request: Request) -> Option<Field> {
        let error = check_request(&request).unwrap_err();
        crate::Explain::message(&error).fields().next()
    }

    #[test]
    fn values_out_of_range_are_refused_by_their_field() {
        let fox = || Request::new("a fox");
        for sigmas in [&[1.0, 1.0][..], &[0.5, 0.7], &[1.5], &[-0.1], &[f32::NAN], &[0.0], &[0.5; 10_001]] {
            assert_eq!(refused(Request { sigmas: sigmas.to_vec(), ..fox() }), Some(Field::Sigmas));
        }
        for strength in [1.5, -0.1, f64::NAN] {
            let request = Request { init: Some("a".into()), strength: Some(strength), ..fox() };
            assert_eq!(refused(request), Some(Field::Strength));
        }
        for rho in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            let request = Request { rho: Some(rho), schedule: Some(ScheduleKind::Power), ..fox() };
            assert_eq!(refused(request), Some(Field::Rho));
        }
        for guidance in [-1.0, f32::NAN, f32::INFINITY] {
            assert_eq!(refused(Request { guidance: Some(guidance), ..fox() }), Some(Field::Guidance));
        }
        assert_eq!(refused(Request { steps: Some(0), ..fox() }), Some(Field::Steps));
        assert_eq!(refused(Request { n: Some(0), ..fox() }), Some(Field::N));
        assert_eq!(refused(Request { cache: Some(1.5), ..fox() }), Some(Field::Cache));
        assert_eq!(refused(Request { prompts: Vec::new(), ..fox() }), Some(Field::Prompt));
        assert_eq!(refused(Request { seed: vec![1, 2], n: Some(3), ..fox() }), Some(Field::Seed));
        check_request(&Request { sigmas: vec![1.0, 0.5], strength: None, ..fox() }).unwrap();
    }
}
