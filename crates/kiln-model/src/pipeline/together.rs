//! Several pictures at once, of one request or of several: every step is one call of the transformer for all of them.

use std::collections::VecDeque;

use kiln_ops::{Backend, Tensor as _};
use kiln_tensor::HostTensor;

use super::crowd::Crowd;
use super::denoise::{Conditioning, Denoiser, Origin, ReferenceMode, ReferenceTokens, Subject};
use super::plan::{Prepared, Start};
use super::{Generated, Member, MemoryNeed, Pipeline, Resolved, Texts, finite, join, noise, text};
use crate::{Error, Event, Result, Variant};

/// How many pictures may be painted at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Together {
    /// Pictures at most; 1 is one after the other.
    pub most: usize,
    /// Rows of all pictures at most; what the backend is known to gain from ([`Backend::rows_at_once`]) when absent.
    pub rows: Option<usize>,
    /// Bytes that their activations may take.
    pub memory: Option<u64>,
}

/// Fewer rows than this go alone: a backend may multiply a handful of rows in another way, with other last bits.
const FEWEST_ROWS: usize = 16;

/// A request with everything that its steps need.
struct Ready<'a, B: Backend> {
    plan: Resolved,
    prepared: Prepared<'a>,
    noise: Vec<HostTensor>,
    texts: Texts<B>,
    per_prompt: usize,
    references: Option<ReferenceTokens<B>>,
    mode: ReferenceMode,
    origin: Origin<B>,
}

impl<B: Backend> Ready<'_, B> {
    fn text(&self, picture: usize) -> &B::Tensor {
        &self.texts.prompts[picture / self.per_prompt]
    }

    /// Rows of one picture in the transformer.
    fn rows(&self, picture: usize) -> usize {
        let references = self.references.as_ref().map_or(0, |r| r.tokens.shape().rows());
        let [height, width] = self.plan.grid();
        self.text(picture).shape().rows() + height * width + references
    }

    /// Whether these pictures walk through the same noise levels with the same guidance, and are no mere specks.
    fn fits(&self, other: &Self) -> bool {
        let [height, width] = self.plan.grid();
        let texts = self.texts.prompts.iter().chain(&self.texts.negative);
        let fewest = texts.map(|text| text.shape().rows()).fold(height * width, usize::min);
        if fewest < FEWEST_ROWS {
            return false;
        }
        let levels = |plan: &Resolved| plan.schedule.sigmas()[plan.first_step..].to_vec();
        levels(&self.plan) == levels(&other.plan) && self.plan.guidance == other.plan.guidance
    }

    fn subject(&self, member: usize, picture: usize) -> Subject<'_, B> {
        let text = self.text(picture);
        Subject {
            member,
            picture,
            grid: self.plan.grid(),
            noise: &self.noise[picture],
            conditioning: Conditioning { text, negative: self.texts.negative.as_ref() },
            references: self.references.as_ref(),
            mode: self.mode,
            origin: &self.origin,
        }
    }
}

impl<B: Backend> Pipeline<B> {
    /// How many pictures of so many rows each (text, image and reference tokens) are painted at once: as many as the
    /// backend gains from and there is memory for.
    pub fn room(&self, rows: usize, together: &Together) -> usize {
        let rows = rows.max(1);
        let need = MemoryNeed::steps(&self.folder.transformer.config, rows, self.options.dtype).max(1);
        let memory = together.memory.map_or(usize::MAX, |bytes| (bytes / need) as usize);
        let gainful = together.rows.unwrap_or_else(|| self.backend.rows_at_once());
        together.most.min(gainful / rows).min(memory).max(1)
    }

