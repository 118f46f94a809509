//! The step cache: between neighbouring steps, most blocks add nearly the same to the image tokens.
//!
//! ```text
//! image tokens ──first block──▶ x ──other blocks──▶ y       full step: keep what the first block added, and y - x
//!                               x ──▶ x + (y - x) of the last full steps       reused step
//! ```
//! Every step runs the first block. What it adds to an image's tokens is compared with what it added in the last full
//! step (relative L1); the caller decides from this number whether the other blocks run. If not, what they would add
//! is extrapolated from the last two full steps, linearly in the timestep; after one full step it is taken as it was.
//! Extrapolating halves the error: what the blocks add drifts, and a copy always lags behind.
//!
//! Each image of a batch has a cache and a decision of its own, so that its result does not depend on the others. With
//! classifier-free guidance, each of an image's two branches has a cache, and the caller decides for both together: a
//! guided velocity amplifies the difference between the branches, which must be of one age.
//!
//! [`Transformer::first_blocks`] queues the first block, the comparison, and the velocity as it is if the cache is
//! reused. Only then does [`FirstBlocks::changes`] wait for the numbers, so that a device still has work while the host
//! decides. [`FirstBlocks::finish`] runs the other blocks for the images that need them.

use kiln_ops::{Backend, Error, Pending, Tensor as _};
use kiln_tensor::HostTensor;

use super::attention::{BatchAttention, concat};
use super::batch::{BatchItem, GraphInputs, StackedBatch, TransformerBatch};
use super::{Stage, Transformer};
use crate::{Observer, Result};

/// What is kept between the steps of one image and one text; empty before the first full step.
pub struct StepCache<B: Backend> {
    last: Option<FullStep<B>>,
}

/// The last full step.
#[derive(Clone)]
struct FullStep<B: Backend> {
    timestep: f32,
    /// What the first block added to the image tokens, `[n, dim]`.
    first: B::Tensor,
    /// What the other blocks added, `[n, dim]`.
    others: B::Tensor,
    /// How much `others` changed since the full step before, and the difference of their timesteps.
    drift: Option<(B::Tensor, f32)>,
}

// `derive` would require the same of the backend.
impl<B: Backend> Default for StepCache<B> {
    fn default() -> Self {
        StepCache { last: None }
    }
}

impl<B: Backend> FullStep<B> {
    /// Extrapolates what the other blocks add at another timestep.
    fn others_at(&self, b: &B, timestep: f32) -> Result<B::Tensor> {
        match &self.drift {
            Some((drift, difference)) => {
                Ok(b.add_scaled(&self.others, drift, (timestep - self.timestep) / difference)?)
            }
            None => Ok(self.others.clone()),
        }
    }
}

/// A batch after the first block of a step.
pub struct FirstBlocks<'a, B: Backend> {
    transformer: &'a Transformer<B>,
    items: &'a [BatchItem<'a, B>],
    stacked: StackedBatch<'a, B>,
    timestep: f32,
    /// The embedded timestep after SiLU.
    silu: B::Tensor,
    /// All text streams and all image streams after the first block.
    text: B::Tensor,
    image: B::Tensor,
    images: Vec<ImageStep<B>>,
}

/// One image after the first block.
struct ImageStep<B: Backend> {
    /// What the first block added to the image tokens, `[n, dim]`.
    added: B::Tensor,
    /// The image tokens after it, `[n, dim]`.
    tokens: B::Tensor,
    /// The step that the cache holds, the change since then, and the velocity if the cache is reused.
    cached: Option<CachedStep<B>>,
}

struct CachedStep<B: Backend> {
    last: FullStep<B>,
    change: Option<Pending<HostTensor>>,
    velocity: B::Tensor,
}

