//! Which model a name stands for: a path, the one inside the program, one in the models folder, or one that was pulled.

use std::path::{Path, PathBuf};

use kiln_engine::{Model, Parts};
use kiln_weights::WeightSource;

use crate::failure::{Failure, While};
use crate::{ember, hints, hub};

/// The undistilled form of Ember, which is not in the program.
const EMBER_BASE: &str = "ember-base";
const ENDING: &str = ".safetensors";

/// A model that is there.
#[derive(Clone, Debug, PartialEq)]
pub enum Found {
    /// Inside the program.
    BuiltIn,
    /// In the models folder or the cache of pulled models, under this name.
    Named {
        name: String,
        path: PathBuf,
    },
    Path(PathBuf),
}

impl Found {
    /// The model that is asked for; without a wish, the one inside the program.
    pub fn find(asked: Option<&Path>) -> Result<Found, Failure> {
        match asked {
            Some(asked) => Found::among(asked, &folders()),
            None if ember::file().is_some() => Ok(Found::BuiltIn),
            None => Err(Failure::usage("no model was given").hint(format!(
                "this build has none inside (the feature `ember` puts one there); point -m, or the variable KILN_MODEL, \
                 at a folder with FLUX.2 [klein] in diffusers' layout{}",
                folders().first().map_or(String::new(), |f| format!(", or name a model in `{}`", f.display()))
            ))),
        }
    }

    fn among(asked: &Path, folders: &[PathBuf]) -> Result<Found, Failure> {
        // First, so that a recipe means the same in every folder; `./ember` is a path.
        if asked == Path::new(ember::NAME) && ember::file().is_some() {
            return Ok(Found::BuiltIn);
        }
        let name = asked.to_str().filter(|name| !name.is_empty() && !name.contains(std::path::is_separator));
        if is_model(asked) {
            return Ok(Found::Path(asked.to_path_buf()));
        }
        let inside = |folder: &PathBuf, name: &str| {
            let endings = ["", ENDING, ".gguf", ".toml"].iter();
            endings.map(|ending| folder.join(format!("{name}{ending}"))).find(|p| is_model(p))
        };
        let named = name.and_then(|name| Some((name, folders.iter().find_map(|f| inside(f, name))?)));
        let named = named.map(|(name, path)| (name.strip_suffix(ENDING).unwrap_or(name).to_owned(), path));
        let pulled = || if asked.exists() { None } else { hub::pulled(asked) };
        match named.or_else(pulled) {
            Some((name, path)) => Ok(Found::Named { name, path }),
            None if asked.exists() => {
                let what = "is not a model folder: there is no `model_index.json` in it";
                Err(Failure::new(format!("`{}` {what}", asked.display())).hint(hints::not_a_model(asked)))
            }
            None => Err(missing(asked, name, folders)),
        }
    }

    /// Every model that needs no path. Names lead nowhere but into the models folders and the cache of pulled models.
    #[cfg(feature = "serve")]
    pub fn all() -> Vec<(String, Found)> {
        let folders = folders();
        let found = |name: String| {
            if name == ember::NAME && ember::file().is_some() {
                return Some((name, Found::BuiltIn));
            }
            let places = folders.iter().flat_map(|f| [f.join(&name), f.join(format!("{name}{ENDING}"))]);
            let path = places.into_iter().find(|path| is_model(path))?;
            Some((name.clone(), Found::Named { name, path }))
        };
        let pulled = hub::installed(false).into_iter().filter(|one| one.is_model && !one.incomplete);
        let pulled = pulled.filter_map(|one| hub::pulled(Path::new(&hub::short(&one.repo))));
        let pulled = pulled.map(|(name, path)| (name.clone(), Found::Named { name, path }));
        known(&folders).into_iter().filter_map(found).chain(pulled).collect()
    }

    /// Reads its configuration.
    pub fn open(&self) -> Result<Model, Failure> {
        self.open_with(&Parts::default())
    }

    /// The same with some parts from elsewhere.
    pub fn open_with(&self, parts: &Parts) -> Result<Model, Failure> {
        let model = match self {
            Found::Named { path, .. } | Found::Path(path) => hints::open_model_with(path, parts),
            Found::BuiltIn if !parts.is_empty() => {
                Err(Failure::usage("the model inside the program can't be used with parts of another")
                    .hint("name the model with -m, or give its transformer with --transformer"))
            }
            Found::BuiltIn => {
                let source = WeightSource::from_bytes(ember::NAME, ember::file().unwrap_or_default());
                let model = source.map_err(kiln_engine::Error::from).and_then(Model::packed);
                model.while_doing(|| "opening the built-in model".into())
            }
        };
        let mut model = model?;
        model.name = self.name();
        Ok(model)
    }

    /// The name that needs no path.
    pub fn name(&self) -> Option<String> {
        match self {
            Found::BuiltIn => Some(ember::NAME.into()),
            Found::Named { name, .. } => Some(name.clone()),
            Found::Path(_) => None,
        }
    }
}

/// The model that the environment names for when no other is.
pub fn usual() -> Option<PathBuf> {
    std::env::var_os("KILN_MODEL").filter(|name| !name.is_empty()).map(PathBuf::from)
}

