//! What files say about themselves.

use std::collections::BTreeMap;

use crate::WeightSource;
use crate::encoding::{COMFY_METADATA, HEADER_CONFIG};
use crate::layout::GGUF_SETTINGS;

/// The metadata key of the precision in which a file's linear layers are meant to be used.
pub const PRECISION_KEY: &str = "kiln.linear";

/// The source's metadata that stays true in a file with other names and types: all but descriptions of its
/// quantization and the files of a packed model; of a GGUF file only what Kiln knows.
pub(crate) fn kept_metadata(source: &WeightSource) -> BTreeMap<String, String> {
    let is_setting = |key: &str| GGUF_SETTINGS.iter().any(|(_, setting)| *setting == key);
    let is_known = |key: &str| key.starts_with("kiln.") || is_setting(key);
    let untrue = [COMFY_METADATA, PRECISION_KEY, NAME_KEY, HEADER_CONFIG, "model_index.json"];
    let is_kept =
        |key: &str| !untrue.contains(&key) && !key.contains('/') && (!source.is_gguf() || is_known(key));
    let kept = source.metadata().iter().filter(|(key, _)| is_kept(key));
    kept.map(|(key, value)| (key.clone(), value.clone())).collect()
}

/// The metadata key of a model's name in GGUF files.
pub const NAME_KEY: &str = "general.name";
