use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

/// A whole model folder put together from a set's parts, for as long as this value lives.
pub struct Checkpoint {
    folder: TempDir,
}

impl Checkpoint {
    /// Completes `tiny/{name}` of the set: parts it does not have itself are klein's, the tokenizer is the set's.
    pub fn assemble(set: &Path, name: &str) -> Result<Checkpoint, String> {
        let folder = tempfile::tempdir().map_err(|e| e.to_string())?;
        let own = set.join("tiny").join(name);
        link(&own, folder.path())?;
        let mut parts = vec!["transformer", "vae", "scheduler"];
        if name != "dev" {
            parts.push("text_encoder");
            link(&set.join("tokenizer"), &folder.path().join("tokenizer"))?;
        }
        for part in parts {
            if !own.join(part).exists() {
                link(&set.join("tiny/klein").join(part), &folder.path().join(part))?;
            }
        }
        Ok(Checkpoint { folder })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }
}

/// Hard links where possible, copies elsewhere.
fn link(from: &Path, to: &Path) -> Result<(), String> {
    let failed = |path: &Path, e: std::io::Error| format!("{}: {e}", path.display());
    fs::create_dir_all(to).map_err(|e| failed(to, e))?;
    for entry in fs::read_dir(from).map_err(|e| failed(from, e))? {
        let source: PathBuf = entry.map_err(|e| failed(from, e))?.path();
        let target = to.join(source.file_name().unwrap_or_default());
        if source.is_dir() {
            link(&source, &target)?;
        } else if fs::hard_link(&source, &target).is_err() {
            fs::copy(&source, &target).map_err(|e| failed(&source, e))?;
        }
    }
    Ok(())
}
