//! What a training shows: a bar on a terminal, else a line now and then.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use kiln_train::{EncodingStage, JobWatcher, Result, Status, Watcher};

use crate::bench::memory::anonymous_memory;
use crate::cancel::CancelFlag;
use crate::progress::TaskDisplay;
use crate::values::bytes;

/// Time between lines where there is no terminal.
const LINES_EVERY: Duration = Duration::from_secs(20);
/// Steps after which the time of all steps is told.
const MEASURED: u64 = 3;

/// The display of a training.
pub struct Display {
    task: TaskDisplay,
    cancel: CancelFlag,
    last_line: Option<Instant>,
    /// Steps that were taken before this run.
    first: u64,
    told_cost: bool,
}

impl Display {
    pub fn new(quiet: bool, cancel: CancelFlag) -> Display {
        let task = TaskDisplay::new("{bar:20.cyan/dim} {pos}/{len}  {wide_msg}", quiet);
        Display { task, cancel, last_line: None, first: 0, told_cost: false }
    }

    /// Prints a line, unless quiet.
    pub fn tell(&self, text: &str) {
        self.task.tell(text);
    }

    /// Removes the bar.
    pub fn finish(&self) {
        self.task.finish();
    }

    /// Shows progress on the bar, or as a line if the last one is long ago or `is_due`.
    fn show(&mut self, [done, total]: [u64; 2], message: String, is_due: bool) {
        if let Some(bar) = self.task.advance(done, total) {
            bar.set_message(message);
        } else if is_due || self.last_line.is_none_or(|last| last.elapsed() >= LINES_EVERY) {
            self.last_line = Some(Instant::now());
            self.tell(&format!("{done}/{total}  {message}"));
        }
    }
}

impl Watcher for Display {
    fn stepped(&mut self, status: &Status) {
        let step = status.report.step;
        if !self.told_cost && step >= self.first + MEASURED {
            self.told_cost = true;
            let left = status.steps.saturating_sub(step);
            let (each, all) = (seconds(status.step_time), duration(status.remaining()));
            self.tell(&format!("{each} s a step: about {all} for the other {left} steps"));
        }
        let memory = anonymous_memory().map_or(String::new(), |used| format!("  {}", bytes(used)));
        let message = format!(
            "loss {:.4}  lr {:.1e}  {} s/step  {} left{memory}",
            status.smoothed,
            status.report.learning_rate,
            seconds(status.step_time),
            duration(status.remaining()),
        );
        self.show([step, status.steps], message, step == status.steps);
    }

    fn is_cancelled(&self) -> bool {
        self.cancel.is_set()
    }
}

impl JobWatcher for Display {
    fn encoding(&mut self, stage: EncodingStage, done: usize, total: usize) {
        let what = match stage {
            EncodingStage::Texts => "encoding captions",
            EncodingStage::Images => "encoding images",
        };
        self.show([done as u64, total as u64], what.into(), done == total);
    }

    fn note(&mut self, text: &str) {
        self.tell(text);
    }

    fn starting(&mut self, step: u64) {
        self.first = step;
        self.last_line = None;
        if step > 0 {
            self.tell(&format!("continuing after step {step}"));
        }
    }

    fn sampled(&mut self, step: u64, sheet: Result<PathBuf>) -> Result<()> {
        self.tell(&format!("samples of step {step}: `{}`", sheet?.display()));
        Ok(())
    }
}

fn seconds(time: Duration) -> String {
    match time.as_secs_f64() {
        seconds if seconds < 1.0 => format!("{seconds:.3}"),
        seconds => format!("{seconds:.1}"),
    }
}

/// A time in hours and minutes, or in minutes and seconds.
fn duration(time: Duration) -> String {
    let seconds = time.as_secs();
    match (seconds / 3600, seconds / 60 % 60, seconds % 60) {
        (0, 0, seconds) => format!("{seconds} s"),
        (0, minutes, seconds) => format!("{minutes} min {seconds} s"),
        (hours, minutes, _) => format!("{hours} h {minutes} min"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_told_in_two_units() {
        let told = [59, 61, 7260].map(|seconds| duration(Duration::from_secs(seconds)));
        assert_eq!(told, ["59 s", "1 min 1 s", "2 h 1 min"]);
        assert_eq!(seconds(Duration::from_millis(72)), "0.072");
    }
}
