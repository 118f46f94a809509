//! The progress of a request, from the events of its run.

use std::time::{Duration, Instant};

use kiln_model::Event;

use crate::plan::Plan;
use crate::progress::{Phase, Progress};

/// Progress within a step is reported no more often than this.
const INTERVAL: Duration = Duration::from_millis(100);
/// The shares of the work before and after the steps, of one image.
const TEXT: f32 = 0.04;
const DECODE: f32 = 0.08;

/// Turns the events of one request into its progress.
#[derive(Clone, Debug)]
pub struct Tracker {
    progress: Progress,
    /// Images of this request that take their steps at once: the first, and how many.
    first: u32,
    own: u32,
    reported: Instant,
    blocks: usize,
    /// Calls of the transformer a step.
    calls: usize,
}

impl Tracker {
    /// Of a model that is being loaded.
    pub fn loading() -> Tracker {
        let progress = Progress { phase: Phase::Load, ..Progress::default() };
        Tracker { progress, first: 0, own: 1, reported: Instant::now(), blocks: 0, calls: 1 }
    }

    /// Of a request.
    pub fn new(plan: &Plan) -> Tracker {
        let progress = Progress {
            phase: Phase::Text,
            pictures: plan.images as u32,
            steps: (plan.steps - plan.first_step) as u32,
            ..Progress::default()
        };
        Tracker { progress, calls: plan.calls_per_step, ..Tracker::loading() }
    }

    /// The progress after an event, where it is worth reporting.
    pub fn after(&mut self, event: &Event) -> Option<Progress> {
        match *event {
            Event::Loading { .. } | Event::Rounded { .. } => self.report(Phase::Load, 0.0, true),
            Event::Note(_) | Event::Lora { .. } => None,
            Event::Text { prompt, prompts, done, total } => {
                let part = (prompt * total + done) as f32 / (prompts * total).max(1) as f32;
                self.report(Phase::Text, TEXT * part, false)
            }
            Event::Reference { .. } => self.report(Phase::Encode, TEXT, true),
            Event::StepStarted { picture, own, step, .. } => {
                (self.progress.picture, self.progress.step) = (picture as u32, step as u32);
                (self.first, self.own) = (picture as u32, own as u32);
                if step > 0 {
                    return None;
                }
                self.blocks = 0;
                self.report(Phase::Steps, TEXT, true)
            }
            Event::Block { total, .. } => {
                self.blocks += 1;
                self.report(Phase::Steps, self.within_steps(total), false)
            }
            Event::StepFinished { step, steps, .. } => {
                self.progress.step = step as u32 + 1;
                let part = (step + 1) as f32 / steps.max(1) as f32;
                self.report(Phase::Steps, TEXT + (1.0 - TEXT - DECODE) * part, true)
            }
            Event::Decoding { picture } => {
                self.progress.picture = picture as u32;
                self.report(Phase::Decode, self.decoded(0.0), true)
            }
            Event::Decode { done, total } => {
                self.report(Phase::Decode, self.decoded(done as f32 / total.max(1) as f32), false)
            }
        }
    }

    /// `within` is how much of each image at work is done.
    fn report(&mut self, phase: Phase, within: f32, always: bool) -> Option<Progress> {
        if self.progress.phase == phase && !always && self.reported.elapsed() <= INTERVAL {
            return None;
        }
        let images = self.progress.pictures.max(1) as f32;
        self.progress.phase = phase;
        self.progress.fraction = (self.first as f32 + self.own as f32 * within) / images;
        self.reported = Instant::now();
        Some(self.progress)
    }

    fn within_steps(&self, total: usize) -> f32 {
        let all = (total * self.calls).max(1) as f32 * self.progress.steps.max(1) as f32;
        TEXT + (1.0 - TEXT - DECODE) * (self.blocks as f32 / all).min(1.0)
    }

    /// How much of the images at work is done when those before this one are decoded, and `part` of it.
    fn decoded(&self, part: f32) -> f32 {
        let before = self.progress.picture.saturating_sub(self.first) as f32;
        1.0 - DECODE + DECODE * (before + part) / self.own.max(1) as f32
    }
}
