//! Generates the images of one or several requests in batches: every step is one transformer call for all images of a
//! batch.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use kiln_base::lock;
use kiln_image::RgbImage;
use kiln_nn::tokenizer::Tokens;
use kiln_nn::{Autoencoder, Event, Observer};
use kiln_ops::{Backend, Tensor as _};
use kiln_tensor::{DType, HostTensor};

use super::batch::{Batch, BatchMember};
use super::denoise::{Conditioning, Denoiser, InitialLatents, ReferenceMode, ReferenceTokens};
use super::options::BatchLimit;
use super::output::{DeferredWork, IMAGE, PendingOutput, check_finite};
use super::{Pipeline, join};
use crate::error::{Error, Result};
use crate::memory::MemoryEstimate;
use crate::noise;
use crate::plan::{Plan, Prompt, PromptSet, StartingPoint};

/// Images with fewer text or image rows are not batched: a backend may use another kernel for a handful of rows, which
/// rounds differently.
const MIN_BATCH_ROWS: usize = 16;

/// A plan with everything that its steps need.
pub(super) struct PreparedPlan<'a, B: Backend> {
    pub(super) plan: &'a Plan,
    pub(super) autoencoder: Arc<Autoencoder<B>>,
    pub(super) noise: Vec<HostTensor>,
    texts: PromptSet<B::Tensor>,
    pub(super) references: Option<ReferenceTokens<B>>,
    mode: ReferenceMode,
    initial: InitialLatents<B>,
    /// Taken by the first image.
    pub(super) deferred: Mutex<Vec<DeferredWork>>,
}

impl<B: Backend> PreparedPlan<'_, B> {
    pub(super) fn text(&self, image: usize) -> &B::Tensor {
        &self.texts.prompts[image / self.plan.images_per_prompt]
    }

    /// Returns the rows of an image in the transformer: text, image and reference tokens.
    fn rows(&self, image: usize) -> usize {
        let references = self.references.as_ref().map_or(0, |r| r.tokens.shape().rows());
        let [height, width] = self.plan.grid();
        self.text(image).shape().rows() + height * width + references
    }

    /// Whether these images can share a batch: they have the same noise levels, guidance and cache threshold, are not tiny, and are not
    /// upscaled.
    fn can_share_batch(&self, other: &Self) -> bool {
        if self.plan.upscale().is_some() {
            return false;
        }
        let [height, width] = self.plan.grid();
        let texts = self.texts.prompts.iter().chain(&self.texts.negatives);
        let fewest_rows = texts.map(|text| text.shape().rows()).fold(height * width, usize::min);
        if fewest_rows < MIN_BATCH_ROWS {
            return false;
        }
        let sigmas = |plan: &Plan| plan.schedule.sigmas()[plan.first_step..].to_vec();
        let sampling = |plan: &Plan| (plan.guidance, plan.cache);
        sigmas(self.plan) == sigmas(other.plan) && sampling(self.plan) == sampling(other.plan)
    }

    pub(super) fn conditioning(&self, member: usize, image: usize) -> Conditioning<'_, B> {
        Conditioning {
            member,
            image,
            grid: self.plan.grid(),
            noise: &self.noise[image],
            text: self.text(image),
            negative: self.texts.negative(image / self.plan.images_per_prompt),
            references: self.references.as_ref(),
            mode: self.mode,
            initial: &self.initial,
        }
    }
}

impl<B: Backend> Pipeline<B> {
    /// Returns how many images of this many rows each (text, image and reference tokens) run in one batch: as many as
    /// pay off on the backend and fit into memory.
    pub fn batch_capacity(&self, rows: usize, limit: &BatchLimit) -> usize {
        let rows = rows.max(1);
        let bytes = MemoryEstimate::step(&self.model.transformer.config, rows, self.options.dtype).max(1);
        let by_memory = limit.memory.map_or(usize::MAX, |memory| (memory / bytes) as usize);
        let max_rows = limit.rows.unwrap_or_else(|| self.backend.max_batch_rows());
        limit.images.min(max_rows / rows).min(by_memory).max(1)
    }

