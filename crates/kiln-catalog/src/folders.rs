//! The folders with models that have a name, and what a name or path means.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use kiln_engine::{Field, Hint, hint};

use crate::error::{Error, Result};
use crate::location::ModelLocation;
use crate::open::not_a_model;
use crate::{cache, ember};

const EXTENSION: &str = ".safetensors";
/// Extensions that a name may leave out; the first one wins.
const EXTENSIONS: [&str; 3] = [EXTENSION, ".gguf", ".toml"];
/// The variable with a folder of models.
const FOLDER: &str = "KILN_MODELS";

/// The folders with models that have a name; a model of an earlier folder hides one of the same name.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelFolders {
    paths: Vec<PathBuf>,
}

impl ModelFolders {
    /// Returns the folder set by `KILN_MODELS` or else in the user's settings, then the user's own.
    pub fn new(setting: Option<PathBuf>) -> ModelFolders {
        let set = kiln_base::folders::from_env(FOLDER).or(setting);
        ModelFolders { paths: set.into_iter().chain(ModelFolders::own()).collect() }
    }

    /// Returns the folder set by `KILN_MODELS`, then the user's own.
    pub fn from_env() -> ModelFolders {
        ModelFolders::new(None)
    }

    /// Returns these folders with another one before them.
    pub fn with_first(mut self, folder: PathBuf) -> ModelFolders {
        self.paths.insert(0, folder);
        self
    }

    /// Returns the models folder that is used unless another one is set.
    pub fn own() -> Option<PathBuf> {
        Some(kiln_base::folders::data()?.join("kiln").join("models"))
    }

    /// Returns the folders.
    pub fn paths(&self) -> &[PathBuf] {
        &self.paths
    }

    /// Resolves a path or name; `None` is the built-in model.
    pub fn resolve(&self, model: Option<&Path>) -> Result<ModelLocation> {
        match model {
            Some(model) => self.resolve_name(model),
            None if ember::file().is_some() => Ok(ModelLocation::BuiltIn),
            None => Err(Error::usage(
                "no model given",
                hint![
                    "this build has no built-in model (it lacks the feature `ember`); set ",
                    Field::Model,
                    ", or the variable KILN_MODEL, to a folder with FLUX.2 [klein] in diffusers' layout",
                    self.paths
                        .first()
                        .map_or(String::new(), |f| format!(", or to a model in `{}`", f.display()))
                ],
            )),
        }
    }

    fn resolve_name(&self, model: &Path) -> Result<ModelLocation> {
        // First, so that a recipe means the same in every folder; `./ember` is a path.
        match model.to_str().filter(|name| ember::is_built_in(name)) {
            Some(ember::BASE) => return Ok(ModelLocation::BuiltInBase),
            Some(_) => return Ok(ModelLocation::BuiltIn),
            None => {}
        }
        let name = model.to_str().filter(|name| !name.is_empty() && !name.contains(std::path::is_separator));
        if is_model(model) {
            return Ok(ModelLocation::Path(model.to_path_buf()));
        }
        let named = name.and_then(|name| {
            let path = self.find(name)?;
            Some((self.shortest_name(name, &path), path))
        });
        let pulled = || if model.exists() { None } else { cache::find_pulled(model) };
        match named.or_else(pulled) {
            Some((name, path)) => Ok(ModelLocation::Named { name, path }),
            None if model.exists() => {
                let problem = "is not a model folder: it has no `model_index.json`";
                Err(Error::missing(format!("`{}` {problem}", model.display()), not_a_model(model)))
            }
            None => Err(self.not_found(model, name)),
        }
    }

    /// Lists every model that has a name, but for [`ember::BASE`], which is there to be trained. Names never lead outside the
    /// models folders and the Hugging Face cache.
    pub fn all(&self) -> Vec<(String, ModelLocation)> {
        let built_in = ember::file().map(|_| (ember::NAME.to_owned(), ModelLocation::BuiltIn));
        let local = self.list().into_iter().filter(|(name, _)| !ember::is_built_in(name));
        let pulled = cache::installed(false).into_iter().filter(|model| !model.incomplete);
        let pulled = pulled.flat_map(|model| model.models()).map(|model| (model.name.short(), model.path));
        let named =
            local.chain(pulled).map(|(name, path)| (name.clone(), ModelLocation::Named { name, path }));
        named.chain(built_in.clone()).collect()
    }

