//! Writing safetensors files.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Seek, Write};
use std::path::Path;

use kiln_base::AtomicFile;
use kiln_tensor::{DType, HostTensor, Shape};
use serde_json::{Map, Value, json};

use crate::{Error, Result, dtypes};

/// The header entry that is not a tensor.
const METADATA: &str = "__metadata__";

/// Writes `tensors` and `metadata` to `path`, atomically: on an error no file is left behind, and an existing one stays as it
/// was.
///
/// The same input gives the same bytes.
///
/// ```
/// use kiln_weights::{WeightSource, save};
/// use kiln_tensor::HostTensor;
///
/// let dir = tempfile::tempdir()?;
/// let file = dir.path().join("latents.safetensors");
/// save::save(&file, &[("latents", HostTensor::zeros([1, 16, 128]))], &Default::default())?;
/// assert_eq!(WeightSource::open(&file)?.names().collect::<Vec<_>>(), ["latents"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn save(
    path: impl AsRef<Path>,
    tensors: &[(&str, HostTensor)],
    metadata: &BTreeMap<String, String>,
) -> Result<()> {
    let plan: Vec<TensorSpec> = tensors
        .iter()
        .map(|(name, t)| TensorSpec { name: (*name).to_owned(), dtype: t.dtype(), shape: t.shape().clone() })
        .collect();
    let mut next = tensors.iter();
    write_tensors(path.as_ref(), &plan, metadata, AtomicFile::commit, &mut |_| match next.next() {
        Some((_, tensor)) => Ok(tensor.clone()),
        None => unreachable!("as many as were planned"),
    })
}

/// A tensor to write.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorSpec {
    /// Its name.
    pub name: String,
    /// Its dtype.
    pub dtype: DType,
    /// Its dimensions.
    pub shape: Shape,
}

impl TensorSpec {
    /// Its bytes; [`u64::MAX`] on overflow.
    pub(crate) fn bytes_saturating(&self) -> u64 {
        self.bytes().unwrap_or(u64::MAX)
    }

    fn bytes(&self) -> Option<u64> {
        let bytes = self.shape.checked_numel()?.checked_mul(self.dtype.size())?;
        u64::try_from(bytes).ok()
    }
}

/// [`save`] for tensors that don't fit into memory together: calls `tensor` for each in the order of the plan, and writes the
/// result before the next. A file that another process writes meanwhile is an error, and stays.
pub fn stream(
    path: impl AsRef<Path>,
    plan: &[TensorSpec],
    metadata: &BTreeMap<String, String>,
    tensor: &mut dyn FnMut(&TensorSpec) -> Result<HostTensor>,
) -> Result<()> {
    write_tensors(path.as_ref(), plan, metadata, AtomicFile::commit_unless_changed, tensor)
}

/// How a written file gets its name.
pub(crate) type Commit = fn(AtomicFile) -> io::Result<()>;

fn write_tensors(
    path: &Path,
    plan: &[TensorSpec],
    metadata: &BTreeMap<String, String>,
    commit: Commit,
    tensor: &mut dyn FnMut(&TensorSpec) -> Result<HostTensor>,
) -> Result<()> {
    let mut names = BTreeSet::from([METADATA]);
    if let Some(TensorSpec { name, .. }) = plan.iter().find(|spec| !names.insert(&spec.name)) {
        let reason = if name == METADATA { "the name is reserved" } else { "the name is given twice" };
        return Err(Error::InvalidTensor { file: path.to_owned(), tensor: name.clone(), reason });
    }
    let io = |source| Error::Io { doing: "write", file: path.to_owned(), source };
    let (header, starts) = layout(plan, metadata).ok_or_else(|| io(io::ErrorKind::FileTooLarge.into()))?;
    write_with(path, commit, &mut |out| {
        out.write_all(&(header.len() as u64).to_le_bytes()).map_err(io)?;
        out.write_all(header.as_bytes()).map_err(io)?;
        let data_start = 8 + header.len() as u64;
        for (spec, start) in plan.iter().zip(&starts) {
            let found = tensor(spec)?;
            if (found.dtype(), found.shape()) != (spec.dtype, &spec.shape) {
                return Err(Error::Shape {
                    file: path.to_owned(),
                    tensor: spec.name.clone(),
                    found: found.shape().clone(),
                    expected: spec.shape.clone(),
                });
            }
            out.seek(io::SeekFrom::Start(data_start + start)).map_err(io)?;
            out.write_all(found.bytes()).map_err(io)?;
        }
        Ok(())
    })
}

/// Creates a file atomically from what `write` writes to it; on an error nothing is left behind.
pub(crate) fn write_with(
    path: &Path,
    commit: Commit,
    write: &mut dyn FnMut(&mut File) -> Result<()>,
) -> Result<()> {
    if fs::metadata(path).is_ok_and(|metadata| !metadata.is_file()) {
        return Err(Error::NotAFile { file: path.to_owned() });
    }
    let io = |source| Error::Io { doing: "write", file: path.to_owned(), source };
    let mut file = AtomicFile::create(path).map_err(io)?;
    write(file.file())?;
    commit(file).map_err(io)
}

/// The JSON header, and the offset of each tensor after it; `None` if they are more than a file can hold.
///
/// Not written by the `safetensors` crate, whose metadata has the random order of a hash map.
fn layout(plan: &[TensorSpec], metadata: &BTreeMap<String, String>) -> Option<(String, Vec<u64>)> {
    // Wide types first, so that each tensor is aligned for its type, then by name.
    let mut order: Vec<usize> = (0..plan.len()).collect();
    order.sort_by_key(|&i| (std::cmp::Reverse(plan[i].dtype.size()), &plan[i].name));
    let mut entries = Map::new();
    if !metadata.is_empty() {
        entries.insert(METADATA.into(), json!(metadata));
    }
    let (mut start, mut starts) = (0u64, vec![0; plan.len()]);
    for i in order {
        let spec = &plan[i];
        let end = start.checked_add(spec.bytes()?)?;
        let entry = json!({
            "dtype": dtypes::name_of(spec.dtype),
            "shape": spec.shape.dims(),
            "data_offsets": [start, end],
        });
        entries.insert(spec.name.clone(), entry);
        (starts[i], start) = (start, end);
    }
    let mut text = Value::Object(entries).to_string();
    // The data starts at a multiple of 8 bytes.
    text.push_str(&" ".repeat(text.len().next_multiple_of(8) - text.len()));
    Some((text, starts))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_another_process_writes_meanwhile_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.safetensors");
        let plan = [TensorSpec { name: "x".into(), dtype: DType::F32, shape: [2].into() }];
        let others = || {
            fs::write(&path, b"another's").unwrap();
            Ok(HostTensor::zeros([2]))
        };
        let error = stream(&path, &plan, &BTreeMap::new(), &mut |_| others()).unwrap_err().to_string();
        assert!(error.contains("another process has written it"), "{error}");
        assert_eq!(fs::read(&path).unwrap(), b"another's");
        stream(&path, &plan, &BTreeMap::new(), &mut |_| Ok(HostTensor::zeros([2]))).unwrap();
        assert!(fs::read(&path).unwrap().len() > 9);
    }
}
