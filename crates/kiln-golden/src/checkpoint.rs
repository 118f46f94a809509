use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use kiln_weights::WeightSource;
use tempfile::TempDir;

/// The files of a folder beside its weights.
const CONFIGURATIONS: [&str; 7] = [
    "model_index.json",
    "transformer/config.json",
    "text_encoder/config.json",
    "vae/config.json",
    "scheduler/scheduler_config.json",
    "tokenizer/tokenizer.json",
    "tokenizer/tokenizer_config.json",
];

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

    /// Writes it as one safetensors file, with these values as its own `kiln.` metadata.
    pub fn pack(&self, file: &Path, own: &[(&str, &str)]) -> Result<(), String> {
        let text = |e: &dyn std::fmt::Display| e.to_string();
        let mut tensors = Vec::new();
        for part in ["transformer", "text_encoder", "vae"] {
            let source = WeightSource::open(self.path().join(part)).map_err(|e| text(&e))?;
            for name in source.names() {
                tensors.push((format!("{part}.{name}"), source.tensor(name).map_err(|e| text(&e))?));
            }
        }
        let mut metadata = BTreeMap::new();
        for name in CONFIGURATIONS {
            let bytes = fs::read_to_string(self.path().join(name)).map_err(|e| text(&e))?;
            metadata.insert(name.to_owned(), bytes);
        }
        metadata.extend(own.iter().map(|(name, value)| (format!("kiln.{name}"), (*value).to_owned())));
        let tensors: Vec<_> = tensors.iter().map(|(name, t)| (name.as_str(), t.clone())).collect();
        kiln_weights::save::save(file, &tensors, &metadata).map_err(|e| text(&e))
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
