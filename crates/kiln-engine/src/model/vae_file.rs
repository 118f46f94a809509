//! VAEs used in place of a model's own.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use kiln_base::lock;
use kiln_model::{taef2, vae};
use kiln_ops::Reference;
use kiln_weights::{Component, WeightSource};

use super::component::config_of;
use crate::error::{Error, Result};

/// A VAE in a file or folder of its own: TAEF2, or a FLUX.2 VAE.
#[derive(Debug)]
pub struct VaeFile {
    /// The file or folder.
    pub path: PathBuf,
    /// The `config.json` next to it, or what its tensors imply; `None` for TAEF2.
    pub config: Option<vae::Config>,
    /// Its weights.
    pub weights: WeightSource,
    /// A hash that identifies its weights in recipes.
    pub fingerprint: String,
}

impl VaeFile {
    fn open(path: &Path) -> Result<VaeFile> {
        let source = WeightSource::open(path)?;
        let (path, fingerprint) = (path.to_path_buf(), source.fingerprint()?);
        let vars = source.root();
        if taef2::Taef2::<Reference>::matches(&vars) {
            source.check_tensors(Component::Vae, &taef2::Taef2::<Reference>::tensors(&vars))?;
            return Ok(VaeFile { path, config: None, weights: source, fingerprint });
        }
        let weights = source.component(Component::Vae)?.unwrap_or(source);
        let config: vae::Config = config_of(&weights, &path)?
            .ok_or_else(|| Error::config(&path, "neither TAEF2 nor a FLUX.2 autoencoder"))?;
        if let Some(what) = config.problem() {
            return Err(Error::config(&path, what));
        }
        weights.check_tensors(Component::Vae, &config.tensors())?;
        Ok(VaeFile { path, config: Some(config), weights, fingerprint })
    }
}

/// The VAE files opened so far.
#[derive(Debug, Default)]
pub(super) struct VaeFiles(Mutex<Vec<Arc<VaeFile>>>);

impl VaeFiles {
    pub fn open(&self, path: &Path) -> Result<Arc<VaeFile>> {
        let mut files = lock(&self.0);
        if let Some(file) = files.iter().find(|file| file.path == path) {
            return Ok(Arc::clone(file));
        }
        let file = Arc::new(VaeFile::open(path)?);
        files.push(Arc::clone(&file));
        Ok(file)
    }
}
