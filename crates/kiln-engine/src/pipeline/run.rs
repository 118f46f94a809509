//! Several images at once, of one request or of several: every step is one call of the transformer for all of them.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use kiln_base::lock;
use kiln_image::Picture;
use kiln_model::tokenizer::Tokens;
use kiln_model::{Autoencoder, Event, Observer};
use kiln_ops::{Backend, Tensor as _};
use kiln_tensor::{DType, HostTensor};

use super::batch::{Batch, Member};
use super::denoise::{Conditioning, Denoiser, Origin, ReferenceMode, ReferenceTokens};
use super::options::BatchLimit;
use super::unfinished::{Afterwards, Unfinished, finite};
use super::{Pipeline, join};
use crate::error::{Error, Result};
use crate::memory::MemoryNeed;
use crate::model::Variant;
use crate::noise;
use crate::plan::{Plan, Prompt, Start, Texts};

/// Fewer rows than this go alone: a backend may multiply a handful of rows in another way, with other last bits.
const FEWEST_ROWS: usize = 16;

/// A plan with everything that its steps need.
struct Ready<'a, B: Backend> {
    plan: &'a Plan,
    autoencoder: Arc<Autoencoder<B>>,
    noise: Vec<HostTensor>,
    texts: Texts<B::Tensor>,
    references: Option<ReferenceTokens<B>>,
    mode: ReferenceMode,
    origin: Origin<B>,
    /// Left for when the device is done with the first image.
    afterwards: Mutex<Vec<Afterwards>>,
}

impl<B: Backend> Ready<'_, B> {
    fn text(&self, image: usize) -> &B::Tensor {
        &self.texts.prompts[image / self.plan.per_prompt]
    }

    /// Rows of one image in the transformer.
    fn rows(&self, image: usize) -> usize {
        let references = self.references.as_ref().map_or(0, |r| r.tokens.shape().rows());
        let [height, width] = self.plan.grid();
        self.text(image).shape().rows() + height * width + references
    }

    /// Whether these images walk through the same noise levels with the same guidance, and are no mere specks.
    fn fits(&self, other: &Self) -> bool {
        let [height, width] = self.plan.grid();
        let texts = self.texts.prompts.iter().chain(&self.texts.negatives);
        let fewest = texts.map(|text| text.shape().rows()).fold(height * width, usize::min);
        if fewest < FEWEST_ROWS {
            return false;
        }
        let levels = |plan: &Plan| plan.schedule.sigmas()[plan.first_step..].to_vec();
        levels(self.plan) == levels(other.plan) && self.plan.guidance == other.plan.guidance
    }

    fn conditioning(&self, member: usize, image: usize) -> Conditioning<'_, B> {
        Conditioning {
            member,
            image,
            grid: self.plan.grid(),
            noise: &self.noise[image],
            text: self.text(image),
            negative: self.texts.negative(image / self.plan.per_prompt),
            references: self.references.as_ref(),
            mode: self.mode,
            origin: &self.origin,
        }
    }
}

impl<B: Backend> Pipeline<B> {
    /// How many images of so many rows each (text, image and reference tokens) are made at once: as many as the backend
    /// gains from and there is memory for.
    pub fn room(&self, rows: usize, limit: &BatchLimit) -> usize {
        let rows = rows.max(1);
        let need = MemoryNeed::steps(&self.model.transformer.config, rows, self.options.dtype).max(1);
        let memory = limit.memory.map_or(usize::MAX, |bytes| (bytes / need) as usize);
        let gainful = limit.rows.unwrap_or_else(|| self.backend.rows_at_once());
        limit.images.min(gainful / rows).min(memory).max(1)
    }

