//! Reading configuration files, with errors that name the file, and checks that all components share.

use std::io::Read;
use std::path::Path;

use serde::de::DeserializeOwned;

use crate::error::{Error, Result};

/// The largest configuration or tokenizer that is read, in bytes: Mistral's tokenizers have 20 MB.
const MAX_BYTES: u64 = 128 << 20;

/// Reads a file that is small unless it is the wrong one.
pub fn read_bytes(file: &Path) -> Result<Vec<u8>> {
    let read = || -> std::io::Result<(u64, Vec<u8>)> {
        let (open, mut bytes) = (kiln_base::open_regular(file)?, Vec::new());
        let len = open.metadata()?.len();
        // It may grow: one byte more, so that more is noticed.
        if len <= MAX_BYTES {
            open.take(MAX_BYTES + 1).read_to_end(&mut bytes)?;
        }
        Ok((len.max(bytes.len() as u64), bytes))
    };
    let (len, bytes) = read().map_err(|source| Error::Read { file: file.to_path_buf(), source })?;
    if len > MAX_BYTES {
        let limit = MAX_BYTES >> 20;
        return Err(Error::config(file, format!("it is larger than {limit} MiB: not a file of this kind")));
    }
    Ok(bytes)
}

/// Reads a JSON file; an error names the file, line and field.
pub fn read<T: DeserializeOwned>(file: &Path) -> Result<T> {
    parse(file, &read_bytes(file)?)
}

/// Parses JSON text; `file` is for the error.
pub fn parse<T: DeserializeOwned>(file: &Path, text: &[u8]) -> Result<T> {
    serde_json::from_slice(text).map_err(|e| Error::config(file, e.to_string()))
}

/// Describes an implausible size, if there is one: a width of 0, or a width or number of layers beyond any machine.
pub(crate) fn implausible_size(widths: &[(&str, usize)], layers: &[(&str, usize)]) -> Option<String> {
    const MAX_WIDTH: usize = 1 << 20;
    const MAX_LAYERS: usize = 1 << 12;
    if let Some((name, _)) = widths.iter().find(|(_, n)| *n == 0) {
        return Some(format!("{name} is 0"));
    }
    let widths = widths.iter().map(|(name, n)| (name, *n, MAX_WIDTH));
    let mut all = widths.chain(layers.iter().map(|(name, n)| (name, *n, MAX_LAYERS)));
    all.find(|(_, n, max)| n > max).map(|(name, n, max)| format!("{name} is {n}, expected at most {max}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_huge_file_is_refused_before_it_is_read() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(MAX_BYTES + 1).unwrap();
        let error = read_bytes(file.path()).unwrap_err().to_string();
        assert!(error.contains("larger than 128 MiB"), "{error}");
        file.as_file().set_len(3).unwrap();
        assert_eq!(read_bytes(file.path()).unwrap(), [0; 3]);
    }
}
