//! Denoising: the steps of images that share their noise levels and guidance.
//!
//! ```text
//! noise, initial image ─▶ latents ─┐
//! text, references ────────────────┴─transformer─▶ velocity ─▶ latents at the next noise level ─▶ …
//! ```
//!
//! The host runs one step ahead of the device (`Backend::fence`): the device never waits, progress is accurate, and
//! cancelling takes about one step. What it waits for is the answer whether the latents are finite: NaN or infinity end an
//! image's request one step later. With the step cache (`transformer/step_cache.rs`) the host waits in each step for one
//! number; meanwhile the device computes the velocity for the case that the cache is reused.

use kiln_family::Variant;
use kiln_nn::schedule::Schedule;
use kiln_nn::transformer::{
    BatchItem, KvCache, Position, Prediction, References, RopeTables, StepCache, Transformer,
    TransformerBatch,
};
use kiln_nn::{Event, StepEnd, StepOutput, are_finite};
use kiln_ops::{Backend, Pending, Tensor as _};
use kiln_tensor::{DType, HostTensor};

use super::batch::Batch;
use super::output::not_finite_after;
use crate::error::Result;
use crate::plan::Plan;
use crate::progress::StepCounts;

/// Tokens of all reference images in order, f32 `[tokens, channels]`, and their grids.
pub(super) struct ReferenceTokens<B: Backend> {
    pub(super) tokens: B::Tensor,
    pub(super) grids: Vec<[usize; 2]>,
}

/// What the first latents are made from.
pub(super) enum InitialLatents<B: Backend> {
    /// Noise alone.
    Noise,
    /// The tokens of an initial image, noised to the first level.
    Image(B::Tensor),
    /// The same; after every step, rows whose mask is 0 are restored from the initial image.
    Masked { tokens: B::Tensor, mask: B::Tensor },
}

/// How reference tokens enter the transformer: with the image tokens at every step, or once, with their keys and values
/// cached.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ReferenceMode {
    Joint,
    Cached,
}

/// Denoises images that share their noise levels and guidance.
pub(super) struct Denoiser<'a, B: Backend> {
    pub(super) b: &'a B,
    pub(super) transformer: &'a Transformer<B>,
    pub(super) variant: Variant,
    /// The plan of any of the images.
    pub(super) plan: &'a Plan,
}

/// The inputs of one image.
pub(super) struct Conditioning<'a, B: Backend> {
    /// The batch member that the image belongs to.
    pub(super) member: usize,
    /// Its index in that member's request.
    pub(super) image: usize,
    /// Token grid: height and width.
    pub(super) grid: [usize; 2],
    pub(super) noise: &'a HostTensor,
    pub(super) text: &'a B::Tensor,
    /// The encoded negative prompt, if there is guidance.
    pub(super) negative: Option<&'a B::Tensor>,
    pub(super) references: Option<&'a ReferenceTokens<B>>,
    pub(super) mode: ReferenceMode,
    pub(super) initial: &'a InitialLatents<B>,
}

/// The state of an image between two steps.
pub(super) struct DenoiseState<'a, B: Backend> {
    pub(super) conditioning: &'a Conditioning<'a, B>,
    noise: B::Tensor,
    /// f32 `[tokens, channels]`.
    pub(super) latents: B::Tensor,
    /// Steps computed in full and steps that reused the step cache.
    pub(super) steps: StepCounts,
    positive: Branch<'a, B>,
    negative: Option<Branch<'a, B>>,
    /// The step caches of the two branches, if the plan has a threshold for them.
    caches: [StepCache<B>; 2],
}

