//! Finding the weights in a component's folder.

use std::fs;
use std::path::{Path, PathBuf};

use crate::{Error, Result};

const INDEX: &str = ".safetensors.index.json";
const SINGLE: &str = ".safetensors";
const GGUF: &str = ".gguf";
/// The usual names of weights in diffusers and transformers.
const USUAL: [&str; 2] = ["diffusion_pytorch_model", "model"];

/// Where the weights in a folder are.
#[derive(Debug, PartialEq)]
pub(crate) enum WeightsLocation {
    /// A list of shards.
    Index(PathBuf),
    /// One file.
    File(PathBuf),
}

impl WeightsLocation {
    /// Whether it has the name of a GGUF file, which describes itself: no configuration beside it is about its encoding.
    pub fn is_gguf(&self) -> bool {
        matches!(self, WeightsLocation::File(file) if file.to_string_lossy().to_lowercase().ends_with(GGUF))
    }
}

/// Whether `path` has the name of a list of shards.
pub(crate) fn is_index(path: &Path) -> bool {
    path.file_name().is_some_and(|n| n.to_string_lossy().ends_with(INDEX))
}

/// The folder whose `config.json` describes the weights at `path`: the folder itself, or that of a list of shards or of a
/// file with a usual name. Files with other names may lie beside a configuration that is not theirs.
pub(crate) fn of_config(path: &Path) -> Option<&Path> {
    let usual = || path.file_stem().is_some_and(|stem| USUAL.iter().any(|usual| stem == *usual));
    if path.is_dir() {
        Some(path)
    } else if is_index(path) || usual() {
        path.parent()
    } else {
        None
    }
}

/// Locates the weights in `folder`. Of the usual names, transformers reads `model.safetensors` before its list of shards,
/// diffusers the list of shards before `diffusion_pytorch_model.safetensors`. Other than that, prefers a list of shards to a
/// single file, safetensors to GGUF, the usual names to others, and the plain file to a variant
/// (`model.fp16.safetensors`). Several that are equally good are an error.
pub(crate) fn locate(folder: &Path) -> Result<WeightsLocation> {
    let names = file_names(folder)?;
    let has = |stem: &str, extension: &str| {
        names.iter().any(|name| name.strip_suffix(extension).is_some_and(|found| found == stem))
    };
    let [diffusers, transformers] = USUAL;
    if has(transformers, SINGLE) && !has(diffusers, INDEX) && !has(diffusers, SINGLE) {
        return Ok(WeightsLocation::File(folder.join(format!("{transformers}{SINGLE}"))));
    }
    if let Some(name) = choose(folder, &names, INDEX, |_| true)? {
        return Ok(WeightsLocation::Index(folder.join(name)));
    }
    let is_whole = |stem: &str| !is_shard(stem);
    if let Some(name) = choose(folder, &names, SINGLE, |s| is_whole(s) && !is_variant(s))? {
        return Ok(WeightsLocation::File(folder.join(name)));
    }
    if let Some(name) = choose(folder, &names, SINGLE, is_whole)? {
        return Ok(WeightsLocation::File(folder.join(name)));
    }
    if let Some(name) = choose(folder, &names, GGUF, |_| true)? {
        return Ok(WeightsLocation::File(folder.join(name)));
    }
    Err(Error::NoWeights { folder: folder.to_owned(), found: describe(&names) })
}

/// The name with this extension and an acceptable stem: a usual one, else the only one.
fn choose<'n>(
    folder: &Path,
    names: &'n [String],
    extension: &str,
    accept: impl Fn(&str) -> bool,
) -> Result<Option<&'n str>> {
    let stems = names.iter().filter_map(|n| Some((n.as_str(), n.strip_suffix(extension)?)));
    let candidates: Vec<_> = stems.filter(|(_, stem)| accept(stem)).collect();
    for usual in USUAL {
        if let Some((name, _)) = candidates.iter().find(|(_, stem)| *stem == usual) {
            return Ok(Some(name));
        }
    }
    match candidates[..] {
        [] => Ok(None),
        [(name, _)] => Ok(Some(name)),
        _ => Err(Error::AmbiguousWeights {
            folder: folder.to_owned(),
            names: candidates.iter().map(|(name, _)| (*name).to_owned()).collect(),
        }),
    }
}

/// Whether it is the stem of a shard: `model-00001-of-00002`.
pub(crate) fn is_shard(stem: &str) -> bool {
    let digits = |s: &str| !s.is_empty() && s.bytes().all(|b| b.is_ascii_digit());
    let parts = stem.rsplit_once("-of-").and_then(|(rest, of)| Some((rest.rsplit_once('-')?.1, of)));
    parts.is_some_and(|(number, of)| digits(number) && digits(of))
}

/// Whether it is the stem of a variant: `model.fp16`. A number after the dot is part of a name (`flux-v1.1`).
fn is_variant(stem: &str) -> bool {
    stem.rsplit_once('.').is_some_and(|(_, v)| v.starts_with(|c: char| c.is_ascii_alphabetic()))
}

/// The names of files in `folder`, sorted; without those that are not UTF-8, which can't be weights.
fn file_names(folder: &Path) -> Result<Vec<String>> {
    let io = |source| Error::Io { doing: "list", file: folder.to_owned(), source };
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(io)? {
        let entry = entry.map_err(io)?;
        if let Ok(name) = entry.file_name().into_string()
            && entry.path().is_file()
        {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

/// Describes what is in a folder without weights, and what to do about it.
fn describe(names: &[String]) -> String {
    let has = |test: &dyn Fn(&str) -> bool| names.iter().any(|n| test(n));
    if has(&|n| n == "model_index.json") {
        "this is a whole pipeline; its weights are in the folders beside model_index.json".into()
    } else if has(&|n| n.ends_with(SINGLE)) {
        "there are shards, but not the `*.safetensors.index.json` that lists them".into()
    } else if has(&|n| n.ends_with(".bin") || n.ends_with(".pt") || n.ends_with(".pth")) {
        "found only PyTorch pickles, which Kiln does not read; get the safetensors version".into()
    } else if names.is_empty() {
        "it is empty".into()
    } else {
        format!("found {}", names.iter().take(8).map(String::as_str).collect::<Vec<_>>().join(", "))
    }
}
