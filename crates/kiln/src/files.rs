//! Reading the files that options name, with the hashes that recipes keep.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use kiln_image::Picture;
use kiln_tensor::HostTensor;
use kiln_weights::WeightSource;
use sha2::{Digest, Sha256};

use crate::failure::{Failure, While};
use crate::recipe::Used;

/// All bytes of a picture file; refuses files larger than any picture.
///
/// Read once, so that pipes work as well as files.
pub fn read_picture_bytes(path: &Path) -> Result<Vec<u8>, kiln_image::Error> {
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

/// A picture and what a recipe says of it; `role` is for messages.
pub fn picture(path: &Path, role: &str) -> Result<(Picture, Used), Failure> {
    let read = || {
        let bytes = read_picture_bytes(path)?;
        let picture = kiln_image::from_bytes(&path.display().to_string(), &bytes)?;
        Ok::<_, kiln_image::Error>((picture, Used { path: absolute(path), sha256: sha256(&bytes) }))
    };
    read().while_doing(|| format!("reading the {role}"))
}

/// The tensors of a safetensors file and what a recipe says of it.
pub fn tensors(path: &Path, role: &str) -> Result<(WeightSource, Used), Failure> {
    let source = WeightSource::open(path).while_doing(|| format!("reading the {role}"))?;
    let mut hash = Sha256::new();
    // The fingerprint samples large tensors; these are small and matter whole.
    for name in source.names() {
        hash.update(name);
        hash.update(source.tensor(name)?.bytes());
    }
    Ok((source, Used { path: absolute(path), sha256: hex(hash) }))
}

/// What a recipe says of weights.
pub fn weights(path: &Path) -> Result<Used, Failure> {
    let sha256 = WeightSource::open(path)?.fingerprint()?;
    Ok(Used { path: absolute(path), sha256 })
}

/// The first of `names` that the file has, or its only tensor.
pub fn named_tensor(source: &WeightSource, names: &[&str]) -> Result<HostTensor, Failure> {
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
            Err(Failure::new(format!("`{path}` has no tensor `{expected}`; it has {found}"))
                .hint("save the tensor under that name, or alone in a file"))
        }
    }
}

/// Refuses tensors with NaN or infinity, and with numbers that can't be read as such.
pub fn finite(path: &Path, role: &str, x: &HostTensor) -> Result<(), Failure> {
    let (path, again) = (path.display(), "save the file again, as f32 or bf16");
    let values = x.to_f32().map_err(|e| Failure::new(format!("`{path}`: its {role}: {e}")).hint(again))?;
    match values.iter().position(|v| !v.is_finite()) {
        Some(at) => {
            Err(Failure::new(format!("`{path}` has {} among its {role}, at {at}", values[at])).hint(again))
        }
        None => Ok(()),
    }
}

/// An absolute path, so that a recipe works from any folder.
pub fn absolute(path: &Path) -> String {
    std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf()).to_string_lossy().into_owned()
}

fn sha256(bytes: &[u8]) -> String {
    hex(Sha256::new().chain_update(bytes))
}

fn hex(hash: Sha256) -> String {
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}
