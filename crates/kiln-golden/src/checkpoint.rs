use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use kiln_weights::WeightSource;
use tempfile::TempDir;

use crate::recipe;

/// The files of a model folder other than its weights.
const CONFIG_FILES: [&str; 7] = [
    "model_index.json",
    "transformer/config.json",
    "text_encoder/config.json",
    "vae/config.json",
    "scheduler/scheduler_config.json",
    "tokenizer/tokenizer.json",
    "tokenizer/tokenizer_config.json",
];

/// A temporary model folder, assembled from a set's components.
pub struct Checkpoint {
    folder: TempDir,
}

impl Checkpoint {
    /// Assembles `tiny/{name}` of the set: missing components are those of klein, the tokenizer is the set's. Weights
    /// that a `recipe.json` describes are drawn.
    pub fn assemble(set: &Path, name: &str) -> Result<Checkpoint, String> {
        let folder = tempfile::tempdir().map_err(|e| e.to_string())?;
        let own = set.join("tiny").join(name);
        link(&own, folder.path())?;
        if own.join("recipe.json").is_file() {
            recipe::write(&own, folder.path())?;
        }
        let mut components = vec!["transformer", "vae", "scheduler"];
        if name != "dev" {
            components.push("text_encoder");
            link(&set.join("tokenizer"), &folder.path().join("tokenizer"))?;
        }
        for component in components {
            if !own.join(component).exists() {
                link(&set.join("tiny/klein").join(component), &folder.path().join(component))?;
            }
        }
        Ok(Checkpoint { folder })
    }

    /// Writes the model to a single safetensors file, with `kiln_metadata` as its `kiln.` metadata.
    pub fn write_single_file(&self, file: &Path, kiln_metadata: &[(&str, &str)]) -> Result<(), String> {
        let text = |e: &dyn std::fmt::Display| e.to_string();
        let mut tensors = Vec::new();
        for component in ["transformer", "text_encoder", "vae"] {
            let source = WeightSource::open(self.path().join(component)).map_err(|e| text(&e))?;
            for name in source.names() {
                tensors.push((format!("{component}.{name}"), source.tensor(name).map_err(|e| text(&e))?));
            }
        }
        let mut metadata = BTreeMap::new();
        for name in CONFIG_FILES {
            match fs::read_to_string(self.path().join(name)) {
                Ok(bytes) => _ = metadata.insert(name.to_owned(), bytes),
                // dev's is built in.
                Err(_) if name.starts_with("tokenizer/") => {}
                Err(error) => return Err(text(&error)),
            }
        }
        metadata
            .extend(kiln_metadata.iter().map(|(name, value)| (format!("kiln.{name}"), (*value).to_owned())));
        let tensors: Vec<_> = tensors.iter().map(|(name, t)| (name.as_str(), t.clone())).collect();
        kiln_weights::save::save(file, &tensors, &metadata).map_err(|e| text(&e))
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }
}

/// Links the files of a folder, or copies them: where hard links are not possible, and on Windows, which replaces no file that
/// another test has mapped under its other name.
fn link(from: &Path, to: &Path) -> Result<(), String> {
    let failed = |path: &Path, e: std::io::Error| format!("{}: {e}", path.display());
    fs::create_dir_all(to).map_err(|e| failed(to, e))?;
    for entry in fs::read_dir(from).map_err(|e| failed(from, e))? {
        let source: PathBuf = entry.map_err(|e| failed(from, e))?.path();
        let target = to.join(source.file_name().unwrap_or_default());
        if source.is_dir() {
            link(&source, &target)?;
        } else if cfg!(windows) || fs::hard_link(&source, &target).is_err() {
            fs::copy(&source, &target).map_err(|e| failed(&source, e))?;
        }
    }
    Ok(())
}
