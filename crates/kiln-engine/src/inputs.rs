//! The files that a request names: how names become files, and how images and tensors are read.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kiln_base::hex;
use kiln_image::RgbImage;
use kiln_tensor::HostTensor;
use kiln_weights::Error::{AmbiguousWeights, NoWeights};
use kiln_weights::WeightSource;
use sha2::{Digest, Sha256};

use crate::error::{Error, ErrorContext, Result};
use crate::request::FileRef;

/// Resolves the names in a request: paths on a command line, uploads and lists of known files in a server.
pub trait InputResolver {
    /// Reads an image.
    fn image(&self, name: &Path) -> Result<InputImage>;

    /// Returns the file of a LoRA, or the folder that PEFT saved it to.
    fn lora(&self, name: &Path) -> Result<PathBuf>;

    /// Returns the file or folder of a VAE.
    fn vae(&self, name: &Path) -> Result<PathBuf>;

    /// Reads prompt embeddings or noise.
    fn tensors(&self, name: &Path) -> Result<InputTensors>;
}

/// An input image.
#[derive(Clone, Debug)]
pub struct InputImage {
    /// The pixels.
    pub image: Arc<RgbImage>,
    /// How a recipe refers to its file.
    pub file: FileRef,
}

/// Reads an image, and updates `file` with its hash.
pub(crate) fn read_image(
    inputs: &dyn InputResolver,
    file: &mut FileRef,
    role: &str,
) -> Result<Arc<RgbImage>> {
    let read = inputs.image(&file.path).with_context(|| format!("reading the {role}"))?;
    let InputImage { image, file: hashed } = read;
    *file = hashed;
    Ok(image)
}

/// Prompt embeddings or noise: the tensors of a file, or tensors in memory.
#[derive(Clone, Debug)]
pub struct InputTensors {
    /// The file's name in messages.
    name: PathBuf,
    tensors: BTreeMap<String, HostTensor>,
    /// How a recipe refers to its file.
    pub file: FileRef,
}

impl InputTensors {
    /// Opens a safetensors file.
    pub fn open(path: &Path) -> Result<InputTensors> {
        let source = WeightSource::open(path)?;
        let tensor = |name: &str| Ok((name.to_owned(), source.tensor(name)?));
        let tensors = source.names().map(tensor).collect::<Result<_>>()?;
        let mut opened = InputTensors::in_memory(path, tensors);
        opened.file.path = absolute(path).into();
        Ok(opened)
    }

    /// Tensors that are in no file; a recipe refers to them by `name` and their hash.
    pub fn in_memory(name: impl Into<PathBuf>, tensors: BTreeMap<String, HostTensor>) -> InputTensors {
        let name = name.into();
        let mut hash = Sha256::new();
        // Every byte counts here, while `fingerprint` only samples large tensors.
        for (name, tensor) in &tensors {
            hash.update(name);
            hash.update(tensor.bytes());
        }
        let file = FileRef { path: name.clone(), sha256: Some(hex(hash.finalize())) };
        InputTensors { name, tensors, file }
    }

    /// Returns a tensor.
    pub(crate) fn get(&self, name: &str) -> Option<&HostTensor> {
        self.tensors.get(name)
    }

    /// Returns the first of `names` that there is, or the only tensor.
    pub(crate) fn find(&self, names: &[&str]) -> Result<&HostTensor> {
        let only = || self.tensors.values().next().filter(|_| self.tensors.len() == 1);
        names.iter().find_map(|name| self.get(name)).or_else(only).ok_or_else(|| {
            let (path, expected) = (self.name.display(), names.join("` or `"));
            let found = self.tensors.keys().take(8).map(|n| format!("`{n}`")).collect::<Vec<_>>().join(", ");
            Error::request(format!("`{path}` has no tensor `{expected}`; it has {found}"))
                .with_hint("save the tensor under that name, or alone in a file")
        })
    }
}

/// An [`InputResolver`] for names that are paths on this machine.
#[derive(Clone, Copy, Debug, Default)]
pub struct LocalFiles;

impl InputResolver for LocalFiles {
    fn image(&self, path: &Path) -> Result<InputImage> {
        let bytes = read_image_bytes(path)?;
        let image = kiln_image::from_bytes(&path.display().to_string(), &bytes)?;
        let file = FileRef { path: absolute(path).into(), sha256: Some(sha256(&bytes)) };
        Ok(InputImage { image: Arc::new(image), file })
    }

    fn lora(&self, path: &Path) -> Result<PathBuf> {
        if path.is_dir()
            && let Err(error @ (NoWeights { .. } | AmbiguousWeights { .. })) = WeightSource::open(path)
        {
            let what = format!("LoRA `{}` is a folder, expected one with one LoRA: {error}", path.display());
            return Err(Error::request(what).with_hint("name the LoRA's file"));
        }
        Ok(path.to_path_buf())
    }

    fn vae(&self, path: &Path) -> Result<PathBuf> {
        Ok(path.to_path_buf())
    }

    fn tensors(&self, path: &Path) -> Result<InputTensors> {
        InputTensors::open(path)
    }
}

/// Reads an image file; refuses files larger than any image.
///
/// Reads it in one pass, so that `/dev/stdin` and `<(command)` work as well as files.
pub fn read_image_bytes(path: &Path) -> Result<Vec<u8>, kiln_image::Error> {
    let unreadable = |source| kiln_image::Error::Read { path: path.into(), source };
    let mut bytes = Vec::new();
    let file = kiln_base::open_input(path).map_err(unreadable)?;
    file.take(kiln_image::MAX_BYTES + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.len() as u64 > kiln_image::MAX_BYTES {
        let (name, limit) = (path.display().to_string(), kiln_image::MAX_BYTES);
        return Err(kiln_image::Error::FileTooLarge { name, limit });
    }
    Ok(bytes)
}

/// The file that a recipe names, if it is there and is the same.
pub(crate) fn unchanged_file(file: &FileRef) -> Option<Vec<u8>> {
    let bytes = read_image_bytes(&file.path).ok()?;
    (file.sha256.as_deref() == Some(&sha256(&bytes)[..])).then_some(bytes)
}

/// Refuses tensors that contain NaN or infinity, or whose dtype can't be converted to f32.
pub(crate) fn check_finite(path: &Path, role: &str, x: &HostTensor) -> Result<()> {
    let (path, hint) = (path.display(), "save the file again, as f32 or bf16");
    let values =
        x.to_f32().map_err(|e| Error::request(format!("`{path}`: its {role}: {e}")).with_hint(hint))?;
    match values.iter().position(|v| !v.is_finite()) {
        Some(index) => {
            let what = format!("`{path}` has {} among its {role}, at index {index}", values[index]);
            Err(Error::request(what).with_hint(hint))
        }
        None => Ok(()),
    }
}

/// Returns an absolute path, so that a recipe works from any folder.
pub(crate) fn absolute(path: &Path) -> String {
    std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf()).to_string_lossy().into_owned()
}

/// Returns the SHA-256 of some bytes in hex.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    hex(Sha256::digest(bytes))
}
