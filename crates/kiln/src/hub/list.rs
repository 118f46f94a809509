use std::fs;
use std::path::Path;

use serde::Serialize;

use crate::args::ModelsArgs;
use crate::failure::Failure;
use crate::models::{self, Found};
use crate::values::bytes;
use crate::{ember, hub};

/// A model that `-m` takes.
#[derive(Serialize)]
struct Row {
    name: String,
    bytes: u64,
    place: String,
    /// What keeps it from being used, or what it is.
    #[serde(skip_serializing_if = "String::is_empty")]
    note: String,
}

pub fn run(args: &ModelsArgs) -> Result<(), Failure> {
    let mut rows: Vec<Row> = models::known(&models::folders()).into_iter().filter_map(named).collect();
    rows.extend(hub::installed(args.all).into_iter().map(|one| Row {
        name: hub::short(&one.repo),
        bytes: one.bytes,
        note: match (one.incomplete, one.is_model, one.weights.len()) {
            (true, ..) => "not all of it is there: pull it again".into(),
            (_, true, _) | (_, _, 1) => String::new(),
            (_, _, 0) => "no weights".into(),
            _ => format!("choose with NAME:FILE: {}", one.weights.join(", ")),
        },
        place: one.folder.display().to_string(),
    }));
    let text = match args.json {
        true => serde_json::to_string_pretty(&rows).unwrap_or_default() + "\n",
        false => lines(&rows),
    };
    crate::print(text.as_bytes())
}

/// A model that is inside the program or in the models folder.
fn named(name: String) -> Option<Row> {
    match Found::find(Some(Path::new(&name))).ok()? {
        Found::BuiltIn => Some(Row {
            name,
            bytes: ember::file().map_or(0, |file| file.len() as u64),
            place: "inside the program".into(),
            note: String::new(),
        }),
        Found::Named { path, .. } => {
            let (bytes, place) = (size(&path), path.display().to_string());
            Some(Row { name, bytes, place, note: String::new() })
        }
        Found::Path(_) => None,
    }
}

/// Bytes of a file, or of all files below a folder.
pub fn size(path: &Path) -> u64 {
    let Ok(about) = fs::metadata(path) else { return 0 };
    if !about.is_dir() {
        return about.len();
    }
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    let inside = entries.map(|entry| match entry.path().is_symlink() && entry.path().is_dir() {
        // It could lead round in a circle.
        true => 0,
        false => size(&entry.path()),
    });
    inside.sum()
}

fn lines(rows: &[Row]) -> String {
    if rows.is_empty() {
        return "no models; `kiln pull klein-4b` fetches one\n".into();
    }
    let width = rows.iter().map(|row| row.name.chars().count()).max().unwrap_or(0);
    let line = |row: &Row| {
        let note = if row.note.is_empty() { String::new() } else { format!("  ({})", row.note) };
        format!("{:width$}  {:>9}  {}{note}\n", row.name, bytes(row.bytes), row.place)
    };
    rows.iter().map(line).collect()
}