impl<B: Backend> Denoiser<'_, B> {
    /// Runs all steps. Returns the final states of the images whose members are still active.
    pub(super) fn run<'a>(
        &self,
        images: &'a [Conditioning<'a, B>],
        batch: &mut Batch<'_, '_, B>,
    ) -> Result<Vec<DenoiseState<'a, B>>> {
        let sigmas = self.plan.schedule.sigmas();
        let (first, steps) = (self.plan.first_step, self.plan.steps - self.plan.first_step);
        batch.set_in_progress(images.iter().map(|image| (image.member, image.image)));
        let start = |image| self.start(image, sigmas[first], batch);
        let mut states = images.iter().map(start).collect::<Result<Vec<_>>>()?;
        let mut stopped = Vec::new();
        let mut previous: Option<StepCheck<'_, B>> = None;
        for step in 0..steps {
            let (sigma, next) = (sigmas[first + step], sigmas[first + step + 1]);
            batch.report(|_, own, batch| {
                let (image, images) = (own.start, own.len());
                Event::StepStarted { image, images, batch, step, steps, sigma }
            });
            states.retain(|state| batch.is_active(state.conditioning.member));
            if states.is_empty() {
                break;
            }
            batch.set_in_progress(states.iter().map(|s| (s.conditioning.member, s.conditioning.image)));
            let edge = step == 0 || step + 1 == steps;
            self.step(&mut states, step, edge, [sigma, next], batch)?;
            let check = StepCheck::new(self.b, &states, step)?;
            end_step(&mut states, &mut stopped, (step, steps, sigma), batch);
            // The host runs one step ahead: the device never waits, progress is accurate, and cancelling is quick. The last
            // step is checked with the image itself.
            if let Some(check) = previous.replace(check) {
                check.finish(self.b, steps, batch)?;
            }
            batch.report(|member, own, _| {
                let (image, images) = (own.start, own.len());
                let of_member = |s: &&DenoiseState<'_, B>| s.conditioning.member == member;
                let reused = states.iter().find(of_member).map_or(0, |state| state.steps.reused);
                Event::StepFinished { image, images, step, steps, reused }
            });
            if states.is_empty() {
                break;
            }
        }
        states.append(&mut stopped);
        states.retain(|state| batch.is_active(state.conditioning.member));
        Ok(states)
    }

    /// Takes one step, from noise level `sigma` to `next`. `edge`: the first or the last step, which is always computed.
    fn step(
        &self,
        states: &mut [DenoiseState<'_, B>],
        step: usize,
        edge: bool,
        [sigma, next]: [f32; 2],
        batch: &mut Batch<'_, '_, B>,
    ) -> Result<()> {
        let b = self.b;
        let [mut velocities, negative] = match self.plan.cache {
            Some(threshold) => self.cached_velocities(states, sigma, (!edge).then_some(threshold), batch)?,
            None => {
                states.iter_mut().for_each(|state| state.steps.computed += 1);
                [
                    self.velocities(states, |s| Some(&mut s.positive), sigma, batch)?,
                    self.velocities(states, |s| s.negative.as_mut(), sigma, batch)?,
                ]
            }
        };
        if let Some(guidance) = self.plan.guidance {
            for (velocity, negative) in velocities.iter_mut().zip(&negative) {
                *velocity = b.guide(velocity, negative, guidance)?;
            }
        }
        for (state, velocity) in states.iter_mut().zip(&velocities) {
            let member = state.conditioning.member;
            let mut inspect = |name: &str, x: &B::Tensor| {
                batch.with_member(member, |m| Ok(m.observer.inspect(&format!("step{step}.{name}"), x)?));
            };
            inspect("model_output", velocity);
            state.latents = b.add_scaled(&state.latents, velocity, next - sigma)?;
            inspect("latents", &state.latents);
            if let InitialLatents::Masked { tokens, mask } = state.conditioning.initial {
                let outside = if next == 0.0 { tokens.clone() } else { b.lerp(tokens, &state.noise, next)? };
                state.latents = b.blend_rows(&outside, &state.latents, mask)?;
                inspect("latents_after_mask_blend", &state.latents);
            }
            let output = StepOutput { step, latents: &state.latents, velocity, sigma: next };
            batch.with_member(member, |m| Ok(m.observer.step_output(&output)?));
        }
        Ok(())
    }

    /// Prepares an image for its first step, at noise level `sigma`.
    fn start<'a>(
        &self,
        conditioning: &'a Conditioning<'a, B>,
        sigma: f32,
        batch: &mut Batch<'_, '_, B>,
    ) -> Result<DenoiseState<'a, B>> {
        let b = self.b;
        let noise = b.upload(conditioning.noise, DType::F32)?;
        batch.with_member(conditioning.member, |m| Ok(m.observer.inspect("noise", &noise)?));
        let latents = match conditioning.initial {
            InitialLatents::Noise => noise.clone(),
            InitialLatents::Image(tokens) | InitialLatents::Masked { tokens, .. } => {
                b.lerp(tokens, &noise, sigma)?
            }
        };
        let branch = |text| Branch::new(b, self.transformer, conditioning, text);
        Ok(DenoiseState {
            conditioning,
            noise,
            latents,
            steps: StepCounts::default(),
            positive: branch(conditioning.text)?,
            negative: conditioning.negative.map(branch).transpose()?,
            caches: Default::default(),
        })
    }

    /// Predicts the velocities of both branches with the step cache. An image reuses its caches if the first block's
    /// result has changed by less than `threshold` in both branches; without a threshold all images are computed.
    fn cached_velocities(
        &self,
        states: &mut [DenoiseState<'_, B>],
        sigma: f32,
        threshold: Option<f32>,
        batch: &mut Batch<'_, '_, B>,
    ) -> Result<[Vec<B::Tensor>; 2]> {
        let [mut positive, mut negative] = [0, 1].map(|branch| -> Vec<StepCache<B>> {
            states.iter_mut().map(|state| std::mem::take(&mut state.caches[branch])).collect()
        });
        let items = states.iter().map(|s| s.positive.item(&s.latents)).collect::<Vec<_>>();
        let negative_items =
            states.iter().filter_map(|s| Some(s.negative.as_ref()?.item(&s.latents))).collect::<Vec<_>>();
        // Both branches are queued before the host waits for a number.
        let mut branches = Vec::with_capacity(2);
        for (items, caches) in [(&items, &positive), (&negative_items, &negative)] {
            let inputs = self.inputs(items, sigma);
            let caches: Vec<_> = caches.iter().take(items.len()).collect();
            if !items.is_empty() {
                branches.push(self.transformer.first_blocks(self.b, &inputs, &caches, batch)?);
            }
        }
        let mut full = vec![threshold.is_none(); items.len()];
        if let Some(threshold) = threshold {
            for branch in &mut branches {
                for (full, change) in full.iter_mut().zip(branch.changes()?) {
                    *full |= change.is_nan() || change >= threshold;
                }
            }
        }
        let mut results = [Vec::new(), Vec::new()];
        let caches = [&mut positive, &mut negative];
        for ((branch, caches), result) in branches.into_iter().zip(caches).zip(&mut results) {
            let mut caches: Vec<_> = caches.iter_mut().collect();
            *result = branch.finish(self.b, &full, &mut caches, batch)?;
        }
        for (((state, positive), negative), full) in states.iter_mut().zip(positive).zip(negative).zip(full) {
            state.caches = [positive, negative];
            *(if full { &mut state.steps.computed } else { &mut state.steps.reused }) += 1;
        }
        Ok(results)
    }

    /// Returns the transformer's input for images at this noise level.
    fn inputs<'s>(&self, items: &'s [BatchItem<'s, B>], sigma: f32) -> TransformerBatch<'s, B> {
        let guidance = self.plan.guidance.filter(|_| self.variant.embeds_guidance());
        TransformerBatch { items, timestep: Schedule::timestep(sigma), guidance }
    }

    /// Predicts the velocities of all images that have this branch, in one transformer call.
    fn velocities<'a, 's>(
        &self,
        states: &'s mut [DenoiseState<'a, B>],
        branch: impl Fn(&'s mut DenoiseState<'a, B>) -> Option<&'s mut Branch<'a, B>>,
        sigma: f32,
        batch: &mut Batch<'_, '_, B>,
    ) -> Result<Vec<B::Tensor>> {
        let latents: Vec<B::Tensor> = states.iter().map(|s| s.latents.clone()).collect();
        let mut branches: Vec<&mut Branch<'a, B>> = states.iter_mut().filter_map(branch).collect();
        if branches.is_empty() {
            return Ok(Vec::new());
        }
        let items: Vec<BatchItem<'_, B>> =
            branches.iter().zip(&latents).map(|(branch, latents)| branch.item(latents)).collect();
        let predictions = self.transformer.forward(self.b, &self.inputs(&items, sigma), batch)?;
        drop(items);
        let take = |(branch, prediction): (&mut &mut Branch<'a, B>, Prediction<B>)| {
            branch.cache = prediction.cache.or(branch.cache.take());
            prediction.velocity
        };
        Ok(branches.iter_mut().zip(predictions).map(take).collect())
    }
}

