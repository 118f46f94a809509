//! Reports a training's progress to the server, and makes way for image jobs between its steps: it pauses, and ends if one
//! of them claims its memory.

use std::path::PathBuf;

use kiln_engine::{DeviceLease, Session, SharedDevice};
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
        let ends = || self.progress.is_stopped() || self.turn.is_claimed();
        while self.progress.is_device_wanted() && !ends() {
            self.turn.give_back();
            self.progress.wait_for_device(&|| self.turn.is_claimed());
            self.turn.take();
        }
    }

    /// Tells that the training will hold memory.
    pub fn hold(&self) {
        self.turn.hold();
    }
}

impl Drop for DeviceGuard<'_> {
    fn drop(&mut self) {
        self.turn.release();
    }
}

/// Follows a training for the server.
pub struct ServerWatcher<'t> {
    pub progress: &'t TrainingProgress,
    pub turn: DeviceGuard<'t>,
    /// The models of image jobs on the device.
    pub session: Option<&'t Session>,
    /// Whether the training ends for every image job, because the memory may not hold both; else it pauses.
    pub releases_memory: bool,
    /// Whether that stays so when its model is loaded.
    pub runs_alone: bool,
}

impl Drop for ServerWatcher<'_> {
    fn drop(&mut self) {
        // Before the memory is given back.
        if let Some(session) = self.session {
            session.end_lease();
        }
    }
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
        self.progress.is_stopped()
            || self.turn.turn.is_claimed()
            || (self.releases_memory && self.progress.is_device_wanted())
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

    fn loaded(&mut self, device: SharedDevice, activations: u64) {
        if let Some(session) = self.session.filter(|_| !self.runs_alone) {
            session.begin_lease(DeviceLease { device, activations });
            self.releases_memory = false;
        }
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
