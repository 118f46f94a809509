//! Reading configuration files, with errors that name the file, and checks that all components share.

use std::path::Path;

use serde::de::DeserializeOwned;

use crate::error::{Error, Result};

/// Reads a JSON file; an error names the file, line and field.
pub fn read<T: DeserializeOwned>(file: &Path) -> Result<T> {
    let text = std::fs::read(file).map_err(|source| Error::Read { file: file.to_path_buf(), source })?;
    parse(file, &text)
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
