//! A part of a model: its configuration, and its weights, opened once.

use std::cell::RefCell;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kiln_weights::{Component, WeightSource};

use crate::error::{Error, Result};
use crate::lazy::Lazy;

/// A part of a model: where it is, how it is configured, and its weights.
#[derive(Debug)]
pub struct Part<C> {
    /// Its folder or file; in a packed model, the path it would have.
    pub path: PathBuf,
    /// Its `config.json`, or what its tensors tell.
    pub config: C,
    component: Component,
    /// The file it shares with the other parts.
    packed: Option<Arc<WeightSource>>,
    weights: Lazy<WeightSource>,
    fingerprint: Lazy<String>,
}

impl<C> Part<C> {
    /// A part whose files are opened when they are first needed.
    pub(super) fn at(path: PathBuf, config: C, component: Component) -> Part<C> {
        Part { path, config, component, packed: None, weights: Lazy::new(), fingerprint: Lazy::new() }
    }

    /// A part of a file that holds a whole model; the last name of `path` is its own there.
    pub(super) fn packed(
        file: &Arc<WeightSource>,
        path: PathBuf,
        config: C,
        component: Component,
    ) -> Part<C> {
        Part { packed: Some(Arc::clone(file)), ..Part::at(path, config, component) }
    }

    /// A part whose weights are open.
    pub fn open(path: PathBuf, config: C, component: Component, weights: WeightSource) -> Part<C> {
        Part { weights: Lazy::from(weights), ..Part::at(path, config, component) }
    }

    /// Its weights, under the model's names for them. The files are opened the first time.
    pub fn weights(&self) -> Result<&WeightSource> {
        self.weights.get(|| {
            let source = match &self.packed {
                None => WeightSource::open(&self.path)?,
                Some(file) => {
                    let name = self.path.file_name().unwrap_or_default().to_string_lossy();
                    let missing =
                        || Error::config(file.path(), format!("it has no tensors named `{name}.…`"));
                    file.part(&name).ok_or_else(missing)?
                }
            };
            // Weights that can't be recognised are refused tensor by tensor when they are loaded.
            Ok(source.component(self.component)?.unwrap_or(source))
        })
    }

    /// Identity of its weights, for recipes.
    pub fn fingerprint(&self) -> Result<&str> {
        Ok(self.fingerprint.get(|| Ok::<_, Error>(self.weights()?.fingerprint()?))?.as_str())
    }

    /// Bytes of its files; 0 where they can't be read.
    pub fn file_bytes(&self) -> u64 {
        let Ok(source) = self.weights() else { return 0 };
        source.files().filter_map(|file| Some(file.metadata().ok()?.len())).sum()
    }
}

/// Files that were opened while a model is put together: each is opened once, however often it is looked into.
#[derive(Default)]
pub(super) struct Opened {
    files: RefCell<HashMap<PathBuf, Arc<WeightSource>>>,
}

impl Opened {
    /// The file or folder at `path`.
    pub fn source(&self, path: &Path) -> Result<Arc<WeightSource>> {
        if let Some(source) = self.files.borrow().get(path) {
            return Ok(Arc::clone(source));
        }
        let source = Arc::new(WeightSource::open(path)?);
        self.files.borrow_mut().insert(path.to_path_buf(), Arc::clone(&source));
        Ok(source)
    }

    /// A part of the file at `path`; `None` when it has no such part.
    pub fn component(&self, path: &Path, component: Component) -> Result<Option<WeightSource>> {
        Ok(self.source(path)?.component(component)?)
    }

    /// [`Opened::component`] of a file that must have this part.
    pub fn expect(&self, path: &Path, component: Component) -> Result<WeightSource> {
        let source = self.source(path)?;
        let missing = || kiln_weights::Error::OtherComponent {
            file: source.path().to_path_buf(),
            component,
            found: source.describe(),
        };
        Ok(source.component(component)?.ok_or_else(missing)?)
    }
}
