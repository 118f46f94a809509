//! One training: its settings, and its state as it changes.

use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use kiln_base::lock;
use tokio::sync::watch;

use super::record::{self, Record};
use super::state::{TrainingJob, TrainingSnapshot, TrainingState};
use super::task::{LossPoint, TrainingTask};
use crate::jobs::store::now;

/// A training.
pub(crate) struct Training {
    job: TrainingJob,
    folder: PathBuf,
    cancelled: AtomicBool,
    /// Held while its record is written or its folder removed; whether that has happened.
    removed: Mutex<bool>,
    snapshot: watch::Sender<TrainingSnapshot>,
    /// The losses while it runs; else they are read from its folder.
    losses: Mutex<Vec<LossPoint>>,
}

impl Deref for Training {
    type Target = TrainingJob;

    fn deref(&self) -> &TrainingJob {
        &self.job
    }
}

impl Training {
    pub(super) fn new(Record { job, snapshot }: Record, folder: &Path) -> Training {
        Training {
            job,
            folder: folder.to_owned(),
            cancelled: AtomicBool::new(false),
            removed: Mutex::new(false),
            snapshot: watch::Sender::new(snapshot),
            losses: Mutex::default(),
        }
    }

    /// The folder of a training's images, in its own.
    pub(super) fn images_folder(folder: &Path) -> PathBuf {
        folder.join("pictures")
    }

    /// The folder of what it writes, in its own.
    pub(super) fn run_folder(folder: &Path) -> PathBuf {
        folder.join("run")
    }

    pub(crate) fn run_path(&self) -> PathBuf {
        Training::run_folder(&self.folder)
    }

    pub(super) fn with_task<T>(&self, use_task: impl FnOnce(TrainingTask<'_>) -> T) -> T {
        let (images, folder) = (Training::images_folder(&self.folder), Training::run_folder(&self.folder));
        use_task(TrainingTask { request: &self.request, images: &images, folder: &folder })
    }

    pub(crate) fn watch(&self) -> watch::Receiver<TrainingSnapshot> {
        self.snapshot.subscribe()
    }

    pub(crate) fn snapshot(&self) -> TrainingSnapshot {
        self.snapshot.borrow().clone()
    }

    pub(crate) fn state(&self) -> TrainingState {
        self.snapshot.borrow().state
    }

    /// Whether it is queued or running.
    pub(crate) fn is_active(&self) -> bool {
        self.state().is_active()
    }

    pub(crate) fn change(&self, change: impl FnOnce(&mut TrainingSnapshot)) {
        self.snapshot.send_modify(change);
    }

    pub(super) fn cancel(&self) {
        self.cancelled.store(true, SeqCst);
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.cancelled.load(SeqCst)
    }

    pub(super) fn queue_again(&self) {
        self.cancelled.store(false, SeqCst);
        self.change(|s| (s.state, s.error, s.finished) = (TrainingState::Queued, None, None));
    }

    /// Ends it in this state, and stores that.
    pub(super) fn end(&self, state: TrainingState, error: Option<(String, String)>, lora: Option<String>) {
        let finished = (!state.is_active()).then(now);
        self.change(|s| {
            (s.state, s.error, s.lora, s.finished) = (state, error, lora, finished);
            (s.paused, s.preparing, s.seconds) = (false, None, None);
        });
        lock(&self.losses).clear();
        self.save();
    }

    /// Stores its state. On a full disk the state is right until the server stops.
    pub(super) fn save(&self) {
        if let Err(error) = self.try_save() {
            tracing::error!(%error, training = self.id, "failed to store the state of a training");
        }
    }

    fn try_save(&self) -> std::io::Result<()> {
        let removed = lock(&self.removed);
        if *removed {
            return Ok(());
        }
        Record { job: self.job.clone(), snapshot: self.snapshot() }.write(&self.folder)
    }

    pub(super) fn remove(&self) -> std::io::Result<()> {
        let mut removed = lock(&self.removed);
        *removed = true;
        record::remove(&self.folder)
    }

    /// Replaces the losses with those of the steps up to this one.
    pub(super) fn set_losses(&self, mut losses: Vec<LossPoint>, step: u64) {
        losses.retain(|point| point.0 <= step);
        *lock(&self.losses) = losses;
    }

    pub(super) fn add_loss(&self, point: LossPoint) {
        lock(&self.losses).push(point);
    }

    /// The losses of the steps after this one, while it runs.
    pub(crate) fn losses_after(&self, step: u64) -> Vec<LossPoint> {
        let losses = lock(&self.losses);
        losses[losses.partition_point(|point| point.0 <= step)..].to_vec()
    }
}

/// At most `most` points of a curve: each the mean of neighbours, at the last one's step.
pub(crate) fn thin(points: &[LossPoint], most: usize) -> Vec<LossPoint> {
    let size = points.len().div_ceil(most.max(1)).max(1);
    let mean = |part: &[LossPoint]| {
        let count = part.len() as f32;
        let (step, _, smoothed) = *part.last()?;
        Some((step, part.iter().map(|point| point.1).sum::<f32>() / count, smoothed))
    };
    points.chunks(size).filter_map(mean).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_curve_is_thinned_to_means() {
        let points: Vec<LossPoint> = (1..=10).map(|step| (step, step as f32, 0.5)).collect();
        assert_eq!(thin(&points, 20), points);
        assert_eq!(thin(&points, 4), [(3, 2.0, 0.5), (6, 5.0, 0.5), (9, 8.0, 0.5), (10, 10.0, 0.5)]);
        assert!(thin(&[], 4).is_empty());
    }
}
