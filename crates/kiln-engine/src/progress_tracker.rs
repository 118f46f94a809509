//! Computes the progress of a request from the events of its run.

use std::time::{Duration, Instant};

use kiln_nn::Event;

use crate::plan::Plan;
use crate::progress::{Phase, Progress};

/// The shortest time between two reports within a phase.
const INTERVAL: Duration = Duration::from_millis(100);
/// Share of an image's work before the steps.
const TEXT_SHARE: f32 = 0.04;
/// Share of an image's work after the steps.
const DECODE_SHARE: f32 = 0.08;
const STEPS_SHARE: f32 = 1.0 - TEXT_SHARE - DECODE_SHARE;

/// Turns the events of one request into its progress.
#[derive(Clone, Debug)]
pub struct ProgressTracker {
    progress: Progress,
    /// The first of this request's images in the current batch.
    batch_start: u32,
    /// How many of this request's images are in the current batch.
    batch_images: u32,
    last_report: Instant,
    /// Transformer blocks finished in the current batch.
    blocks: usize,
    calls_per_step: usize,
    /// The tile in progress of an image that is upscaled, and the number of its tiles.
    tile: (usize, usize),
}

impl ProgressTracker {
    /// Tracks the loading of a model.
    pub fn loading() -> ProgressTracker {
        let progress = Progress { phase: Phase::Load, ..Progress::default() };
        ProgressTracker {
            progress,
            batch_start: 0,
            batch_images: 1,
            last_report: Instant::now(),
            blocks: 0,
            calls_per_step: 1,
            tile: (0, 1),
        }
    }

    /// Tracks a request.
    pub fn new(plan: &Plan) -> ProgressTracker {
        let progress = Progress {
            phase: Phase::Text,
            images: plan.images as u32,
            steps: (plan.steps - plan.first_step) as u32,
            ..Progress::default()
        };
        ProgressTracker { progress, calls_per_step: plan.calls_per_step, ..ProgressTracker::loading() }
    }

    /// Takes an event into account; returns the progress if it is worth reporting.
    pub fn update(&mut self, event: &Event) -> Option<Progress> {
        match *event {
            Event::Loading { .. } | Event::BlockQuantized { .. } => self.report(Phase::Load, 0.0, true),
            Event::Note(_) | Event::LoraApplied { .. } => None,
            Event::TextLayer { prompt, prompts, done, total } => {
                let fraction = (prompt * total + done) as f32 / (prompts * total).max(1) as f32;
                self.report(Phase::Text, TEXT_SHARE * fraction, false)
            }
            Event::TileStarted { image, tile, tiles } => {
                (self.batch_start, self.batch_images) = (image as u32, 1);
                (self.progress.image, self.tile) = (image as u32, (tile, tiles));
                (self.progress.tile, self.progress.tiles) = (tile as u32 + 1, tiles as u32);
                None
            }
            Event::EncodingReference { .. } => self.report(Phase::Encode, TEXT_SHARE, true),
            Event::StepStarted { image, images, step, .. } => {
                (self.progress.image, self.progress.step) = (image as u32, step as u32);
                if step == 0 {
                    self.progress.reused = 0;
                }
                (self.batch_start, self.batch_images) = (image as u32, images as u32);
                if step > 0 {
                    return None;
                }
                self.blocks = 0;
                self.report(Phase::Steps, TEXT_SHARE, true)
            }
            Event::Block { total, .. } => {
                self.blocks += 1;
                let all_blocks =
                    (total * self.calls_per_step).max(1) as f32 * self.progress.steps.max(1) as f32;
                let fraction = (self.blocks as f32 / all_blocks).min(1.0);
                self.report(Phase::Steps, TEXT_SHARE + STEPS_SHARE * fraction, false)
            }
            Event::StepFinished { step, steps, reused, .. } => {
                self.progress.step = step as u32 + 1;
                self.progress.reused = reused as u32;
                let fraction = (step + 1) as f32 / steps.max(1) as f32;
                self.report(Phase::Steps, TEXT_SHARE + STEPS_SHARE * fraction, true)
            }
            Event::DecodingImage { image } => {
                self.progress.image = image as u32;
                self.report(Phase::Decode, self.decoded(0.0), true)
            }
            Event::TileDecoded { done, total } => {
                self.report(Phase::Decode, self.decoded(done as f32 / total.max(1) as f32), false)
            }
        }
    }

    /// Returns the progress, unless the last report is too recent. `batch_fraction` is the finished part of the current
    /// batch.
    fn report(&mut self, phase: Phase, batch_fraction: f32, always: bool) -> Option<Progress> {
        if self.progress.phase == phase && !always && self.last_report.elapsed() <= INTERVAL {
            return None;
        }
        let images = self.progress.images.max(1) as f32;
        let (tile, tiles) = self.tile;
        let batch_fraction = (tile as f32 + batch_fraction) / tiles.max(1) as f32;
        self.progress.phase = phase;
        self.progress.fraction =
            (self.batch_start as f32 + self.batch_images as f32 * batch_fraction) / images;
        self.last_report = Instant::now();
        Some(self.progress)
    }

    /// Returns the finished part of the batch when this fraction of the current image is decoded.
    fn decoded(&self, image_fraction: f32) -> f32 {
        let before = self.progress.image.saturating_sub(self.batch_start) as f32;
        1.0 - DECODE_SHARE + DECODE_SHARE * (before + image_fraction) / self.batch_images.max(1) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_advance_the_progress_of_an_image() {
        let mut tracker = ProgressTracker::loading();
        (tracker.progress.images, tracker.progress.steps) = (1, 2);
        let mut fractions = Vec::new();
        for tile in 0..3 {
            assert_eq!(tracker.update(&Event::TileStarted { image: 0, tile, tiles: 3 }), None);
            let events = [
                Event::EncodingReference { index: 0, total: 1 },
                Event::StepStarted { image: 0, images: 1, batch: 1, step: 0, steps: 2, sigma: 0.4 },
                Event::StepFinished { image: 0, images: 1, step: 1, steps: 2, reused: 0 },
                Event::DecodingImage { image: 0 },
            ];
            let progress: Vec<Progress> = events.iter().filter_map(|event| tracker.update(event)).collect();
            assert!(progress.iter().all(|p| (p.tile, p.tiles) == (tile as u32 + 1, 3)));
            fractions.extend(progress.iter().map(|p| p.fraction));
        }
        assert!(fractions.windows(2).all(|pair| pair[0] <= pair[1]), "{fractions:?}");
        assert!(fractions[0] < 0.05 && fractions[11] > 0.9, "{fractions:?}");
    }
}
