//! Reads the files of a request: prompt embeddings, noise, images, LoRAs and VAEs.
//!
//! Each function also replaces the names in `resolved` by absolute paths and hashes.

use std::sync::Arc;

use kiln_image::{GrayImage, RgbImage};
use kiln_tensor::HostTensor;
use kiln_weights::{DoraRule, Lora};

use super::contents::{InitImage, PlannedLora, Prompt, StartingPoint};
use super::defaults::round_side;
use super::upscale;
use crate::error::{Error, ErrorContext, ErrorKind, Field, Result};
use crate::hint;
use crate::inputs::{self, InputResolver, read_image};
use crate::model::{Model, VaeFile};
use crate::noise::NoiseSource;
use crate::request::{BatchPosition, FileRef, Request};

/// Default strength of image-to-image: keeps the composition and changes the rest.
const STRENGTH: f64 = 0.6;
/// Default strength with a mask, as in diffusers' inpainting.
const MASK_STRENGTH: f64 = 0.8;

pub(super) fn read_prompt(
    request: &Request,
    resolved: &mut Request,
    inputs: &dyn InputResolver,
) -> Result<Prompt> {
    let Some(file) = &request.embeds else {
        resolved.prompts = upscale::prompts(request);
        let (prompts, negatives) = (resolved.prompts.clone(), request.negative_prompts.clone());
        return Ok(Prompt::Text { prompts, negatives });
    };
    let tensors = inputs.tensors(&file.path).with_context(|| "reading the prompt embeddings".into())?;
    let all = split_batch(tensors.find(&["prompt_embeds"])?)?;
    let negatives = tensors.get("negative_prompt_embeds").map(split_batch).transpose()?.unwrap_or_default();
    let (path, count) = (file.path.display(), all.len());
    if negatives.len() > 1 && negatives.len() != count {
        let found = negatives.len();
        let what = format!("`{path}` has {found} negative prompt embeddings for {count} prompts");
        return Err(Error::request(what).with_hint("give one for all, or one for each prompt"));
    }
    resolved.embeds = Some(tensors.file);
    let row = request.batch_position.and_then(|position| position.embeds_row);
    let (prompts, negatives) = match row {
        None => (all, negatives),
        Some(row) if row < count => {
            let negative = negatives.get(row).or(negatives.first());
            (vec![all[row].clone()], negative.cloned().into_iter().collect())
        }
        Some(row) => {
            let what = format!("`{path}` has {count} prompts, the recipe needs number {}", row + 1);
            return Err(Error::request(what));
        }
    };
    Ok(Prompt::Embeddings { prompts, negatives, first_row: row.unwrap_or(0) })
}

/// Splits `[batch, tokens, dim]` into its entries; `[tokens, dim]` is one.
fn split_batch(x: &HostTensor) -> Result<Vec<HostTensor>> {
    let invalid = |e: kiln_tensor::Error| Error::request(format!("invalid prompt embeddings: {e}"));
    match *x.shape().dims() {
        [batch, tokens, dim] => (0..batch)
            .map(|i| x.rows(i..i + 1)?.reshape([tokens, dim]))
            .collect::<Result<_, _>>()
            .map_err(invalid),
        _ => Ok(vec![x.clone()]),
    }
}

pub(super) fn open_loras(resolved: &mut Request, inputs: &dyn InputResolver) -> Result<Vec<PlannedLora>> {
    let mut planned = Vec::with_capacity(resolved.loras.len());
    let dora_rule = resolved.dora_rule.map(DoraRule::from);
    for lora in &mut resolved.loras {
        let path = inputs.lora(&lora.path)?;
        let open = || {
            let lora = Lora::open(&path)?;
            Ok::<_, kiln_weights::Error>((lora.fingerprint()?, lora))
        };
        let (fingerprint, opened) = open()
            .map_err(|error| Error::from(error).of_file(ErrorKind::Lora))
            .with_context(|| "reading a LoRA".into())?;
        lora.path = inputs::absolute(&path).into();
        lora.sha256 = Some(fingerprint.clone());
        let files = opened.source().file_identity();
        let (weight, lora) = (lora.weight, Arc::new(opened));
        planned.push(PlannedLora { path, weight, dora_rule, fingerprint, files, lora });
    }
    Ok(planned)
}

