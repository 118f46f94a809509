//! The errors of this crate; [`MalformedFile`] and [`LoraProblem`] hold the details of bad files.

use std::io;
use std::path::{Path, PathBuf};

use kiln_tensor::packed::Format;
use kiln_tensor::{LinearError, Shape};

use crate::{Component, LoraProblem, MalformedFile};

/// Why weights can't be read or written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No file or folder at this path.
    #[error("there is no file or folder `{}`", path.display())]
    NotFound {
        /// The path.
        path: PathBuf,
    },
    /// An error of the operating system.
    #[error("can't {doing} `{}`: {source}", file.display())]
    Io {
        /// What was tried: open, map, list, write.
        doing: &'static str,
        /// The file or folder.
        file: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A folder, pipe or device where a file should be.
    #[error("`{}` is not a regular file", file.display())]
    NotAFile {
        /// The path.
        file: PathBuf,
    },
    /// A folder without weights.
    #[error("no weights in folder `{}`: {found}", folder.display())]
    NoWeights {
        /// The folder.
        folder: PathBuf,
        /// What is in it instead.
        found: String,
    },
    /// A folder with several files that could be meant.
    #[error("several weights in folder `{}`: {}; name the file instead", folder.display(), quoted(names))]
    AmbiguousWeights {
        /// The folder.
        folder: PathBuf,
        /// These files.
        names: Vec<String>,
    },
    /// Not a valid safetensors or GGUF file, or one of a kind that Kiln can't read.
    #[error("{}: {problem}", verdict(file, problem))]
    Malformed {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        problem: MalformedFile,
    },
    /// An invalid list of shards.
    #[error("`{}` is not a valid list of shards: {reason}", file.display())]
    ShardIndex {
        /// The list.
        file: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// Shards that don't exist.
    #[error(
        "`{}` names shards that are missing beside it: {}; the download is not complete",
        index.display(),
        quoted(shards)
    )]
    MissingShards {
        /// The list of shards.
        index: PathBuf,
        /// The missing ones.
        shards: Vec<String>,
    },
    /// A shard without a tensor that the list places in it.
    #[error("`{}` places tensor `{tensor}` in `{shard}`, which does not have it", index.display())]
    NotInShard {
        /// The list of shards.
        index: PathBuf,
        /// The shard.
        shard: String,
        /// The tensor.
        tensor: String,
    },
    /// One tensor in two shards.
    #[error("tensor `{tensor}` is both in `{}` and in `{}`", first.display(), second.display())]
    DuplicateTensor {
        /// The tensor.
        tensor: String,
        /// A shard that has it.
        first: PathBuf,
        /// Another one.
        second: PathBuf,
    },
    /// A difference from another model that can't be applied to it.
    #[error("`{}` can't be applied to the model that it is the difference from: {reason}", file.display())]
    Delta {
        /// The difference.
        file: PathBuf,
        /// Why.
        reason: String,
    },
    /// Weights without layers to quantize.
    #[error(
        "`{}` has no layers to quantize: {}",
        file.display(),
        if *already_int8 { "they are int8 already" } else { "there are no float matrices under `transformer_blocks`" }
    )]
    NothingToQuantize {
        /// The file or folder.
        file: PathBuf,
        /// Whether it has int8 layers.
        already_int8: bool,
    },
    /// A weight with NaN or infinite values.
    #[error("tensor `{tensor}` in `{}` holds values that are not finite", file.display())]
    NotFinite {
        /// The file or folder.
        file: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A tensor that the model needs and the weights don't have.
    #[error("no tensor `{tensor}` in `{}`{}", file.display(), similar_hint(similar, *count))]
    MissingTensor {
        /// The file or folder.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Similar names, most similar first.
        similar: Vec<String>,
        /// How many tensors there are.
        count: usize,
    },
    /// A tensor of another shape than the model needs.
    #[error("tensor `{tensor}` in `{}` has shape {found}, expected {expected}", file.display())]
    Shape {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its shape.
        found: Shape,
        /// The shape the model needs.
        expected: Shape,
    },
    /// An unusable tensor.
    #[error("tensor `{tensor}` in `{}`: {source}", file.display())]
    Tensor {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// What is wrong with it.
        source: kiln_tensor::Error,
    },
    /// Tensors that don't form a linear layer.
    #[error("linear layer `{module}` in `{}`: {source}", file.display())]
    Linear {
        /// The file or folder.
        file: PathBuf,
        /// The layer.
        module: String,
        /// What is wrong with it.
        source: LinearError,
    },
    /// A layer that is quantized in a way that Kiln can't read.
    #[error("layer `{module}` in `{}` {problem}", file.display())]
    UnsupportedQuantization {
        /// The file.
        file: PathBuf,
        /// The layer.
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
        /// The file or folder.
        file: PathBuf,
        /// The format.
        format: String,
        /// What shows it: a tensor, or a configuration file.
        evidence: String,
    },
    /// A format that only GGUF files can hold.
    #[error("`{}` can't hold {format}: that requires a GGUF file", file.display())]
    RequiresGguf {
        /// The file to be written.
        file: PathBuf,
        /// The format.
        format: Format,
    },
    /// A format that GGUF files can't hold.
    #[error("`{}` can't hold {format}: that requires a safetensors file", file.display())]
    RequiresSafetensors {
        /// The file to be written.
        file: PathBuf,
        /// The format.
        format: Format,
    },
    /// Weights of another component or model.
    #[error("`{}` holds no FLUX.2 {component}: {found}", file.display())]
    WrongComponent {
        /// The file or folder.
        file: PathBuf,
        /// The component that should be in it.
        component: Component,
        /// What is in it instead.
        found: String,
    },
    /// Tensors of a component that no part of the model reads.
    #[error(
        "`{}` has {} tensors that FLUX.2's {component} does not have: {}; without them the image would be wrong",
        file.display(),
        names.len(),
        quoted(names)
    )]
    UnusedTensors {
        /// The file or folder.
        file: PathBuf,
        /// The component.
        component: Component,
        /// Their names.
        names: Vec<String>,
    },
    /// Two tensors of a file that stand for the same tensor of the model.
    #[error("`{}` has tensor `{tensor}` of the model twice, under different names", file.display())]
    TwoNames {
        /// The file or folder.
        file: PathBuf,
        /// The model's name for it.
        tensor: String,
    },
    /// A tensor that can't be split as its name requires.
    #[error("tensor `{tensor}` in `{}` has shape {found}, which can't be split into {parts}", file.display())]
    CannotSplit {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its shape.
        found: Shape,
        /// What it should be split into.
        parts: String,
    },
    /// An unusable LoRA.
    #[error("LoRA `{}`: {problem}", file.display())]
    Lora {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        problem: Box<LoraProblem>,
    },
    /// A LoRA with modules that match no layer of the model.
    #[error(
        "LoRA `{}`: {} of its {total} modules match nothing in `{}`: {}; it was made for another model",
        file.display(),
        keys.len(),
        base.display(),
        quoted(keys)
    )]
    LoraUnmatched {
        /// The LoRA.
        file: PathBuf,
        /// The weights it is applied to.
        base: PathBuf,
        /// Modules that matched nothing.
        keys: Vec<String>,
        /// How many modules the LoRA has.
        total: usize,
    },
    /// The caller cancelled an export.
    #[error("cancelled")]
    Cancelled,
    /// A tensor that can't be saved.
    #[error("can't save tensor `{tensor}` in `{}`: {reason}", file.display())]
    InvalidTensor {
        /// The file.
        file: PathBuf,
        /// The name.
        tensor: String,
        /// Why not.
        reason: &'static str,
    },
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

/// Formats names for a message: the first eight, and the number of the others.
pub(crate) fn quoted(names: &[String]) -> String {
    const SHOWN: usize = 8;
    let shown: Vec<String> = names.iter().take(SHOWN).map(|n| format!("`{n}`")).collect();
    match names.len().saturating_sub(SHOWN) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

fn similar_hint(similar: &[String], count: usize) -> String {
    if similar.is_empty() {
        format!(", nor a similar one among its {count}")
    } else {
        format!("; nearest: {}", quoted(similar))
    }
}