/// Asks whether the latents of images are finite after a step.
struct StepCheck<'a, B: Backend> {
    step: usize,
    images: Vec<&'a Conditioning<'a, B>>,
    finite: Pending<Vec<bool>>,
}

impl<'a, B: Backend> StepCheck<'a, B> {
    fn new(b: &B, states: &[DenoiseState<'a, B>], step: usize) -> Result<Self> {
        let images = states.iter().map(|state| state.conditioning).collect();
        let latents: Vec<&B::Tensor> = states.iter().map(|state| &state.latents).collect();
        Ok(StepCheck { step, images, finite: are_finite(b, &latents)? })
    }

    /// Waits for the step, and ends the requests whose images are not finite.
    fn finish(self, b: &B, steps: usize, batch: &mut Batch<'_, '_, B>) -> Result<()> {
        for (image, finite) in self.images.iter().zip((self.finite)()?) {
            if !finite && batch.is_active(image.member) {
                let references = image.references.map(|references| &references.tokens);
                let initial = match image.initial {
                    InitialLatents::Noise => None,
                    InitialLatents::Image(tokens) | InitialLatents::Masked { tokens, .. } => Some(tokens),
                };
                let images: Vec<&B::Tensor> = references.into_iter().chain(initial).collect();
                let error = not_finite_after(b, [self.step + 1, steps], image.text, &images);
                batch.end(image.member, Err(error));
            }
        }
        Ok(())
    }
}

/// Lets each request change the latents of its images. Those of a request that wants no more steps move to `stopped`.
fn end_step<'a, B: Backend>(
    states: &mut Vec<DenoiseState<'a, B>>,
    stopped: &mut Vec<DenoiseState<'a, B>>,
    (step, steps, sigma): (usize, usize, f32),
    batch: &mut Batch<'_, '_, B>,
) {
    let mut members: Vec<usize> = states.iter().map(|state| state.conditioning.member).collect();
    members.dedup();
    for member in members {
        let is_own = |state: &DenoiseState<'a, B>| state.conditioning.member == member;
        let mut stop = false;
        batch.with_member(member, |m| {
            if !m.observer.wants_step_end() {
                return Ok(());
            }
            let own = || states.iter().filter(|state| is_own(state));
            let image = own().map(|state| state.conditioning.image).next().unwrap_or(0);
            let latents = own().map(|state| &state.latents).collect();
            let reply = m.observer.step_end(&StepEnd { image, step, steps, sigma, latents })?;
            let own = states.iter_mut().filter(|state| is_own(state));
            for (state, latents) in own.zip(reply.latents.into_iter().flatten()) {
                state.latents = latents;
            }
            stop = reply.stop;
            Ok(())
        });
        if stop {
            stopped.extend(states.extract_if(.., |state| is_own(state)));
        }
    }
}

