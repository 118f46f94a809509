//! Sharded weights, listed in `X.safetensors.index.json`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::Deserialize;

use crate::file::{WeightFile, not_found_or};
use crate::{Error, Result};

#[derive(Deserialize)]
struct Index {
    /// File name of each tensor.
    weight_map: BTreeMap<String, String>,
}

/// Opens every shard in the index, and checks that each has the tensors that the index says.
pub(crate) fn open(path: &Path) -> Result<Vec<WeightFile>> {
    let invalid = |reason: String| Error::ShardIndex { file: path.to_owned(), reason };
    let text = kiln_base::read_regular(path).map_err(|e| not_found_or(path, e))?;
    let index: Index = serde_json::from_slice(&text).map_err(|e| invalid(e.to_string()))?;
    let names: BTreeSet<&String> = index.weight_map.values().collect();
    if names.is_empty() {
        return Err(invalid("its `weight_map` names no tensor".into()));
    }
    // Shards lie beside their index: a path would let a downloaded file reach anywhere on this machine.
    if let Some(name) = names.iter().find(|n| Path::new(n).file_name().is_none_or(|f| f != n.as_str())) {
        return Err(invalid(format!("shard `{name}` is not a plain file name")));
    }
    let folder = path.parent().unwrap_or(Path::new(""));
    let missing: Vec<String> =
        names.iter().filter(|n| !folder.join(n).exists()).map(|n| n.to_string()).collect();
    if !missing.is_empty() {
        return Err(Error::MissingShards { index: path.to_owned(), shards: missing });
    }
    let shards = names.iter().map(|n| WeightFile::open(&folder.join(n))).collect::<Result<Vec<_>>>()?;
    for (tensor, name) in &index.weight_map {
        let shard = names.iter().position(|n| *n == name).and_then(|i| shards.get(i));
        if !shard.is_some_and(|s| s.entries.contains_key(tensor)) {
            return Err(Error::NotInShard {
                index: path.to_owned(),
                shard: name.clone(),
                tensor: tensor.clone(),
            });
        }
    }
    Ok(shards)
}
