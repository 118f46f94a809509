//! Images and captions to what the transformer takes: latents (the mode of the autoencoder's distribution, patched and
//! batch-normed) and text states, each computed once and cached.
//!
//! Images and references go through the code that encodes references for editing, captions through the tokenizer, the
//! template and the layers that the model generates with: what is learned is what is generated with.

use std::collections::BTreeMap;

use kiln_base::{hex, is_or_are, plural, program_identity};
use kiln_engine::{ContentHashes, Field, Model, hint, read_image_bytes};
use kiln_image::RgbImage;
use kiln_nn::text_encoder::TextEncoder;
use kiln_nn::{Autoencoder, ResidencyPlan};
use kiln_ops::Backend;
use kiln_tensor::{DType, HostTensor};
use sha2::{Digest, Sha256};

use crate::cache::{Cache, Encoded, Key};
use crate::dataset::{Dataset, Draw, ImageSize, ImageUse, fit, flip};
use crate::{Error, Example, ReferenceLatents, Result};

/// GPU memory that is left for activations while texts are encoded.
const WORK_BYTES: u64 = 2 << 30;

/// What is being encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EncodingStage {
    /// Captions.
    Texts,
    /// Images and references.
    Images,
}

/// Called with the stage, the number of encoded items and their total; returns `false` to cancel.
pub type EncodingProgress<'a> = &'a mut dyn FnMut(EncodingStage, usize, usize) -> bool;

/// The encoders of a model: gives images and texts their cache keys, and encodes those that are missing.
pub struct Encoders<'m> {
    model: &'m Model,
    dtype: DType,
    text: String,
    image: String,
    states: Vec<usize>,
    max_tokens: usize,
}

