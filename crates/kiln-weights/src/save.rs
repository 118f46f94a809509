//! Writing small safetensors files.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use kiln_tensor::HostTensor;
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
    let path = path.as_ref();
    let mut names = BTreeSet::from([METADATA]);
    if let Some((name, _)) = tensors.iter().find(|(name, _)| !names.insert(*name)) {
        let reason = if *name == METADATA { "reserved" } else { "given twice" };
        return Err(Error::SaveName { file: path.to_owned(), tensor: (*name).to_owned(), reason });
    }
    // A rename would replace a folder's entry or a device such as /dev/null by a file.
    if fs::metadata(path).is_ok_and(|about| !about.is_file()) {
        return Err(Error::NotAFile { file: path.to_owned() });
    }
    write(path, tensors, metadata).map_err(|source| Error::Io {
        doing: "write",
        file: path.to_owned(),
        source,
    })
}

fn write(path: &Path, tensors: &[(&str, HostTensor)], metadata: &BTreeMap<String, String>) -> io::Result<()> {
    // Wide types first, so that each tensor is aligned for its type, then by name.
    let mut order: Vec<_> = tensors.iter().collect();
    order.sort_by_key(|(name, t)| (std::cmp::Reverse(t.dtype().size()), *name));

    let temporary = temporary_beside(path)?;
    let mut out = BufWriter::new(temporary.as_file());
    let header = header(&order, metadata);
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(header.as_bytes())?;
    for (_, tensor) in order {
        out.write_all(tensor.bytes())?;
    }
    out.flush()?;
    drop(out);
    temporary.as_file().sync_all()?;
    temporary.persist(path).map_err(|e| e.error)?;
    Ok(())
}

/// The JSON header. Not from the `safetensors` crate, whose metadata come in the random order of a hash map.
fn header(tensors: &[&(&str, HostTensor)], metadata: &BTreeMap<String, String>) -> String {
    let mut entries = Map::new();
    if !metadata.is_empty() {
        entries.insert(METADATA.into(), json!(metadata));
    }
    let mut start = 0;
    for (name, t) in tensors {
        let end = start + t.bytes().len();
        let entry = json!({
            "dtype": dtypes::name_of(t.dtype()),
            "shape": t.shape().dims(),
            "data_offsets": [start, end],
        });
        entries.insert((*name).into(), entry);
        start = end;
    }
    let mut text = Value::Object(entries).to_string();
    // The data starts at a multiple of 8 bytes.
    text.push_str(&" ".repeat(text.len().next_multiple_of(8) - text.len()));
    text
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