/// A single file is taken for a model without a look inside; what is wrong with it is said when it is opened. So is a folder
/// of the Hugging Face cache, and one with weights in it.
fn is_model(path: &Path) -> bool {
    let weights = |name: &str| [".safetensors", ".gguf"].iter().any(|ending| name.ends_with(ending));
    let entries = || std::fs::read_dir(path).into_iter().flatten().flatten();
    path.is_file()
        || ["model_index.json", "model.toml"].iter().any(|name| path.join(name).is_file())
        || path.join("snapshots").is_dir()
        || entries().any(|entry| weights(&entry.file_name().to_string_lossy()))
}

fn missing(asked: &Path, name: Option<&str>, folders: &[PathBuf]) -> Failure {
    let failure = Failure::new(format!("the model `{}` does not exist", asked.display()));
    let place = folders
        .first()
        .map_or_else(|| "the folder KILN_MODELS names".into(), |f| format!("`{}`", f.display()));
    match name {
        Some(EMBER_BASE) => failure.hint(format!(
            "Ember's undistilled form is not in the program: make {EMBER_BASE}{ENDING} with tools/ember (its README says \
             how) and put it into {place}"
        )),
        Some(ember::NAME) => failure.hint(format!(
            "this build is without it: build with the feature `ember`, or put {}{ENDING} into {place}",
            ember::NAME
        )),
        _ if hub::can_be_pulled(asked) => {
            let pull = format!("`kiln pull {}` fetches it from Hugging Face", asked.display());
            match name {
                Some(_) => failure.hint(pull),
                None => failure.hint(format!("if it is no path, {pull}; else {}", hints::not_a_model(asked))),
            }
        }
        Some(name) => {
            let known = known(folders);
            let near = kiln_weights::nearest(name, known.iter().map(String::as_str));
            let (word, names) = if near.is_empty() { ("known", known) } else { ("nearest", near) };
            let listed = match names.is_empty() {
                true => String::new(),
                false => format!("; {word}: {}", names.join(", ")),
            };
            failure.hint(format!("it is no path, and there is no model of that name in {place}{listed}"))
        }
        None => failure.hint(hints::not_a_model(asked)),
    }
}

/// The names of all models that need no path.
pub fn known(folders: &[PathBuf]) -> Vec<String> {
    let entries = folders.iter().filter_map(|f| std::fs::read_dir(f).ok()).flatten().flatten();
    let name = |path: PathBuf| {
        let name = path.file_name()?.to_str()?;
        match path.is_file() {
            true => name.strip_suffix(ENDING).map(str::to_owned),
            false => is_model(&path).then(|| name.to_owned()),
        }
    };
    let mut names: Vec<String> = entries.filter_map(|entry| name(entry.path())).collect();
    names.extend(ember::file().map(|_| ember::NAME.to_owned()));
    names.sort();
    names.dedup();
    names
}

/// Where models are looked for by name: the folder KILN_MODELS names, then the user's own.
pub fn folders() -> Vec<PathBuf> {
    let var = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let data = match std::env::consts::OS {
        "windows" => var("LOCALAPPDATA"),
        "macos" => var("HOME").map(|home| home.join("Library/Application Support")),
        _ => var("XDG_DATA_HOME").or_else(|| Some(var("HOME")?.join(".local/share"))),
    };
    var("KILN_MODELS").into_iter().chain(data.map(|data| data.join("kiln").join("models"))).collect()
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
    fn a_name_is_a_model_of_the_folder_with_or_without_its_ending() {
        let (dir, folders) = with_models(&["fox.safetensors"]);
        let path = dir.path().join("fox.safetensors");
        for asked in ["fox", "fox.safetensors"] {
            let found = Found::among(Path::new(asked), &folders).unwrap();
            assert_eq!(found, Found::Named { name: "fox".into(), path: path.clone() });
            assert_eq!(found.name().as_deref(), Some("fox"));
        }
        assert_eq!(Found::among(&path, &folders).unwrap(), Found::Path(path));
    }

    #[test]
    fn a_name_that_is_missing_is_told_with_its_nearest() {
        let (_dir, folders) = with_models(&["fox-large.safetensors", "hen.safetensors"]);
        let told = |name: &str| Found::among(Path::new(name), &folders).unwrap_err().to_string();
        assert!(told("fox-larg").contains("nearest: fox-large"), "{}", told("fox-larg"));
        assert!(told("quite-another").contains("known: ") && told("quite-another").contains("hen"));
        let base = told("ember-base");
        assert!(base.contains("tools/ember") && base.contains(&folders[0].display().to_string()), "{base}");
        assert!(told("no/such/folder").contains("diffusers download"));
    }

    #[test]
    fn the_model_inside_the_program_goes_by_its_name_only() {
        let found = Found::among(Path::new("ember"), &[]);
        assert_eq!(found.is_ok(), ember::file().is_some());
        assert!(Found::among(Path::new("./ember"), &[]).is_err());
        assert_eq!(Found::find(None).is_ok(), ember::file().is_some());
    }
}
