//! What a plan reads: prompts, noise, images, LoRAs and autoencoders.

use std::sync::Arc;

use kiln_image::{GrayPicture, Picture};
use kiln_tensor::HostTensor;
use kiln_weights::Lora;

use super::checks::side;
use super::contents::{InitImage, PlannedLora, Prompt, Start};
use crate::error::{Error, Result, While};
use crate::inputs::{self, InputImage, Inputs};
use crate::model::{Model, VaeFile};
use crate::noise::Noise;
use crate::request::{FileRef, Request};

/// Image to image keeps the composition and changes the rest.
const STRENGTH: f64 = 0.6;
/// What diffusers' inpainting takes.
const MASK_STRENGTH: f64 = 0.8;

pub(super) fn prompt(request: &Request, used: &mut Request, inputs: &dyn Inputs) -> Result<Prompt> {
    let Some(file) = &request.embeds else {
        let (prompts, negatives) = (request.prompts.clone(), request.negative_prompts.clone());
        return Ok(Prompt::Text { prompts, negatives });
    };
    let (source, from) = inputs::tensors(&inputs.tensors(&file.path)?, "prompt embeddings")?;
    used.embeds = Some(from);
    let all = entries(&inputs::named_tensor(&source, &["prompt_embeds"])?)?;
    let negative = match source.contains("negative_prompt_embeds") {
        true => entries(&source.tensor("negative_prompt_embeds")?)?.into_iter().next(),
        false => None,
    };
    let row = request.part.and_then(|part| part.row);
    let prompts = match row {
        None => all,
        Some(row) if row < all.len() => vec![all[row].clone()],
        Some(row) => {
            let (path, found) = (file.path.display(), all.len());
            let what = format!("`{path}` has {found} prompts, the recipe wants number {}", row + 1);
            return Err(Error::request(what));
        }
    };
    Ok(Prompt::Embeddings { prompts, negative, first_row: row.unwrap_or(0) })
}

/// `[batch, tokens, dim]` as its entries; `[tokens, dim]` is one.
fn entries(x: &HostTensor) -> Result<Vec<HostTensor>> {
    let bad = |e: kiln_tensor::Error| Error::request(format!("the prompt embeddings can't be used: {e}"));
    match *x.shape().dims() {
        [batch, tokens, dim] => (0..batch)
            .map(|i| x.rows(i..i + 1)?.reshape([tokens, dim]))
            .collect::<Result<_, _>>()
            .map_err(bad),
        _ => Ok(vec![x.clone()]),
    }
}

pub(super) fn loras(used: &mut Request, inputs: &dyn Inputs) -> Result<Vec<PlannedLora>> {
    let mut planned = Vec::with_capacity(used.loras.len());
    for lora in &mut used.loras {
        let path = inputs.lora(&lora.path)?;
        let open = || {
            let lora = Lora::open(&path)?;
            Ok::<_, kiln_weights::Error>((lora.fingerprint()?, lora))
        };
        let (fingerprint, opened) = open().while_doing(|| "reading a LoRA".into())?;
        lora.path = inputs::absolute(&path).into();
        lora.sha256 = Some(fingerprint.clone());
        planned.push(PlannedLora { path, weight: lora.weight, fingerprint, lora: Arc::new(opened) });
    }
    Ok(planned)
}

pub(super) fn vae(model: &Model, used: &mut Request, inputs: &dyn Inputs) -> Result<Option<Arc<VaeFile>>> {
    let Some(asked) = &used.vae else { return Ok(None) };
    let path = inputs.vae(&asked.path)?;
    let file = model.vae_file(&path).while_doing(|| "opening the autoencoder".into())?;
    let (path, sha256) = (inputs::absolute(&path).into(), Some(file.fingerprint.clone()));
    used.vae = Some(FileRef { path, sha256 });
    Ok(Some(file))
}

/// Reads an image, and notes what a recipe says of it.
pub(super) fn read_image(inputs: &dyn Inputs, file: &mut FileRef, role: &str) -> Result<Arc<Picture>> {
    let read = inputs.image(&file.path).while_doing(|| format!("reading the {role}"))?;
    let InputImage { picture, file: used } = read;
    *file = used;
    Ok(picture)
}

