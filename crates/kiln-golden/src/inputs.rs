use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kiln_engine::{FileRef, InputImage, InputResolver, InputTensors, LocalFiles, Result};
use kiln_image::RgbImage;
use kiln_tensor::HostTensor;
use tempfile::TempDir;

/// Named images and tensors of a test; other names are paths of local files.
pub struct TestInputs {
    images: HashMap<PathBuf, Arc<RgbImage>>,
    folder: TempDir,
}

impl Default for TestInputs {
    fn default() -> Self {
        Self::new()
    }
}

impl TestInputs {
    /// Creates an empty set of inputs.
    ///
    /// # Panics
    /// If no temporary folder can be created.
    pub fn new() -> TestInputs {
        TestInputs { images: HashMap::new(), folder: tempfile::tempdir().expect("a temporary folder") }
    }

    /// Adds an image.
    pub fn add_image(&mut self, name: &str, image: RgbImage) -> FileRef {
        self.images.insert(name.into(), Arc::new(image));
        name.into()
    }

    /// Adds a file with these tensors.
    ///
    /// # Panics
    /// If the file can't be written.
    pub fn add_tensors(&mut self, name: &str, tensors: &[(&str, HostTensor)]) -> FileRef {
        let file = self.folder.path().join(format!("{name}.safetensors"));
        kiln_weights::save::save(&file, tensors, &Default::default()).expect("tensors can be saved");
        file.into()
    }
}

impl InputResolver for TestInputs {
    fn image(&self, name: &Path) -> Result<InputImage> {
        match self.images.get(name) {
            Some(image) => Ok(InputImage { image: Arc::clone(image), file: name.to_path_buf().into() }),
            None => LocalFiles.image(name),
        }
    }

    fn lora(&self, name: &Path) -> Result<PathBuf> {
        LocalFiles.lora(name)
    }

    fn vae(&self, name: &Path) -> Result<PathBuf> {
        LocalFiles.vae(name)
    }

    fn tensors(&self, name: &Path) -> Result<InputTensors> {
        LocalFiles.tensors(name)
    }
}
