//! The log of a training: one JSON object per step, and the same numbers for TensorBoard.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::tensorboard::EventFile;
use crate::{Error, Result, StepReport};

/// One line of the log.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LogLine {
    /// The step, counted from 1.
    pub step: u64,
    /// The loss of the step.
    pub loss: f32,
    /// The smoothed loss.
    pub smoothed: f32,
    /// The learning rate.
    pub learning_rate: f32,
    /// Norm of the gradient before clipping.
    pub grad_norm: f32,
    /// How long the step took.
    pub seconds: f32,
}

/// Writes the log.
pub struct Log {
    path: PathBuf,
    file: File,
    events: Option<EventFile>,
}

impl Log {
    /// Opens the log of a training that continues after `step`: later lines, of steps that were not saved, are removed.
    pub fn open(path: &Path, step: u64, tensorboard: Option<&Path>) -> Result<Log> {
        let kept: String = match fs::read_to_string(path) {
            Ok(text) if step > 0 => {
                let is_kept =
                    |line: &&str| serde_json::from_str::<LogLine>(line).is_ok_and(|line| line.step <= step);
                text.lines().filter(is_kept).map(|line| format!("{line}\n")).collect()
            }
            _ => String::new(),
        };
        kiln_base::write_atomic(path, kept.as_bytes()).map_err(Error::io("write", path))?;
        let file = OpenOptions::new().append(true).open(path).map_err(Error::io("write", path))?;
        let events = tensorboard.map(EventFile::create).transpose()?;
        Ok(Log { path: path.to_owned(), file, events })
    }

    /// Reads the lines of a log.
    pub fn read(path: &Path) -> Vec<LogLine> {
        let text = fs::read_to_string(path).unwrap_or_default();
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    /// Adds a step.
    pub fn add(&mut self, report: &StepReport, smoothed: f32, seconds: f32) -> Result<()> {
        let StepReport { step, loss, grad_norm, learning_rate } = *report;
        let line = LogLine { step, loss, smoothed, learning_rate, grad_norm, seconds };
        let text = serde_json::to_string(&line).unwrap_or_default();
        writeln!(self.file, "{text}").map_err(Error::io("write", &self.path))?;
        if let Some(events) = &mut self.events {
            let values = [
                ("loss", loss),
                ("loss/smoothed", smoothed),
                ("learning_rate", learning_rate),
                ("grad_norm", grad_norm),
                ("seconds", seconds),
            ];
            events.scalars(step, &values).map_err(Error::io("write", &self.path))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_resumed_log_has_every_step_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log.jsonl");
        let report = |step| StepReport { step, loss: 0.5, grad_norm: 1.0, learning_rate: 1e-4 };
        let mut log = Log::open(&path, 0, None).unwrap();
        (1..=5).for_each(|step| log.add(&report(step), 0.5, 0.1).unwrap());
        drop(log);
        let mut log = Log::open(&path, 3, Some(&folder.path().join("tensorboard"))).unwrap();
        log.add(&report(4), 0.5, 0.1).unwrap();
        assert_eq!(Log::read(&path).iter().map(|line| line.step).collect::<Vec<_>>(), [1, 2, 3, 4]);
        assert!(fs::read_dir(folder.path().join("tensorboard")).unwrap().count() == 1);
        drop(log);
        Log::open(&path, 0, None).unwrap();
        assert!(Log::read(&path).is_empty());
    }
}