pub(super) fn open_vae(
    model: &Model,
    resolved: &mut Request,
    inputs: &dyn InputResolver,
    notes: &mut Vec<String>,
) -> Result<Option<Arc<VaeFile>>> {
    let Some(requested) = &resolved.vae else { return Ok(None) };
    let path = inputs.vae(&requested.path)?;
    let file = model
        .vae_file(&path)
        .map_err(|error| error.of_file(ErrorKind::Input))
        .with_context(|| "opening the autoencoder".into())?;
    check_latent_space(model, &file, notes)?;
    let (path, sha256) = (inputs::absolute(&path).into(), Some(file.fingerprint.clone()));
    resolved.vae = Some(FileRef { path, sha256 });
    Ok(Some(file))
}

/// Refuses an autoencoder of other latents than the model's own, or notes it. Small models have latents of their own;
/// for others there may be autoencoders that fit although their statistics differ.
fn check_latent_space(model: &Model, file: &VaeFile, notes: &mut Vec<String>) -> Result<()> {
    if model.shares_latents(file) != Some(false) {
        return Ok(());
    }
    let (path, name) = (file.path.display(), model.recorded_name());
    let what = format!("the autoencoder `{path}` is of another model: `{name}` has latents of its own");
    if model.trained_sides().is_some() {
        return Err(Error::request(what).with_hint(hint![
            "leave out ",
            Field::Vae,
            ": the model has its own autoencoder"
        ]));
    }
    notes.push(format!("{what}; the image will probably be wrong"));
    Ok(())
}

/// Resizes and crops a reference image. For a small model it is no larger than the images it was trained on.
pub(super) fn prepare_reference(model: &Model, file: &FileRef, image: &RgbImage) -> Result<RgbImage> {
    let unit = model.pixels_per_token() as u32;
    let prepared = if model.trained_sides().is_some() {
        let area = (model.default_size as u64).pow(2);
        kiln_image::prepare_reference_within(image, area, unit)
    } else {
        kiln_image::prepare_reference(image, unit)
    };
    prepared.with_context(|| format!("preparing the reference image `{}`", file.path.display()))
}

/// Reads the initial image and the mask. Returns width, height, the starting point, and the strength if there is one.
pub(super) fn read_starting_point(
    model: &Model,
    request: &Request,
    resolved: &mut Request,
    inputs: &dyn InputResolver,
    references: &[RgbImage],
    notes: &mut Vec<String>,
) -> Result<(usize, usize, StartingPoint, Option<f64>)> {
    const INIT: &str = "initial image";
    let unit = model.pixels_per_token() as u32;
    if let Some((width, height, start, strength)) = upscale::read(model, request, resolved, inputs, notes)? {
        return Ok((width, height, start, Some(strength)));
    }
    let Some(init) = &mut resolved.init else {
        let first = references.first().map(|r| (r.width(), r.height()));
        let default = model.default_size as u32;
        let (width, height) = first.unwrap_or((default, default));
        let width = round_side(model, "width", request.width.unwrap_or(width), notes)?;
        let height = round_side(model, "height", request.height.unwrap_or(height), notes)?;
        return Ok((width as usize, height as usize, StartingPoint::Noise, None));
    };
    let source = read_image(inputs, init, INIT)?;
    let Some(mask) = &mut resolved.mask else {
        let mut round = |name, size: Option<u32>| size.map(|s| round_side(model, name, s, notes)).transpose();
        let (width, height) = (round("width", request.width)?, round("height", request.height)?);
        let (final_width, final_height) = kiln_image::init_size(&source, width, height, unit)
            .with_context(|| format!("preparing the {INIT}"))?;
        let start = StartingPoint::Image(Box::new(InitImage::new(source, width, height, unit)));
        let strength = Some(request.strength.unwrap_or(STRENGTH));
        return Ok((final_width as usize, final_height as usize, start, strength));
    };
    let mask = GrayImage::from(&*read_image(inputs, mask, "mask")?);
    notes.extend(mask_notes(&source, &mask));
    let sized = request.width.is_some() || request.height.is_some();
    let inpaint = if sized && request.mask_padding.is_none() {
        let mut round = |name, size: Option<u32>| size.map(|s| round_side(model, name, s, notes)).transpose();
        let (width, height) = (round("width", request.width)?, round("height", request.height)?);
        kiln_image::prepare_inpaint_sized(&source, &mask, width, height, unit)
            .with_context(|| format!("preparing the {INIT}"))?
    } else {
        if sized && !is_own_size(request, &source, unit) {
            notes.push("width and height have no effect with mask_padding: the image keeps its size".into());
        }
        kiln_image::prepare_inpaint(&source, &mask, request.mask_padding, unit)?
    };
    let (width, height) = (inpaint.width as usize, inpaint.height as usize);
    let strength = Some(request.strength.unwrap_or(MASK_STRENGTH));
    Ok((width, height, StartingPoint::Inpaint(Box::new(inpaint)), strength))
}