    /// Makes every image of several plans, together as far as they are alike and `limit` allows: same noise levels and
    /// guidance. Each image is the one that its plan gives alone; on a GPU, where a product's size decides how it is computed,
    /// but for the last bits.
    ///
    /// Images are handed over as soon as their work is on the device. `ended` hears how each plan ended, as soon as its last
    /// image was handed over. An error of one, or of its observer, leaves the others as they are; if a step of several goes
    /// wrong, its images are made one by one.
    pub fn run(
        &self,
        members: &mut [Member<'_, B>],
        limit: &BatchLimit,
        ended: &mut dyn FnMut(usize, Result<()>),
    ) {
        let plans: Vec<_> = members.iter().map(|member| member.plan).collect();
        let mut batch = Batch::new(members, ended);
        let mut ready = Vec::with_capacity(plans.len());
        for (member, plan) in plans.into_iter().enumerate() {
            let mut found = None;
            batch.with(member, |m| {
                found = Some(self.get_ready(plan, m.observer)?);
                Ok(())
            });
            ready.push(found);
        }
        let images = |(member, ready): (usize, &Option<Ready<'_, B>>)| {
            let count = ready.as_ref().map_or(0, |ready| ready.plan.images);
            (0..count).map(move |image| (member, image))
        };
        let mut waiting: VecDeque<(usize, usize)> = ready.iter().enumerate().flat_map(images).collect();
        loop {
            waiting.retain(|(member, _)| batch.is_active(*member));
            let places = self.next_batch(&ready, &mut waiting, limit);
            if places.is_empty() {
                return;
            }
            let conditioning =
                |&(member, image): &(usize, usize)| Some(ready[member].as_ref()?.conditioning(member, image));
            let images: Vec<Conditioning<'_, B>> = places.iter().filter_map(conditioning).collect();
            if let Err(error) = self.denoise_and_decode(&ready, &images, &mut batch) {
                // Whose fault it was shows when they are alone.
                match &images[..] {
                    [one] => batch.end(one.member, Err(error)),
                    several => several.chunks(1).for_each(|one| {
                        let member = one[0].member;
                        if batch.is_active(member)
                            && let Err(error) = self.denoise_and_decode(&ready, one, &mut batch)
                        {
                            batch.end(member, Err(error));
                        }
                    }),
                }
            }
        }
    }

    /// The images to make next: the first that waits, and those that go with it.
    fn next_batch(
        &self,
        ready: &[Option<Ready<'_, B>>],
        waiting: &mut VecDeque<(usize, usize)>,
        limit: &BatchLimit,
    ) -> Vec<(usize, usize)> {
        let (mut batch, mut rest, mut rows, mut full) = (Vec::new(), VecDeque::new(), 0, false);
        let mut leader = None;
        for (member, image) in waiting.drain(..) {
            let Some(own) = &ready[member] else { continue };
            let fits = leader.is_none_or(|leader: &Ready<'_, B>| leader.fits(own) && own.fits(leader));
            let more = rows + own.rows(image);
            // Rows are what is counted: images may differ in them.
            full |= fits && !batch.is_empty() && {
                let mean = more.div_ceil(batch.len() + 1);
                self.room(mean, limit) <= batch.len()
            };
            if fits && !full {
                batch.push((member, image));
                (rows, leader) = (more, Some(leader.unwrap_or(own)));
            } else {
                rest.push_back((member, image));
            }
        }
        *waiting = rest;
        batch
    }

    /// Everything before the first step.
    fn get_ready<'a>(&self, plan: &'a Plan, observer: &mut dyn Observer<B>) -> Result<Ready<'a, B>> {
        let variant = self.model.variant;
        for note in plan.notes.iter().chain(&plan.cut_prompts()?) {
            observer.event(Event::Note(note.clone()))?;
        }
        let autoencoder = self.autoencoder(plan.vae.as_ref())?;
        let channels = self.model.transformer.config.in_channels;
        // The generator's numbers come one after the other: meanwhile the text is encoded.
        let (grid, dtype) = (plan.grid(), self.options.dtype);
        let mut afterwards = Vec::new();
        let (noise, texts) = std::thread::scope(|scope| {
            let noise = scope.spawn(|| noise::draw(&plan.noise, plan.images, channels, grid, dtype));
            let texts = self.encode_text(plan, &mut afterwards, observer);
            Ok::<_, Error>((join(noise)?, texts?))
        })?;
        let (references, origin) = self.encode_images(plan, &autoencoder, &mut afterwards, observer)?;
        // Inpainting hands its source over as a reference, and is a pipeline of its own: it has no cached form.
        let cached = variant == Variant::Kv && references.is_some() && matches!(plan.start, Start::Noise);
        let mode = if cached { ReferenceMode::Cached } else { ReferenceMode::Joint };
        let afterwards = Mutex::new(afterwards);
        Ok(Ready { plan, autoencoder, noise, texts, references, mode, origin, afterwards })
    }

    fn encode_text(
        &self,
        plan: &Plan,
        afterwards: &mut Vec<Afterwards>,
        observer: &mut dyn Observer<B>,
    ) -> Result<Texts<B::Tensor>> {
        let tokens = plan.tokens()?;
        let total = tokens.prompts.len() + tokens.negatives.len();
        let mut encode = |(i, tokens): (usize, &Tokens)| {
            let (encoded, keep) = self.text_encoder.encode(&self.backend, tokens, (i, total), observer)?;
            afterwards.extend(keep);
            observer.see("prompt_embeds", &encoded)?;
            Ok::<_, Error>(encoded)
        };
        let all = tokens.prompts.iter().chain(&tokens.negatives).enumerate();
        let mut encoded = all.map(&mut encode).collect::<Result<Vec<_>>>()?;
        let mut negatives = encoded.split_off(tokens.prompts.len());
        let Prompt::Embeddings { prompts, negative, .. } = &plan.prompt else {
            return Ok(Texts { prompts: encoded, negatives });
        };
        let upload = |text: &HostTensor| Ok(self.backend.upload(text, self.options.dtype)?);
        if let Some(negative) = negative.as_ref().filter(|_| plan.calls_per_step > 1) {
            negatives = vec![upload(negative)?];
        }
        Ok(Texts { prompts: prompts.iter().map(upload).collect::<Result<_>>()?, negatives })
    }

    /// Tokens of the references (the source of an inpainting first), and what the image starts from.
    fn encode_images(
        &self,
        plan: &Plan,
        autoencoder: &Autoencoder<B>,
        afterwards: &mut Vec<Afterwards>,
        observer: &mut dyn Observer<B>,
    ) -> Result<(Option<ReferenceTokens<B>>, Origin<B>)> {
        let b = &self.backend;
        let source = match &plan.start {
            Start::Noise => None,
            Start::Image(init) => Some(init.prepared()?),
            Start::Inpaint(inpaint) => Some(&inpaint.source),
        };
        let images: Vec<&Picture> = source.into_iter().chain(&plan.references).collect();
        let mut tokens = Vec::new();
        let mut grids = Vec::new();
        for (index, image) in images.iter().enumerate() {
            observer.event(Event::Reference { index, total: images.len() })?;
            let encoded = autoencoder.encode(b, image, observer)?;
            let latents = b.download_later(&encoded)?;
            afterwards.push(Box::new(move || {
                finite("the autoencoder's latent", &latents()?)?;
                Ok(None)
            }));
            observer.see(&format!("ref{index}.normalised_latents"), &encoded)?;
            tokens.push(encoded);
            grids.push([image.height() as usize / 16, image.width() as usize / 16]);
        }
        let origin = match &plan.start {
            Start::Noise => Origin::Noise,
            Start::Image(_) => {
                grids.remove(0);
                Origin::Image(tokens.remove(0))
            }
            Start::Inpaint(inpaint) => {
                let mask = HostTensor::from_f32([inpaint.mask.len()], inpaint.mask.clone())?;
                Origin::Masked { tokens: tokens[0].clone(), mask: b.upload(&mask, DType::F32)? }
            }
        };
        if tokens.is_empty() {
            return Ok((None, origin));
        }
        let tokens = b.concat_rows(&tokens.iter().collect::<Vec<_>>())?;
        Ok((Some(ReferenceTokens { tokens, grids }), origin))
    }

    /// All steps of these images, then image by image what follows. An error is one of the steps.
    fn denoise_and_decode(
        &self,
        ready: &[Option<Ready<'_, B>>],
        images: &[Conditioning<'_, B>],
        batch: &mut Batch<'_, '_, B>,
    ) -> Result<()> {
        let Some(plan) = images.first().and_then(|image| Some(ready[image.member].as_ref()?.plan)) else {
            return Ok(());
        };
        let (b, variant) = (&self.backend, self.model.variant);
        let denoiser = Denoiser { b, transformer: &self.transformer, variant, plan };
        for state in denoiser.run(images, batch)? {
            let (member, index) = (state.conditioning.member, state.conditioning.image);
            let Some(own) = &ready[member] else { continue };
            batch.with(member, |m| {
                let latents = b.download_later(&state.latents)?;
                m.observer.event(Event::Decoding { picture: index })?;
                let picture = own.autoencoder.decode_later(b, &state.latents, own.plan.grid(), m.observer)?;
                let afterwards = &mut *lock(&own.afterwards);
                let (text, afterwards) = (state.conditioning.text.clone(), std::mem::take(afterwards));
                (m.done)(Unfinished { index, picture, latents, text, afterwards })
            });
            // Images of one request are made in their order.
            if index + 1 == own.plan.images {
                batch.end(member, Ok(()));
            }
        }
        Ok(())
    }
}