impl<B: Backend> Transformer<B> {
    /// Runs the first block of a step, with the cache of each image. No references may be extracted or cached.
    pub fn first_blocks<'a>(
        &'a self,
        b: &B,
        batch: &TransformerBatch<'a, B>,
        caches: &[&StepCache<B>],
        observer: &mut dyn Observer<B>,
    ) -> Result<FirstBlocks<'a, B>> {
        let timestep = self.time_guidance_embed.project(b, batch.timestep, batch.guidance)?;
        let stacked = StackedBatch::new(b, batch.items, &self.attention_spec(), timestep)?;
        if !stacked.is_replayable() || self.transformer_blocks.is_empty() || caches.len() != batch.items.len()
        {
            return Err(unsuitable().into());
        }
        let all = self.stage(b, Stage::FirstBlock, &stacked, &stacked.inputs, observer)?;
        let silu = self.time_guidance_embed.forward(b, &stacked.inputs.timestep)?.silu;
        let (texts, images) = (stacked.inputs.text.shape().rows(), stacked.inputs.image.shape().rows());
        let text = b.slice_rows(&all, 0..texts)?;
        let image = b.slice_rows(&all, texts..texts + images)?;
        let added = b.slice_rows(&all, texts + images..texts + 2 * images)?;
        let mut steps = Vec::with_capacity(caches.len());
        for ((item, [_, stream]), cache) in batch.items.iter().zip(stacked.streams()).zip(caches) {
            // The image's own tokens come first in its stream, references behind them.
            let own = stream.start..stream.start + item.image.shape().rows();
            let (added, tokens) = (b.slice_rows(&added, own.clone())?, b.slice_rows(&image, own)?);
            let cached = cache.last.as_ref().map(|last| -> Result<CachedStep<B>> {
                let change = b.download_async(&b.relative_l1(&added, &last.first)?)?;
                let reused = b.add(&tokens, &last.others_at(b, batch.timestep)?)?;
                let velocity = self.output(b, &reused, &silu, &mut ())?;
                Ok(CachedStep { last: last.clone(), change: Some(change), velocity })
            });
            steps.push(ImageStep { added, tokens, cached: cached.transpose()? });
        }
        let (items, timestep) = (batch.items, batch.timestep);
        Ok(FirstBlocks { transformer: self, items, stacked, timestep, silu, text, image, images: steps })
    }

    /// Runs a stage of the forward pass, as a recorded graph where possible.
    fn stage(
        &self,
        b: &B,
        stage: Stage,
        batch: &StackedBatch<'_, B>,
        inputs: &GraphInputs<B>,
        observer: &mut dyn Observer<B>,
    ) -> Result<B::Tensor> {
        if observer.wants_tensors() {
            self.run(b, stage, batch, inputs, observer)
        } else {
            self.replay(b, stage, batch, inputs, observer)
        }
    }

    /// Embeds the streams and runs the first block. Returns rows of one tensor: the text streams, the image streams, and
    /// what the block added to the image streams.
    pub(super) fn first_block(
        &self,
        b: &B,
        batch: &StackedBatch<'_, B>,
        inputs: &GraphInputs<B>,
        attention: &mut BatchAttention<'_, B>,
        observer: &mut dyn Observer<B>,
    ) -> Result<B::Tensor> {
        let m = self.modulations(b, batch, inputs, None, observer)?;
        let streams = self.embed(b, inputs, observer)?;
        let embedded = streams[1].clone();
        let modulation = m.double.as_ref().ok_or_else(unsuitable)?;
        let [text, image] = self.double_block(b, 0, streams, modulation, inputs, attention, observer)?;
        let added = b.add_scaled(&image, &embedded, -1.0)?;
        Ok(b.concat_rows(&[&text, &image, &added])?)
    }

    /// Runs all blocks but the first on streams that have passed it. Returns the image tokens, `[Σ n, dim]`.
    pub(super) fn other_blocks(
        &self,
        b: &B,
        batch: &StackedBatch<'_, B>,
        inputs: &GraphInputs<B>,
        attention: &mut BatchAttention<'_, B>,
        observer: &mut dyn Observer<B>,
    ) -> Result<B::Tensor> {
        let m = self.modulations(b, batch, inputs, None, observer)?;
        let streams = [inputs.text.clone(), inputs.image.clone()];
        self.blocks(b, 1, streams, &m, batch, inputs, attention, observer)
    }
}

