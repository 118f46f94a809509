//! What `kiln convert` and `kiln quantize` share: progress and cancellation.

use kiln_catalog::export::ExportWatcher;

use crate::cancel::CancelFlag;
use crate::progress::TaskDisplay;

/// Returns the number of threads to use: the given one, or all the machine has.
pub fn threads(number: Option<u32>) -> usize {
    let all = || std::thread::available_parallelism().ok().map(usize::from);
    number.map(|n| n as usize).or_else(all).unwrap_or(1)
}

/// Shows the progress of an export and cancels it on Ctrl-C.
pub struct ExportProgress {
    display: TaskDisplay,
    cancel: CancelFlag,
}

impl ExportProgress {
    pub fn new(quiet: bool) -> ExportProgress {
        let display = TaskDisplay::new("{bar:20.cyan/dim} {elapsed:>4}, {eta} left  writing", quiet);
        ExportProgress { display, cancel: CancelFlag::install_polled() }
    }

    /// Removes the bar.
    pub fn finish(&self) {
        self.display.finish();
    }
}

impl ExportWatcher for ExportProgress {
    /// Shows that `done` of `total` tensors are written: on the bar, or as a line per tenth. After Ctrl-C it cancels the
    /// export.
    fn update(&self, done: usize, total: usize) -> kiln_weights::Result<()> {
        let bar = self.display.advance(done as u64, total as u64);
        if bar.is_none() && done * 10 / total > (done - 1) * 10 / total {
            self.message(&format!("{done} of {total} tensors"));
        }
        if self.cancel.is_set() { Err(kiln_weights::Error::Cancelled) } else { Ok(()) }
    }

    /// Prints a line, unless quiet.
    fn message(&self, text: &str) {
        self.display.tell(text);
    }

    fn is_cancelled(&self) -> bool {
        self.cancel.is_set()
    }
}
