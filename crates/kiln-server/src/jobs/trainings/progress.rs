//! What a running training tells the server and hears from it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::state::TrainingState;
use super::task::{LossPoint, TrainingStep};
use super::training::Training;
use crate::jobs::Jobs;

/// Time between two looks at the queue of image jobs.
const POLL: Duration = Duration::from_millis(20);
/// The most notes of a training.
const MAX_NOTES: usize = 50;

/// A running training, as its [`Trainer`](crate::Trainer) sees it.
pub struct TrainingProgress {
    pub(super) jobs: Jobs,
    pub(super) training: Arc<Training>,
    /// The losses of steps that were taken before.
    pub(super) losses: Vec<LossPoint>,
}

impl TrainingProgress {
    /// Tells that something is prepared: so many of so many.
    pub fn preparing(&self, what: &str, done: usize, total: usize) {
        self.training.change(|s| s.preparing = Some((what.to_owned(), done, total)));
    }

    /// Tells that the steps begin, after this many.
    pub fn starting(&self, step: u64) {
        self.training.set_losses(self.losses.clone(), step);
        self.training.change(|s| (s.state, s.preparing, s.step) = (TrainingState::Running, None, step));
    }

    /// Tells that a step is done.
    pub fn stepped(&self, step: TrainingStep) {
        self.training.add_loss((step.step, step.loss, step.smoothed));
        self.training.change(|s| {
            (s.step, s.loss, s.seconds) = (step.step, Some(step.smoothed), Some(step.seconds));
        });
    }

    /// Tells that there are new sample images.
    pub fn sampled(&self) {
        self.training.change(|s| s.samples += 1);
    }

    /// Adds a message for the client.
    pub fn note(&self, text: &str) {
        let text = kiln_base::without_folders(text).into_owned();
        self.training.change(|s| {
            if s.notes.len() < MAX_NOTES && !s.notes.contains(&text) {
                s.notes.push(text);
            }
        });
    }

    /// Whether to save and stop: it was cancelled, or the server stops.
    pub fn is_stopped(&self) -> bool {
        self.training.is_cancelled() || *self.jobs.closing.borrow()
    }

    /// Whether image jobs are queued or running, or the model is still being loaded for them.
    pub fn is_device_wanted(&self) -> bool {
        !self.jobs.unfinished().is_empty() || !self.jobs.is_ready()
    }

    /// Waits until image jobs no longer want the device, the training is stopped, or one of the jobs claims its memory.
    pub fn wait_for_device(&self, is_claimed: &dyn Fn() -> bool) {
        self.wait_until(Duration::ZERO, is_claimed);
    }

    /// Waits until image jobs have not wanted the device for this long, or the training is stopped.
    pub(super) fn wait_until_idle(&self, idle: Duration) {
        self.wait_until(idle, &|| false);
    }

    fn wait_until(&self, idle: Duration, is_claimed: &dyn Fn() -> bool) {
        let mut since = Instant::now();
        while !self.is_stopped() && !is_claimed() {
            if self.is_device_wanted() {
                since = Instant::now();
                if !self.training.snapshot().paused {
                    self.training.change(|s| s.paused = true);
                }
            } else if since.elapsed() >= idle {
                break;
            }
            std::thread::sleep(POLL);
        }
        self.training.change(|s| s.paused = false);
    }
}
