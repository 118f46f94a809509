//! The files that a request names, and what names mean.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kiln_image::Picture;
use kiln_tensor::HostTensor;
use kiln_weights::WeightSource;
use sha2::{Digest, Sha256};

use crate::error::{Error, Result, While};
use crate::request::FileRef;

/// What the names in a request mean: paths on a command line, uploads and lists of known files in a service.
pub trait Inputs {
    /// An image.
    fn image(&self, name: &Path) -> Result<InputImage>;

    /// The file of a LoRA.
    fn lora(&self, name: &Path) -> Result<PathBuf>;

    /// The file or folder of an autoencoder.
    fn vae(&self, name: &Path) -> Result<PathBuf>;

    /// A file of tensors.
    fn tensors(&self, name: &Path) -> Result<PathBuf>;
}

/// An image that was read.
#[derive(Clone, Debug)]
pub struct InputImage {
    /// Its pixels.
    pub picture: Arc<Picture>,
    /// What a recipe says of its file.
    pub file: FileRef,
}

/// Names are paths on this machine.
#[derive(Clone, Copy, Debug, Default)]
pub struct LocalFiles;

impl Inputs for LocalFiles {
    fn image(&self, path: &Path) -> Result<InputImage> {
        let bytes = read_image_bytes(path)?;
        let picture = kiln_image::from_bytes(&path.display().to_string(), &bytes)?;
        let file = FileRef { path: absolute(path).into(), sha256: Some(sha256(&bytes)) };
        Ok(InputImage { picture: Arc::new(picture), file })
    }

    fn lora(&self, path: &Path) -> Result<PathBuf> {
        if path.is_dir() {
            let path = path.display();
            let what = format!("LoRA `{path}` is a folder, expected a safetensors file");
            return Err(Error::request(what).hint("name the file in it"));
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

/// All bytes of an image file; refuses files larger than any image.
///
/// Read once, so that pipes work as well as files.
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

/// The tensors of a safetensors file and what a recipe says of it; `role` is for messages.
pub(crate) fn tensors(path: &Path, role: &str) -> Result<(WeightSource, FileRef)> {
    let source = WeightSource::open(path).while_doing(|| format!("reading the {role}"))?;
    let mut hash = Sha256::new();
    // The fingerprint samples large tensors; these are small and matter whole.
    for name in source.names() {
        hash.update(name);
        hash.update(source.tensor(name)?.bytes());
    }
    Ok((source, FileRef { path: absolute(path).into(), sha256: Some(hex(hash)) }))
}

/// The first of `names` that the file has, or its only tensor.
pub(crate) fn named_tensor(source: &WeightSource, names: &[&str]) -> Result<HostTensor> {
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

/// Refuses tensors with NaN or infinity, and with numbers that can't be read as such.
pub(crate) fn finite(path: &Path, role: &str, x: &HostTensor) -> Result<()> {
    let (path, again) = (path.display(), "save the file again, as f32 or bf16");
    let values = x.to_f32().map_err(|e| Error::request(format!("`{path}`: its {role}: {e}")).hint(again))?;
    match values.iter().position(|v| !v.is_finite()) {
        Some(at) => {
            let what = format!("`{path}` has {} among its {role}, at {at}", values[at]);
            Err(Error::request(what).hint(again))
        }
        None => Ok(()),
    }
}

/// An absolute path, so that a recipe works from any folder.
pub fn absolute(path: &Path) -> String {
    std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf()).to_string_lossy().into_owned()
}

/// SHA-256 in hex.
pub fn sha256(bytes: &[u8]) -> String {
    hex(Sha256::new().chain_update(bytes))
}

fn hex(hash: Sha256) -> String {
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}
