//! Resolves the model that `-m` names: a path, the built-in model, one in the models folder, or a downloaded one.

use std::path::{Path, PathBuf};

use kiln_engine::{ComponentPaths, Model};
use kiln_weights::WeightSource;

use crate::error::{CliError, ErrorContext};
use crate::{ember, hints, hub};

/// The undistilled variant of Ember, which is not built in.
const EMBER_BASE: &str = "ember-base";
const EXTENSION: &str = ".safetensors";
/// The variable with a folder of models.
const FOLDER: &str = "KILN_MODELS";

/// Where an existing model is.
#[derive(Clone, Debug, PartialEq)]
pub enum ModelLocation {
    /// In the binary.
    BuiltIn,
    /// In the models folder or the Hugging Face cache, under this name.
    Named {
        name: String,
        path: PathBuf,
    },
    Path(PathBuf),
}

impl ModelLocation {
    /// Resolves a path or name; `None` is the built-in model.
    pub fn resolve(model: Option<&Path>) -> Result<ModelLocation, CliError> {
        match model {
            Some(model) => ModelLocation::resolve_in(model, &folders()),
            None if ember::file().is_some() => Ok(ModelLocation::BuiltIn),
            None => Err(CliError::usage("no model given").hint(format!(
                "this build has no built-in model (it lacks the feature `ember`); set -m, or the variable KILN_MODEL, \
                 to a folder with FLUX.2 [klein] in diffusers' layout{}",
                folders().first().map_or(String::new(), |f| format!(", or to a model in `{}`", f.display()))
            ))),
        }
    }

    fn resolve_in(model: &Path, folders: &[PathBuf]) -> Result<ModelLocation, CliError> {
        // First, so that a recipe means the same in every folder; `./ember` is a path.
        if model == Path::new(ember::NAME) && ember::file().is_some() {
            return Ok(ModelLocation::BuiltIn);
        }
        let name = model.to_str().filter(|name| !name.is_empty() && !name.contains(std::path::is_separator));
        if is_model(model) {
            return Ok(ModelLocation::Path(model.to_path_buf()));
        }
        let find_in = |folder: &PathBuf, name: &str| {
            let extensions = ["", EXTENSION, ".gguf", ".toml"].iter();
            extensions.map(|extension| folder.join(format!("{name}{extension}"))).find(|p| is_model(p))
        };
        let named = name.and_then(|name| Some((name, folders.iter().find_map(|f| find_in(f, name))?)));
        let named = named.map(|(name, path)| (name.strip_suffix(EXTENSION).unwrap_or(name).to_owned(), path));
        let pulled = || if model.exists() { None } else { hub::find_pulled(model) };
        match named.or_else(pulled) {
            Some((name, path)) => Ok(ModelLocation::Named { name, path }),
            None if model.exists() => {
                let problem = "is not a model folder: it has no `model_index.json`";
                Err(CliError::new(format!("`{}` {problem}", model.display())).hint(hints::not_a_model(model)))
            }
            None => Err(not_found(model, name, folders)),
        }
    }

    /// Lists every model that has a name. Names never lead outside the models folders and the Hugging Face cache.
    #[cfg(feature = "serve")]
    pub fn all() -> Vec<(String, ModelLocation)> {
        let folders = folders();
        let local = |name: String| {
            if name == ember::NAME && ember::file().is_some() {
                return Some((name, ModelLocation::BuiltIn));
            }
            let paths = folders.iter().flat_map(|f| [f.join(&name), f.join(format!("{name}{EXTENSION}"))]);
            let path = paths.into_iter().find(|path| is_model(path))?;
            Some((name.clone(), ModelLocation::Named { name, path }))
        };
        let pulled = hub::installed(false).into_iter().filter(|model| model.is_model && !model.incomplete);
        let pulled = pulled.filter_map(|model| hub::find_pulled(Path::new(&hub::short_name(&model.repo))));
        let pulled = pulled.map(|(name, path)| (name.clone(), ModelLocation::Named { name, path }));
        names(&folders).into_iter().filter_map(local).chain(pulled).collect()
    }

    /// Opens the model: reads its configuration.
    pub fn open(&self) -> Result<Model, CliError> {
        self.open_with(&ComponentPaths::default())
    }

    /// Opens the model with some components from elsewhere.
    pub fn open_with(&self, components: &ComponentPaths) -> Result<Model, CliError> {
        let model = match self {
            ModelLocation::Named { path, .. } | ModelLocation::Path(path) => {
                hints::open_model_with(path, components)
            }
            ModelLocation::BuiltIn if !components.is_empty() => {
                Err(CliError::usage("the built-in model can't be combined with components of another model")
                    .hint("choose a model with -m, or give its transformer with --transformer"))
            }
            ModelLocation::BuiltIn => {
                let source = WeightSource::from_bytes(ember::NAME, ember::file().unwrap_or_default());
                let model = source.map_err(kiln_engine::Error::from).and_then(Model::from_packed);
                model.with_context(|| "opening the built-in model".into())
            }
        };
        let mut model = model?;
        model.name = self.name();
        Ok(model)
    }

    /// Returns the path, unless it is the built-in model.
    pub fn path(&self) -> Option<&Path> {
        match self {
            ModelLocation::BuiltIn => None,
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
            ModelLocation::Named { name, .. } => Some(name.clone()),
            ModelLocation::Path(_) => None,
        }
    }
}

/// Returns the default model from the environment.
pub fn from_env() -> Option<PathBuf> {
    kiln_base::folders::from_env("KILN_MODEL")
}

