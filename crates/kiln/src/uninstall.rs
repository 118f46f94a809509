//! `kiln uninstall`: what Kiln has on this machine, and the commands that delete it. It deletes nothing.

use std::path::{Path, PathBuf};

use kiln_base::folders;
use kiln_catalog::{ModelFolders, cache, user_cache};
use serde::Serialize;

use crate::args::UninstallArgs;
use crate::error::CliError;
use crate::hub::models::size;
use crate::origin::{self, Origin, delete_command};
use crate::values::bytes;
use crate::{models, output, settings};

/// A file or folder that is there.
#[derive(Serialize)]
struct Item {
    path: PathBuf,
    bytes: u64,
    holds: &'static str,
    /// The command that deletes it; `None` for what may belong to other programs.
    #[serde(skip_serializing_if = "Option::is_none")]
    delete: Option<String>,
}

pub fn run(args: &UninstallArgs) -> Result<(), CliError> {
    let items = items();
    let text = if args.json {
        serde_json::to_string_pretty(&items).unwrap_or_default() + "\n"
    } else {
        kiln_base::printable(&to_text(&items)).into_owned()
    };
    output::print(text.as_bytes())
}

/// Lists what is there, the program last: it deletes downloaded models.
fn items() -> Vec<Item> {
    let mut items = downloads();
    let caches = [user_cache::folder(), folders::cache().map(|cache| cache.join("kiln"))];
    let data = ModelFolders::own().and_then(|own| own.parent().map(Path::to_path_buf));
    // Windows has one folder for both.
    let (shared, caches): (Vec<PathBuf>, Vec<PathBuf>) =
        caches.into_iter().flatten().partition(|cache| Some(cache) == data.as_ref());
    let mut add = |path: Option<PathBuf>, holds: &'static str| {
        if let Some(path) = path.filter(|path| path.exists())
            && items.iter().all(|item| item.path != path)
        {
            let delete = Some(delete_command(std::slice::from_ref(&path)));
            items.push(Item { bytes: size(&path), delete, holds, path });
        }
    };
    for cache in caches {
        add(Some(cache), "cache: encoded prompts and compiled kernels");
    }
    let holds = if shared.is_empty() {
        "data: your models and LoRAs, the jobs and images of `kiln serve`"
    } else {
        "data and cache: your models and LoRAs, the jobs and images of `kiln serve`, encoded prompts and kernels"
    };
    add(data.clone(), holds);
    let server = folders::from_env("KILN_DATA").or_else(|| {
        let option = settings::get().serve.iter().find(|option| option.name == "data")?;
        option.values.first().map(PathBuf::from)
    });
    add(server, "data folder of `kiln serve`: jobs and images");
    add(settings::file(), "settings");
    items.extend(foreign_models(data.as_deref()));
    items.extend(program());
    items
}

/// The models that were downloaded from Hugging Face.
fn downloads() -> Vec<Item> {
    let installed = cache::installed(false);
    let item = |model: &kiln_hub::InstalledModel| Item {
        path: model.folder.clone(),
        bytes: model.bytes,
        holds: "a downloaded model, which other programs use, too",
        delete: Some(format!("kiln rm {} --yes", model.repo)),
    };
    let mut items: Vec<Item> = installed.iter().map(item).collect();
    items.dedup_by(|a, b| a.path == b.path);
    items
}

/// Folders of models that the user named: they may be those of other programs.
fn foreign_models(data: Option<&Path>) -> Vec<Item> {
    let folders = models::folders();
    let named = folders.paths().iter().filter(|path| data.is_none_or(|data| !path.starts_with(data)));
    let item = |path: &PathBuf| Item {
        path: path.clone(),
        bytes: size(path),
        holds: "models, in a folder that you named: perhaps those of other programs, too",
        delete: None,
    };
    named.filter(|path| path.exists()).map(item).collect()
}

fn program() -> Option<Item> {
    let (path, origin) = origin::of_program()?;
    if origin == Origin::Pip {
        let (bytes, holds) = (0, "Python, with Kiln as a package");
        return Some(Item { bytes, holds, delete: Some(origin.remove(&[])), path });
    }
    let files = origin::files_of(&path);
    let bytes = files.iter().map(|file| size(file)).sum();
    let holds = if files.len() > 1 { "the program, its manual pages and completions" } else { "the program" };
    Some(Item { bytes, holds, delete: Some(origin.remove(&files)), path })
}

fn to_text(items: &[Item]) -> String {
    let block = |item: &Item| {
        let size = if item.bytes > 0 { format!(" ({})", bytes(item.bytes)) } else { String::new() };
        let delete = item.delete.as_ref().map_or(String::new(), |command| format!("  {command}\n"));
        format!("\n{}{size}\n  {}\n{delete}", item.path.display(), item.holds)
    };
    let blocks: String = items.iter().map(block).collect();
    format!("Kiln has these files here. This command deletes none of them; those below each do.\n{blocks}")
}
