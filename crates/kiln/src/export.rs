//! What `kiln convert` and `kiln quantize` share: progress, cancellation, the report, and writing a folder atomically.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};

use indicatif::{ProgressBar, ProgressStyle};
use kiln_base::TemporaryFolder;
use kiln_tensor::packed::Format;
use kiln_weights::quantize::{LayerGroup, Report};

use crate::cancel::CancelFlag;
use crate::error::CliError;
use crate::properties::Properties;
use crate::values::{bytes, count};

const CHECK_DISK: &str = "check that the disk is not full and the folder is writable";

/// Returns the number of threads to use: the given one, or all the machine has.
pub fn threads(number: Option<u32>) -> usize {
    let all = || std::thread::available_parallelism().ok().map(usize::from);
    number.map(|n| n as usize).or_else(all).unwrap_or(1)
}

/// Shows the progress of an export and cancels it on Ctrl-C.
pub struct ExportProgress {
    display: Display,
    pub cancel: CancelFlag,
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
        ExportProgress { display, cancel }
    }

    /// Shows that `done` of `total` tensors are written. After Ctrl-C it cancels the export.
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
        if self.cancel.is_set() { Err(kiln_weights::Error::Cancelled) } else { Ok(()) }
    }

    /// Prints a line, unless quiet.
    pub fn message(&self, text: &str) {
        if !matches!(self.display, Display::Silent) {
            crate::terminal::tell(text);
        }
    }

    /// Removes the bar and returns the export's result.
    pub fn finish<T>(&self, result: kiln_weights::Result<T>) -> Result<T, CliError> {
        if let Display::Bar(bar) = &self.display {
            bar.finish_and_clear();
        }
        result.map_err(|error| match error {
            kiln_weights::Error::Io { doing: "write", .. } => CliError::from(error).hint(CHECK_DISK),
            error => error.into(),
        })
    }
}

/// A new folder that gets its name with [`commit`](AtomicFolder::commit). Dropped before, it leaves nothing behind.
pub struct AtomicFolder {
    /// Next to the final path, so that a rename moves it there.
    temporary: TemporaryFolder,
    target: PathBuf,
}

impl AtomicFolder {
    /// Starts a folder that will be named `path`, which must not exist.
    pub fn create(path: &Path) -> Result<AtomicFolder, CliError> {
        let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let temporary = TemporaryFolder::create(parent).map_err(|e| {
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
        // Temporary folders are private; this one becomes a normal folder.
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            fs::set_permissions(self.path(), fs::Permissions::from_mode(0o755))
                .map_err(|e| write_error(&self.target, &e))?;
        }
        if self.target.symlink_metadata().is_ok() {
            // By another process, meanwhile.
            return Err(CliError::new(format!("`{}` exists already", self.target.display()))
                .hint("another program made it meanwhile: choose another OUT"));
        }
        let AtomicFolder { temporary, target } = self;
        temporary.rename(&target).map_err(|e| write_error(&target, &e))
    }
}

/// Returns the report's properties; `asked` is the type that the layers were to be quantized to.
pub fn report_properties(out: &Path, report: &Report, asked: Option<&str>) -> Properties {
    let [before, after] = report.bytes;
    let changed: usize = report.changed.values().sum();
    let mut properties = Properties::default()
        .with("path", out.display().to_string())
        .with_amount("bytes_before", before, bytes(before))
        .with_amount("bytes_after", after, bytes(after))
        .with("tensors_kept", report.copied - changed);
    if changed > 0 {
        let lines = report.changed.iter();
        let lines = lines.fold(Properties::verbatim(), |lines, ((from, to), count)| {
            lines.with(format!("{} to {}", type_name(from), type_name(to)), count)
        });
        properties = properties.with_group("tensors_changed", lines);
    }
    if let Some(asked) = asked {
        let layers = report.layers.iter();
        let layers = layers.fold(Properties::verbatim(), |all, (storage, n)| all.with(type_name(storage), n));
        properties = properties.with("asked_for", asked).with_group("layers", layers);
    }
    let mut groups = BTreeMap::<&str, Properties>::new();
    for LayerGroup { name, storage, layers, weights, error } in &report.groups {
        let layers = Properties::default()
            .with("layers", layers)
            .with_amount("weights", *weights, count(*weights))
            .with("relative_error", (error * 1e6).round() / 1e6);
        let group = groups.entry(type_name(storage)).or_insert_with(Properties::verbatim_group);
        let before = std::mem::replace(group, Properties::verbatim_group());
        *group = before.with_group(name, layers);
    }
    groups.into_iter().fold(properties, |properties, (name, group)| properties.with_group(name, group))
}

/// Returns the name of a storage type on the command line.
fn type_name(storage: &str) -> &str {
    if storage == Format::F8E4M3.name() { "fp8" } else { storage }
}

/// What OUT is, by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutKind {
    Safetensors,
    Gguf,
    Folder,
}

