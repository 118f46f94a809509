//! What a path is: a folder, a file that holds a whole model, a set of parts, a transformer.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kiln_weights::{Component, WeightSource};

use super::part::Opened;
use super::parts::Parts;
use super::{beside, set};
use crate::error::{Error, Result};

/// What a path turned out to be.
pub(super) enum Located {
    /// A folder in diffusers' layout.
    Folder(PathBuf),
    /// A whole model in one file.
    Packed(Arc<WeightSource>),
    /// A list of parts, and the file it stands in.
    Set(PathBuf, Parts),
    /// A transformer.
    Transformer(PathBuf),
}

const INDEX: &str = "model_index.json";
const SET: &str = "model.toml";

pub(super) fn locate(path: &Path, opened: &Opened) -> Result<Located> {
    if path.is_file() {
        return file(path, opened);
    }
    let folder = snapshot(path)?.unwrap_or_else(|| path.to_path_buf());
    if folder.join(INDEX).is_file() {
        return Ok(Located::Folder(folder));
    }
    if folder.join(SET).is_file() {
        return set(&folder.join(SET));
    }
    let mut transformers = Vec::new();
    for file in beside::weight_files(&folder) {
        // What can't be read is none; should nothing else be there, the folder is told of.
        let parts = opened.source(&file).map(|source| source.components()).unwrap_or_default();
        if parts.iter().any(|(part, _)| *part == Component::Transformer) {
            transformers.push(file);
        }
    }
    match &transformers[..] {
        [one] => Ok(Located::Transformer(one.clone())),
        // The reader of folders says what is missing.
        [] => Ok(Located::Folder(folder)),
        several => Err(Error::config(
            &folder,
            format!("there are several transformers in it: {}; name one of them", beside::names(several)),
        )),
    }
}

fn file(path: &Path, opened: &Opened) -> Result<Located> {
    if path.extension().is_some_and(|e| e.eq_ignore_ascii_case("toml")) {
        return set(path);
    }
    let source = opened.source(path)?;
    match source.metadata().contains_key(INDEX) {
        true => Ok(Located::Packed(source)),
        false => Ok(Located::Transformer(path.to_path_buf())),
    }
}

fn set(file: &Path) -> Result<Located> {
    Ok(Located::Set(file.to_path_buf(), set::read(file)?))
}

/// The files behind a folder of the Hugging Face cache: the snapshot that `refs/main` names, or the only one.
fn snapshot(path: &Path) -> Result<Option<PathBuf>> {
    let snapshots = path.join("snapshots");
    if !snapshots.is_dir() || path.join(INDEX).is_file() {
        return Ok(None);
    }
    // A name is a plain one: the file was downloaded, and must not lead anywhere else.
    let main = fs::read_to_string(path.join("refs/main")).unwrap_or_default();
    let main = main.trim();
    if !main.is_empty() && main.bytes().all(|b| b.is_ascii_alphanumeric()) && snapshots.join(main).is_dir() {
        return Ok(Some(snapshots.join(main)));
    }
    let entries = fs::read_dir(&snapshots)
        .map_err(|source| kiln_model::Error::Read { file: snapshots.clone(), source })?;
    let mut folders: Vec<PathBuf> = entries.flatten().map(|e| e.path()).filter(|p| p.is_dir()).collect();
    folders.sort();
    match &folders[..] {
        [] => Err(Error::config(path, "there is no snapshot in it: the download was not finished")),
        [one] => Ok(Some(one.clone())),
        several => Err(Error::config(
            path,
            format!("there are several snapshots in it: {}; name one of them", beside::names(several)),
        )),
    }
}