    /// Lists the names of the built-in models and of those in the models folders.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = self.list().into_iter().map(|(name, _)| name).collect();
        let built_in = [ember::NAME, ember::BASE].into_iter().filter(|name| ember::is_built_in(name));
        names.extend(built_in.map(str::to_owned));
        names.sort();
        names.dedup();
        names
    }

    /// Lists the models in the models folders, by the names that lead to them.
    pub fn list(&self) -> Vec<(String, PathBuf)> {
        let entries = self.paths.iter().filter_map(|f| std::fs::read_dir(f).ok()).flatten().flatten();
        let named = |path: PathBuf| {
            let name = path.file_name()?.to_str()?;
            let is_listed = if path.is_file() {
                EXTENSIONS.iter().any(|extension| name.ends_with(extension)) && !name.starts_with('.')
            } else {
                is_model(&path)
            };
            // A file of an earlier folder hides one of the same name.
            let is_found = is_listed && self.find(name).as_ref() == Some(&path);
            is_found.then(|| (self.shortest_name(name, &path), path.clone()))
        };
        let mut models: Vec<_> = entries.filter_map(|entry| named(entry.path())).collect();
        models.sort();
        models
    }

    /// Finds a file or folder of this name, with or without its extension.
    fn find(&self, name: &str) -> Option<PathBuf> {
        let paths = |folder: &PathBuf| {
            let paths =
                [""].iter().chain(&EXTENSIONS).map(|extension| folder.join(format!("{name}{extension}")));
            paths.collect::<Vec<_>>()
        };
        self.paths.iter().flat_map(paths).find(|path| is_model(path))
    }

    /// Leaves the extension out, unless another file has the same name without it.
    fn shortest_name(&self, name: &str, path: &Path) -> String {
        let stem = EXTENSIONS.iter().find_map(|extension| name.strip_suffix(extension));
        let stem = stem.filter(|stem| !stem.is_empty() && self.find(stem).as_deref() == Some(path));
        stem.unwrap_or(name).to_owned()
    }

    /// Lists the names that a name may be a typo of: of models that are there, and of those that can be pulled.
    pub fn similar(&self, name: &str) -> Vec<String> {
        let known = self.all().into_iter().map(|(name, _)| name);
        let names: BTreeSet<String> =
            known.chain(kiln_family::aliases().map(|alias| alias.name.to_owned())).collect();
        kiln_weights::similar_names(&name.to_ascii_lowercase(), names.iter().map(String::as_str))
    }

    fn not_found(&self, model: &Path, name: Option<&str>) -> Error {
        let mut what = format!("the model `{}` does not exist", model.display());
        if let Some(wrong) = kiln_base::folders::from_env(FOLDER).filter(|folder| !folder.is_dir()) {
            what += &format!("; the variable {FOLDER} is `{}`, which is not a folder", wrong.display());
        }
        let first = self.paths.first();
        let folder =
            first.map_or_else(|| "the folder set by KILN_MODELS".into(), |f| format!("`{}`", f.display()));
        let hint: Hint = match name {
            Some(ember::BASE) => "this build has no built-in model: build with the feature `ember`".into(),
            Some(ember::NAME) => format!(
                "this build has no built-in model: build with the feature `ember`, or put {}{EXTENSION} into {folder}",
                ember::NAME
            )
            .into(),
            _ if cache::can_be_pulled(model) => {
                let pull = format!("`kiln pull {}` downloads it from Hugging Face", model.display());
                match name {
                    Some(_) => pull.into(),
                    None => hint![format!("if it is not a path, {pull}")].or(not_a_model(model)),
                }
            }
            Some(name) => {
                let known: Vec<String> = self.all().into_iter().map(|(name, _)| name).collect();
                let list = match self.similar(name).as_slice() {
                    [] if known.is_empty() => String::new(),
                    [] => format!("; known: {}", known.join(", ")),
                    similar => format!("; nearest: {}", similar.join(", ")),
                };
                format!("there is no such path, and no model of that name in {folder}{list}").into()
            }
            None => not_a_model(model),
        };
        Error::missing(what, hint)
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use kiln_engine::Explain;
    use std::fs;

    fn with_models(names: &[&str]) -> (tempfile::TempDir, ModelFolders) {
        let dir = tempfile::tempdir().unwrap();
        for name in names {
            fs::write(dir.path().join(name), b"").unwrap();
        }
        let folders = ModelFolders { paths: vec![dir.path().to_path_buf()] };
        (dir, folders)
    }

    #[test]
    fn a_named_model_is_found_with_or_without_its_extension() {
        let (dir, folders) = with_models(&["fox.safetensors"]);
        let path = dir.path().join("fox.safetensors");
        for name in ["fox", "fox.safetensors"] {
            let location = folders.resolve(Some(Path::new(name))).unwrap();
            assert_eq!(location, ModelLocation::Named { name: "fox".into(), path: path.clone() });
            assert_eq!(location.name().as_deref(), Some("fox"));
        }
        assert_eq!(folders.resolve(Some(&path)).unwrap(), ModelLocation::Path(path));
    }

    #[test]
    fn files_of_every_kind_are_listed_by_the_names_that_lead_to_them() {
        let (dir, folders) =
            with_models(&["a.gguf", "b.toml", "c.safetensors", "c.gguf", "d.txt", ".e.gguf"]);
        let listed = folders.list();
        let names: Vec<&str> = listed.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["a", "b", "c", "c.gguf"]);
        for (name, path) in listed {
            let location = folders.resolve(Some(Path::new(&name))).unwrap();
            assert_eq!(location, ModelLocation::Named { name, path });
        }
        let earlier = with_models(&["a.gguf"]);
        let earlier = earlier.0.path();
        let both = ModelFolders { paths: vec![earlier.to_path_buf(), dir.path().to_path_buf()] };
        assert!(both.list().contains(&("a".into(), earlier.join("a.gguf"))));
        assert_eq!(both.list().len(), 4);
    }

    #[test]
    fn an_unknown_name_gets_a_hint_with_similar_names() {
        let (_dir, folders) = with_models(&["fox-large.safetensors", "hen.safetensors"]);
        let text = |error: Error| format!("{error}; {}", error.hint().unwrap().say(&|_, _| None).unwrap());
        let message = |name: &str| text(folders.resolve(Some(Path::new(name))).unwrap_err());
        assert!(message("fox-larg").contains("nearest: fox-large"), "{}", message("fox-larg"));
        for typo in ["klien-4b", "Klein4b", "klein-4"] {
            assert!(message(typo).contains("nearest: klein-4b"), "{}", message(typo));
        }
        assert!(message("quite-another").contains("known: ") && message("quite-another").contains("hen"));
        let base = text(folders.not_found(Path::new(ember::BASE), Some(ember::BASE)));
        assert!(base.contains("the feature `ember`"), "{base}");
        assert!(message("no/such/folder").contains("diffusers download"));
    }

    #[test]
    fn built_in_models_are_found_by_their_names_only() {
        let folders = ModelFolders { paths: Vec::new() };
        for (name, expected) in
            [(ember::NAME, ModelLocation::BuiltIn), (ember::BASE, ModelLocation::BuiltInBase)]
        {
            let location = folders.resolve(Some(Path::new(name))).ok();
            assert_eq!(location, ember::file().map(|_| expected), "{name}");
            assert_eq!(folders.names().iter().any(|known| known == name), ember::file().is_some(), "{name}");
        }
        assert!(folders.resolve(Some(Path::new("./ember"))).is_err());
        assert_eq!(folders.resolve(None).is_ok(), ember::file().is_some());
    }
}