impl OutKind {
    /// Returns what `out` is, if it can be written: its own folder must exist, and it must not be a folder or device.
    pub fn check(out: &Path) -> Result<OutKind, CliError> {
        let kind = OutKind::of(out)?;
        let parent = out.parent().filter(|parent| !parent.as_os_str().is_empty());
        if let Some(parent) = parent.filter(|parent| !parent.is_dir()) {
            return Err(CliError::new(format!("there is no folder `{}`", parent.display()))
                .hint("create it, or choose another OUT"));
        }
        kiln_base::remove_stale(parent.unwrap_or(Path::new(".")));
        match out.metadata() {
            Ok(found) if kind != OutKind::Folder && !found.is_file() => {
                let what = if found.is_dir() { "a folder" } else { "not a regular file" };
                Err(CliError::new(format!("`{}` is {what}", out.display())).hint("choose another OUT"))
            }
            _ if kind == OutKind::Folder && out.symlink_metadata().is_ok() => {
                Err(CliError::new(format!("`{}` exists already", out.display()))
                    .hint("give a folder that does not exist yet, or a .safetensors or .gguf file"))
            }
            _ => Ok(kind),
        }
    }

    /// A name without an extension is a folder's, and so is one like `flux.2`.
    fn of(out: &Path) -> Result<OutKind, CliError> {
        let text = out.to_string_lossy();
        if text.ends_with(std::path::is_separator) {
            return Ok(OutKind::Folder);
        }
        let extension = out.extension().map(|e| e.to_string_lossy().to_lowercase());
        match extension.as_deref() {
            Some("safetensors" | "sft") => Ok(OutKind::Safetensors),
            Some("gguf") => Ok(OutKind::Gguf),
            None if text != "-" => Ok(OutKind::Folder),
            Some(version) if version.starts_with(|c: char| c.is_ascii_digit()) => Ok(OutKind::Folder),
            _ => Err(CliError::usage(format!(
                "can't write `{text}`: Kiln writes .safetensors and .gguf files, and folders"
            ))
            .hint("end OUT in .safetensors or .gguf; a folder's name has no extension, or ends in `/`")),
        }
    }
}

/// Refuses to write over a file that is read.
pub fn refuse_input<'p>(out: &Path, read: impl IntoIterator<Item = &'p Path>) -> Result<(), CliError> {
    match read.into_iter().find(|file| is_same_file(file, out)) {
        None => Ok(()),
        Some(file) => Err(CliError::new(format!(
            "`{}` is `{}`, a file of the input: it would be overwritten",
            out.display(),
            file.display()
        ))
        .hint("choose another OUT")),
    }
}

/// Returns whether two paths lead to the same file, also through links.
fn is_same_file(a: &Path, b: &Path) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        if let (Ok(a), Ok(b)) = (fs::metadata(a), fs::metadata(b)) {
            return (a.dev(), a.ino()) == (b.dev(), b.ino());
        }
    }
    matches!((fs::canonicalize(a), fs::canonicalize(b)), (Ok(a), Ok(b)) if a == b)
}

pub fn read_error(path: &Path, error: &io::Error) -> CliError {
    CliError::new(format!("can't read `{}`: {error}", path.display())).hint("check that the file is readable")
}

pub fn write_error(path: &Path, error: &io::Error) -> CliError {
    CliError::new(format!("can't write `{}`: {error}", path.display())).hint(CHECK_DISK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_two_folders_of_one_name_the_first_stays() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("model");
        let [first, second] = ["first", "second"].map(|text| {
            let folder = AtomicFolder::create(&target).unwrap();
            fs::write(folder.path().join("a"), text).unwrap();
            folder
        });
        first.commit().unwrap();
        assert!(second.commit().unwrap_err().message.contains("exists already"));
        assert_eq!(fs::read_to_string(target.join("a")).unwrap(), "first");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn the_extension_tells_what_is_written() {
        let of = |out: &str| OutKind::of(Path::new(out)).ok();
        for file in ["a.safetensors", "a.SFT", "flux.2.safetensors"] {
            assert_eq!(of(file), Some(OutKind::Safetensors), "{file}");
        }
        assert_eq!(of("b/a.GGUF"), Some(OutKind::Gguf));
        for folder in ["a", "flux.2", "klein-1.5", "a.ckpt/", ".hidden"] {
            assert_eq!(of(folder), Some(OutKind::Folder), "{folder}");
        }
        for unknown in ["a.ckpt", "a.bin", "a.pt", "a.pth", "a.json", "-", "a."] {
            assert_eq!(of(unknown), None, "{unknown}");
        }
    }
}
