//! The files that a request names: how names become files, and how images and tensors are read.

use std::fs::File;
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

    /// Returns a safetensors file with prompt embeddings or noise.
    fn tensors(&self, name: &Path) -> Result<PathBuf>;
}

/// An input image.
#[derive(Clone, Debug)]
pub struct InputImage {
    /// The pixels.
    pub image: Arc<RgbImage>,
    /// How a recipe refers to its file.
    pub file: FileRef,
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
            return Err(Error::request(what).hint("name the LoRA's file"));
        }
        Ok(path.to_path_buf())
    }

    fn vae(&self, path: &Path) -> Result<PathBuf> {
        Ok(path.to_path_buf())
    }

    fn tensors(&self, path: &Path) -> Result<PathBuf> {
        Ok(path.to_path_buf())
    }
}

/// Reads an image file; refuses files larger than any image.
///
/// Reads it in one pass, so that pipes work as well as files.
pub fn read_image_bytes(path: &Path) -> Result<Vec<u8>, kiln_image::Error> {
    let unreadable = |source| kiln_image::Error::Read { path: path.into(), source };
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(unreadable)?;
    file.take(kiln_image::MAX_BYTES + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.len() as u64 > kiln_image::MAX_BYTES {
        let (name, limit) = (path.display().to_string(), kiln_image::MAX_BYTES);
        return Err(kiln_image::Error::FileTooLarge { name, limit });
    }
    Ok(bytes)
}

/// Opens a safetensors file and hashes its tensors. Messages call it `role`.
pub(crate) fn open_tensors(path: &Path, role: &str) -> Result<(WeightSource, FileRef)> {
    let source = WeightSource::open(path).with_context(|| format!("reading the {role}"))?;
    let mut hash = Sha256::new();
    // Every byte counts here, while `fingerprint` only samples large tensors.
    for name in source.names() {
        hash.update(name);
        hash.update(source.tensor(name)?.bytes());
    }
    let sha256 = hex(hash.finalize());
    Ok((source, FileRef { path: absolute(path).into(), sha256: Some(sha256) }))
}

/// Returns the first of `names` that the file has, or its only tensor.
pub(crate) fn find_tensor(source: &WeightSource, names: &[&str]) -> Result<HostTensor> {
    let all: Vec<&str> = source.names().collect();
    let name = names.iter().find(|name| source.contains(name)).or(match &all[..] {
        [only] => Some(only),
        _ => None,
    });
    match name {
        Some(name) => Ok(source.tensor(name)?),
        None => {
            let (path, expected) = (source.path().display(), names.join("` or `"));
            let found = all.iter().take(8).map(|n| format!("`{n}`")).collect::<Vec<_>>().join(", ");
            Err(Error::request(format!("`{path}` has no tensor `{expected}`; it has {found}"))
                .hint("save the tensor under that name, or alone in a file"))
        }
    }
}

/// Refuses tensors that contain NaN or infinity, or whose dtype can't be converted to f32.
pub(crate) fn check_finite(path: &Path, role: &str, x: &HostTensor) -> Result<()> {
    let (path, hint) = (path.display(), "save the file again, as f32 or bf16");
    let values = x.to_f32().map_err(|e| Error::request(format!("`{path}`: its {role}: {e}")).hint(hint))?;
    match values.iter().position(|v| !v.is_finite()) {
        Some(index) => {
            let what = format!("`{path}` has {} among its {role}, at index {index}", values[index]);
            Err(Error::request(what).hint(hint))
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