/// Whether the size of a request is that of the initial image, as in a recipe.
fn is_own_size(request: &Request, source: &RgbImage, unit: u32) -> bool {
    let own = kiln_image::init_size(source, None, None, unit).ok();
    own.is_some_and(|(width, height)| (request.width, request.height) == (Some(width), Some(height)))
}

/// Notes about a mask that is probably not what the user meant.
fn mask_notes(source: &RgbImage, mask: &GrayImage) -> Vec<String> {
    let mut notes = Vec::new();
    let [of_mask, of_source] =
        [(mask.width(), mask.height()), (source.width(), source.height())].map(|(w, h)| format!("{w}x{h}"));
    if of_mask != of_source {
        notes.push(format!(
            "the mask is {of_mask}, the initial image {of_source}: the mask is stretched over it"
        ));
    }
    // The threshold of inpainting.
    let is_white = |value: &u8| *value >= 128;
    if !mask.pixels().iter().any(is_white) {
        notes.push(
            "the mask is black everywhere, so nothing changes: the area to change must be white".into(),
        );
    } else if mask.pixels().iter().all(is_white) {
        notes.push("the mask is white everywhere, so all of the image may change".into());
    }
    notes
}

/// Chooses the source of the noise, and reads it if it is a file.
pub(super) fn read_noise(
    model: &Model,
    request: &Request,
    resolved: &mut Request,
    inputs: &dyn InputResolver,
    images: usize,
    [height, width]: [usize; 2],
) -> Result<NoiseSource> {
    let rng = request.rng.unwrap_or_default();
    let Some(file) = &request.noise else {
        return Ok(match (&request.seed[..], request.batch_position) {
            (&[seed], Some(BatchPosition { index, batch, .. })) if batch > 1 => {
                NoiseSource::OneOfBatch { seed, rng, index, batch }
            }
            (&[seed], _) if request.one_generator => NoiseSource::Seed { seed, rng },
            _ => NoiseSource::Seeds { seeds: request.seeds(images), rng },
        });
    };
    let tensors = inputs.tensors(&file.path).with_context(|| "reading the noise".into())?;
    let all = tensors.find(&["noise", "latents"])?.clone();
    resolved.noise = Some(tensors.file);
    let path = file.path.display();
    let noise = match request.batch_position {
        Some(BatchPosition { index, batch, .. }) if batch > 1 => all
            .rows(index..index + 1)
            .map_err(|e| Error::request(format!("`{path}` is not the noise of {batch} images: {e}")))?,
        _ => all,
    };
    let (channels, tokens) = (model.transformer.config.in_channels, height * width);
    let has_shape = |dims: &[usize], image: &[usize]| {
        dims.strip_suffix(image).is_some_and(|rest| rest.iter().product::<usize>() == images)
    };
    let dims = noise.shape().dims();
    if !has_shape(dims, &[channels, height, width]) && !has_shape(dims, &[tokens, channels]) {
        let shape = noise.shape();
        return Err(Error::request(format!(
            "`{path}` has noise of shape {shape}, expected [{images}, {channels}, {height}, {width}] or \
             [{images}, {tokens}, {channels}]"
        ))
        .with_hint("the noise is a sixteenth of the image in width and height: choose a size that fits"));
    }
    inputs::check_finite(&file.path, "noise", &noise)?;
    Ok(NoiseSource::Given(noise))
}
