//! PEFT's `adapter_config.json` beside a LoRA file.
//!
//! It is certainly the LoRA's if the file is named `adapter_model`, if the user gave the folder, or if there are no other
//! weights in the folder. Otherwise it may be another file's: then it is not read, and [`super::Lora::notes`] tells.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::{LoraProblem, SettingsPlace};
use crate::{Error, Result, WeightSource, folder};

const CONFIG: &str = "adapter_config.json";
const MODEL: &str = "adapter_model";
/// The extensions of weights, in all formats.
const WEIGHTS: [&str; 7] = ["safetensors", "gguf", "bin", "pt", "pth", "ckpt", "sft"];
/// As many links as Linux follows.
const MAX_LINKS: usize = 40;

/// The `adapter_config.json` of a LoRA.
#[derive(Debug)]
pub(super) enum AdapterFile {
    /// There is none.
    Missing,
    /// Its path and text.
    Read(PathBuf, String),
    /// There is one that may be another file's.
    Unclear,
}

impl AdapterFile {
    /// The one beside an opened LoRA or, if that is a link, beside what the link leads to.
    pub fn find(source: &WeightSource) -> Result<AdapterFile> {
        let is_folder = source.path().is_dir();
        let mut found = AdapterFile::Missing;
        for file in source.files().next().map(links).unwrap_or_default() {
            let config = file.with_file_name(CONFIG);
            if !exists(&config)? {
                continue;
            }
            if is_folder || is_named_adapter(&file) || is_alone(&file) {
                return read(config, source.path());
            }
            found = AdapterFile::Unclear;
        }
        Ok(found)
    }
}

/// A file and, if it is a link, the files that it leads to, one after the other.
fn links(file: &Path) -> Vec<PathBuf> {
    let mut files = vec![file.to_owned()];
    while let Some(target) =
        files.last().and_then(|link| Some(link.with_file_name(fs::read_link(link).ok()?)))
        && files.len() <= MAX_LINKS
    {
        files.push(target);
    }
    files
}

/// Whether there is anything at this path, even a link that leads nowhere.
fn exists(path: &Path) -> Result<bool> {
    match fs::symlink_metadata(path) {
        Ok(_) => Ok(true),
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Ok(false),
        Err(source) => Err(Error::Io { doing: "read", file: path.to_owned(), source }),
    }
}

/// Whether it has the name that PEFT gives, also as a variant (`adapter_model.fp16.safetensors`) or a shard.
fn is_named_adapter(file: &Path) -> bool {
    let name = file.file_name().map(|name| name.to_string_lossy().to_lowercase()).unwrap_or_default();
    let stem = name.split('.').next().unwrap_or_default();
    stem == MODEL || stem.starts_with(MODEL) && folder::is_shard(stem)
}

/// Whether there are no other weights in its folder.
fn is_alone(file: &Path) -> bool {
    let is_weights = |path: &Path| {
        let extension = path.extension().map(|e| e.to_string_lossy().to_lowercase()).unwrap_or_default();
        WEIGHTS.contains(&extension.as_str())
    };
    let parent = file.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let others = |entry: io::Result<fs::DirEntry>| {
        entry.map_or(true, |e| is_weights(&e.path()) && Some(e.file_name().as_os_str()) != file.file_name())
    };
    fs::read_dir(parent).is_ok_and(|mut entries| !entries.any(others))
}

fn read(config: PathBuf, lora: &Path) -> Result<AdapterFile> {
    let unreadable = |source| Error::Io { doing: "read", file: config.clone(), source };
    // A pipe would wait forever.
    if !fs::metadata(&config).map_err(unreadable)?.is_file() {
        return Err(Error::NotAFile { file: config });
    }
    let bytes = fs::read(&config).map_err(unreadable)?;
    let text = std::str::from_utf8(bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&bytes));
    let text = text.map(str::to_owned).map_err(|_| {
        let settings = SettingsPlace::File(config.clone());
        let problem = LoraProblem::Metadata { settings, reason: "it is not UTF-8 text".into() };
        Error::Lora { file: lora.to_owned(), problem: Box::new(problem) }
    })?;
    Ok(AdapterFile::Read(config, text))
}
