//! The models that `-m` names, with the folder and the default model of the user's settings.

use std::path::{Path, PathBuf};

use kiln_catalog::{ModelFolders, ModelLocation};

use crate::error::CliError;
use crate::settings;

/// Returns the folders with named models.
pub fn folders() -> ModelFolders {
    ModelFolders::new(settings::get().models_folder.clone())
}

/// Resolves a path or name; `None` is the built-in model.
pub fn resolve(model: Option<&Path>) -> Result<ModelLocation, CliError> {
    Ok(folders().resolve(model)?)
}

/// Returns the default model: the environment's, or that of the user's settings.
pub fn default_model() -> Option<PathBuf> {
    kiln_base::folders::from_env("KILN_MODEL").or_else(|| settings::get().model.clone())
}

/// Says where the default model is set.
pub fn default_source() -> String {
    match (kiln_base::folders::from_env("KILN_MODEL"), settings::file()) {
        (None, Some(file)) => format!("`model` in `{}`", file.display()),
        _ => "KILN_MODEL".into(),
    }
}