impl<'m> Encoders<'m> {
    /// Creates the keys for a model on a backend whose arithmetic is `numerics`, with activations of `dtype`. The hashes of
    /// its weights are remembered in the cache.
    pub fn new(model: &'m Model, numerics: &str, dtype: DType, cache: &Cache) -> Result<Encoders<'m>> {
        let text = model.text_encoder.as_ref().ok_or_else(|| missing(model, "text encoder"))?;
        let vae = model.vae.as_ref().ok_or_else(|| missing(model, "VAE"))?;
        let hashes = ContentHashes::new(cache.folder());
        // Another build may decode, resize or round differently.
        let (version, program) = (env!("CARGO_PKG_VERSION"), program_identity());
        let identity = |key: &str| format!("{key} {numerics} {} {version} {program}", dtype.name());
        let (states, max_tokens) = (text.config.output_layers().to_vec(), model.default_tokens());
        Ok(Encoders {
            model,
            dtype,
            text: format!("{} {states:?}", identity(text.content_key(&hashes)?)),
            image: identity(vae.content_key(&hashes)?),
            states,
            max_tokens,
        })
    }

    /// The key of a caption: by its tokens, since the same words are other tokens with another tokenizer or template.
    pub fn text_key(&self, caption: &str) -> Result<Key> {
        let tokens = self.model.prompt_tokenizer()?.encode(caption, self.max_tokens)?;
        Ok(Key::new(&["text", &self.text, &format!("{:?} {:?}", tokens.real, tokens.ids)]))
    }

    /// The key of an image or reference, perhaps mirrored.
    pub fn image_key(&self, image: &ImageUse, flipped: bool) -> Key {
        let size = format!("{:?} {flipped}", image.size);
        Key::new(&["image", &self.image, &image.hash, &size])
    }

    /// Returns a note if captions are longer than the model reads.
    pub fn truncation_note(&self, data: &Dataset) -> Result<Option<String>> {
        let tokenizer = self.model.prompt_tokenizer()?;
        let mut cut = Vec::new();
        for text in data.texts() {
            if tokenizer.count(text)? > self.max_tokens {
                cut.push(text);
            }
        }
        let first = |text: &str| text.chars().take(60).collect::<String>();
        Ok(cut.first().map(|text| {
            let (count, are, max) = (plural(cut.len(), "caption"), is_or_are(cut.len()), self.max_tokens);
            format!("{count} {are} longer than {max} tokens and {are} cut, such as \"{}…\"", first(text))
        }))
    }

    /// Encodes what the cache lacks: first the texts, then the images, so that only one encoder is loaded at a time.
    pub fn encode_missing<B: Backend>(
        &self,
        b: &B,
        vram: Option<u64>,
        data: &Dataset,
        cache: &mut Cache,
        progress: EncodingProgress<'_>,
    ) -> Result<()> {
        self.encode_texts(b, vram, data, cache, progress)?;
        self.encode_images(b, data, cache, progress)
    }

    fn encode_texts<B: Backend>(
        &self,
        b: &B,
        vram: Option<u64>,
        data: &Dataset,
        cache: &mut Cache,
        progress: EncodingProgress<'_>,
    ) -> Result<()> {
        let with_key = |text| Ok((self.text_key(text)?, text));
        let texts: Vec<(Key, &str)> = data.texts().into_iter().map(with_key).collect::<Result<_>>()?;
        let texts: Vec<_> = texts.into_iter().filter(|(key, _)| cache.get(key).is_none()).collect();
        let Some(component) = self.model.text_encoder.as_ref().filter(|_| !texts.is_empty()) else {
            return Ok(());
        };
        let mut report = |done| {
            if progress(EncodingStage::Texts, done, texts.len()) { Ok(()) } else { Err(Error::CANCELLED) }
        };
        report(0)?;
        let weights = component.weights()?;
        let plan = match vram.map(|vram| vram.saturating_sub(WORK_BYTES)) {
            Some(vram) if vram < weights.bytes() => ResidencyPlan::new(vram, weights.bytes()),
            _ => ResidencyPlan::all_on_device(),
        };
        let config = component.config.clone().with_output_layers(&self.states);
        let encoder = TextEncoder::load(b, &weights.root(), &config, self.dtype, &plan)?;
        let tokenizer = self.model.prompt_tokenizer()?;
        for (done, (key, text)) in texts.iter().enumerate() {
            let tokens = tokenizer.encode(text, self.max_tokens)?;
            let states = encoder.forward(b, &tokens, &self.states, (done, texts.len()), &mut ())?;
            let values = finite(b.download(&states)?, &format!("the text encoder's output for \"{text}\""))?;
            let grid = [1, tokens.ids.len()];
            cache.put(key, Encoded { values, grid })?;
            report(done + 1)?;
        }
        Ok(())
    }

    fn encode_images<B: Backend>(
        &self,
        b: &B,
        data: &Dataset,
        cache: &mut Cache,
        progress: EncodingProgress<'_>,
    ) -> Result<()> {
        let mut images: BTreeMap<Key, (&ImageUse, bool)> = BTreeMap::new();
        for entry in &data.entries {
            for image in std::iter::once(&entry.image).chain(&entry.references) {
                for flipped in [false, true].into_iter().take(1 + usize::from(data.options.flip)) {
                    images.insert(self.image_key(image, flipped), (image, flipped));
                }
            }
        }
        images.retain(|key, _| cache.get(key).is_none());
        let Some(component) = self.model.vae.as_ref().filter(|_| !images.is_empty()) else { return Ok(()) };
        let total = images.len();
        let mut report = |done| {
            if progress(EncodingStage::Images, done, total) { Ok(()) } else { Err(Error::CANCELLED) }
        };
        report(0)?;
        let vae = Autoencoder::load(b, component.weights()?, Some(&component.config), self.dtype)?;
        for (done, (key, (image, flipped))) in images.into_iter().enumerate() {
            let pixels = prepare(image, flipped, self.model.pixels_per_token() as u32)?;
            let latents = b.download(&vae.encode(b, &pixels, &mut ())?)?;
            let values = finite(latents, &format!("the latent of `{}`", image.path.display()))?;
            let grid = self.model.grid([pixels.width(), pixels.height()].map(|side| side as usize));
            cache.put(&key, Encoded { values, grid })?;
            report(done + 1)?;
        }
        Ok(())
    }

    /// Returns an example of a step. Everything it needs must be cached.
    pub fn example(&self, data: &Dataset, draw: Draw, cache: &mut Cache) -> Result<Example> {
        let entry = &data.entries[draw.entry];
        let caption = if draw.drop_caption { "" } else { &entry.caption };
        let folder = cache.folder().to_owned();
        let lost = || {
            Error::data(format!("an entry of the cache `{}` is gone or damaged", folder.display())).with_hint(
                hint!["start again with ", Field::Resume.on(), ": what is missing is encoded again"],
            )
        };
        let mut get = |key: Key| cache.get(&key).ok_or_else(lost);
        let text = get(self.text_key(caption)?)?.values;
        let Encoded { values: latents, grid: [height, width] } =
            get(self.image_key(&entry.image, draw.flip))?;
        let references = if draw.drop_references { &[] } else { &entry.references[..] };
        let references = references.iter().map(|image| {
            let Encoded { values: latents, grid: [height, width] } = get(self.image_key(image, draw.flip))?;
            Ok(ReferenceLatents { latents, height, width })
        });
        let references = references.collect::<Result<_>>()?;
        Ok(Example { latents, height, width, references, text })
    }
}

/// Reads an image and brings it to its size.
fn prepare(image: &ImageUse, flipped: bool, unit: u32) -> Result<RgbImage> {
    let bytes = read_image_bytes(&image.path)?;
    if hex(Sha256::digest(&bytes)) != image.hash {
        let what = format!("`{}` was changed after the training had read it", image.path.display());
        return Err(Error::data(what).with_hint("start the training again"));
    }
    let pixels = kiln_image::from_bytes(&image.path.display().to_string(), &bytes)?;
    let pixels = match image.size {
        ImageSize::Bucket(bucket) => fit(&pixels, bucket),
        ImageSize::Reference(side) => {
            kiln_image::prepare_reference_within(&pixels, u64::from(side) * u64::from(side), unit)?
        }
    };
    Ok(if flipped { flip(&pixels) } else { pixels })
}

fn finite(values: HostTensor, what: &str) -> Result<HostTensor> {
    if values.is_finite() {
        return Ok(values);
    }
    Err(Error::data(format!("{what} is not finite")).with_hint(
        hint!["try ", Field::Dtype.to("f32"); "download the model again: its files may be damaged"],
    ))
}

fn missing(model: &Model, component: &str) -> Error {
    let path = model.path.display();
    Error::data(format!("the model `{path}` has no {component}, which training needs"))
        .with_hint(hint!["name it with ", Field::TextEncoder, " or ", Field::Vae; "use a whole model"])
}
