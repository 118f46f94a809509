//! What lies beside a file: the folders that programs keep parts of models in.

use std::path::{Path, PathBuf};

use kiln_weights::{Component, WeightSource};

use super::part::Opened;
use crate::error::{Error, Result};

/// Names of folders that parts are kept in, by diffusers and by ComfyUI.
const FOLDERS: [(Component, &[&str]); 2] =
    [(Component::TextEncoder, &["text_encoder", "text_encoders", "clip"]), (Component::Vae, &["vae"])];
/// Files of one folder that are looked at.
const MOST_FILES: usize = 200;

/// Looks for parts around a file.
pub(super) struct Search<'o> {
    file: PathBuf,
    opened: &'o Opened,
    /// Where it was looked so far.
    pub places: Vec<PathBuf>,
}

impl<'o> Search<'o> {
    pub fn new(file: &Path, opened: &'o Opened) -> Search<'o> {
        Search { file: file.to_path_buf(), opened, places: Vec::new() }
    }

    /// The one file that has this part and fits: in the file itself, its folder, or the folders beside it. `None` when there
    /// is none, and an error that names `option` when there are several.
    pub fn find(
        &mut self,
        component: Component,
        option: &str,
        fits: &dyn Fn(&WeightSource) -> bool,
    ) -> Result<Option<PathBuf>> {
        let opened = self.opened;
        let has = |file: &PathBuf| {
            let source = opened.component(file, component).ok()??;
            fits(&source).then_some(())
        };
        if has(&self.file).is_some() {
            return Ok(Some(self.file.clone()));
        }
        let own = if self.file.is_dir() {
            self.file.as_path()
        } else {
            self.file.parent().unwrap_or(Path::new(""))
        };
        let around = own.parent();
        let folders = FOLDERS.iter().find(|(c, _)| *c == component).map_or(&[][..], |(_, names)| names);
        let below = [Some(own), around].into_iter().flatten();
        let below = below.flat_map(|folder| folders.iter().map(|name| folder.join(name)));
        for place in std::iter::once(own.to_path_buf()).chain(below.collect::<Vec<_>>()) {
            let found: Vec<PathBuf> = weight_files(&place).into_iter().filter(|f| has(f).is_some()).collect();
            if !self.places.contains(&place) {
                self.places.push(place.clone());
            }
            match &found[..] {
                [] => {}
                [one] => return Ok(Some(one.clone())),
                several => {
                    let what = format!(
                        "several files could be its {component}: {}; name one with {option}",
                        names(several)
                    );
                    return Err(Error::config(&self.file, what));
                }
            }
        }
        Ok(None)
    }
}

impl Search<'_> {
    /// The folders called `name` of other models, where there was nothing nearer.
    pub fn elsewhere<'a>(
        &mut self,
        models: &'a [PathBuf],
        name: &'a str,
    ) -> impl Iterator<Item = PathBuf> + use<'a> {
        let folders = models.iter().map(move |model| model.join(name)).filter(|folder| folder.is_dir());
        self.places.extend(models.iter().filter(|model| model.join(name).is_dir()).cloned());
        self.places.dedup();
        folders
    }
}

/// Weight files of a folder, sorted: lists of shards, single files, no shards.
pub(super) fn weight_files(folder: &Path) -> Vec<PathBuf> {
    // `Path::new("")` is this folder to everything but the function that lists it.
    let listed = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let entries = std::fs::read_dir(listed).into_iter().flatten().flatten();
    let weights = |name: &str| {
        let shard = name.contains("-of-0");
        name.ends_with(".safetensors.index.json")
            || !shard && [".safetensors", ".gguf"].iter().any(|e| name.ends_with(e))
    };
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let mut files: Vec<PathBuf> = names.filter(|name| weights(name)).map(|name| folder.join(name)).collect();
    files.retain(|file| file.is_file());
    files.sort();
    files.truncate(MOST_FILES);
    files
}

/// The `tokenizer.json` that belongs to a text encoder's file or folder, if it lies beside it.
pub(super) fn tokenizer(of: &Path) -> Option<PathBuf> {
    let own = if of.is_dir() { Some(of) } else { of.parent() };
    let folders = [own, own.and_then(Path::parent)].into_iter().flatten();
    let places =
        folders.flat_map(|folder| [folder.join("tokenizer.json"), folder.join("tokenizer/tokenizer.json")]);
    // Of the folder around only the one meant for it: a loose file there may be anything's.
    places.enumerate().filter(|(i, _)| *i != 2).map(|(_, file)| file).find(|file| file.is_file())
}

/// File names for a message.
pub(super) fn names(files: &[PathBuf]) -> String {
    let names = files.iter().map(|f| format!("`{}`", f.file_name().unwrap_or_default().to_string_lossy()));
    names.collect::<Vec<_>>().join(", ")
}
