//! The thread that runs trainings, and what a running training tells the server and hears from it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::check_queue::CheckQueue;
use super::training::{Training, TrainingState};
use super::{TrainedLoras, Trainings, record};
use crate::jobs::Jobs;
use crate::jobs::error::{ErrorCode, JobError};
use crate::jobs::trainer::{Trainer, TrainingEnd, TrainingStep};

/// Time between two looks at the queue of image jobs.
const POLL: Duration = Duration::from_millis(20);
/// The most notes of a training.
const MAX_NOTES: usize = 50;

impl Trainings {
    /// Reads the trainings of a folder.
    pub(crate) fn open(jobs: &Jobs, folder: PathBuf, trainer: impl Trainer) -> std::io::Result<Trainings> {
        record::create_folder(&folder)?;
        let all = record::load(&folder, &trainer)?;
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

    fn run_training(self: &Arc<Self>, training: Arc<Training>) {
        let progress = TrainingProgress { trainings: Arc::clone(self), training: Arc::clone(&training) };
        progress.wait_until_idle(Duration::ZERO);
        if progress.is_stopped() {
            return end_stopped(&training);
        }
        training.change(|s| s.state = TrainingState::Preparing);
        training.save();
        tracing::info!(training = training.id, client = training.client, "training started");
        let end = loop {
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

/// Ends a training that was cancelled, or that the server stops in: it continues at the next start.
fn end_stopped(training: &Training) {
    let cancelled = training.is_cancelled();
    let state = if cancelled { TrainingState::Cancelled } else { TrainingState::Queued };
    training.end(state, None, None);
    tracing::info!(training = training.id, cancelled, "training stopped");
}

/// A running training, as its [`Trainer`] sees it.
pub struct TrainingProgress {
    trainings: Arc<Trainings>,
    training: Arc<Training>,
}

impl TrainingProgress {
    /// Tells that something is prepared: so many of so many.
    pub fn preparing(&self, what: &str, done: usize, total: usize) {
        self.training.change(|s| s.preparing = Some((what.to_owned(), done, total)));
    }

    /// Tells that the steps begin, after this many.
    pub fn starting(&self, step: u64) {
        let files = self.trainings.trainer.files(&self.training.run_path());
        self.training.set_losses(files.losses, step);
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
        self.training.is_cancelled() || *self.trainings.jobs.closing.borrow()
    }

    /// Whether image jobs are queued or running, or the model is still being loaded for them.
    pub fn is_device_wanted(&self) -> bool {
        let jobs = &self.trainings.jobs;
        !jobs.unfinished().is_empty() || !jobs.is_ready()
    }

    /// Waits until image jobs no longer want the device, or the training is stopped.
    pub fn wait_for_device(&self) {
        self.wait_until_idle(Duration::ZERO);
    }

    fn wait_until_idle(&self, idle: Duration) {
        let mut since = Instant::now();
        while !self.is_stopped() {
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