/// A reference as the pipeline takes it. A small model gets it no larger than the images it was trained on.
pub(super) fn prepare_reference(model: &Model, file: &FileRef, picture: &Picture) -> Result<Picture> {
    let prepared = match model.trained_sides() {
        None => kiln_image::prepare_reference(picture),
        Some(_) => {
            let area = (model.default_size as u64).pow(2);
            kiln_image::prepare_reference(&kiln_image::shrink_to(picture, area))
        }
    };
    prepared.while_doing(|| format!("preparing the reference image `{}`", file.path.display()))
}

/// Width, height, what to start from, and the strength where there is one.
pub(super) fn start(
    model: &Model,
    request: &Request,
    used: &mut Request,
    inputs: &dyn Inputs,
    references: &[Picture],
    notes: &mut Vec<String>,
) -> Result<(usize, usize, Start, Option<f64>)> {
    const INIT: &str = "image to start from";
    let Some(init) = &mut used.init else {
        let first = references.first().map(|r| (r.width(), r.height()));
        let own = model.default_size as u32;
        let (width, height) = first.unwrap_or((own, own));
        let width = side("width", request.width.unwrap_or(width), notes)?;
        let height = side("height", request.height.unwrap_or(height), notes)?;
        return Ok((width as usize, height as usize, Start::Noise, None));
    };
    let source = read_image(inputs, init, INIT)?;
    let Some(mask) = &mut used.mask else {
        let mut ask = |name, size: Option<u32>| size.map(|s| side(name, s, notes)).transpose();
        let (width, height) = (ask("width", request.width)?, ask("height", request.height)?);
        let size =
            kiln_image::init_size(&source, width, height).while_doing(|| format!("preparing the {INIT}"));
        let size = size.map(|(width, height)| (width as usize, height as usize))?;
        let start = InitImage::new(source, width, height);
        let strength = Some(request.strength.unwrap_or(STRENGTH));
        return Ok((size.0, size.1, Start::Image(Box::new(start)), strength));
    };
    if request.width.is_some() || request.height.is_some() {
        notes.push("width and height have no effect with a mask: the image keeps its size".into());
    }
    let mask = GrayPicture::from(&*read_image(inputs, mask, "mask")?);
    let inpaint = kiln_image::prepare_inpaint(&source, &mask, request.mask_padding)?;
    let (width, height) = (inpaint.width as usize, inpaint.height as usize);
    let strength = Some(request.strength.unwrap_or(MASK_STRENGTH));
    Ok((width, height, Start::Inpaint(Box::new(inpaint)), strength))
}

pub(super) fn noise(
    model: &Model,
    request: &Request,
    used: &mut Request,
    inputs: &dyn Inputs,
    images: usize,
    [height, width]: [usize; 2],
) -> Result<Noise> {
    let rng = request.rng.unwrap_or_default();
    let Some(file) = &request.noise else {
        return Ok(match (&request.seed[..], request.part) {
            ([], _) => Noise::Seed { seed: 0, rng },
            (&[seed], Some(part)) => Noise::Part { seed, rng, index: part.index, of: part.of },
            (&[seed], None) => Noise::Seed { seed, rng },
            (seeds, _) => Noise::Seeds { seeds: seeds.to_vec(), rng },
        });
    };
    let (source, from) = inputs::tensors(&inputs.tensors(&file.path)?, "noise")?;
    used.noise = Some(from);
    let all = inputs::named_tensor(&source, &["noise", "latents"])?;
    let path = file.path.display();
    let noise = match request.part {
        Some(part) if part.of > 1 => all
            .rows(part.index..part.index + 1)
            .map_err(|e| Error::request(format!("`{path}` is not the noise of {} images: {e}", part.of)))?,
        _ => all,
    };
    let (channels, tokens) = (model.transformer.config.in_channels, height * width);
    let batch = |dims: &[usize], one: &[usize]| {
        dims.strip_suffix(one).is_some_and(|rest| rest.iter().product::<usize>() == images)
    };
    let dims = noise.shape().dims();
    if !batch(dims, &[channels, height, width]) && !batch(dims, &[tokens, channels]) {
        let shape = noise.shape();
        return Err(Error::request(format!(
            "`{path}` has noise of shape {shape}, expected [{images}, {channels}, {height}, {width}] or \
             [{images}, {tokens}, {channels}]"
        ))
        .hint("width and height of the noise are a sixteenth of the image's: choose them to fit"));
    }
    inputs::finite(&file.path, "noise", &noise)?;
    Ok(Noise::Given(noise))
}
