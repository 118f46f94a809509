//! The errors of this crate; [`MalformedFile`] and [`LoraProblem`] hold the details of bad files.

use std::io;
use std::path::{Path, PathBuf};

use kiln_family::published_names;
use kiln_tensor::packed::Format;
use kiln_tensor::{LinearError, Shape};

use crate::similar::quoted;
use crate::{Component, LoraProblem, MalformedFile};

/// Why weights can't be read or written.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the fields are")]
pub enum Error {
    /// No file or folder at this path.
    #[error("there is no file or folder `{}`", path.display())]
    NotFound { path: PathBuf },
    /// An error of the operating system.
    #[error("can't {doing} `{}`: {source}", file.display())]
    Io {
        /// What was tried: open, map, list, write.
        doing: &'static str,
        file: PathBuf,
        source: io::Error,
    },
    /// A folder, pipe or device where a file should be.
    #[error("`{}` is not a regular file", file.display())]
    NotAFile { file: PathBuf },
    /// A folder without weights.
    #[error("no weights in folder `{}`: {found}", folder.display())]
    NoWeights { folder: PathBuf, found: String },
    /// A folder with several files that could be meant.
    #[error("several weights in folder `{}`: {}; name the file instead", folder.display(), quoted(names))]
    AmbiguousWeights { folder: PathBuf, names: Vec<String> },
    /// Not a valid safetensors or GGUF file, or one of a kind that Kiln can't read.
    #[error("{}: {problem}", verdict(file, problem))]
    Malformed { file: PathBuf, problem: MalformedFile },
    /// An invalid list of shards.
    #[error("`{}` is not a valid list of shards: {reason}", file.display())]
    ShardIndex { file: PathBuf, reason: String },
    /// Shards that don't exist.
    #[error(
        "`{}` names shards that are missing beside it: {}; the download is not complete",
        index.display(),
        quoted(shards)
    )]
    MissingShards { index: PathBuf, shards: Vec<String> },
    /// A shard without a tensor that the list places in it.
    #[error("`{}` places tensor `{tensor}` in `{shard}`, which does not have it", index.display())]
    NotInShard { index: PathBuf, shard: String, tensor: String },
    /// One tensor in two shards.
    #[error("tensor `{tensor}` is both in `{}` and in `{}`", first.display(), second.display())]
    DuplicateTensor { tensor: String, first: PathBuf, second: PathBuf },
    /// A difference from another model that can't be applied to it.
    #[error("`{}` can't be applied to the model that it is the difference from: {reason}", file.display())]
    Delta { file: PathBuf, reason: String },
    /// Weights without layers to quantize.
    #[error(
        "`{}` has no layers to quantize: {}",
        file.display(),
        if *already_int8 { "they are int8 already" } else { "there are no float matrices under `transformer_blocks`" }
    )]
    NothingToQuantize { file: PathBuf, already_int8: bool },
    /// A weight with NaN or infinite values.
    #[error("tensor `{tensor}` in `{}` holds values that are not finite", file.display())]
    NotFinite { file: PathBuf, tensor: String },
    /// A tensor that the model needs and the weights don't have.
    #[error("no tensor `{tensor}` in `{}`{}", file.display(), similar_hint(similar, *count))]
    MissingTensor { file: PathBuf, tensor: String, similar: Vec<String>, count: usize },
    /// A tensor of another shape than the model needs.
    #[error("tensor `{tensor}` in `{}` has shape {found}, expected {expected}", file.display())]
    Shape { file: PathBuf, tensor: String, found: Shape, expected: Shape },
    /// An unusable tensor.
    #[error("tensor `{tensor}` in `{}`: {source}", file.display())]
    Tensor { file: PathBuf, tensor: String, source: kiln_tensor::Error },
    /// Tensors that don't form a linear layer.
    #[error("linear layer `{module}` in `{}`: {source}", file.display())]
    Linear { file: PathBuf, module: String, source: LinearError },
    /// A layer that is quantized in a way that Kiln can't read.
    #[error("layer `{module}` in `{}` {problem}", file.display())]
    UnsupportedQuantization {
        file: PathBuf,
        module: String,
        /// How it is stored, and what Kiln supports.
        problem: String,
    },
    /// Weights quantized by a program whose format Kiln can't read.
    #[error(
        "`{}` stores its weights with {format} ({evidence}), which Kiln does not read; use the original safetensors, a \
         GGUF file, or the original quantized with `kiln quantize`",
        file.display()
    )]
    ForeignQuantization {
        file: PathBuf,
        format: String,
        /// What shows it: a tensor, or a configuration file.
        evidence: String,
    },
    /// A format that only GGUF files can hold.
    #[error("`{}` can't hold {format}: that requires a GGUF file", file.display())]
    RequiresGguf { file: PathBuf, format: Format },
    /// A format that GGUF files can't hold.
    #[error("`{}` can't hold {format}: that requires a safetensors file", file.display())]
    RequiresSafetensors { file: PathBuf, format: Format },
    /// Weights of another component or model.
    #[error("`{}` holds no {} {component}: {found}", file.display(), published_names())]
    WrongComponent { file: PathBuf, component: Component, found: String },
    /// Tensors of a component that no part of the model reads.
    #[error(
        "`{}` has {} tensors that {family}'s {component} does not have: {}; without them the image would be wrong",
        file.display(),
        names.len(),
        quoted(names)
    )]
    UnusedTensors { file: PathBuf, family: &'static str, component: Component, names: Vec<String> },
    /// Two tensors of a file that stand for the same tensor of the model.
    #[error("`{}` has tensor `{tensor}` of the model twice, under different names", file.display())]
    TwoNames { file: PathBuf, tensor: String },
    /// A tensor that can't be split as its name requires.
    #[error("tensor `{tensor}` in `{}` has shape {found}, which can't be split into {parts}", file.display())]
    CannotSplit { file: PathBuf, tensor: String, found: Shape, parts: String },
    /// An unusable LoRA.
    #[error("LoRA `{}`: {problem}", file.display())]
    Lora { file: PathBuf, problem: Box<LoraProblem> },
    /// A LoRA with modules that match no layer of the model.
    #[error(
        "LoRA `{}`: {} of its {total} modules match nothing in `{}`: {}; it was made for another model",
        file.display(),
        keys.len(),
        base.display(),
        quoted(keys)
    )]
    LoraUnmatched { file: PathBuf, base: PathBuf, keys: Vec<String>, total: usize },
    /// The caller cancelled an export.
    #[error("cancelled")]
    Cancelled,
    /// A tensor that can't be saved.
    #[error("can't save tensor `{tensor}` in `{}`: {reason}", file.display())]
    InvalidTensor { file: PathBuf, tensor: String, reason: &'static str },
}

impl Error {
    pub(crate) fn foreign_quantization(file: PathBuf, format: &str, evidence: String) -> Error {
        Error::ForeignQuantization { file, format: format.to_owned(), evidence }
    }
}

/// Result with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What a problem with the content of a file makes of the file.
fn verdict(file: &Path, problem: &MalformedFile) -> String {
    if problem.is_unsupported() {
        format!("can't read `{}`", file.display())
    } else {
        format!("`{}` is not a valid {} file", file.display(), container(file))
    }
}

/// The format that a file should have, by its name.
fn container(file: &Path) -> &'static str {
    let gguf = file.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf"));
    if gguf { "GGUF" } else { "safetensors" }
}

fn similar_hint(similar: &[String], count: usize) -> String {
    if similar.is_empty() {
        format!(", nor a similar one among its {count}")
    } else {
        format!("; nearest: {}", quoted(similar))
    }
}
