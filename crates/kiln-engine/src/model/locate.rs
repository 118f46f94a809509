//! Finds out what a path refers to: a folder, a packed model, a manifest or a transformer.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kiln_weights::{Component, WeightSource};

use super::component::SourceCache;
use super::component_paths::ComponentPaths;
use super::manifest;
use super::search::{quoted_names, weight_files};
use crate::error::{Error, Result};

/// What a path refers to.
pub(super) enum Located {
    /// A folder in the diffusers layout.
    Folder(PathBuf),
    /// A whole model in one file.
    Packed(Arc<WeightSource>),
    /// A `model.toml`, and the components it names.
    Manifest(PathBuf, ComponentPaths),
    /// A transformer.
    Transformer(PathBuf),
    /// A folder with components in separate files, for a transformer that the user names.
    Components(PathBuf),
}

const INDEX: &str = "model_index.json";
const MANIFEST: &str = "model.toml";

/// Finds out what `path` refers to. With `transformer_named`, the choice among several transformers is made already.
pub(super) fn locate(path: &Path, transformer_named: bool, sources: &SourceCache) -> Result<Located> {
    if path.is_file() {
        return locate_file(path, sources);
    }
    let folder = cache_snapshot(path)?.unwrap_or_else(|| path.to_path_buf());
    if folder.join(INDEX).is_file() {
        return Ok(Located::Folder(folder));
    }
    if folder.join(MANIFEST).is_file() {
        return read_manifest(&folder.join(MANIFEST));
    }
    if transformer_named && folder.is_dir() {
        return Ok(Located::Components(folder));
    }
    let mut transformers = Vec::new();
    for file in weight_files(&folder) {
        // Unreadable files are skipped; if nothing else is there, the error is about the folder.
        let components = sources.open(&file).map(|source| source.components()).unwrap_or_default();
        if components.iter().any(|(component, _)| *component == Component::Transformer) {
            transformers.push(file);
        }
    }
    match &transformers[..] {
        [one] => Ok(Located::Transformer(one.clone())),
        // Reading the folder reports what is missing.
        [] => Ok(Located::Folder(folder)),
        several => Err(Error::config(
            &folder,
            format!("there are several transformers in it: {}", quoted_names(several)),
        )),
    }
}

fn locate_file(path: &Path, sources: &SourceCache) -> Result<Located> {
    if path.extension().is_some_and(|e| e.eq_ignore_ascii_case("toml")) {
        return read_manifest(path);
    }
    let source = sources.open(path)?;
    if source.metadata().contains_key(INDEX) {
        Ok(Located::Packed(source))
    } else {
        Ok(Located::Transformer(path.to_path_buf()))
    }
}

fn read_manifest(file: &Path) -> Result<Located> {
    Ok(Located::Manifest(file.to_path_buf(), manifest::read(file)?))
}

/// Returns the snapshot inside a folder of the Hugging Face cache: the one that `refs/main` names, or the only one.
fn cache_snapshot(path: &Path) -> Result<Option<PathBuf>> {
    let snapshots = path.join("snapshots");
    if !snapshots.is_dir() || path.join(INDEX).is_file() {
        return Ok(None);
    }
    // The downloaded name must not lead out of the folder.
    let main = fs::read_to_string(path.join("refs/main")).unwrap_or_default();
    let main = main.trim();
    if !main.is_empty() && main.bytes().all(|b| b.is_ascii_alphanumeric()) && snapshots.join(main).is_dir() {
        return Ok(Some(snapshots.join(main)));
    }
    let entries = fs::read_dir(&snapshots)
        .map_err(|source| kiln_nn::Error::Read { file: snapshots.clone(), source })?;
    let mut folders: Vec<PathBuf> = entries.flatten().map(|e| e.path()).filter(|p| p.is_dir()).collect();
    folders.sort();
    match &folders[..] {
        [] => Err(Error::config(path, "there is no snapshot in it: the download is not finished")),
        [one] => Ok(Some(one.clone())),
        several => Err(Error::config(
            path,
            format!("there are several snapshots in it: {}; name one of them", quoted_names(several)),
        )),
    }
}
