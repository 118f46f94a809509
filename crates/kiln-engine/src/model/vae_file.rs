//! VAEs used in place of a model's own.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use kiln_base::lock;
use kiln_nn::{taef2, vae};
use kiln_ops::Reference;
use kiln_weights::{Component, WeightSource};

use super::component::{config_file, config_of};
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
    /// Which files were opened, in which state, and their `config.json`.
    files: Option<String>,
}

impl VaeFile {
    fn open(path: &Path, source: WeightSource, files: Option<String>) -> Result<VaeFile> {
        let (path, fingerprint) = (path.to_path_buf(), source.fingerprint()?);
        let vars = source.root();
        if taef2::Taef2::<Reference>::matches(&vars) {
            source.check_tensors(Component::Vae, &taef2::Taef2::<Reference>::tensors(&vars))?;
            return Ok(VaeFile { path, config: None, weights: source, fingerprint, files });
        }
        let weights = source.component(Component::Vae)?.unwrap_or(source);
        let config: vae::Config = config_of(&weights, &path)?
            .ok_or_else(|| Error::config(&path, "neither TAEF2 nor a FLUX.2 autoencoder"))?;
        if let Some(what) = config.problem() {
            return Err(Error::config(&path, what));
        }
        weights.check_tensors(Component::Vae, &config.tensors())?;
        Ok(VaeFile { path, config: Some(config), weights, fingerprint, files })
    }

    /// Whether it is the same VAE: the same file in the same state.
    pub(crate) fn is_same(&self, other: &VaeFile) -> bool {
        self.path == other.path && self.files.is_some() && self.files == other.files
    }
}

/// Whether two autoencoders have the same latents, as far as their batch norms tell, which hold the latents' mean and
/// variance; `None` if they can't be read.
pub(super) fn share_latents(a: &WeightSource, b: &WeightSource) -> Option<bool> {
    /// Differences of rounding are far below, those of other latents far above: they have nothing in common.
    const MAX_DIFFERENCE: f32 = 0.1;
    let read = |source: &WeightSource, name: &str| {
        let tensor = source.tensor(&format!("bn.running_{name}")).ok()?;
        Some(tensor.to_f32().ok()?.into_owned())
    };
    let (mean_a, mean_b) = (read(a, "mean")?, read(b, "mean")?);
    let (var_a, var_b) = (read(a, "var")?, read(b, "var")?);
    if mean_a.len() != mean_b.len() || mean_a.is_empty() {
        return Some(false);
    }
    let means =
        mean_a.iter().zip(&mean_b).zip(&var_a).map(|((a, b), var)| (a - b).abs() / var.sqrt().max(1e-6));
    let variances = var_a.iter().zip(&var_b).map(|(a, b)| (a - b).abs() / a.max(1e-6));
    let count = mean_a.len() as f32;
    Some(means.sum::<f32>() / count < MAX_DIFFERENCE && variances.sum::<f32>() / count < MAX_DIFFERENCE)
}

/// Tells whether the VAE at `path` is the same and unchanged; `None` if that is not known.
fn file_identity(path: &Path, source: &WeightSource) -> Option<String> {
    let config = config_file(path).map(|file| std::fs::read_to_string(file).unwrap_or_default());
    Some(format!("{}\n{config:?}", source.file_identity()?))
}

/// The VAE files opened so far.
#[derive(Debug, Default)]
pub(super) struct VaeFiles(Mutex<Vec<Arc<VaeFile>>>);

impl VaeFiles {
    pub fn open(&self, path: &Path) -> Result<Arc<VaeFile>> {
        // Reads the header only. The file may have been replaced since it was opened.
        let source = WeightSource::open(path)?;
        let identity = file_identity(path, &source);
        let mut files = lock(&self.0);
        if let Some(file) = files.iter().find(|file| file.path == path && file.files == identity) {
            return Ok(Arc::clone(file));
        }
        let file = Arc::new(VaeFile::open(path, source, identity)?);
        files.retain(|file| file.path != path);
        files.push(Arc::clone(&file));
        Ok(file)
    }
}
