//! `kiln models`: the models that can be used by name.

use std::fs;
use std::path::Path;

use serde::Serialize;

use crate::args::ModelsArgs;
use crate::error::CliError;
use crate::models::{self, ModelLocation};
use crate::values::bytes;
use crate::{ember, hub};

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
    let mut list: Vec<ListedModel> =
        models::names(&models::folders()).into_iter().filter_map(local_model).collect();
    list.extend(hub::installed(args.all).into_iter().map(|model| ListedModel {
        name: hub::short_name(&model.repo),
        bytes: model.bytes,
        note: match model.weights.len() {
            _ if model.incomplete => "incomplete: pull it again".into(),
            _ if model.is_model => String::new(),
            0 => "no weights".into(),
            1 => String::new(),
            _ => format!("choose one with NAME:FILE: {}", model.weights.join(", ")),
        },
        location: model.folder.display().to_string(),
    }));
    let text = if args.json {
        serde_json::to_string_pretty(&list).unwrap_or_default() + "\n"
    } else {
        kiln_base::printable(&to_text(&list)).into_owned()
    };
    crate::print(text.as_bytes())
}

/// Describes a model that is built in or in the models folder.
fn local_model(name: String) -> Option<ListedModel> {
    match ModelLocation::resolve(Some(Path::new(&name))).ok()? {
        ModelLocation::BuiltIn => Some(ListedModel {
            name,
            bytes: ember::file().map_or(0, |file| file.len() as u64),
            location: "built in".into(),
            note: String::new(),
        }),
        ModelLocation::Named { path, .. } => {
            let (bytes, location) = (size(&path), path.display().to_string());
            Some(ListedModel { name, bytes, location, note: String::new() })
        }
        ModelLocation::Path(_) => None,
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

fn to_text(list: &[ListedModel]) -> String {
    if list.is_empty() {
        return "no models; download one with `kiln pull klein-4b`\n".into();
    }
    let width = list.iter().map(|model| model.name.chars().count()).max().unwrap_or(0);
    let line = |model: &ListedModel| {
        let note = if model.note.is_empty() { String::new() } else { format!("  ({})", model.note) };
        format!("{:width$}  {:>9}  {}{note}\n", model.name, bytes(model.bytes), model.location)
    };
    list.iter().map(line).collect()
}