/// Returns whether a path may be a model: any file, a folder of the Hugging Face cache, or a folder with an index or
/// weights. Files are not read; opening the model reports what is wrong with them.
fn is_model(path: &Path) -> bool {
    let weights = |name: &str| [".safetensors", ".gguf"].iter().any(|extension| name.ends_with(extension));
    let entries = || std::fs::read_dir(path).into_iter().flatten().flatten();
    path.is_file()
        || ["model_index.json", "model.toml"].iter().any(|name| path.join(name).is_file())
        || path.join("snapshots").is_dir()
        || entries().any(|entry| weights(&entry.file_name().to_string_lossy()))
}

fn not_found(model: &Path, name: Option<&str>, folders: &[PathBuf]) -> CliError {
    let mut error = CliError::new(format!("the model `{}` does not exist", model.display()));
    if let Some(wrong) = kiln_base::folders::from_env(FOLDER).filter(|folder| !folder.is_dir()) {
        error.message += &format!("; the variable {FOLDER} is `{}`, which is not a folder", wrong.display());
    }
    let folder = folders
        .first()
        .map_or_else(|| "the folder set by KILN_MODELS".into(), |f| format!("`{}`", f.display()));
    match name {
        Some(EMBER_BASE) => error.hint(format!(
            "Ember's undistilled variant is not built in: create {EMBER_BASE}{EXTENSION} with tools/ember (see its \
             README) and put it into {folder}"
        )),
        Some(ember::NAME) => error.hint(format!(
            "this build has no built-in model: build with the feature `ember`, or put {}{EXTENSION} into {folder}",
            ember::NAME
        )),
        _ if hub::can_be_pulled(model) => {
            let pull = format!("`kiln pull {}` downloads it from Hugging Face", model.display());
            match name {
                Some(_) => error.hint(pull),
                None => error.hint(format!("if it is not a path, {pull}; else {}", hints::not_a_model(model))),
            }
        }
        Some(name) => {
            let known = names(folders);
            let similar = kiln_weights::similar_names(name, known.iter().map(String::as_str));
            let (label, names) = if similar.is_empty() { ("known", known) } else { ("nearest", similar) };
            let list =
                if names.is_empty() { String::new() } else { format!("; {label}: {}", names.join(", ")) };
            error.hint(format!("there is no such path, and no model of that name in {folder}{list}"))
        }
        None => error.hint(hints::not_a_model(model)),
    }
}

/// Lists the names of the built-in model and of those in the models folders.
pub fn names(folders: &[PathBuf]) -> Vec<String> {
    let entries = folders.iter().filter_map(|f| std::fs::read_dir(f).ok()).flatten().flatten();
    let name = |path: PathBuf| {
        let name = path.file_name()?.to_str()?;
        if path.is_file() {
            name.strip_suffix(EXTENSION).map(str::to_owned)
        } else {
            is_model(&path).then(|| name.to_owned())
        }
    };
    let mut names: Vec<String> = entries.filter_map(|entry| name(entry.path())).collect();
    names.extend(ember::file().map(|_| ember::NAME.to_owned()));
    names.sort();
    names.dedup();
    names
}

/// Returns the folders with named models: the one set by `KILN_MODELS`, then the user's.
pub fn folders() -> Vec<PathBuf> {
    use kiln_base::folders;
    let own = folders::data().map(|data| data.join("kiln").join("models"));
    folders::from_env(FOLDER).into_iter().chain(own).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn with_models(names: &[&str]) -> (tempfile::TempDir, Vec<PathBuf>) {
        let dir = tempfile::tempdir().unwrap();
        for name in names {
            fs::write(dir.path().join(name), b"").unwrap();
        }
        let folders = vec![dir.path().to_path_buf()];
        (dir, folders)
    }

    #[test]
    fn a_named_model_is_found_with_or_without_its_extension() {
        let (dir, folders) = with_models(&["fox.safetensors"]);
        let path = dir.path().join("fox.safetensors");
        for name in ["fox", "fox.safetensors"] {
            let location = ModelLocation::resolve_in(Path::new(name), &folders).unwrap();
            assert_eq!(location, ModelLocation::Named { name: "fox".into(), path: path.clone() });
            assert_eq!(location.name().as_deref(), Some("fox"));
        }
        assert_eq!(ModelLocation::resolve_in(&path, &folders).unwrap(), ModelLocation::Path(path));
    }

    #[test]
    fn an_unknown_name_gets_a_hint_with_similar_names() {
        let (_dir, folders) = with_models(&["fox-large.safetensors", "hen.safetensors"]);
        let message =
            |name: &str| ModelLocation::resolve_in(Path::new(name), &folders).unwrap_err().to_string();
        assert!(message("fox-larg").contains("nearest: fox-large"), "{}", message("fox-larg"));
        assert!(message("quite-another").contains("known: ") && message("quite-another").contains("hen"));
        let base = message("ember-base");
        assert!(base.contains("tools/ember") && base.contains(&folders[0].display().to_string()), "{base}");
        assert!(message("no/such/folder").contains("diffusers download"));
    }

    #[test]
    fn the_built_in_model_is_found_by_its_name_only() {
        let location = ModelLocation::resolve_in(Path::new("ember"), &[]);
        assert_eq!(location.is_ok(), ember::file().is_some());
        assert!(ModelLocation::resolve_in(Path::new("./ember"), &[]).is_err());
        assert_eq!(ModelLocation::resolve(None).is_ok(), ember::file().is_some());
    }
}
