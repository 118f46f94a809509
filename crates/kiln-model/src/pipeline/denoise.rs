use kiln_ops::{Backend, Tensor as _};
use kiln_tensor::{DType, HostTensor};

use super::Resolved;
use crate::schedule::Schedule;
use crate::transformer::{Call, KvCache, Layout, Position, References, Transformer};
use crate::{Event, Observer, Result, Variant};

/// Text tokens of one picture.
pub(super) struct Conditioning<'a, B: Backend> {
    pub(super) text: &'a B::Tensor,
    /// Tokens to steer away from, where there is guidance.
    pub(super) negative: Option<&'a B::Tensor>,
}

/// Tokens of all references in order, f32 `[r, channels]`, and their grids.
pub(super) struct ReferenceTokens<B: Backend> {
    pub(super) tokens: B::Tensor,
    pub(super) grids: Vec<[usize; 2]>,
}

/// What a picture starts from besides noise.
pub(super) enum Origin<B: Backend> {
    Noise,
    /// Tokens of a picture that is noised to the first level.
    Picture(B::Tensor),
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

/// The way from noise to a picture's tokens.
pub(super) struct Denoiser<'a, B: Backend> {
    pub(super) b: &'a B,
    pub(super) transformer: &'a Transformer<B>,
    pub(super) variant: Variant,
    pub(super) plan: &'a Resolved,
    pub(super) references: Option<&'a ReferenceTokens<B>>,
    pub(super) mode: ReferenceMode,
    pub(super) origin: &'a Origin<B>,
}

impl<B: Backend> Denoiser<'_, B> {
    /// The final tokens, f32 `[n, channels]`, of picture number `picture`.
    pub(super) fn run(
        &self,
        picture: usize,
        noise: &HostTensor,
        conditioning: &Conditioning<'_, B>,
        observer: &mut dyn Observer<B>,
    ) -> Result<B::Tensor> {
        let b = self.b;
        let sigmas = self.plan.schedule.sigmas();
        let (first, steps) = (self.plan.first_step, self.plan.steps - self.plan.first_step);
        let noise = b.upload(noise, DType::F32)?;
        observer.see("noise", &noise)?;
        let mut latents = match self.origin {
            Origin::Noise => noise.clone(),
            Origin::Picture(tokens) | Origin::Masked { tokens, .. } => {
                b.lerp(tokens, &noise, sigmas[first])?
            }
        };
        let mut positive = Branch::new(self, conditioning.text)?;
        let mut negative = conditioning.negative.map(|text| Branch::new(self, text)).transpose()?;
        for step in 0..steps {
            let (sigma, next) = (sigmas[first + step], sigmas[first + step + 1]);
            observer.event(Event::StepStarted { picture, step, steps, sigma })?;
            let mut velocity = positive.velocity(self, &latents, sigma, observer)?;
            if let (Some(negative), Some(guidance)) = (&mut negative, self.plan.guidance) {
                let away = negative.velocity(self, &latents, sigma, observer)?;
                velocity = b.guide(&velocity, &away, guidance)?;
            }
            observer.see(&format!("step{step}.model_output"), &velocity)?;
            latents = b.add_scaled(&latents, &velocity, next - sigma)?;
            observer.see(&format!("step{step}.latents"), &latents)?;
            if let Origin::Masked { tokens, mask } = self.origin {
                let outside = if step + 1 < steps { b.lerp(tokens, &noise, next)? } else { tokens.clone() };
                latents = b.blend_rows(&outside, &latents, mask)?;
                observer.see(&format!("step{step}.latents_after_mask_blend"), &latents)?;
            }
            observer.event(Event::StepFinished { picture, step, steps })?;
        }
        Ok(latents)
    }
}

/// The calls of one text: with guidance there are two, each with its own layout and cache.
struct Branch<'a, B: Backend> {
    text: &'a B::Tensor,
    layout: Layout<B>,
    /// The layout of the steps that use the cache.
    cached_layout: Option<Layout<B>>,
    cache: Option<KvCache<B>>,
}

impl<'a, B: Backend> Branch<'a, B> {
    fn new(d: &Denoiser<'_, B>, text: &'a B::Tensor) -> Result<Self> {
        let [height, width] = d.plan.grid();
        let image = Position::grid(0, height, width);
        let grids = d.references.map_or(&[][..], |r| &r.grids);
        let place = |(i, &[h, w]): (usize, &[usize; 2])| Position::grid(10 * (i as u32 + 1), h, w);
        let references: Vec<Position> = grids.iter().enumerate().flat_map(place).collect();
        let words = Position::text(text.shape().rows());
        let layout = |image: &[Position]| d.transformer.layout(d.b, &words, image);
        let (all, cached) = match d.mode {
            ReferenceMode::Joint => ([image, references].concat(), None),
            ReferenceMode::Cached => ([references, image.clone()].concat(), Some(layout(&image)?)),
        };
        Ok(Branch { text, layout: layout(&all)?, cached_layout: cached, cache: None })
    }

    fn velocity(
        &mut self,
        d: &Denoiser<'_, B>,
        latents: &B::Tensor,
        sigma: f32,
        observer: &mut dyn Observer<B>,
    ) -> Result<B::Tensor> {
        let tokens = d.references.map(|r| &r.tokens);
        let (references, layout) = match (&self.cache, &self.cached_layout, tokens) {
            (Some(cache), Some(layout), _) => (References::Cached(cache), layout),
            (None, Some(_), Some(tokens)) => (References::Extract(tokens), &self.layout),
            _ => (References::Joint(tokens), &self.layout),
        };
        let call = Call {
            text: self.text,
            image: latents,
            references,
            layout,
            timestep: Schedule::timestep(sigma),
            guidance: d.plan.guidance.filter(|_| d.variant == Variant::Dev),
        };
        let (velocity, cache) = d.transformer.forward(d.b, &call, observer)?;
        self.cache = cache.or(self.cache.take());
        Ok(velocity)
    }
}
