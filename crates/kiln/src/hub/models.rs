//! `kiln models`: the models that can be used by name.

use std::fs;
use std::path::{Path, PathBuf};

use kiln_catalog::{cache, ember};
use kiln_engine::ComponentPaths;
use kiln_hub::{InstalledModel, ModelName};
use kiln_weights::{Component, WeightSource};
use serde::Serialize;

use crate::args::ModelsArgs;
use crate::error::CliError;
use crate::hub;
use crate::models;
use crate::values::bytes;

/// A line of the list.
#[derive(Serialize)]
struct ListedModel {
    name: String,
    bytes: u64,
    #[serde(rename = "place")]
    location: String,
    /// What keeps the model from being used, or how to choose a file of it.
    #[serde(skip_serializing_if = "String::is_empty")]
    note: String,
}

pub fn run(args: &ModelsArgs) -> Result<(), CliError> {
    let mut list = built_in();
    list.extend(models::folders().list().into_iter().filter_map(local_model));
    let installed = cache::installed(args.all);
    // Revisions of a repository share their files.
    let mut repositories: Vec<(&PathBuf, u64)> =
        installed.iter().map(|one| (&one.folder, one.bytes)).collect();
    repositories.dedup();
    let total =
        list.iter().map(|model| model.bytes).sum::<u64>() + repositories.iter().map(|(_, b)| b).sum::<u64>();
    list.extend(installed.iter().flat_map(pulled_models));
    let text = if args.json {
        serde_json::to_string_pretty(&list).unwrap_or_default() + "\n"
    } else {
        kiln_base::printable(&to_text(&list, total)).into_owned()
    };
    crate::output::print(text.as_bytes())
}

fn built_in() -> Vec<ListedModel> {
    let files = [(ember::NAME, ember::file(), ""), (ember::BASE, ember::base_file(), "for training")];
    let listed = files.into_iter().filter_map(|(name, file, note)| {
        let (name, bytes, location) = (name.into(), file?.len() as u64, "built in".into());
        Some(ListedModel { name, bytes, location, note: note.into() })
    });
    listed.collect()
}

/// Describes a model in the models folder. A built-in model hides one of its name.
fn local_model((name, path): (String, PathBuf)) -> Option<ListedModel> {
    let hidden = ember::is_built_in(&name);
    let location = path.display().to_string();
    let model = || ListedModel { note: note(&name, &path), bytes: size(&path), location, name };
    (!hidden).then(model)
}

/// Lists what was pulled of a repository: the whole model, or the files that were chosen by a pattern.
fn pulled_models(repository: &InstalledModel) -> Vec<ListedModel> {
    let models = repository.models();
    let location = repository.folder.display().to_string();
    if models.is_empty() {
        let name =
            ModelName { repo: repository.repo.clone(), revision: repository.revision.clone(), pattern: None };
        let note = if repository.incomplete { unfinished(&name) } else { "no weights".into() };
        return vec![ListedModel { name: name.short(), bytes: repository.bytes, location, note }];
    }
    let alone = models.len() == 1;
    let listed = models.into_iter().map(|model| {
        let name = model.name.short();
        let note = if repository.incomplete {
            unfinished(&model.name)
        } else if model.path.is_dir() {
            String::new()
        } else {
            note(&name, &model.path)
        };
        let bytes = if alone { repository.bytes } else { model.bytes };
        ListedModel { name, bytes, location: location.clone(), note }
    });
    listed.collect()
}

fn unfinished(name: &ModelName) -> String {
    format!("incomplete: `kiln pull {}` resumes", name.short())
}

/// What keeps a file or folder from being used as a model.
fn note(name: &str, path: &Path) -> String {
    match kiln_catalog::open_with(path, &cache::with_companions(name, &ComponentPaths::default())) {
        Ok(model) => hub::missing_components(&model).unwrap_or_default(),
        Err(_) => component(path).unwrap_or_else(|| format!("not a model: see `kiln info {name}`")),
    }
}

/// Names the component in a file that has one and no transformer.
pub fn component(path: &Path) -> Option<String> {
    let components = WeightSource::open(path).ok()?.components();
    match &components[..] {
        [(component, _)] if *component != Component::Transformer => Some(format!("a {component}")),
        _ => None,
    }
}

/// Returns the bytes of a file, or of all files below a folder.
pub fn size(path: &Path) -> u64 {
    let Ok(metadata) = fs::metadata(path) else { return 0 };
    if !metadata.is_dir() {
        return metadata.len();
    }
    let entries = fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path());
    // Links to folders are skipped: they could form a loop.
    entries.map(|path| if path.is_symlink() && path.is_dir() { 0 } else { size(&path) }).sum()
}

fn to_text(list: &[ListedModel], total: u64) -> String {
    if list.is_empty() {
        return "no models; download one with `kiln pull klein-4b`\n".into();
    }
    let width = list.iter().map(|model| model.name.chars().count()).max().unwrap_or(0).max("total".len());
    let line = |model: &ListedModel| {
        let note = if model.note.is_empty() { String::new() } else { format!("  ({})", model.note) };
        format!("{:width$}  {:>9}  {}{note}\n", model.name, bytes(model.bytes), model.location)
    };
    let lines: String = list.iter().map(line).collect();
    format!("{lines}{:width$}  {:>9}\n", "total", bytes(total))
}
