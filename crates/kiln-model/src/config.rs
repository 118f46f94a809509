//! Configuration files: JSON with errors that name the file, and checks that every part shares.

use std::path::Path;

use serde::de::DeserializeOwned;

use crate::error::{Error, Result};

/// A JSON file as `T`, with an error that names the file, line and field.
pub fn read<T: DeserializeOwned>(file: &Path) -> Result<T> {
    let text = std::fs::read(file).map_err(|source| Error::Read { file: file.to_path_buf(), source })?;
    parse(file, &text)
}

/// JSON text as `T`; `file` is for the error.
pub fn parse<T: DeserializeOwned>(file: &Path, text: &[u8]) -> Result<T> {
    serde_json::from_slice(text).map_err(|e| Error::config(file, e.to_string()))
}

/// A problem with sizes of a model: a width that is 0, or a width or number of layers that no machine could hold.
pub(crate) fn absurd(widths: &[(&str, usize)], layers: &[(&str, usize)]) -> Option<String> {
    const WIDEST: usize = 1 << 20;
    const MOST_LAYERS: usize = 1 << 12;
    if let Some((name, _)) = widths.iter().find(|(_, n)| *n == 0) {
        return Some(format!("{name} is 0"));
    }
    let widths = widths.iter().map(|(name, n)| (name, *n, WIDEST));
    let mut all = widths.chain(layers.iter().map(|(name, n)| (name, *n, MOST_LAYERS)));
    all.find(|(_, n, most)| n > most)
        .map(|(name, n, most)| format!("{name} is {n}, at most {most} make sense"))
}
