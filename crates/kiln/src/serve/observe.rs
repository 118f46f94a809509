//! What the pipeline tells, as the server's clients hear it.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use kiln_model::{Error, Event, Observer, Pipeline, Resolved, Result, Variant};
use kiln_ops::Backend;
use kiln_server::{Phase, Progress, Watch};

use super::preview::Previews;

/// Progress within a step is told no more often than this.
const OFTEN: Duration = Duration::from_millis(100);
/// The parts of the work before and after the steps, of one picture.
const TEXT: f32 = 0.04;
const DECODE: f32 = 0.08;

/// Follows a run.
pub struct Follow<'a, 'w, B: Backend> {
    watch: &'a RefCell<&'w mut dyn Watch>,
    picture: Option<Picture<'a, B>>,
    progress: Progress,
    /// Pictures of this order that are painted at once, the first and how many.
    first: u32,
    own: u32,
    told: Instant,
    blocks: usize,
    calls: usize,
}

/// What is needed to show a picture that is not done.
struct Picture<'a, B: Backend> {
    previews: &'a RefCell<&'a mut Previews<B>>,
    pipeline: &'a Pipeline<B>,
    resolved: &'a Resolved,
    velocity: Option<B::Tensor>,
    /// The step whose preview was shown: of several pictures it is the first one's.
    shown: Option<usize>,
}

impl<'a, 'w, B: Backend> Follow<'a, 'w, B> {
    /// Follows a model being loaded.
    pub fn loading(watch: &'a RefCell<&'w mut dyn Watch>) -> Follow<'a, 'w, B> {
        let progress = Progress { phase: Phase::Load, ..Progress::default() };
        Follow { watch, picture: None, progress, first: 0, own: 1, told: Instant::now(), blocks: 0, calls: 1 }
    }

    /// Follows pictures being painted.
    pub fn painting(
        watch: &'a RefCell<&'w mut dyn Watch>,
        previews: &'a RefCell<&'a mut Previews<B>>,
        pipeline: &'a Pipeline<B>,
        variant: Variant,
        resolved: &'a Resolved,
    ) -> Follow<'a, 'w, B> {
        let two = variant == Variant::Base && resolved.guidance.is_some_and(|g| g > 1.0);
        let progress = Progress {
            phase: Phase::Text,
            pictures: resolved.pictures as u32,
            steps: (resolved.steps - resolved.first_step) as u32,
            ..Progress::default()
        };
        let picture = Some(Picture { previews, pipeline, resolved, velocity: None, shown: None });
        let calls = if two { 2 } else { 1 };
        Follow { watch, picture, progress, first: 0, own: 1, told: Instant::now(), blocks: 0, calls }
    }

    /// Tells of progress: so much is done `within` each of the pictures at work; `always` or when it is time.
    fn tell(&mut self, phase: Phase, within: f32, always: bool) {
        if self.progress.phase != phase || always || self.told.elapsed() > OFTEN {
            let pictures = self.progress.pictures.max(1) as f32;
            self.progress.phase = phase;
            self.progress.fraction = (self.first as f32 + self.own as f32 * within) / pictures;
            self.watch.borrow_mut().progress(self.progress);
            self.told = Instant::now();
        }
    }

    fn steps(&self, total: usize) -> f32 {
        let all = (total * self.calls).max(1) as f32 * self.progress.steps.max(1) as f32;
        TEXT + (1.0 - TEXT - DECODE) * (self.blocks as f32 / all).min(1.0)
    }

    /// The steps, the pictures before this one, and `part` of it.
    fn decoded(&self, part: f32) -> f32 {
        let before = self.progress.picture.saturating_sub(self.first) as f32;
        1.0 - DECODE + DECODE * (before + part) / self.own.max(1) as f32
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Loading { .. } | Event::Rounded { .. } => self.tell(Phase::Load, 0.0, true),
            Event::Note(text) => self.watch.borrow_mut().note(&text),
            Event::Lora { report } => self.watch.borrow_mut().note(&report),
            Event::Text { prompt, prompts, done, total } => {
                let part = (prompt * total + done) as f32 / (prompts * total).max(1) as f32;
                self.tell(Phase::Text, TEXT * part, false);
            }
            Event::Reference { .. } => self.tell(Phase::Encode, TEXT, true),
            Event::StepStarted { picture, own, all, step, .. } => {
                (self.progress.picture, self.progress.step) = (picture as u32, step as u32);
                (self.first, self.own) = (picture as u32, own as u32);
                if step == 0 {
                    self.blocks = 0;
                    if let Some(picture) = &mut self.picture {
                        picture.shown = None;
                    }
                    self.watch.borrow_mut().together(own as u32, all as u32);
                    self.tell(Phase::Steps, TEXT, true);
                }
            }
            Event::Block { total, .. } => {
                self.blocks += 1;
                let within = self.steps(total);
                self.tell(Phase::Steps, within, false);
            }
            Event::StepFinished { step, steps, .. } => {
                self.progress.step = step as u32 + 1;
                let part = (step + 1) as f32 / steps.max(1) as f32;
                self.tell(Phase::Steps, TEXT + (1.0 - TEXT - DECODE) * part, true);
            }
            Event::Decoding { picture } => {
                self.progress.picture = picture as u32;
                self.tell(Phase::Decode, self.decoded(0.0), true);
            }
            Event::Decode { done, total } => {
                self.tell(Phase::Decode, self.decoded(done as f32 / total.max(1) as f32), false);
            }
        }
    }

    /// What the picture would be if the step's direction were right: its latents, taken to the end at once.
    fn preview(&mut self, step: usize, latents: &B::Tensor) -> Result<()> {
        let Some(picture) = &mut self.picture else { return Ok(()) };
        let Some(velocity) = picture.velocity.take() else { return Ok(()) };
        if picture.shown.replace(step) == Some(step) {
            return Ok(());
        }
        let sigmas = picture.resolved.schedule.sigmas();
        let next = sigmas.get(picture.resolved.first_step + step + 1).copied().unwrap_or(0.0);
        // After the last step the picture itself follows.
        if next <= 0.0 {
            return Ok(());
        }
        let b = picture.pipeline.backend();
        let guess = b.add_scaled(latents, &velocity, -next)?;
        if let Some(shown) = picture.previews.borrow_mut().show(b, &guess, picture.resolved.grid())? {
            self.watch.borrow_mut().preview(shown);
        }
        Ok(())
    }
}

impl<B: Backend> Observer<B> for Follow<'_, '_, B> {
    fn event(&mut self, event: Event) -> Result<()> {
        self.handle(event);
        if self.watch.borrow().cancelled() { Err(Error::Cancelled) } else { Ok(()) }
    }

    fn see(&mut self, name: &str, x: &B::Tensor) -> Result<()> {
        if self.watch.borrow().cancelled() {
            return Err(Error::Cancelled);
        }
        let Some((step, what)) = name.strip_prefix("step").and_then(|rest| rest.split_once('.')) else {
            return Ok(());
        };
        match (what, step.parse::<usize>()) {
            ("model_output", Ok(_)) if self.watch.borrow().wants_preview() => {
                if let Some(picture) = &mut self.picture {
                    picture.velocity = Some(x.clone());
                }
                Ok(())
            }
            ("latents", Ok(step)) => self.preview(step, x),
            _ => Ok(()),
        }
    }

    // Previews are made of what comes out of a step.
    fn looks_inside(&self) -> bool {
        false
    }
}
