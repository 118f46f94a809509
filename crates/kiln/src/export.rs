//! What `kiln convert` and `kiln quantize` share: progress, cancellation, the report, and writing a folder atomically.

use std::cell::Cell;
use std::fs;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};

use indicatif::{ProgressBar, ProgressStyle};
use kiln_weights::quantize::{LayerGroup, Report};
use tempfile::TempDir;

use crate::cancel::CancelFlag;
use crate::error::CliError;
use crate::properties::Properties;
use crate::values::{bytes, count};

/// Returns the number of threads to use: the given one, or all the machine has.
pub fn threads(number: Option<u32>) -> usize {
    let all = || std::thread::available_parallelism().ok().map(usize::from);
    number.map(|n| n as usize).or_else(all).unwrap_or(1)
}

/// Shows the progress of an export and cancels it on Ctrl-C.
pub struct ExportProgress {
    display: Display,
    pub cancel: CancelFlag,
    cancelled: Cell<bool>,
}

/// A bar on a terminal, else a line per tenth of the tensors.
enum Display {
    Silent,
    Bar(ProgressBar),
    Lines,
}

impl ExportProgress {
    pub fn new(quiet: bool, cancel: CancelFlag) -> ExportProgress {
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
        ExportProgress { display, cancel, cancelled: Cell::new(false) }
    }

    /// Shows that `done` of `total` tensors are written. After Ctrl-C it returns an error that only ends the export:
    /// [`finish`](ExportProgress::finish) replaces it.
    pub fn update(&self, done: usize, total: usize) -> kiln_weights::Result<()> {
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
        self.cancelled.set(self.cancel.is_set());
        if self.cancelled.get() {
            return Err(kiln_weights::Error::NotFound { path: PathBuf::new() });
        }
        Ok(())
    }

    /// Prints a line, unless quiet.
    pub fn message(&self, text: &str) {
        if !matches!(self.display, Display::Silent) {
            let _ = writeln!(io::stderr(), "{text}");
        }
    }

    /// Removes the bar and returns the export's result.
    pub fn finish<T>(&self, result: kiln_weights::Result<T>) -> Result<T, CliError> {
        if let Display::Bar(bar) = &self.display {
            bar.finish_and_clear();
        }
        if self.cancelled.get() { Err(CliError::cancelled()) } else { Ok(result?) }
    }
}

/// A new folder that gets its name with [`commit`](AtomicFolder::commit). Dropped before, it leaves nothing behind.
pub struct AtomicFolder {
    /// Next to the final path, so that a rename moves it there.
    temporary: TempDir,
    target: PathBuf,
}

impl AtomicFolder {
    /// Starts a folder that will be named `path`, which must not exist.
    pub fn create(path: &Path) -> Result<AtomicFolder, CliError> {
        let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let temporary = tempfile::Builder::new().prefix(".kiln-").suffix(".tmp").tempdir_in(parent);
        let temporary = temporary.map_err(|e| {
            CliError::new(format!("can't create a folder in `{}`: {e}", parent.display()))
                .hint("choose another OUT")
        })?;
        Ok(AtomicFolder { temporary, target: path.to_path_buf() })
    }

    /// Returns the folder to write to.
    pub fn path(&self) -> &Path {
        self.temporary.path()
    }

    /// Gives the folder its name.
    pub fn commit(self) -> Result<(), CliError> {
        let error = |e: io::Error| write_error(&self.target, &e);
        // Temporary folders are private; this one becomes a normal folder.
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            fs::set_permissions(self.path(), fs::Permissions::from_mode(0o755)).map_err(error)?;
        }
        fs::rename(self.path(), &self.target).map_err(error)?;
        // Renamed: nothing is left to remove.
        let _ = self.temporary.keep();
        Ok(())
    }
}

/// Returns the report's properties; `group` names the group of the rounded layers.
pub fn report_properties(out: &Path, report: &Report, group: &str) -> Properties {
    let [before, after] = report.bytes;
    let mut groups = Properties::default();
    for LayerGroup { name, layers, weights, error } in &report.groups {
        let layers = Properties::default()
            .with("layers", layers)
            .with_amount("weights", *weights, count(*weights))
            .with("relative_error", (error * 1e6).round() / 1e6);
        groups = groups.with_group(name, layers);
    }
    Properties::default()
        .with("path", out.display().to_string())
        .with_amount("bytes_before", before, bytes(before))
        .with_amount("bytes_after", after, bytes(after))
        .with("tensors_kept", report.copied)
        .with_group(group, groups)
}

/// Returns whether `out` names a file rather than a folder, by its extension.
pub fn is_weight_file(out: &Path) -> bool {
    let extension = out.extension().and_then(|e| e.to_str()).map(str::to_lowercase);
    matches!(extension.as_deref(), Some("gguf" | "safetensors"))
}

pub fn read_error(path: &Path, error: &io::Error) -> CliError {
    CliError::new(format!("can't read `{}`: {error}", path.display()))
}

pub fn write_error(path: &Path, error: &io::Error) -> CliError {
    CliError::new(format!("can't write `{}`: {error}", path.display()))
        .hint("check that the disk is not full and the folder is writable")
}