/// The transformer inputs for one text. Classifier-free guidance has two branches: the prompt's and the negative prompt's.
struct Branch<'a, B: Backend> {
    text: &'a B::Tensor,
    references: Option<&'a B::Tensor>,
    rope: RopeTables<B>,
    /// The tables for steps that use the cache.
    cached_rope: Option<RopeTables<B>>,
    cache: Option<KvCache<B>>,
}

impl<'a, B: Backend> Branch<'a, B> {
    fn new(
        b: &B,
        transformer: &Transformer<B>,
        conditioning: &Conditioning<'a, B>,
        text: &'a B::Tensor,
    ) -> Result<Self> {
        let [height, width] = conditioning.grid;
        let image = Position::grid(0, height, width);
        let grids = conditioning.references.map_or(&[][..], |r| &r.grids);
        // Reference i has the time coordinate 10 · (i + 1).
        let positions = |(i, &[h, w]): (usize, &[usize; 2])| Position::grid(10 * (i as u32 + 1), h, w);
        let references: Vec<Position> = grids.iter().enumerate().flat_map(positions).collect();
        let text_positions = Position::text(text.shape().rows());
        let rope = |image: &[Position]| transformer.rope_tables(b, &text_positions, image);
        let (all, cached_rope) = match conditioning.mode {
            ReferenceMode::Joint => ([image, references].concat(), None),
            ReferenceMode::Cached => ([references, image.clone()].concat(), Some(rope(&image)?)),
        };
        let references = conditioning.references.map(|r| &r.tokens);
        Ok(Branch { text, references, rope: rope(&all)?, cached_rope, cache: None })
    }

    fn item<'s>(&'s self, latents: &'s B::Tensor) -> BatchItem<'s, B> {
        let (references, rope) = match (&self.cache, &self.cached_rope, self.references) {
            (Some(cache), Some(rope), _) => (References::Cached(cache), rope),
            (None, Some(_), Some(tokens)) => (References::Extract(tokens), &self.rope),
            (_, _, tokens) => (References::Joint(tokens), &self.rope),
        };
        BatchItem { text: self.text, image: latents, references, rope }
    }
}