    /// Hands over every picture of several requests, painted together as far as they are alike and `together` allows:
    /// same noise levels and guidance. Each picture is the one that its request gives alone; on a GPU, where a product's
    /// size decides how it is computed, but for the last bits.
    ///
    /// `ended` hears how each request ended, as soon as it did. An error of one, or of its observer, leaves the others as
    /// they are; if a step of several goes wrong, its pictures are painted one by one.
    pub fn generate_together(
        &self,
        members: &mut [Member<'_, B>],
        together: &Together,
        ended: &mut dyn FnMut(usize, Result<()>),
    ) {
        let requests: Vec<_> = members.iter().map(|member| member.request).collect();
        let mut crowd = Crowd::new(members, ended);
        let mut ready = Vec::with_capacity(requests.len());
        for (member, request) in requests.into_iter().enumerate() {
            let mut found = None;
            crowd.tell(member, |m| {
                found = Some(self.get_ready(request, m.observer)?);
                Ok(())
            });
            ready.push(found);
        }
        let pictures = |(member, ready): (usize, &Option<Ready<'_, B>>)| {
            let count = ready.as_ref().map_or(0, |ready| ready.plan.pictures);
            (0..count).map(move |picture| (member, picture))
        };
        let mut waiting: VecDeque<(usize, usize)> = ready.iter().enumerate().flat_map(pictures).collect();
        loop {
            waiting.retain(|(member, _)| crowd.is_there(*member));
            let places = self.next_batch(&ready, &mut waiting, together);
            if places.is_empty() {
                return;
            }
            let subject =
                |&(member, picture): &(usize, usize)| Some(ready[member].as_ref()?.subject(member, picture));
            let subjects: Vec<Subject<'_, B>> = places.iter().filter_map(subject).collect();
            if let Err(error) = self.paint(&ready, &subjects, &mut crowd) {
                // Whose fault it was shows when they are alone.
                match &subjects[..] {
                    [one] => crowd.end(one.member, Err(error)),
                    several => several.chunks(1).for_each(|one| {
                        let member = one[0].member;
                        if crowd.is_there(member)
                            && let Err(error) = self.paint(&ready, one, &mut crowd)
                        {
                            crowd.end(member, Err(error));
                        }
                    }),
                }
            }
        }
    }

    /// The pictures to paint next: the first that waits, and those that go with it.
    fn next_batch(
        &self,
        ready: &[Option<Ready<'_, B>>],
        waiting: &mut VecDeque<(usize, usize)>,
        together: &Together,
    ) -> Vec<(usize, usize)> {
        let (mut batch, mut rest, mut rows, mut full) = (Vec::new(), VecDeque::new(), 0, false);
        let mut leader = None;
        for (member, picture) in waiting.drain(..) {
            let Some(own) = &ready[member] else { continue };
            let fits = leader.is_none_or(|leader: &Ready<'_, B>| leader.fits(own) && own.fits(leader));
            let more = rows + own.rows(picture);
            // Rows are what is counted: pictures may differ in them.
            full |= fits && !batch.is_empty() && {
                let mean = more.div_ceil(batch.len() + 1);
                self.room(mean, together) <= batch.len()
            };
            match fits && !full {
                true => {
                    batch.push((member, picture));
                    (rows, leader) = (more, Some(leader.unwrap_or(own)));
                }
                false => rest.push_back((member, picture)),
            }
        }
        *waiting = rest;
        batch
    }

    /// Everything before the first step.
    fn get_ready<'a>(
        &self,
        request: &'a crate::Request,
        observer: &mut dyn crate::Observer<B>,
    ) -> Result<Ready<'a, B>> {
        let variant = self.folder.variant;
        let (plan, prepared) = self.plan(request)?;
        for note in &plan.notes {
            observer.event(Event::Note(note.clone()))?;
        }
        let channels = self.folder.transformer.config.in_channels;
        // The generator's numbers come one after the other: meanwhile the text is encoded.
        let (grid, dtype) = (plan.grid(), self.options.dtype);
        let (noise, texts) = std::thread::scope(|scope| {
            let noise = scope.spawn(|| noise::draw(&request.noise, plan.pictures, channels, grid, dtype));
            let texts = self.encode_text(request, plan.two_calls(variant), observer);
            Ok::<_, Error>((join(noise)?, texts?))
        })?;
        let (references, origin) = self.encode_pictures(&plan, &prepared, observer)?;
        // Inpainting hands its source over as a reference, and is a pipeline of its own: it has no cached form.
        let cached = variant == Variant::Kv && references.is_some() && matches!(prepared.start, Start::Noise);
        let mode = if cached { ReferenceMode::Cached } else { ReferenceMode::Joint };
        let per_prompt = request.pictures_per_prompt;
        Ok(Ready { plan, prepared, noise, texts, per_prompt, references, mode, origin })
    }

    /// All steps of these pictures, then picture by picture what follows. An error is one of the steps.
    fn paint(
        &self,
        ready: &[Option<Ready<'_, B>>],
        subjects: &[Subject<'_, B>],
        crowd: &mut Crowd<'_, '_, B>,
    ) -> Result<()> {
        let Some(plan) = subjects.first().and_then(|s| Some(&ready[s.member].as_ref()?.plan)) else {
            return Ok(());
        };
        let (b, variant) = (&self.backend, self.folder.variant);
        let denoiser = Denoiser { b, transformer: &self.transformer, variant, plan };
        for sketch in denoiser.run(subjects, crowd)? {
            let subject = sketch.subject;
            let Some(own) = &ready[subject.member] else { continue };
            crowd.tell(subject.member, |member| {
                let latents = b.download(&sketch.latents)?;
                if let Err(error) = finite("the transformer's result", &latents) {
                    finite(text::RESULT, &b.download(subject.conditioning.text)?)?;
                    return Err(error);
                }
                let index = subject.picture;
                member.observer.event(Event::Decoding { picture: index })?;
                let picture =
                    self.autoencoder.decode(b, &sketch.latents, own.plan.grid(), member.observer)?;
                let picture = match &own.prepared.start {
                    Start::Inpaint(inpaint) => kiln_image::paste_back(inpaint, &picture),
                    _ => picture,
                };
                (member.done)(Generated { picture, latents, index })
            });
            // Pictures of one request are painted in their order.
            if subject.picture + 1 == own.plan.pictures {
                crowd.end(subject.member, Ok(()));
            }
        }
        Ok(())
    }
}
