//! What `kiln convert` and `kiln quantize` share: progress and cancellation.

use std::io::{self, IsTerminal};

use indicatif::{ProgressBar, ProgressStyle};
use kiln_catalog::export::ExportWatcher;

use crate::cancel::CancelFlag;

/// Returns the number of threads to use: the given one, or all the machine has.
pub fn threads(number: Option<u32>) -> usize {
    let all = || std::thread::available_parallelism().ok().map(usize::from);
    number.map(|n| n as usize).or_else(all).unwrap_or(1)
}

/// Shows the progress of an export and cancels it on Ctrl-C.
pub struct ExportProgress {
    display: Display,
    cancel: CancelFlag,
}

/// A bar on a terminal, else a line per tenth of the tensors.
enum Display {
    Silent,
    Bar(ProgressBar),
    Lines,
}

impl ExportProgress {
    pub fn new(quiet: bool) -> ExportProgress {
        let display = if quiet {
            Display::Silent
        } else if io::stderr().is_terminal() {
            let style =
                ProgressStyle::with_template("{bar:20.cyan/dim} {elapsed:>4}, {eta} left  {wide_msg}");
            let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
            Display::Bar(ProgressBar::new(1).with_style(style).with_message("writing"))
        } else {
            Display::Lines
        };
        ExportProgress { display, cancel: CancelFlag::install_polled() }
    }

    /// Removes the bar.
    pub fn finish(&self) {
        if let Display::Bar(bar) = &self.display {
            bar.finish_and_clear();
        }
    }
}

impl ExportWatcher for ExportProgress {
    /// Shows that `done` of `total` tensors are written. After Ctrl-C it cancels the export.
    fn update(&self, done: usize, total: usize) -> kiln_weights::Result<()> {
        match &self.display {
            Display::Bar(bar) => {
                bar.set_length(total as u64);
                bar.set_position(done as u64);
            }
            Display::Lines if done * 10 / total > (done - 1) * 10 / total => {
                self.message(&format!("{done} of {total} tensors"));
            }
            Display::Silent | Display::Lines => {}
        }
        if self.cancel.is_set() { Err(kiln_weights::Error::Cancelled) } else { Ok(()) }
    }

    /// Prints a line, unless quiet.
    fn message(&self, text: &str) {
        if !matches!(self.display, Display::Silent) {
            crate::terminal::tell(text);
        }
    }

    fn is_cancelled(&self) -> bool {
        self.cancel.is_set()
    }
}
