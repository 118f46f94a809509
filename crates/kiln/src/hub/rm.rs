//! `kiln rm`: removes a downloaded model, or one in the models folder.

use std::fs;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};

use kiln_base::printable_line;
use kiln_catalog::ember;
use kiln_hub::{Cache, ModelName};

use crate::args::RmArgs;
use crate::error::CliError;
use crate::models;
use crate::values::bytes;
use crate::{hub, terminal};

/// A model to remove.
enum RemovableModel {
    /// A file or folder in the models folder.
    Local(PathBuf),
    /// A repository in the cache, or some of its files.
    Pulled(Cache, ModelName),
}

pub fn run(args: &RmArgs) -> Result<(), CliError> {
    let model = find(&args.name)?;
    let (what, size) = match &model {
        RemovableModel::Local(path) => (format!("`{}`", path.display()), hub::models::size(path)),
        RemovableModel::Pulled(cache, name) => {
            let installed = cache.installed(&name.repo, &name.revision);
            let files = cache.files(name);
            let folder = installed.as_ref().map_or(cache.folder(), |installed| &installed.folder).display();
            match &name.pattern {
                Some(_) => {
                    let names: Vec<String> = files.iter().map(|(path, _)| format!("`{path}`")).collect();
                    let what = format!("{} in `{folder}`", names.join(", "));
                    (what, files.iter().map(|(_, bytes)| bytes).sum())
                }
                None => {
                    let what = format!("`{folder}`, which other programs may also use");
                    (what, installed.map_or(0, |installed| installed.bytes))
                }
            }
        }
    };
    if !args.yes {
        confirm(&what, size)?;
    }
    let remove_error = |path: &Path, e: std::io::Error| {
        CliError::new(format!("can't remove `{}`: {e}", path.display())).hint(if cfg!(windows) {
            "end the programs that use it, such as `kiln serve`, and check that you may write to its folder"
        } else {
            "check that you may write to its folder"
        })
    };
    let freed = match &model {
        // Removes a link itself, not the folder it points to.
        RemovableModel::Local(path) if path.is_symlink() || path.is_file() => {
            fs::remove_file(path).map_err(|e| remove_error(path, e)).map(|()| size)?
        }
        RemovableModel::Local(path) => {
            fs::remove_dir_all(path).map_err(|e| remove_error(path, e)).map(|()| size)?
        }
        RemovableModel::Pulled(cache, ModelName { repo, pattern: Some(pattern), .. }) => {
            cache.remove_matching(repo, pattern).map_err(kiln_catalog::Error::from)?
        }
        RemovableModel::Pulled(cache, name) => {
            cache.remove_revision(&name.repo, &name.revision).map_err(kiln_catalog::Error::from)?
        }
    };
    terminal::tell(&format!("removed {what}: {}", bytes(freed)));
    Ok(())
}

fn find(text: &str) -> Result<RemovableModel, CliError> {
    if ember::is_built_in(text) {
        return Err(CliError::usage("Ember is built in and can't be removed")
            .hint("`kiln models` lists the models that can"));
    }
    if let Some((_, path)) = models::folders().list().into_iter().find(|(name, _)| name == text) {
        return Ok(RemovableModel::Local(path));
    }
    if let Ok(name) = ModelName::parse(text) {
        let cache = Cache::new(kiln_catalog::cache_settings()?.cache);
        let installed = cache.installed(&name.repo, &name.revision).is_some();
        let matches = name.pattern.is_none() || !cache.files(&name).is_empty();
        if installed && matches {
            return Ok(RemovableModel::Pulled(cache, name));
        }
    }
    Err(CliError::new(format!("there is no model `{text}` to remove"))
        .hint("`kiln models` lists the models; delete files in other folders yourself"))
}

fn confirm(what: &str, size: u64) -> Result<(), CliError> {
    if !std::io::stdin().is_terminal() {
        return Err(CliError::usage(format!("this would remove {what}")).hint("confirm with --yes"));
    }
    let size = if size > 0 { format!(" ({})", bytes(size)) } else { String::new() };
    if hub::ask(&format!("remove {}{size}?", printable_line(what))) {
        Ok(())
    } else {
        Err(CliError::cancelled())
    }
}
