//! Reports a training's progress to the server, and makes way for image jobs between its steps.

use std::path::PathBuf;

use kiln_server::{TrainingProgress, TrainingStep};
use kiln_train::{EncodingStage, JobWatcher, Result, Status, Watcher};

use crate::serve::turn::DeviceLock;

/// A training's turn on the device, until it is dropped.
pub struct DeviceGuard<'t> {
    turn: &'t DeviceLock,
    progress: &'t TrainingProgress,
}

impl<'t> DeviceGuard<'t> {
    /// Waits until no image job is unfinished, and takes the turn.
    pub fn take(turn: &'t DeviceLock, progress: &'t TrainingProgress) -> DeviceGuard<'t> {
        turn.take();
        let taken = DeviceGuard { turn, progress };
        taken.make_way();
        taken
    }

    /// Gives the turn to image jobs, as long as there are any.
    fn make_way(&self) {
        while self.progress.is_device_wanted() && !self.progress.is_stopped() {
            self.turn.give_back();
            self.progress.wait_for_device();
            self.turn.take();
        }
    }
}

impl Drop for DeviceGuard<'_> {
    fn drop(&mut self) {
        self.turn.give_back();
    }
}

/// Follows a training for the server.
pub struct ServerWatcher<'t> {
    pub progress: &'t TrainingProgress,
    pub turn: DeviceGuard<'t>,
    /// Whether the training stops for image jobs, because the memory can't hold both; else it pauses.
    pub releases_memory: bool,
}

impl ServerWatcher<'_> {
    fn make_way(&self) {
        if !self.releases_memory {
            self.turn.make_way();
        }
    }
}

impl Watcher for ServerWatcher<'_> {
    fn stepped(&mut self, status: &Status) {
        self.progress.stepped(TrainingStep {
            step: status.report.step,
            loss: status.report.loss,
            smoothed: status.smoothed,
            seconds: status.step_time.as_secs_f32(),
        });
        self.make_way();
    }

    fn is_cancelled(&self) -> bool {
        self.progress.is_stopped() || (self.releases_memory && self.progress.is_device_wanted())
    }
}

impl JobWatcher for ServerWatcher<'_> {
    fn encoding(&mut self, stage: EncodingStage, done: usize, total: usize) {
        let what = match stage {
            EncodingStage::Texts => "captions",
            EncodingStage::Images => "images",
        };
        self.progress.preparing(what, done, total);
        self.make_way();
    }

    fn note(&mut self, text: &str) {
        self.progress.note(text);
    }

    fn starting(&mut self, step: u64) {
        self.progress.starting(step);
    }

    fn sampled(&mut self, step: u64, sheet: Result<PathBuf>) -> Result<()> {
        match sheet {
            Ok(_) => self.progress.sampled(),
            // Failed samples don't stop the training.
            Err(error) => self.progress.note(&format!("the samples of step {step} failed: {error}")),
        }
        Ok(())
    }
}
