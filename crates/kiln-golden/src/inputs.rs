use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kiln_engine::{FileRef, InputImage, Inputs, LocalFiles, Result};
use kiln_image::Picture;
use kiln_tensor::HostTensor;
use tempfile::TempDir;

/// Images and tensors that a test makes up, by name; any other name is a path.
pub struct MadeUpInputs {
    images: HashMap<PathBuf, Arc<Picture>>,
    folder: TempDir,
}

impl Default for MadeUpInputs {
    fn default() -> Self {
        Self::new()
    }
}

impl MadeUpInputs {
    /// None so far.
    ///
    /// # Panics
    /// Where there is no temporary folder.
    pub fn new() -> MadeUpInputs {
        MadeUpInputs { images: HashMap::new(), folder: tempfile::tempdir().expect("a temporary folder") }
    }

    /// Names an image.
    pub fn add_image(&mut self, name: &str, picture: Picture) -> FileRef {
        self.images.insert(name.into(), Arc::new(picture));
        name.into()
    }

    /// Saves a file with these tensors.
    ///
    /// # Panics
    /// If it can't be written.
    pub fn add_tensors(&mut self, name: &str, tensors: &[(&str, HostTensor)]) -> FileRef {
        let file = self.folder.path().join(format!("{name}.safetensors"));
        kiln_weights::save::save(&file, tensors, &Default::default()).expect("tensors can be saved");
        file.into()
    }
}

impl Inputs for MadeUpInputs {
    fn image(&self, name: &Path) -> Result<InputImage> {
        match self.images.get(name) {
            Some(picture) => Ok(InputImage { picture: Arc::clone(picture), file: name.to_path_buf().into() }),
            None => LocalFiles.image(name),
        }
    }

    fn lora(&self, name: &Path) -> Result<PathBuf> {
        LocalFiles.lora(name)
    }

    fn vae(&self, name: &Path) -> Result<PathBuf> {
        LocalFiles.vae(name)
    }

    fn tensors(&self, name: &Path) -> Result<PathBuf> {
        LocalFiles.tensors(name)
    }
}
