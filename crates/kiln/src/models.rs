//! The models that `-m` names, with the folder and the default model of the user's settings.

use std::path::{Path, PathBuf};

use kiln_catalog::{ModelFolders, ModelLocation};
use kiln_engine::Model;
use kiln_weights::Component;

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

/// Refuses a model of which several files could be a component, for commands that have no option to name one. With
/// `vae_given`, its VAE is not used.
pub fn refuse_ambiguous(model: &Model, vae_given: bool) -> Result<(), CliError> {
    let mut ambiguous = model.ambiguous.iter();
    match ambiguous.find(|(component, _)| !(vae_given && *component == Component::Vae)) {
        None => Ok(()),
        Some((component, files)) => {
            let files: Vec<String> = files.iter().map(|file| format!("`{}`", file.display())).collect();
            let (path, files) = (model.path.display(), files.join(", "));
            Err(CliError::new(format!("several files could be the {component} of `{path}`: {files}"))
                .hint("name the model's files in a model.toml"))
        }
    }
}
