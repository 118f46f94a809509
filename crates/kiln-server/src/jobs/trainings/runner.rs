//! The thread that runs trainings.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use super::check_queue::CheckQueue;
use super::progress::TrainingProgress;
use super::record::{self, Record};
use super::state::TrainingState;
use super::training::Training;
use super::{TrainedLoras, Trainings};
use crate::jobs::Jobs;
use crate::jobs::error::{ErrorCode, JobError};
use crate::jobs::trainer::{Trainer, TrainingEnd};

impl Trainings {
    /// Reads the trainings of a folder.
    pub(crate) fn open(jobs: &Jobs, folder: PathBuf, trainer: impl Trainer) -> std::io::Result<Trainings> {
        record::create_folder(&folder)?;
        let restore = |(record, folder): (Record, PathBuf)| Arc::new(restore(record, &folder, &trainer));
        let all: Vec<Arc<Training>> = record::load(&folder)?.into_iter().map(restore).collect();
        Ok(Trainings {
            jobs: jobs.clone(),
            trainer: Arc::new(trainer),
            loras: TrainedLoras::load(&folder, &all),
            all: Mutex::new(all),
            folder,
            wake: Condvar::new(),
            checks: CheckQueue::default(),
        })
    }

    /// Starts the thread that runs trainings. It ends when the server stops, once the running training has saved its state.
    pub(crate) fn start(self: &Arc<Self>) -> std::io::Result<JoinHandle<()>> {
        let trainings = Arc::clone(self);
        std::thread::Builder::new().name("training".into()).spawn(move || {
            while let Some(training) = trainings.next() {
                trainings.run_training(training);
            }
        })
    }

    fn run_training(&self, training: Arc<Training>) {
        let mut progress =
            TrainingProgress { jobs: self.jobs.clone(), training: Arc::clone(&training), losses: Vec::new() };
        progress.wait_until_idle(Duration::ZERO);
        if progress.is_stopped() {
            return end_stopped(&training);
        }
        training.change(|s| s.state = TrainingState::Preparing);
        training.save();
        tracing::info!(training = training.id, client = training.client, "training started");
        let end = loop {
            progress.losses = self.trainer.files(&training.run_path()).losses;
            let train = || training.with_task(|task| self.trainer.train(task, &progress));
            let end = catch_unwind(AssertUnwindSafe(train)).unwrap_or_else(|_| {
                self.jobs.metrics.panicked();
                Err(JobError::new(ErrorCode::Panicked, "the training panicked; the log says more"))
            });
            match end {
                Ok(TrainingEnd::Stopped) if !progress.is_stopped() => {
                    progress.wait_until_idle(self.trainer.idle_time());
                }
                end => break end,
            }
        };
        match end {
            Ok(TrainingEnd::Done(lora)) => {
                self.trainer.clean_up(&training.run_path());
                self.loras.insert(&lora, &training.client);
                training.end(TrainingState::Done, None, Some(lora));
            }
            Ok(TrainingEnd::Stopped) => return end_stopped(&training),
            Err(error) if error.is_cancelled() => return end_stopped(&training),
            Err(error) => {
                training.end(TrainingState::Failed, Some((error.code.name().into(), error.message)), None)
            }
        }
        let error = training.snapshot().error.map(|(_, message)| message);
        tracing::info!(training = training.id, error, "training ended");
    }
}

/// A training of an earlier process. One that was running when that ended is interrupted.
fn restore(mut record: Record, folder: &Path, trainer: &dyn Trainer) -> Training {
    let snapshot = &mut record.snapshot;
    if matches!(snapshot.state, TrainingState::Preparing | TrainingState::Running) {
        snapshot.state = TrainingState::Interrupted;
        // The record is written when a training starts and ends; its losses after every step.
        let losses = trainer.files(&Training::run_folder(folder)).losses;
        snapshot.step = losses.last().map_or(snapshot.step, |point| point.0);
    }
    Training::new(record, folder)
}

/// Ends a training that was cancelled, or that the server stops in: it continues at the next start.
fn end_stopped(training: &Training) {
    let cancelled = training.is_cancelled();
    let state = if cancelled { TrainingState::Cancelled } else { TrainingState::Queued };
    training.end(state, None, None);
    tracing::info!(training = training.id, cancelled, "training stopped");
}
