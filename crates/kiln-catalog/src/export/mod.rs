//! Writes components of models with other names, types or formats: what `kiln convert` and `kiln quantize` do, without the
//! command line.

mod component;
mod folder;
mod quant_type;
mod quantize;
mod report;

use std::io;
use std::path::Path;

pub use component::{ConvertOptions, SourceComponent};
pub use quant_type::QuantType;
pub use quantize::{QuantizeOptions, quantize_model};
pub use report::report_properties;

use kiln_engine::{Explain, Field, hint};

use crate::error::{Error, Result};

const CHECK_DISK: &str = "check that the disk is not full and the folder is writable";

/// Watches an export, and can cancel it.
pub trait ExportWatcher {
    /// `done` of `total` tensors are written. [`kiln_weights::Error::Cancelled`] cancels the export.
    fn update(&self, done: usize, total: usize) -> kiln_weights::Result<()> {
        let _ = (done, total);
        Ok(())
    }

    /// Receives a message for the user.
    fn message(&self, text: &str) {
        let _ = text;
    }

    /// Whether to stop copying files.
    fn is_cancelled(&self) -> bool {
        false
    }
}

/// Watches nothing.
impl ExportWatcher for () {}

/// Adds what was being done; cancellation stays as it is.
fn with_context(error: kiln_engine::Error, doing: String) -> kiln_engine::Error {
    if error.is_cancelled() { error } else { kiln_engine::Error::Context { doing, source: Box::new(error) } }
}

fn opened<T, E: Into<kiln_engine::Error>>(
    result: std::result::Result<T, E>,
    doing: impl FnOnce() -> String,
) -> Result<T> {
    result.map_err(|error| Error::Open { source: Box::new(with_context(error.into(), doing())), hint: None })
}

/// What OUT is, by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutKind {
    /// A safetensors file.
    Safetensors,
    /// A GGUF file.
    Gguf,
    /// A folder.
    Folder,
}

impl OutKind {
    /// Returns what `out` is, if it can be written: its parent folder must exist, a file must not be a folder or
    /// device, and a folder must not exist yet.
    pub fn check(out: &Path) -> Result<OutKind> {
        let kind = OutKind::of(out)?;
        let parent = out.parent().filter(|parent| !parent.as_os_str().is_empty());
        if let Some(parent) = parent.filter(|parent| !parent.is_dir()) {
            return Err(Error::missing(
                format!("there is no folder `{}`", parent.display()),
                hint!["create it"; "choose another ", Field::Out],
            ));
        }
        kiln_base::remove_stale(parent.unwrap_or(Path::new(".")));
        match out.metadata() {
            Ok(found) if kind != OutKind::Folder && !found.is_file() => {
                let what = if found.is_dir() { "a folder" } else { "not a regular file" };
                Err(Error::missing(
                    format!("`{}` is {what}", out.display()),
                    hint!["choose another ", Field::Out],
                ))
            }
            _ if kind == OutKind::Folder && out.symlink_metadata().is_ok() => Err(Error::missing(
                format!("`{}` exists already", out.display()),
                "give a folder that does not exist yet, or a .safetensors or .gguf file",
            )),
            _ => Ok(kind),
        }
    }

    /// A name without an extension is a folder's, and so is one like `flux.2`.
    fn of(out: &Path) -> Result<OutKind> {
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
            _ => Err(Error::usage(
                format!("can't write `{text}`: Kiln writes .safetensors and .gguf files, and folders"),
                hint![
                    "end ",
                    Field::Out,
                    " in .safetensors or .gguf; a folder's name has no extension, or ends in `/`"
                ],
            )),
        }
    }
}

/// Refuses to write over a file that is read.
fn refuse_input<'p>(out: &Path, read: impl IntoIterator<Item = &'p Path>) -> Result<()> {
    match read.into_iter().find(|file| kiln_base::is_same_file(file, out)) {
        None => Ok(()),
        Some(file) => Err(Error::missing(
            format!(
                "`{}` is `{}`, a file of the input: it would be overwritten",
                out.display(),
                file.display()
            ),
            hint!["choose another ", Field::Out],
        )),
    }
}

fn read_error(path: &Path, error: &io::Error) -> Error {
    Error::missing(format!("can't read `{}`: {error}", path.display()), "check that the file is readable")
}

fn write_error(path: &Path, error: &io::Error) -> Error {
    Error::missing(format!("can't write `{}`: {error}", path.display()), CHECK_DISK)
}

#[cfg(test)]
mod tests {
    use super::*;

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
