//! Writing safetensors files.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Seek, Write};
use std::path::Path;

use kiln_tensor::{DType, HostTensor, Shape};
use serde_json::{Map, Value, json};
use tempfile::{Builder, NamedTempFile};

use crate::{Error, Result, dtypes};

/// The header's entry that is no tensor.
const METADATA: &str = "__metadata__";

/// Writes `tensors` and `metadata` to `path`, whole or not at all: into a new file beside it, which then takes its
/// name. On an error nothing is left behind and what was at `path` stays.
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
    let plan: Vec<Planned> = tensors
        .iter()
        .map(|(name, t)| Planned { name: (*name).to_owned(), dtype: t.dtype(), shape: t.shape().clone() })
        .collect();
    let mut next = tensors.iter();
    stream(path, &plan, metadata, &mut |_| match next.next() {
        Some((_, tensor)) => Ok(tensor.clone()),
        None => unreachable!("as many as were planned"),
    })
}

/// A tensor that is going to be written.
#[derive(Clone, Debug, PartialEq)]
pub struct Planned {
    /// Its name.
    pub name: String,
    /// Its element type.
    pub dtype: DType,
    /// Its dimensions.
    pub shape: Shape,
}

impl Planned {
    /// Its bytes; as many as can be when they can't be counted.
    pub(crate) fn bytes_or_most(&self) -> u64 {
        self.bytes().unwrap_or(u64::MAX)
    }

    fn bytes(&self) -> Option<u64> {
        let bytes = self.shape.checked_numel()?.checked_mul(self.dtype.size())?;
        u64::try_from(bytes).ok()
    }
}

/// [`save`] for tensors that don't fit into memory together: `tensor` is asked for each in the order of the plan, and
/// what it gives is written before the next.
pub fn stream(
    path: impl AsRef<Path>,
    plan: &[Planned],
    metadata: &BTreeMap<String, String>,
    tensor: &mut dyn FnMut(&Planned) -> Result<HostTensor>,
) -> Result<()> {
    let path = path.as_ref();
    let mut names = BTreeSet::from([METADATA]);
    if let Some(Planned { name, .. }) = plan.iter().find(|p| !names.insert(&p.name)) {
        let reason = if name == METADATA { "reserved" } else { "given twice" };
        return Err(Error::SaveName { file: path.to_owned(), tensor: name.clone(), reason });
    }
    let io = |source| Error::Io { doing: "write", file: path.to_owned(), source };
    let (header, starts) = layout(plan, metadata).ok_or_else(|| io(io::ErrorKind::FileTooLarge.into()))?;
    whole_file(path, &mut |out| {
        out.write_all(&(header.len() as u64).to_le_bytes()).map_err(io)?;
        out.write_all(header.as_bytes()).map_err(io)?;
        let first = 8 + header.len() as u64;
        for (planned, start) in plan.iter().zip(&starts) {
            let found = tensor(planned)?;
            if (found.dtype(), found.shape()) != (planned.dtype, &planned.shape) {
                return Err(Error::Shape {
                    file: path.to_owned(),
                    tensor: planned.name.clone(),
                    found: found.shape().clone(),
                    expected: planned.shape.clone(),
                });
            }
            out.seek(io::SeekFrom::Start(first + start)).map_err(io)?;
            out.write_all(found.bytes()).map_err(io)?;
        }
        Ok(())
    })
}

/// A file that gets its name when `write` is done with it; on an error nothing is left behind.
pub(crate) fn whole_file(path: &Path, write: &mut dyn FnMut(&mut File) -> Result<()>) -> Result<()> {
    // A rename would replace a folder's entry or a device such as /dev/null by a file.
    if fs::metadata(path).is_ok_and(|about| !about.is_file()) {
        return Err(Error::NotAFile { file: path.to_owned() });
    }
    let io = |source| Error::Io { doing: "write", file: path.to_owned(), source };
    let mut temporary = temporary_beside(path).map_err(io)?;
    write(temporary.as_file_mut())?;
    temporary.as_file().sync_all().map_err(io)?;
    temporary.persist(path).map_err(|e| io(e.error))?;
    Ok(())
}

/// A small file, whole or not at all.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    let io = |source| Error::Io { doing: "write", file: path.to_owned(), source };
    whole_file(path, &mut |file| file.write_all(bytes).map_err(io))
}

/// The JSON header, and where each tensor of the plan begins behind it; `None` when they are more than a file can hold.
///
/// Not from the `safetensors` crate, whose metadata come in the random order of a hash map.
fn layout(plan: &[Planned], metadata: &BTreeMap<String, String>) -> Option<(String, Vec<u64>)> {
    // Wide types first, so that each tensor is aligned for its type, then by name.
    let mut order: Vec<usize> = (0..plan.len()).collect();
    order.sort_by_key(|&i| (std::cmp::Reverse(plan[i].dtype.size()), &plan[i].name));
    let mut entries = Map::new();
    if !metadata.is_empty() {
        entries.insert(METADATA.into(), json!(metadata));
    }
    let (mut start, mut starts) = (0u64, vec![0; plan.len()]);
    for i in order {
        let planned = &plan[i];
        let end = start.checked_add(planned.bytes()?)?;
        let entry = json!({
            "dtype": dtypes::name_of(planned.dtype),
            "shape": planned.shape.dims(),
            "data_offsets": [start, end],
        });
        entries.insert(planned.name.clone(), entry);
        (starts[i], start) = (start, end);
    }
    let mut text = Value::Object(entries).to_string();
    // The data starts at a multiple of 8 bytes.
    text.push_str(&" ".repeat(text.len().next_multiple_of(8) - text.len()));
    Some((text, starts))
}

fn temporary_beside(path: &Path) -> io::Result<NamedTempFile> {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut builder = Builder::new();
    builder.prefix(".kiln-").suffix(".tmp");
    // As any new file, readable as the user's mask allows; temporary files are private otherwise.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    builder.tempfile_in(folder)
}