impl<B: Backend> FirstBlocks<'_, B> {
    /// Waits until it is known how much the first block's result changed since the last full step of each image:
    /// `Σ|now - then| / Σ|then|`, infinity without a full step.
    pub fn changes(&mut self) -> Result<Vec<f32>> {
        let change = |image: &mut ImageStep<B>| match image.cached.as_mut().and_then(|c| c.change.take()) {
            Some(pending) => Ok(pending()?.to_f32()?.first().copied().unwrap_or(f32::INFINITY)),
            None => Ok(f32::INFINITY),
        };
        self.images.iter_mut().map(change).collect()
    }

    /// Runs the other blocks for the images with `full`, which also get a new cache, and reuses the cache of the others.
    /// An image without a cache is always computed. Returns the velocities, f32 `[n, 128]`.
    pub fn finish(
        self,
        b: &B,
        full: &[bool],
        caches: &mut [&mut StepCache<B>],
        observer: &mut dyn Observer<B>,
    ) -> Result<Vec<B::Tensor>> {
        let is_full = |i: usize| self.images[i].cached.is_none() || full.get(i) != Some(&false);
        let chosen: Vec<usize> = (0..self.images.len()).filter(|&i| is_full(i)).collect();
        let mut results = self.other_blocks(b, &chosen, observer)?.into_iter();
        let mut velocities = Vec::with_capacity(self.images.len());
        for (i, (image, cache)) in self.images.iter().zip(caches).enumerate() {
            let velocity = match (&image.cached, is_full(i)) {
                (Some(cached), false) => cached.velocity.clone(),
                (cached, _) => {
                    let Some(tokens) = results.next() else { continue };
                    let velocity = self.transformer.output(b, &tokens, &self.silu, observer)?;
                    let others = b.add_scaled(&tokens, &image.tokens, -1.0)?;
                    let last = cached.as_ref().map(|cached| &cached.last);
                    let last = last.filter(|last| last.timestep != self.timestep);
                    let drift = last.map(|last| -> Result<(B::Tensor, f32)> {
                        Ok((b.add_scaled(&others, &last.others, -1.0)?, self.timestep - last.timestep))
                    });
                    let (timestep, first, drift) = (self.timestep, image.added.clone(), drift.transpose()?);
                    cache.last = Some(FullStep { timestep, first, others, drift });
                    velocity
                }
            };
            velocities.push(velocity);
        }
        Ok(velocities)
    }

    /// Runs all blocks but the first for these images. Returns each one's tokens, `[n, dim]`.
    fn other_blocks(
        &self,
        b: &B,
        chosen: &[usize],
        observer: &mut dyn Observer<B>,
    ) -> Result<Vec<B::Tensor>> {
        let transformer = self.transformer;
        if chosen.is_empty() {
            transformer.report_blocks(1..transformer.block_count(), observer)?;
            return Ok(Vec::new());
        }
        let timestep = || GraphInputs::from_tensors(&self.stacked.inputs.tensors());
        let subset;
        let (stacked, text, image) = if chosen.len() == self.images.len() {
            (&self.stacked, self.text.clone(), self.image.clone())
        } else {
            let item = |&i: &usize| {
                let BatchItem { text, image, references, rope } = self.items[i];
                BatchItem { text, image, references, rope }
            };
            let items: Vec<BatchItem<'_, B>> = chosen.iter().map(item).collect();
            subset = StackedBatch::new(b, &items, &transformer.attention_spec(), timestep()?.timestep)?;
            let streams = self.stacked.streams();
            let rows = |of: &B::Tensor, stream: usize| -> Result<B::Tensor> {
                let parts = chosen.iter().map(|&i| Ok(b.slice_rows(of, streams[i][stream].clone())?));
                concat(b, parts.collect::<Result<_>>()?)
            };
            (&subset, rows(&self.text, 0)?, rows(&self.image, 1)?)
        };
        let inputs = GraphInputs { text, image, ..GraphInputs::from_tensors(&stacked.inputs.tensors())? };
        let all = transformer.stage(b, Stage::OtherBlocks, stacked, &inputs, observer)?;
        let mut start = 0;
        let own = |rows: &std::ops::Range<usize>| {
            start += rows.len();
            Ok(b.slice_rows(&all, start - rows.len()..start)?)
        };
        stacked.image_rows.iter().map(own).collect()
    }
}
/// The error for a batch whose first block can't be cached.
fn unsuitable() -> Error {
    let what =
        "needs a double block, a cache for each image, and references that are neither extracted nor cached";
    Error::Arguments { op: "first_blocks", what: what.into() }
}
