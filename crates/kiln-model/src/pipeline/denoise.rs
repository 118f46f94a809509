use kiln_ops::{Backend, Tensor as _};
use kiln_tensor::{DType, HostTensor};

use super::Resolved;
use super::crowd::Crowd;
use crate::schedule::Schedule;
use crate::transformer::{Answer, Call, Item, KvCache, Layout, Position, References, Transformer};
use crate::{Event, Result, Variant};

/// Text tokens of one picture.
#[derive(Clone, Copy)]
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

/// The way from noise to the tokens of pictures that walk through the same noise levels with the same guidance.
pub(super) struct Denoiser<'a, B: Backend> {
    pub(super) b: &'a B,
    pub(super) transformer: &'a Transformer<B>,
    pub(super) variant: Variant,
    /// Of any of the pictures.
    pub(super) plan: &'a Resolved,
}

/// What a picture is painted from.
pub(super) struct Subject<'a, B: Backend> {
    /// Whose it is, and its number there.
    pub(super) member: usize,
    pub(super) picture: usize,
    pub(super) grid: [usize; 2],
    pub(super) noise: &'a HostTensor,
    pub(super) conditioning: Conditioning<'a, B>,
    pub(super) references: Option<&'a ReferenceTokens<B>>,
    pub(super) mode: ReferenceMode,
    pub(super) origin: &'a Origin<B>,
}

/// A picture on its way.
pub(super) struct Sketch<'a, B: Backend> {
    pub(super) subject: &'a Subject<'a, B>,
    noise: B::Tensor,
    /// f32 `[n, channels]`; the picture's tokens after the last step.
    pub(super) latents: B::Tensor,
    positive: Branch<'a, B>,
    negative: Option<Branch<'a, B>>,
}

impl<B: Backend> Denoiser<'_, B> {
    /// All of the pictures whose members are still there after the last step.
    pub(super) fn run<'a>(
        &self,
        subjects: &'a [Subject<'a, B>],
        crowd: &mut Crowd<'_, '_, B>,
    ) -> Result<Vec<Sketch<'a, B>>> {
        let b = self.b;
        let sigmas = self.plan.schedule.sigmas();
        let (first, steps) = (self.plan.first_step, self.plan.steps - self.plan.first_step);
        crowd.begin(subjects.iter().map(|s| (s.member, s.picture)));
        let begin = |subject| self.begin(subject, sigmas[first], crowd);
        let mut sketches = subjects.iter().map(begin).collect::<Result<Vec<_>>>()?;
        for step in 0..steps {
            let (sigma, next) = (sigmas[first + step], sigmas[first + step + 1]);
            crowd.tell_each(|own, all| {
                let (picture, own) = (own.start, own.len());
                Event::StepStarted { picture, own, all, step, steps, sigma }
            });
            sketches.retain(|sketch| crowd.is_there(sketch.subject.member));
            if sketches.is_empty() {
                break;
            }
            crowd.begin(sketches.iter().map(|s| (s.subject.member, s.subject.picture)));
            let mut velocities = self.velocities(&mut sketches, |s| Some(&mut s.positive), sigma, crowd)?;
            if let Some(guidance) = self.plan.guidance {
                let away = self.velocities(&mut sketches, |s| s.negative.as_mut(), sigma, crowd)?;
                for (velocity, away) in velocities.iter_mut().zip(&away) {
                    *velocity = b.guide(velocity, away, guidance)?;
                }
            }
            for (sketch, velocity) in sketches.iter_mut().zip(&velocities) {
                let member = sketch.subject.member;
                let mut see = |name: &str, x: &B::Tensor| {
                    crowd.tell(member, |m| m.observer.see(&format!("step{step}.{name}"), x));
                };
                see("model_output", velocity);
                sketch.latents = b.add_scaled(&sketch.latents, velocity, next - sigma)?;
                see("latents", &sketch.latents);
                if let Origin::Masked { tokens, mask } = sketch.subject.origin {
                    let last = step + 1 == steps;
                    let outside = if last { tokens.clone() } else { b.lerp(tokens, &sketch.noise, next)? };
                    sketch.latents = b.blend_rows(&outside, &sketch.latents, mask)?;
                    see("latents_after_mask_blend", &sketch.latents);
                }
            }
            crowd.tell_each(|own, _| {
                let (picture, own) = (own.start, own.len());
                Event::StepFinished { picture, own, step, steps }
            });
        }
        sketches.retain(|sketch| crowd.is_there(sketch.subject.member));
        Ok(sketches)
    }

    fn begin<'a>(
        &self,
        subject: &'a Subject<'a, B>,
        sigma: f32,
        crowd: &mut Crowd<'_, '_, B>,
    ) -> Result<Sketch<'a, B>> {
        let b = self.b;
        let noise = b.upload(subject.noise, DType::F32)?;
        crowd.tell(subject.member, |m| m.observer.see("noise", &noise));
        let latents = match subject.origin {
            Origin::Noise => noise.clone(),
            Origin::Picture(tokens) | Origin::Masked { tokens, .. } => b.lerp(tokens, &noise, sigma)?,
        };
        let branch = |text| Branch::new(b, self.transformer, subject, text);
        Ok(Sketch {
            subject,
            noise,
            latents,
            positive: branch(subject.conditioning.text)?,
            negative: subject.conditioning.negative.map(branch).transpose()?,
        })
    }

    /// What the transformer says of each picture in one call; of those that have this branch.
    fn velocities<'a, 's>(
        &self,
        sketches: &'s mut [Sketch<'a, B>],
        branch: impl Fn(&'s mut Sketch<'a, B>) -> Option<&'s mut Branch<'a, B>>,
        sigma: f32,
        crowd: &mut Crowd<'_, '_, B>,
    ) -> Result<Vec<B::Tensor>> {
        let latents: Vec<B::Tensor> = sketches.iter().map(|s| s.latents.clone()).collect();
        let mut branches: Vec<&mut Branch<'a, B>> = sketches.iter_mut().filter_map(branch).collect();
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
        let answers = self.transformer.forward(self.b, &call, crowd)?;
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
        subject: &Subject<'a, B>,
        text: &'a B::Tensor,
    ) -> Result<Self> {
        let [height, width] = subject.grid;
        let image = Position::grid(0, height, width);
        let grids = subject.references.map_or(&[][..], |r| &r.grids);
        let place = |(i, &[h, w]): (usize, &[usize; 2])| Position::grid(10 * (i as u32 + 1), h, w);
        let references: Vec<Position> = grids.iter().enumerate().flat_map(place).collect();
        let words = Position::text(text.shape().rows());
        let layout = |image: &[Position]| transformer.layout(b, &words, image);
        let (all, cached) = match subject.mode {
            ReferenceMode::Joint => ([image, references].concat(), None),
            ReferenceMode::Cached => ([references, image.clone()].concat(), Some(layout(&image)?)),
        };
        let references = subject.references.map(|r| &r.tokens);
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
