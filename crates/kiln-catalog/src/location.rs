//! Where a model is, and how it is opened from there.

use std::path::{Path, PathBuf};

use kiln_engine::{ComponentPaths, Field, Model, hint};
use kiln_weights::WeightSource;

use crate::error::{Error, Result};
use crate::open::{open_delta, open_with, opened};
use crate::{cache, ember};

/// Where an existing model is.
#[derive(Clone, Debug, PartialEq)]
pub enum ModelLocation {
    /// Ember, in the binary.
    BuiltIn,
    /// Ember's undistilled variant, in the binary.
    BuiltInBase,
    /// In the models folder or the Hugging Face cache, under this name.
    Named {
        /// Its shortest name.
        name: String,
        /// Its file or folder.
        path: PathBuf,
    },
    /// At a path that was given as such.
    Path(PathBuf),
}

impl ModelLocation {
    /// Opens the model: reads its configuration.
    pub fn open(&self) -> Result<Model> {
        self.open_with(&ComponentPaths::default())
    }

    /// Opens the model with some components from elsewhere.
    pub fn open_with(&self, components: &ComponentPaths) -> Result<Model> {
        let model = match self {
            ModelLocation::Named { name, path } => open_with(path, &cache::with_companions(name, components)),
            ModelLocation::Path(path) => open_with(path, components),
            ModelLocation::BuiltIn | ModelLocation::BuiltInBase if !components.is_empty() => {
                Err(Error::usage(
                    "the built-in model can't be combined with components of another model",
                    hint!["choose a model with ", Field::Model; "give its transformer with ", Field::Transformer],
                ))
            }
            ModelLocation::BuiltIn => {
                let source = WeightSource::from_bytes(ember::NAME, ember::file().unwrap_or_default());
                let model = source.map_err(kiln_engine::Error::from).and_then(Model::from_packed);
                opened(model, "opening the built-in model", None).map(ember::with_vocabulary)
            }
            ModelLocation::BuiltInBase => {
                match WeightSource::from_bytes(ember::BASE, ember::base_file().unwrap_or_default()) {
                    Ok(delta) => open_delta(&delta, components),
                    Err(error) => opened(Err(error.into()), "opening the built-in model", None),
                }
            }
        };
        let mut model = model?;
        model.name = self.name();
        Ok(model)
    }

    /// Returns the path, unless it is a built-in model.
    pub fn path(&self) -> Option<&Path> {
        match self {
            ModelLocation::BuiltIn | ModelLocation::BuiltInBase => None,
            ModelLocation::Named { path, .. } | ModelLocation::Path(path) => Some(path),
        }
    }

    /// Returns whether it is a whole model: a folder with an index or a manifest, a manifest, or a packed file.
    pub fn is_whole_model(&self) -> bool {
        const INDEX: &str = "model_index.json";
        let Some(path) = self.path() else { return true };
        if path.is_dir() {
            return [INDEX, "model.toml", "snapshots"].iter().any(|name| path.join(name).exists());
        }
        let is_packed = || WeightSource::open(path).is_ok_and(|file| file.metadata().contains_key(INDEX));
        path.extension().is_some_and(|e| e.eq_ignore_ascii_case("toml")) || is_packed()
    }

    /// Returns the name, unless the model was given by path.
    pub fn name(&self) -> Option<String> {
        match self {
            ModelLocation::BuiltIn => Some(ember::NAME.into()),
            ModelLocation::BuiltInBase => Some(ember::BASE.into()),
            ModelLocation::Named { name, .. } => Some(name.clone()),
            ModelLocation::Path(_) => None,
        }
    }
}
