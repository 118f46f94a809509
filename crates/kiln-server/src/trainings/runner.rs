//! The thread that runs trainings, and what a running training tells the server and hears from it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::check_queue::CheckQueue;
use super::training::{Training, TrainingState};
use super::{TrainedLoras, Trainings, record};
use crate::Server;
use crate::generator::{ErrorKind, JobError};
use crate::trainer::{Trainer, TrainingEnd, TrainingStep};

/// Time between two looks at the queue of image jobs.
const POLL: Duration = Duration::from_millis(20);
/// The most notes of a training.
const MAX_NOTES: usize = 50;

impl Server {
    /// Allows trainings: reads those of the data folder and starts the thread that runs them. It ends after
    /// [`Server::close`], once the running training has saved its state.
    pub fn train_with(&self, trainer: impl Trainer) -> std::io::Result<JoinHandle<()>> {
        let folder = self.folder().join("trainings");
        record::create_folder(&folder)?;
        let all = record::load(&folder, &trainer)?;
        let trainings = Trainings {
            trainer: Arc::new(trainer),
            loras: TrainedLoras::load(&folder, &all),
            all: Mutex::new(all),
            folder,
            wake: Condvar::new(),
            checks: CheckQueue::default(),
        };
        if self.trainings.set(trainings).is_err() {
            return Err(std::io::Error::other("trainings are allowed already"));
        }
        let server = self.clone();
        std::thread::Builder::new().name("training".into()).spawn(move || {
            let Some(trainings) = server.trainings.get() else { return };
            while let Some(training) = trainings.next(&server) {
                server.run_training(trainings, training);
            }
        })
    }

    /// Whether image jobs are queued or running, or the model is still being loaded for them.
    fn wants_device(&self) -> bool {
        !self.unfinished().is_empty() || !self.is_ready()
    }

    fn run_training(&self, trainings: &Trainings, training: Arc<Training>) {
        let progress = TrainingProgress { server: self.clone(), training: Arc::clone(&training) };
        progress.wait_until_idle(Duration::ZERO);
        if progress.is_stopped() {
            return self.end_stopped(&training);
        }
        training.change(|s| s.state = TrainingState::Preparing);
        training.save();
        tracing::info!(training = training.id, client = training.client, "training started");
        let end = loop {
            let train = || training.with_task(|task| trainings.trainer.train(task, &progress));
            let end = catch_unwind(AssertUnwindSafe(train)).unwrap_or_else(|_| {
                self.metrics.panicked();
                Err(JobError::server("panicked", "the training panicked; the log says more"))
            });
            match end {
                Ok(TrainingEnd::Stopped) if !progress.is_stopped() => {
                    progress.wait_until_idle(trainings.trainer.idle_time());
                }
                end => break end,
            }
        };
        match end {
            Ok(TrainingEnd::Done(lora)) => {
                trainings.trainer.clean_up(&training.run_path());
                trainings.loras.insert(&lora, &training.client);
                training.end(TrainingState::Done, None, Some(lora));
            }
            Ok(TrainingEnd::Stopped) => return self.end_stopped(&training),
            Err(error) if error.kind == ErrorKind::Cancelled => return self.end_stopped(&training),
            Err(error) => training.end(TrainingState::Failed, Some((error.code.into(), error.message)), None),
        }
        let error = training.snapshot().error.map(|(_, message)| message);
        tracing::info!(training = training.id, error, "training ended");
    }

    /// Ends a training that was cancelled, or that the server stops in: it continues at the next start.
    fn end_stopped(&self, training: &Training) {
        let cancelled = training.is_cancelled();
        let state = if cancelled { TrainingState::Cancelled } else { TrainingState::Queued };
        training.end(state, None, None);
        tracing::info!(training = training.id, cancelled, "training stopped");
    }
}

/// A running training, as its [`Trainer`] sees it.
pub struct TrainingProgress {
    server: Server,
    training: Arc<Training>,
}

impl TrainingProgress {
    /// Tells that something is prepared: so many of so many.
    pub fn preparing(&self, what: &str, done: usize, total: usize) {
        self.training.change(|s| s.preparing = Some((what.to_owned(), done, total)));
    }

    /// Tells that the steps begin, after this many.
    pub fn starting(&self, step: u64) {
        if let Some(trainings) = self.server.trainings.get() {
            let files = trainings.trainer.files(&self.training.run_path());
            self.training.set_losses(files.losses, step);
        }
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
        self.training.is_cancelled() || *self.server.closing.borrow()
    }

    /// Whether image jobs wait for the device.
    pub fn is_device_wanted(&self) -> bool {
        self.server.wants_device()
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
