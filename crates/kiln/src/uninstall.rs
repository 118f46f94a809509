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

/// What the packages' service keeps, where systemd has it.
const SERVICE: [(&str, &str); 2] = [
    ("/var/lib/kiln", "data of the service `kiln`: its downloads, jobs and images"),
    ("/etc/kiln", "settings and keys of the service `kiln`"),
];

/// A file or folder that is there.
#[derive(Debug, Serialize)]
struct Item {
    path: PathBuf,
    bytes: u64,
    holds: String,
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
    let mut add = |path: Option<PathBuf>, holds: &str| {
        let is_inside = |path: &Path| items.iter().any(|item| path.starts_with(&item.path));
        if let Some(path) = path.filter(|path| path.exists() && !is_inside(path)) {
            let delete = Some(delete_command(std::slice::from_ref(&path)));
            items.push(Item { bytes: size(&path), delete, holds: holds.into(), path });
        }
    };
    for cache in caches {
        add(Some(cache), "cache: encoded prompts and compiled kernels");
    }
    let cached = if shared.is_empty() { "" } else { ", encoded prompts and kernels" };
    // macOS has one folder for these two.
    let of_settings = settings::file().zip(data.as_ref()).is_some_and(|(file, data)| file.starts_with(data));
    let of_settings = if of_settings { ", your settings" } else { "" };
    add(
        data.clone(),
        &format!("data: your models and LoRAs, the jobs and images of `kiln serve`{cached}{of_settings}"),
    );
    add(settings::serve_folder("data", "KILN_DATA"), "data folder of `kiln serve`: jobs and images");
    add(settings::file(), "settings");
    items.extend(named_folders(data.as_deref()));
    items.extend(of_service());
    items.extend(program());
    items
}

/// The models that were downloaded from Hugging Face.
fn downloads() -> Vec<Item> {
    let installed = cache::installed(false);
    let item = |model: &kiln_hub::InstalledModel| Item {
        path: model.folder.clone(),
        bytes: model.bytes,
        holds: "a downloaded model, which other programs use, too".into(),
        delete: Some(format!("kiln rm {} --yes", model.repo)),
    };
    let mut items: Vec<Item> = installed.iter().map(item).collect();
    items.dedup_by(|a, b| a.path == b.path);
    items
}

/// Folders that the user named: they may be those of other programs.
fn named_folders(data: Option<&Path>) -> Vec<Item> {
    let models = models::folders().paths().to_vec().into_iter().map(|path| (path, "models"));
    let images = settings::get().output_folder.clone().map(|path| (path, "images"));
    let of_serve = [("loras", "KILN_LORAS", "LoRAs"), ("vaes", "KILN_VAES", "autoencoders")]
        .into_iter()
        .filter_map(|(option, variable, what)| Some((settings::serve_folder(option, variable)?, what)));
    let named = models.chain(images).chain(of_serve);
    let item = |(path, what): (PathBuf, &str)| Item {
        bytes: size(&path),
        holds: format!("{what}, in a folder that you named: perhaps those of other programs, too"),
        delete: None,
        path,
    };
    let is_foreign = |path: &PathBuf| path.exists() && data.is_none_or(|data| !path.starts_with(data));
    named.filter(|(path, _)| is_foreign(path)).map(item).collect()
}

/// What the service of a package left, which only administrators may look into.
fn of_service() -> Vec<Item> {
    let there = SERVICE.into_iter().filter(|(path, _)| Path::new(path).symlink_metadata().is_ok());
    let item = |(path, holds): (&str, &str)| {
        // systemd keeps the data of a service in a private folder, and links to it.
        let private = path.replace("/var/lib/", "/var/lib/private/");
        let both = if Path::new(path).is_symlink() { format!("{path} {private}") } else { path.to_owned() };
        Item {
            path: path.into(),
            bytes: size(Path::new(path)),
            holds: holds.into(),
            delete: Some(format!("sudo rm -r {both}")),
        }
    };
    there.map(item).collect()
}

fn program() -> Option<Item> {
    let (path, origin) = origin::of_program()?;
    if origin == Origin::Pip {
        let (bytes, holds) = (0, "Python, with Kiln as a package");
        return Some(Item { bytes, holds: holds.into(), delete: Some(origin.remove(&[])), path });
    }
    let files = origin::files_of(&path);
    let bytes = files.iter().map(|file| size(file)).sum();
    let mut holds =
        if files.len() > 1 { "the program, its manual pages and completions" } else { "the program" }
            .to_owned();
    if cfg!(windows) && origin == Origin::File {
        holds += "; its folder may stay in your PATH, which `install.ps1 -Uninstall` changes, too";
    }
    Some(Item { bytes, holds, delete: Some(origin.remove(&files)), path })
}

fn to_text(items: &[Item]) -> String {
    let block = |item: &Item| {
        let size = if item.bytes > 0 { format!(" ({})", bytes(item.bytes)) } else { String::new() };
        let delete = item.delete.as_ref().map_or(String::new(), |command| format!("  {command}\n"));
        format!("\n{}{size}\n  {}\n{delete}", item.path.display(), item.holds)
    };
    let blocks: String = items.iter().map(block).collect();
    let shell = if cfg!(windows) { ", in PowerShell" } else { "" };
    format!(
        "Kiln has these files here. This command deletes none of them; those below each do{shell}.\n{blocks}"
    )
}
