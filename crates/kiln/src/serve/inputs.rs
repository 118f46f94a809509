//! What the names in a job lead to.

use std::path::{Path, PathBuf};

use kiln_engine::{Error, FileRef, InputImage, InputResolver, InputTensors};
use kiln_server::JobInputs;

use super::files::WeightFolders;

/// Resolves the names in a job: images stored by the server, LoRAs and autoencoders of the catalogue.
pub struct JobInputResolver<'a> {
    pub job: &'a JobInputs<'a>,
    pub files: &'a WeightFolders,
    pub default_vae: Option<&'a Path>,
}

impl InputResolver for JobInputResolver<'_> {
    fn image(&self, name: &Path) -> kiln_engine::Result<InputImage> {
        let image = self.job.image(&FileRef::from(name.to_path_buf()));
        let image = image.map_err(|error| Error::request(error.message))?;
        let file = FileRef { path: image.path, sha256: Some(image.sha256) };
        Ok(InputImage { image: image.image, file })
    }

    fn lora(&self, name: &Path) -> kiln_engine::Result<PathBuf> {
        let missing = || Error::request(format!("the LoRA `{}` no longer exists", name.display()));
        name.to_str().and_then(|name| self.files.lora(name)).ok_or_else(missing)
    }

    fn vae(&self, name: &Path) -> kiln_engine::Result<PathBuf> {
        if self.default_vae == Some(name) {
            return Ok(name.to_path_buf());
        }
        let missing = || Error::request(format!("the autoencoder `{}` no longer exists", name.display()));
        name.to_str().and_then(|name| self.files.vae(name)).ok_or_else(missing)
    }

    fn tensors(&self, _: &Path) -> kiln_engine::Result<InputTensors> {
        Err(Error::request("tensor files are not supported over HTTP"))
    }
}
