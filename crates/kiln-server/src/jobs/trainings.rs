//! Trainings of LoRAs: a folder each, one at a time, behind image jobs.
//!
//! ```text
//! POST ──images, checks──▶ <data>/trainings/ID ──queue──▶ training thread ──Trainer──▶ LoRA
//!                                training.json, images/, run/
//! ```
//! Image jobs go first: a training starts when no job is queued or running, and makes way between two steps when one
//! arrives. A training that the server stops in continues at the next start; one whose process was killed is
//! `interrupted` and waits for a client to resume it, because it may be what killed the process.

mod accept;
mod check_queue;
mod loras;
mod progress;
mod record;
mod runner;
mod state;
mod task;
mod training;

use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex};

use kiln_base::{lock, wait};

pub(crate) use accept::TrainingImage;
use check_queue::CheckQueue;
pub(crate) use loras::TrainedLoras;
pub use progress::TrainingProgress;
pub(crate) use state::{TrainingSnapshot, TrainingState};
pub use task::{LossPoint, TrainingCheck, TrainingStep, TrainingTask};
pub(crate) use training::{Training, thin};

use crate::jobs::Jobs;
use crate::jobs::caller::Caller;
use crate::jobs::error::{ErrorCode, JobError};
use crate::jobs::trainer::Trainer;

/// The most unfinished trainings of a client.
const MAX_UNFINISHED: usize = 8;

/// The trainings of a server, and what runs them.
pub(crate) struct Trainings {
    jobs: Jobs,
    pub(crate) trainer: Arc<dyn Trainer>,
    pub(crate) loras: TrainedLoras,
    folder: PathBuf,
    /// Oldest first.
    all: Mutex<Vec<Arc<Training>>>,
    wake: Condvar,
    checks: CheckQueue,
}

impl Trainings {
    /// All trainings, newest first.
    pub(crate) fn all(&self) -> Vec<Arc<Training>> {
        lock(&self.all).iter().rev().cloned().collect()
    }

    pub(crate) fn find(&self, id: &str) -> Option<Arc<Training>> {
        lock(&self.all).iter().find(|training| training.id == id).cloned()
    }

    /// Makes the training thread look for work, or notice that the server stops.
    pub(crate) fn wake(&self) {
        drop(lock(&self.all));
        self.wake.notify_all();
    }

    /// The number of queued trainings before this one.
    pub(crate) fn position(&self, id: &str) -> usize {
        let all = lock(&self.all);
        all.iter().take_while(|training| training.id != id).filter(|training| training.is_active()).count()
    }

    /// Waits for a queued training; `None` when the server stops.
    fn next(&self) -> Option<Arc<Training>> {
        let mut all = lock(&self.all);
        loop {
            if *self.jobs.closing.borrow() {
                return None;
            }
            let queued = all.iter().find(|training| training.state() == TrainingState::Queued);
            if let Some(training) = queued {
                return Some(Arc::clone(training));
            }
            all = wait(&self.wake, all);
        }
    }

    /// Cancels a training: at once if it is queued, else after its step. Returns false if it has ended.
    pub(crate) fn cancel(&self, training: &Training) -> bool {
        let all = lock(&self.all);
        if !training.is_active() {
            return false;
        }
        training.cancel();
        if training.state() == TrainingState::Queued {
            training.change(|s| s.state = TrainingState::Cancelled);
            drop(all);
            training.save();
        }
        true
    }

    /// Puts a training that was cancelled, interrupted or failed back into the queue. Returns false if it was not; fails if
    /// its client has too many.
    pub(crate) fn resume(&self, training: &Training, caller: &Caller) -> Result<bool, JobError> {
        {
            let all = lock(&self.all);
            if !training.state().can_resume() {
                return Ok(false);
            }
            check_unfinished(&all, &training.client, caller)?;
            training.queue_again();
        }
        training.save();
        self.wake();
        Ok(true)
    }

    /// Deletes a training that has ended. Returns false if it has not.
    pub(crate) fn delete(&self, training: &Training) -> std::io::Result<bool> {
        {
            let mut all = lock(&self.all);
            if training.is_active() {
                return Ok(false);
            }
            all.retain(|other| other.id != training.id);
        }
        training.remove()?;
        Ok(true)
    }

    /// Deletes a LoRA that a training has written. Returns false if its file is gone already.
    pub(crate) fn delete_lora(&self, name: &str) -> std::io::Result<bool> {
        let found = self.trainer.delete_lora(name)?;
        self.loras.remove(name);
        // The next LoRA of this name is another's.
        for training in self.all().iter().filter(|training| training.snapshot().lora.as_deref() == Some(name))
        {
            training.change(|s| s.lora = None);
            training.save();
        }
        Ok(found)
    }
}

/// Checks that a client may have another unfinished training.
fn check_unfinished(all: &[Arc<Training>], client: &str, caller: &Caller) -> Result<(), JobError> {
    let most = caller.quotas.jobs.map_or(MAX_UNFINISHED, usize::from).min(MAX_UNFINISHED);
    if all.iter().filter(|training| training.client == client && training.is_active()).count() >= most {
        let message = format!("there are {most} unfinished trainings; wait for one, or cancel it");
        return Err(JobError::new(ErrorCode::TrainingsFull, message));
    }
    Ok(())
}
