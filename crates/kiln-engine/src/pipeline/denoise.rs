//! From noise to latents: the steps of images that share their noise levels and guidance.

use kiln_model::schedule::Schedule;
use kiln_model::transformer::{Answer, Call, Item, KvCache, Layout, Position, References, Transformer};
use kiln_model::{Denoised, Event};
use kiln_ops::{Backend, Later, Tensor as _};
use kiln_tensor::{DType, HostTensor};

use super::batch::Batch;
use crate::error::Result;
use crate::model::Variant;
use crate::plan::Plan;

/// Tokens of all references in order, f32 `[r, channels]`, and their grids.
pub(super) struct ReferenceTokens<B: Backend> {
    pub(super) tokens: B::Tensor,
    pub(super) grids: Vec<[usize; 2]>,
}

/// What an image starts from besides noise.
pub(super) enum Origin<B: Backend> {
    Noise,
    /// Tokens of an image that is noised to the first level.
    Image(B::Tensor),
    /// The same; and after every step rows whose mask is 0 are put back.
    Masked {
        tokens: B::Tensor,
        mask: B::Tensor,
    },
}

/// How references take part: beside the image, or computed once and cached.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ReferenceMode {
    Joint,
    Cached,
}

/// The way from noise to the tokens of images that walk through the same noise levels with the same guidance.
pub(super) struct Denoiser<'a, B: Backend> {
    pub(super) b: &'a B,
    pub(super) transformer: &'a Transformer<B>,
    pub(super) variant: Variant,
    /// Of any of the images.
    pub(super) plan: &'a Plan,
}

/// What an image is made from.
pub(super) struct Conditioning<'a, B: Backend> {
    /// Whose it is, and its number there.
    pub(super) member: usize,
    pub(super) image: usize,
    pub(super) grid: [usize; 2],
    pub(super) noise: &'a HostTensor,
    pub(super) text: &'a B::Tensor,
    /// Text tokens to steer away from, where there is guidance.
    pub(super) negative: Option<&'a B::Tensor>,
    pub(super) references: Option<&'a ReferenceTokens<B>>,
    pub(super) mode: ReferenceMode,
    pub(super) origin: &'a Origin<B>,
}

/// An image between two steps.
pub(super) struct DenoiseState<'a, B: Backend> {
    pub(super) conditioning: &'a Conditioning<'a, B>,
    noise: B::Tensor,
    /// f32 `[n, channels]`; the image's tokens after the last step.
    pub(super) latents: B::Tensor,
    positive: Branch<'a, B>,
    negative: Option<Branch<'a, B>>,
}

