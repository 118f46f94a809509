//! Finds the files that belong to a transformer: in its own file, in its folder, and in the folders in which diffusers
//! and ComfyUI keep the other components.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use kiln_weights::{Component, WeightSource};

use super::component::{ComponentConfig, ModelComponent, SourceCache, open_component};
use super::component_paths::ComponentPaths;
use crate::error::Result;

/// Maximum number of files inspected per folder.
const MAX_FILES: usize = 200;

/// A search for the other components of a transformer.
pub(super) struct ComponentSearch<'a> {
    /// The model that the user named, if it is another file or folder, and the transformer.
    near: Vec<&'a Path>,
    /// What to borrow components from, and which files to prefer.
    paths: &'a ComponentPaths,
    sources: &'a SourceCache,
    /// The folders searched so far.
    pub searched: Vec<PathBuf>,
    /// Components that several files could be.
    pub ambiguous: Vec<(Component, Vec<PathBuf>)>,
    /// Why files in those folders can't be used.
    pub unusable: BTreeSet<String>,
}

impl<'a> ComponentSearch<'a> {
    pub fn new(
        near: Vec<&'a Path>,
        paths: &'a ComponentPaths,
        sources: &'a SourceCache,
    ) -> ComponentSearch<'a> {
        let (searched, ambiguous, unusable) = (Vec::new(), Vec::new(), BTreeSet::new());
        ComponentSearch { near, paths, sources, searched, ambiguous, unusable }
    }

    /// Opens the component at `named` or, if no path is named, the first one that fits: near the model, then in the
    /// fallback models. `None` if there is none, or if several could be meant: a request may name another or need none.
    pub fn find<C: ComponentConfig>(
        &mut self,
        named: Option<&Path>,
        fits: impl Fn(&C) -> bool,
    ) -> Result<Option<ModelComponent<C>>> {
        if let Some(path) = named {
            return open_component(path, self.sources).map(Some);
        }
        let fits_source = |source: &WeightSource| C::from_tensors(source).is_some_and(|config| fits(&config));
        let nearby = self.find_nearby::<C>(fits_source);
        let preferred = nearby.iter().find(|file| self.paths.preferred.contains(file));
        match (&nearby[..], preferred) {
            ([], _) => {}
            ([file], _) | (_, Some(file)) => return open_component(file, self.sources).map(Some),
            (several, None) => {
                self.ambiguous.push((C::COMPONENT, several.to_vec()));
                return Ok(None);
            }
        }
        Ok(self.find_in_fallbacks(fits))
    }

    /// Opens the first component that fits, of the preferred files and of the fallback models.
    fn find_in_fallbacks<C: ComponentConfig>(
        &mut self,
        fits: impl Fn(&C) -> bool,
    ) -> Option<ModelComponent<C>> {
        let paths = self.paths;
        for path in paths.preferred.iter().chain(&paths.fallback_models) {
            let component = if path.is_file() {
                self.add_searched(path.parent().unwrap_or(path));
                // Files of other components are not even opened as this one.
                let has = self.sources.component(path, C::COMPONENT).is_ok_and(|found| found.is_some());
                if has { open_component::<C>(path, self.sources).ok() } else { None }
            } else if path.join(C::COMPONENT.folder()).is_dir() {
                self.add_searched(path);
                open_component::<C>(&path.join(C::COMPONENT.folder()), self.sources).ok()
            } else {
                None
            };
            if let Some(component) = component.filter(|component| fits(&component.config)) {
                return Some(component);
            }
        }
        None
    }

    /// Returns the files with a fitting component in the first place that has any: the model's own file, else its
    /// folder, else one of the component's usual folders inside or next to that.
    fn find_nearby<C: ComponentConfig>(&mut self, fits: impl Fn(&WeightSource) -> bool) -> Vec<PathBuf> {
        let sources = self.sources;
        let matches = |file: &Path| {
            let component = sources.component(file, C::COMPONENT);
            component.is_ok_and(|component| component.is_some_and(|source| fits(&source)))
        };
        // Of folders, only the transformer's own is one component; in others there may be several files.
        let is_own = |path: &Path| path.is_file() || self.near.last() == Some(&path);
        if let Some(own) = self.near.iter().find(|path| is_own(path) && matches(path)) {
            return vec![own.to_path_buf()];
        }
        let mut folders: Vec<PathBuf> = Vec::new();
        for path in &self.near {
            let own = if path.is_dir() { path } else { path.parent().unwrap_or(Path::new("")) };
            folders.push(own.to_path_buf());
            for parent in [Some(own), own.parent()].into_iter().flatten() {
                folders.push(parent.join(C::COMPONENT.folder()));
                folders.extend(C::COMFYUI_FOLDERS.iter().map(|name| parent.join(name)));
            }
        }
        for folder in folders {
            let mut found = weight_files(&folder);
            found.retain(|file| match sources.component(file, C::COMPONENT) {
                Ok(Some(source)) if fits(&source) => true,
                Ok(Some(source)) => {
                    let other = C::from_tensors(&source).map(|config| config.summary());
                    self.unusable.extend(other.map(|summary| format!("`{}` is {summary}", file.display())));
                    false
                }
                Ok(None) => false,
                Err(error) => {
                    self.unusable.insert(error.to_string());
                    false
                }
            });
            self.add_searched(&folder);
            if !found.is_empty() {
                return found;
            }
        }
        Vec::new()
    }

    fn add_searched(&mut self, folder: &Path) {
        let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
        if !self.searched.iter().any(|searched| searched == folder) {
            self.searched.push(folder.to_path_buf());
        }
    }
}

/// Lists the weight files of a folder, sorted: shard indices and single files, but no shards.
pub(super) fn weight_files(folder: &Path) -> Vec<PathBuf> {
    // `read_dir` does not accept the empty path, which stands for the current folder everywhere else.
    let listed = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let entries = std::fs::read_dir(listed).into_iter().flatten().flatten();
    let is_weight_file = |name: &str| {
        let shard = name.contains("-of-0");
        name.ends_with(".safetensors.index.json")
            || !shard && [".safetensors", ".sft", ".gguf"].iter().any(|e| name.ends_with(e))
    };
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let mut files: Vec<PathBuf> =
        names.filter(|name| is_weight_file(name)).map(|name| folder.join(name)).collect();
    files.retain(|file| file.is_file());
    files.sort();
    files.truncate(MAX_FILES);
    files
}

/// The names of tokenizer files: Hugging Face's and Mistral's.
pub(super) const TOKENIZERS: [&str; 2] = ["tokenizer.json", "tekken.json"];

/// Finds the tokenizer that belongs to a text encoder's file or folder.
pub(super) fn find_tokenizer(text_encoder: &Path) -> Option<PathBuf> {
    let own = if text_encoder.is_dir() { text_encoder } else { text_encoder.parent()? };
    let mut candidates = vec![own.join("tokenizer.json"), own.join("tokenizer/tokenizer.json")];
    // In the parent folder only `tokenizer/` counts: a loose `tokenizer.json` there may belong to any model.
    candidates.extend(own.parent().map(|parent| parent.join("tokenizer/tokenizer.json")));
    candidates.push(own.join(TOKENIZERS[1]));
    candidates.into_iter().find(|file| file.is_file())
}

/// File names for a message.
pub(super) fn quoted_names(files: &[PathBuf]) -> String {
    let names = files.iter().map(|f| format!("`{}`", f.file_name().unwrap_or_default().to_string_lossy()));
    names.collect::<Vec<_>>().join(", ")
}
