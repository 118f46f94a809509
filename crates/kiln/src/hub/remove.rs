use std::fs;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};

use kiln_hub::{Cache, Name};

use crate::args::RmArgs;
use crate::failure::Failure;
use crate::models::{self, Found};
use crate::values::bytes;
use crate::{ember, hub};

/// What is to go.
enum Target {
    /// A file or folder of the models folder.
    Own(PathBuf),
    /// A repository in the cache, or some files of it.
    Pulled(Cache, Name),
}

pub fn run(args: &RmArgs) -> Result<(), Failure> {
    let target = find(&args.name)?;
    let (what, size) = match &target {
        Target::Own(path) => (format!("`{}`", path.display()), hub::list::size(path)),
        Target::Pulled(cache, name) => {
            let found = cache.installed(&name.repo, &name.revision);
            let size = found.as_ref().map_or(0, |found| found.bytes);
            let folder = found.map_or_else(|| cache.folder().to_path_buf(), |found| found.folder);
            match &name.pattern {
                Some(pattern) => (format!("files like `{pattern}` in `{}`", folder.display()), 0),
                None => (format!("`{}`, which other programs may use, too", folder.display()), size),
            }
        }
    };
    if !args.yes {
        confirm(&what, size)?;
    }
    let refused =
        |path: &Path, e: std::io::Error| Failure::new(format!("can't remove `{}`: {e}", path.display()));
    let freed = match &target {
        // Of a link the link goes, not what it leads to.
        Target::Own(path) if path.is_symlink() || path.is_file() => {
            fs::remove_file(path).map_err(|e| refused(path, e)).map(|()| size)?
        }
        Target::Own(path) => fs::remove_dir_all(path).map_err(|e| refused(path, e)).map(|()| size)?,
        Target::Pulled(cache, Name { repo, pattern: Some(pattern), .. }) => {
            cache.remove_matching(repo, pattern)?
        }
        Target::Pulled(cache, name) => cache.remove(&name.repo)?,
    };
    let _ = writeln!(std::io::stderr(), "removed {what}: {}", bytes(freed));
    Ok(())
}

fn find(asked: &str) -> Result<Target, Failure> {
    if asked == ember::NAME && ember::file().is_some() {
        return Err(Failure::usage("Ember is a part of the program and can't be removed"));
    }
    if models::known(&models::folders()).iter().any(|name| name == asked)
        && let Found::Named { path, .. } = Found::find(Some(Path::new(asked)))?
    {
        return Ok(Target::Own(path));
    }
    if let Ok(name) = Name::parse(asked) {
        let cache = Cache::new(hub::settings()?.cache);
        let found = cache.installed(&name.repo, &name.revision).is_some();
        let fits = name.pattern.is_none() || cache.find(&name)?.is_some();
        if found && fits {
            return Ok(Target::Pulled(cache, name));
        }
    }
    Err(Failure::new(format!("there is no model `{asked}` to remove"))
        .hint("`kiln models` lists what there is; files elsewhere are yours to delete"))
}

fn confirm(what: &str, size: u64) -> Result<(), Failure> {
    if !std::io::stdin().is_terminal() {
        return Err(Failure::usage(format!("this would remove {what}")).hint("say --yes to do it"));
    }
    let size = if size > 0 { format!(" ({})", bytes(size)) } else { String::new() };
    let _ = write!(std::io::stderr(), "remove {what}{size}? [y/N] ");
    let mut answer = String::new();
    let _ = std::io::stdin().read_line(&mut answer);
    match answer.trim().to_lowercase().as_str() {
        "y" | "yes" => Ok(()),
        _ => Err(Failure::cancelled()),
    }
}
