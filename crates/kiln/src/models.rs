//! Resolves the model that `-m` names: a path, the built-in model, one in the models folder, or a downloaded one.

use std::path::{Path, PathBuf};

use kiln_engine::{ComponentPaths, Model};
use kiln_weights::WeightSource;

use crate::error::{CliError, ErrorContext};
use crate::{ember, hints, hub, settings};

/// The undistilled variant of Ember, which is not built in but stored as its difference from Ember.
pub const EMBER_BASE: &str = "ember-base";
/// Its file in the repository.
const EMBER_BASE_FILE: &str = "assets/ember/ember-base.safetensors";
const EXTENSION: &str = ".safetensors";
/// Extensions that a name may leave out; the first one wins.
const EXTENSIONS: [&str; 3] = [EXTENSION, ".gguf", ".toml"];
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
        let named = name.and_then(|name| {
            let path = find_named(name, folders).or_else(|| ember_base().filter(|_| name == EMBER_BASE))?;
            Some((shortest_name(name, &path, folders), path))
        });
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
        let built_in = ember::file().map(|_| (ember::NAME.to_owned(), ModelLocation::BuiltIn));
        let local =
            in_folders(&folders()).into_iter().filter(|(name, _)| name != ember::NAME || built_in.is_none());
        let pulled = hub::installed(false).into_iter().filter(|model| !model.incomplete);
        let pulled = pulled.flat_map(|model| model.models()).map(|model| (model.name.short(), model.path));
        let named =
            local.chain(pulled).map(|(name, path)| (name.clone(), ModelLocation::Named { name, path }));
        named.chain(built_in.clone()).collect()
    }

    /// Returns whether a text is the name of the built-in model or of one in the models folder.
    pub fn is_named(name: &str) -> bool {
        names(&folders()).iter().any(|known| known == name)
    }

    /// Opens the model: reads its configuration.
    pub fn open(&self) -> Result<Model, CliError> {
        self.open_with(&ComponentPaths::default())
    }

    /// Opens the model with some components from elsewhere.
    pub fn open_with(&self, components: &ComponentPaths) -> Result<Model, CliError> {
        let model = match self {
            ModelLocation::Named { name, path } => {
                hints::open_model_with(path, &hub::with_companions(name, components))
            }
            ModelLocation::Path(path) => hints::open_model_with(path, components),
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

/// Finds a file or folder of this name in the models folders, with or without its extension.
fn find_named(name: &str, folders: &[PathBuf]) -> Option<PathBuf> {
    let paths = |folder: &PathBuf| {
        let paths = [""].iter().chain(&EXTENSIONS).map(|extension| folder.join(format!("{name}{extension}")));
        paths.collect::<Vec<_>>()
    };
    folders.iter().flat_map(paths).find(|path| is_model(path))
}

/// Leaves the extension out, unless another file has the same name without it.
fn shortest_name(name: &str, path: &Path, folders: &[PathBuf]) -> String {
    let stem = EXTENSIONS.iter().find_map(|extension| name.strip_suffix(extension));
    let stem = stem.filter(|stem| !stem.is_empty() && find_named(stem, folders).as_deref() == Some(path));
    stem.unwrap_or(name).to_owned()
}

/// Lists the models in the models folders, by the names that `-m` takes.
pub fn in_folders(folders: &[PathBuf]) -> Vec<(String, PathBuf)> {
    let entries = folders.iter().filter_map(|f| std::fs::read_dir(f).ok()).flatten().flatten();
    let named = |path: PathBuf| {
        let name = path.file_name()?.to_str()?;
        let is_listed = if path.is_file() {
            EXTENSIONS.iter().any(|extension| name.ends_with(extension)) && !name.starts_with('.')
        } else {
            is_model(&path)
        };
        // A file of an earlier folder hides one of the same name.
        let is_found = is_listed && find_named(name, folders).as_ref() == Some(&path);
        is_found.then(|| (shortest_name(name, &path, folders), path.clone()))
    };
    let mut models: Vec<_> = entries.filter_map(|entry| named(entry.path())).collect();
    models.sort();
    models
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
            "Ember's undistilled variant is not built in: copy {EMBER_BASE_FILE} of Kiln's repository into {folder} or \
             next to the program"
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
    let mut names: Vec<String> = in_folders(folders).into_iter().map(|(name, _)| name).collect();
    names.extend(ember::file().map(|_| ember::NAME.to_owned()));
    names.sort();
    names.dedup();
    names
}

/// Finds Ember base beside the program, or in the repository that the program was built in.
fn ember_base() -> Option<PathBuf> {
    let program = std::env::current_exe().ok()?;
    let beside = program.with_file_name(format!("{EMBER_BASE}{EXTENSION}"));
    let above = program.ancestors().skip(1).take(4).map(|folder| folder.join(EMBER_BASE_FILE));
    std::iter::once(beside).chain(above).find(|path| path.is_file())
}

/// Returns the folders with named models: the one set by `KILN_MODELS` or in the user's settings, then the user's own.
pub fn folders() -> Vec<PathBuf> {
    let set = kiln_base::folders::from_env(FOLDER).or_else(|| settings::get().models_folder.clone());
    set.into_iter().chain(own_folder()).collect()
}

/// Returns the models folder that is used unless another one is set.
pub fn own_folder() -> Option<PathBuf> {
    Some(kiln_base::folders::data()?.join("kiln").join("models"))
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
    fn files_of_every_kind_are_listed_by_the_names_that_lead_to_them() {
        let (dir, folders) =
            with_models(&["a.gguf", "b.toml", "c.safetensors", "c.gguf", "d.txt", ".e.gguf"]);
        let listed = in_folders(&folders);
        let names: Vec<&str> = listed.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["a", "b", "c", "c.gguf"]);
        for (name, path) in listed {
            let location = ModelLocation::resolve_in(Path::new(&name), &folders).unwrap();
            assert_eq!(location, ModelLocation::Named { name, path });
        }
        let earlier = with_models(&["a.gguf"]);
        let both = [earlier.1[0].clone(), dir.path().to_path_buf()];
        assert!(in_folders(&both).contains(&("a".into(), both[0].join("a.gguf"))));
        assert_eq!(in_folders(&both).len(), 4);
    }

    #[test]
    fn an_unknown_name_gets_a_hint_with_similar_names() {
        let (_dir, folders) = with_models(&["fox-large.safetensors", "hen.safetensors"]);
        let message =
            |name: &str| ModelLocation::resolve_in(Path::new(name), &folders).unwrap_err().to_string();
        assert!(message("fox-larg").contains("nearest: fox-large"), "{}", message("fox-larg"));
        assert!(message("quite-another").contains("known: ") && message("quite-another").contains("hen"));
        let base = not_found(Path::new(EMBER_BASE), Some(EMBER_BASE), &folders).to_string();
        assert!(base.contains("assets/ember") && base.contains(&folders[0].display().to_string()), "{base}");
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