impl<B: Backend> Denoiser<'_, B> {
    /// All of the images whose members are still active after the last step.
    pub(super) fn run<'a>(
        &self,
        images: &'a [Conditioning<'a, B>],
        batch: &mut Batch<'_, '_, B>,
    ) -> Result<Vec<DenoiseState<'a, B>>> {
        let sigmas = self.plan.schedule.sigmas();
        let (first, steps) = (self.plan.first_step, self.plan.steps - self.plan.first_step);
        batch.begin(images.iter().map(|image| (image.member, image.image)));
        let begin = |image| self.begin(image, sigmas[first], batch);
        let mut states = images.iter().map(begin).collect::<Result<Vec<_>>>()?;
        let mut previous: Option<Later<()>> = None;
        for step in 0..steps {
            let (sigma, next) = (sigmas[first + step], sigmas[first + step + 1]);
            batch.report(|own, all| {
                let (picture, own) = (own.start, own.len());
                Event::StepStarted { picture, own, all, step, steps, sigma }
            });
            states.retain(|state| batch.is_active(state.conditioning.member));
            if states.is_empty() {
                break;
            }
            batch.begin(states.iter().map(|s| (s.conditioning.member, s.conditioning.image)));
            self.step(&mut states, step, [sigma, next], batch)?;
            // One step ahead of the device: it never waits, progress is true, and a cancelled run ends soon.
            if let Some(wait) = previous.replace(self.b.fence()?) {
                wait()?;
            }
            batch.report(|own, _| {
                let (picture, own) = (own.start, own.len());
                Event::StepFinished { picture, own, step, steps }
            });
        }
        states.retain(|state| batch.is_active(state.conditioning.member));
        Ok(states)
    }

    /// Step `step`, from one noise level to the next.
    fn step(
        &self,
        states: &mut [DenoiseState<'_, B>],
        step: usize,
        [sigma, next]: [f32; 2],
        batch: &mut Batch<'_, '_, B>,
    ) -> Result<()> {
        let b = self.b;
        let mut velocities = self.velocities(states, |s| Some(&mut s.positive), sigma, batch)?;
        if let Some(guidance) = self.plan.guidance {
            let away = self.velocities(states, |s| s.negative.as_mut(), sigma, batch)?;
            for (velocity, away) in velocities.iter_mut().zip(&away) {
                *velocity = b.guide(velocity, away, guidance)?;
            }
        }
        for (state, velocity) in states.iter_mut().zip(&velocities) {
            let member = state.conditioning.member;
            let mut see = |name: &str, x: &B::Tensor| {
                batch.with(member, |m| Ok(m.observer.see(&format!("step{step}.{name}"), x)?));
            };
            see("model_output", velocity);
            state.latents = b.add_scaled(&state.latents, velocity, next - sigma)?;
            see("latents", &state.latents);
            if let Origin::Masked { tokens, mask } = state.conditioning.origin {
                let outside = if next == 0.0 { tokens.clone() } else { b.lerp(tokens, &state.noise, next)? };
                state.latents = b.blend_rows(&outside, &state.latents, mask)?;
                see("latents_after_mask_blend", &state.latents);
            }
            let denoised = Denoised { step, latents: &state.latents, velocity, sigma: next };
            batch.with(member, |m| Ok(m.observer.denoised(&denoised)?));
        }
        Ok(())
    }

    fn begin<'a>(
        &self,
        conditioning: &'a Conditioning<'a, B>,
        sigma: f32,
        batch: &mut Batch<'_, '_, B>,
    ) -> Result<DenoiseState<'a, B>> {
        let b = self.b;
        let noise = b.upload(conditioning.noise, DType::F32)?;
        batch.with(conditioning.member, |m| Ok(m.observer.see("noise", &noise)?));
        let latents = match conditioning.origin {
            Origin::Noise => noise.clone(),
            Origin::Image(tokens) | Origin::Masked { tokens, .. } => b.lerp(tokens, &noise, sigma)?,
        };
        let branch = |text| Branch::new(b, self.transformer, conditioning, text);
        Ok(DenoiseState {
            conditioning,
            noise,
            latents,
            positive: branch(conditioning.text)?,
            negative: conditioning.negative.map(branch).transpose()?,
        })
    }

    /// What the transformer says of each image in one call; of those that have this branch.
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
        let items: Vec<Item<'_, B>> =
            branches.iter().zip(&latents).map(|(branch, image)| branch.item(image)).collect();
        let call = Call {
            items: &items,
            timestep: Schedule::timestep(sigma),
            guidance: self.plan.guidance.filter(|_| self.variant == Variant::Dev),
        };
        let answers = self.transformer.forward(self.b, &call, batch)?;
        drop(items);
        let keep = |(branch, answer): (&mut &mut Branch<'a, B>, Answer<B>)| {
            branch.cache = answer.cache.or(branch.cache.take());
            answer.velocity
        };
        Ok(branches.iter_mut().zip(answers).map(keep).collect())
    }
}

/// The calls of one text: with guidance there are two, each with its own layout and cache.
struct Branch<'a, B: Backend> {
    text: &'a B::Tensor,
    references: Option<&'a B::Tensor>,
    layout: Layout<B>,
    /// The layout of the steps that use the cache.
    cached_layout: Option<Layout<B>>,
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
        let place = |(i, &[h, w]): (usize, &[usize; 2])| Position::grid(10 * (i as u32 + 1), h, w);
        let references: Vec<Position> = grids.iter().enumerate().flat_map(place).collect();
        let words = Position::text(text.shape().rows());
        let layout = |image: &[Position]| transformer.layout(b, &words, image);
        let (all, cached) = match conditioning.mode {
            ReferenceMode::Joint => ([image, references].concat(), None),
            ReferenceMode::Cached => ([references, image.clone()].concat(), Some(layout(&image)?)),
        };
        let references = conditioning.references.map(|r| &r.tokens);
        Ok(Branch { text, references, layout: layout(&all)?, cached_layout: cached, cache: None })
    }

    fn item<'s>(&'s self, image: &'s B::Tensor) -> Item<'s, B> {
        let (references, layout) = match (&self.cache, &self.cached_layout, self.references) {
            (Some(cache), Some(layout), _) => (References::Cached(cache), layout),
            (None, Some(_), Some(tokens)) => (References::Extract(tokens), &self.layout),
            (_, _, tokens) => (References::Joint(tokens), &self.layout),
        };
        Item { text: self.text, image, references, layout }
    }
}