    /// Generates all images of several plans, batched as far as their noise levels and guidance are equal and `limit`
    /// allows. Each image equals the one that its plan gives alone, on a GPU up to rounding: there the kernel depends on
    /// the batch.
    ///
    /// A member gets its images as soon as their work is queued on the device. `ended` gets a plan's result right after
    /// its last image. An error of one plan or its observer leaves the others alone; if a step of several images fails,
    /// they are generated one by one.
    pub fn run(
        &self,
        members: &mut [BatchMember<'_, B>],
        limit: &BatchLimit,
        ended: &mut dyn FnMut(usize, Result<()>),
    ) {
        let plans: Vec<_> = members.iter().map(|member| member.plan).collect();
        let mut batch = Batch::new(members, ended);
        let mut prepared = Vec::with_capacity(plans.len());
        for (member, plan) in plans.into_iter().enumerate() {
            let mut result = None;
            batch.with_member(member, |m| {
                result = Some(self.prepare_plan(plan, m.observer)?);
                Ok(())
            });
            prepared.push(result);
        }
        let images = |(member, prepared): (usize, &Option<PreparedPlan<'_, B>>)| {
            let count = prepared.as_ref().map_or(0, |prepared| prepared.plan.images);
            (0..count).map(move |image| (member, image))
        };
        let mut waiting: VecDeque<(usize, usize)> = prepared.iter().enumerate().flat_map(images).collect();
        loop {
            waiting.retain(|(member, _)| batch.is_active(*member));
            let next = self.next_batch(&prepared, &mut waiting, limit);
            if next.is_empty() {
                return;
            }
            if let [(member, image)] = next[..]
                && let Some(own) = &prepared[member]
                && let Some(inputs) = own.plan.upscale()
            {
                let result = self.upscale(own, inputs, [member, image], &mut batch);
                if result.is_err() || image + 1 == own.plan.images {
                    batch.end(member, result);
                }
                continue;
            }
            let conditioning = |&(member, image): &(usize, usize)| {
                Some(prepared[member].as_ref()?.conditioning(member, image))
            };
            let images: Vec<Conditioning<'_, B>> = next.iter().filter_map(conditioning).collect();
            if let Err(error) = self.denoise_and_decode(&prepared, &images, &mut batch) {
                match &images[..] {
                    [one] => batch.end(one.member, Err(error)),
                    // Running them alone shows which one failed.
                    several => several.chunks(1).for_each(|one| {
                        let member = one[0].member;
                        if batch.is_active(member)
                            && let Err(error) = self.denoise_and_decode(&prepared, one, &mut batch)
                        {
                            batch.end(member, Err(error));
                        }
                    }),
                }
            }
        }
    }

    /// Takes the next batch from the waiting images: the first one, and those that can share its batch.
    fn next_batch(
        &self,
        prepared: &[Option<PreparedPlan<'_, B>>],
        waiting: &mut VecDeque<(usize, usize)>,
        limit: &BatchLimit,
    ) -> Vec<(usize, usize)> {
        let (mut batch, mut rest, mut rows, mut full) = (Vec::new(), VecDeque::new(), 0, false);
        let mut leader = None;
        for (member, image) in waiting.drain(..) {
            let Some(own) = &prepared[member] else { continue };
            let fits = leader.is_none_or(|leader: &PreparedPlan<'_, B>| {
                leader.can_share_batch(own) && own.can_share_batch(leader)
            });
            let new_rows = rows + own.rows(image);
            // Images may differ in size, so the capacity is computed for their mean.
            full |= fits && !batch.is_empty() && {
                let mean = new_rows.div_ceil(batch.len() + 1);
                self.batch_capacity(mean, limit) <= batch.len()
            };
            if fits && !full {
                batch.push((member, image));
                (rows, leader) = (new_rows, Some(leader.unwrap_or(own)));
            } else {
                rest.push_back((member, image));
            }
        }
        *waiting = rest;
        batch
    }

    /// Does everything before the first step.
    fn prepare_plan<'a>(
        &self,
        plan: &'a Plan,
        observer: &mut dyn Observer<B>,
    ) -> Result<PreparedPlan<'a, B>> {
        for note in plan.notes.iter().chain(&plan.truncation_notes()?) {
            observer.event(Event::Note(note.clone()))?;
        }
        let autoencoder = self.autoencoder(plan.vae.as_ref())?;
        let channels = self.model.transformer.config.in_channels;
        // Drawing noise is sequential: it runs on its own thread while the text is encoded.
        let (grid, dtype) = (plan.noise_grid(), self.options.dtype);
        let mut deferred = Vec::new();
        let (noise, texts) = std::thread::scope(|scope| {
            let noise = scope.spawn(|| noise::draw(&plan.noise, plan.images, channels, grid, dtype));
            let texts = self.encode_text(plan, &mut deferred, observer);
            Ok::<_, Error>((join(noise)?, texts?))
        })?;
        let (references, initial) = self.encode_images(plan, &autoencoder, &mut deferred, observer)?;
        // Inpainting, which passes its source as a reference, has no cached form.
        let from_noise = matches!(plan.start, StartingPoint::Noise);
        let cached = self.model.variant.caches_references && references.is_some() && from_noise;
        let mode = if cached { ReferenceMode::Cached } else { ReferenceMode::Joint };
        let deferred = Mutex::new(deferred);
        Ok(PreparedPlan { plan, autoencoder, noise, texts, references, mode, initial, deferred })
    }

    pub(super) fn encode_text(
        &self,
        plan: &Plan,
        deferred: &mut Vec<DeferredWork>,
        observer: &mut dyn Observer<B>,
    ) -> Result<PromptSet<B::Tensor>> {
        let tokens = plan.tokens()?;
        let total = tokens.prompts.len() + tokens.negatives.len();
        let mut encode = |(i, tokens): (usize, &Tokens)| {
            let states = &plan.text_layers;
            let (encoded, work) =
                self.text_encoder.encode(&self.backend, tokens, states, (i, total), observer)?;
            deferred.extend(work);
            observer.inspect("prompt_embeds", &encoded)?;
            Ok::<_, Error>(encoded)
        };
        let all = tokens.prompts.iter().chain(&tokens.negatives).enumerate();
        let mut encoded = all.map(&mut encode).collect::<Result<Vec<_>>>()?;
        let mut negatives = encoded.split_off(tokens.prompts.len());
        let Prompt::Embeddings { prompts, negatives: given, .. } = &plan.prompt else {
            return Ok(PromptSet { prompts: encoded, negatives });
        };
        let upload = |text: &HostTensor| Ok(self.backend.upload(text, self.options.dtype)?);
        if plan.calls_per_step > 1 {
            negatives.extend(given.iter().map(upload).collect::<Result<Vec<_>>>()?);
        }
        Ok(PromptSet { prompts: prompts.iter().map(upload).collect::<Result<_>>()?, negatives })
    }

    /// Encodes the reference images (the source of an inpainting first) and the initial image.
    fn encode_images(
        &self,
        plan: &Plan,
        autoencoder: &Autoencoder<B>,
        deferred: &mut Vec<DeferredWork>,
        observer: &mut dyn Observer<B>,
    ) -> Result<(Option<ReferenceTokens<B>>, InitialLatents<B>)> {
        let b = &self.backend;
        let source = match &plan.start {
            StartingPoint::Noise => None,
            StartingPoint::Image(init) => Some(init.prepared()?),
            StartingPoint::Inpaint(inpaint) => Some(&inpaint.source),
            // Its tiles are encoded one by one.
            StartingPoint::Upscale(_) => None,
        };
        let overview = plan.upscale().and_then(|inputs| inputs.overview.as_ref());
        let images: Vec<&RgbImage> = source.into_iter().chain(&plan.references).chain(overview).collect();
        let mut tokens = Vec::new();
        let mut grids = Vec::new();
        for (index, image) in images.iter().enumerate() {
            observer.event(Event::EncodingReference { index, total: images.len() })?;
            let encoded = autoencoder.encode(b, image, observer)?;
            let latents = b.download_async(&encoded)?;
            deferred.push(Box::new(move || {
                check_finite(IMAGE, &latents()?)?;
                Ok(None)
            }));
            observer.inspect(&format!("ref{index}.normalised_latents"), &encoded)?;
            tokens.push(encoded);
            grids.push(self.model.grid([image.width(), image.height()].map(|side| side as usize)));
        }
        let initial = match &plan.start {
            StartingPoint::Noise | StartingPoint::Upscale(_) => InitialLatents::Noise,
            StartingPoint::Image(_) => {
                grids.remove(0);
                InitialLatents::Image(tokens.remove(0))
            }
            StartingPoint::Inpaint(inpaint) => {
                let mask = HostTensor::from_f32([inpaint.mask.len()], inpaint.mask.clone())?;
                InitialLatents::Masked { tokens: tokens[0].clone(), mask: b.upload(&mask, DType::F32)? }
            }
        };
        if tokens.is_empty() {
            return Ok((None, initial));
        }
        let tokens = b.concat_rows(&tokens.iter().collect::<Vec<_>>())?;
        Ok((Some(ReferenceTokens { tokens, grids }), initial))
    }

    /// Runs all steps of these images, then decodes them one by one. Returns an error only for the steps; an error of
    /// decoding ends that image's request.
    fn denoise_and_decode(
        &self,
        prepared: &[Option<PreparedPlan<'_, B>>],
        images: &[Conditioning<'_, B>],
        batch: &mut Batch<'_, '_, B>,
    ) -> Result<()> {
        let first = images.first().and_then(|image| prepared[image.member].as_ref());
        let Some(plan) = first.map(|prepared| prepared.plan) else { return Ok(()) };
        let (b, variant) = (&self.backend, self.model.variant);
        let denoiser = Denoiser { b, transformer: &self.transformer, variant, plan };
        for state in denoiser.run(images, batch)? {
            let (member, index) = (state.conditioning.member, state.conditioning.image);
            let Some(own) = &prepared[member] else { continue };
            batch.with_member(member, |m| {
                let latents = b.download_async(&state.latents)?;
                m.observer.event(Event::DecodingImage { image: index })?;
                let grid = own.plan.grid();
                let image = own.autoencoder.decode_async(b, &state.latents, grid, m.observer)?;
                let deferred = std::mem::take(&mut *lock(&own.deferred));
                let text = state.conditioning.text.clone();
                let steps = state.steps;
                (m.output)(PendingOutput { index, steps, image, latents, text, deferred })
            });
            // Images of one request are generated in order, so this was the last.
            if index + 1 == own.plan.images {
                batch.end(member, Ok(()));
            }
        }
        Ok(())
    }
}
