use std::io;
use std::path::{Path, PathBuf};

use kiln_tensor::packed::Format;
use kiln_tensor::{LinearError, Shape};

use crate::{Component, LoraProblem, Malformed};

/// Why weights can't be read (or written).
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nothing at this path.
    #[error("there is no file or folder `{}`", path.display())]
    NotFound {
        /// The path.
        path: PathBuf,
    },
    /// The system refused.
    #[error("can't {doing} `{}`: {source}", file.display())]
    Io {
        /// What was tried: open, map, list, write.
        doing: &'static str,
        /// With what.
        file: PathBuf,
        /// What the system says.
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
    /// A folder where it is not clear which file is meant.
    #[error("several weights in folder `{}`: {}; name the file instead", folder.display(), quoted(names))]
    SeveralWeights {
        /// The folder.
        folder: PathBuf,
        /// The files that could be meant.
        names: Vec<String>,
    },
    /// Not a valid safetensors or GGUF file.
    #[error("`{}` is not a valid {} file: {problem}", file.display(), container(file))]
    Malformed {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        problem: Malformed,
    },
    /// A list of shards that can't be used.
    #[error("`{}` is not a valid list of shards: {reason}", file.display())]
    Index {
        /// The list.
        file: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// Shards that are not there.
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
    /// Weights that can't be made smaller.
    #[error(
        "`{}` has no layers to round to 8 bits: {}",
        file.display(),
        if *done { "they are in 8 bits already" } else { "there are no float matrices under `transformer_blocks`" }
    )]
    NothingToRound {
        /// The file or folder.
        file: PathBuf,
        /// Whether it has 8-bit layers.
        done: bool,
    },
    /// A weight with NaN or infinity in it.
    #[error("tensor `{tensor}` in `{}` holds values that are not finite", file.display())]
    NotFinite {
        /// The file or folder.
        file: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A tensor the model needs is not in the weights.
    #[error("no tensor `{tensor}` in `{}`{}", file.display(), nearest(near, *count))]
    Missing {
        /// The file or folder.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Names that resemble it, nearest first.
        near: Vec<String>,
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
    /// A tensor that can't be used.
    #[error("tensor `{tensor}` in `{}`: {source}", file.display())]
    Tensor {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// What is wrong with it.
        source: kiln_tensor::Error,
    },
    /// Tensors that don't make a linear layer.
    #[error("linear layer `{module}` in `{}`: {source}", file.display())]
    Linear {
        /// The file or folder.
        file: PathBuf,
        /// The layer.
        module: String,
        /// What is wrong with it.
        source: LinearError,
    },
    /// A layer that is stored in a way that Kiln doesn't know.
    #[error("layer `{module}` in `{}` {what}", file.display())]
    Coding {
        /// The file.
        file: PathBuf,
        /// The layer.
        module: String,
        /// What is the matter with it.
        what: String,
    },
    /// A packing that only GGUF files have.
    #[error("`{}` can't hold {format}: that takes a GGUF file", file.display())]
    NotInSafetensors {
        /// The file to be written.
        file: PathBuf,
        /// The packing.
        format: Format,
    },
    /// Weights of something else than what is asked for.
    #[error("`{}` holds no FLUX.2 {component}: {found}", file.display())]
    OtherComponent {
        /// The file or folder.
        file: PathBuf,
        /// The part of a model that should be in it.
        component: Component,
        /// What is in it instead.
        found: String,
    },
    /// A tensor that can't be cut as its name asks for.
    #[error("tensor `{tensor}` in `{}` has shape {found}, which can't be cut into {parts}", file.display())]
    Cut {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its shape.
        found: Shape,
        /// What its parts would be.
        parts: String,
    },
    /// A LoRA that can't be used.
    #[error("LoRA `{}`: {problem}", file.display())]
    Lora {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        problem: Box<LoraProblem>,
    },
    /// A LoRA with modules that nothing in the model took.
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
        /// The weights it was laid over.
        base: PathBuf,
        /// Modules that matched nothing.
        keys: Vec<String>,
        /// How many modules the LoRA has.
        total: usize,
    },
    /// A tensor that can't be saved under its name.
    #[error("can't save a tensor named `{tensor}` in `{}`: the name is {reason}", file.display())]
    SaveName {
        /// The file.
        file: PathBuf,
        /// The name.
        tensor: String,
        /// Why not.
        reason: &'static str,
    },
}

/// Result with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The kind of file that this should be, by its name.
fn container(file: &Path) -> &'static str {
    let gguf = file.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf"));
    if gguf { "GGUF" } else { "safetensors" }
}

/// Names for a message: the first eight, and how many more.
pub(crate) fn quoted(names: &[String]) -> String {
    const SHOWN: usize = 8;
    let shown: Vec<String> = names.iter().take(SHOWN).map(|n| format!("`{n}`")).collect();
    match names.len().saturating_sub(SHOWN) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

fn nearest(near: &[String], count: usize) -> String {
    match near {
        [] => format!(", nor a similar one among its {count}"),
        _ => format!("; nearest: {}", quoted(near)),
    }
}
