//! LoRA files in the layout of diffusers and PEFT.
//!
//! A module `M` of the model has `lora_A` of `[rank, cols]` and `lora_B` of `[rows, rank]` under `transformer.M`,
//! `base_model.model.M` or plain `M`. Its output changes by `weight · scale · (x · Aᵀ) · Bᵀ`, where `scale` is
//! alpha / rank, with alpha from the module's `.alpha` tensor, else from the header's `lora_adapter_metadata`; a file
//! without either has scale 1.

mod adapter;
mod applied;
mod keys;
mod problem;

use std::path::Path;

use bytes::Bytes;
use kiln_tensor::{DType, HostTensor};

use crate::{Error, Result, WeightSource, fingerprint};
use adapter::Adapter;
pub(crate) use applied::Applied;
pub use applied::LoraReport;
pub use problem::LoraProblem;

/// A LoRA for the transformer, checked in itself; [`WeightSource::add_lora`] lays it over weights.
#[derive(Debug)]
pub struct Lora {
    source: WeightSource,
    /// Sorted by name.
    modules: Vec<Module>,
}

/// The update of one linear layer.
#[derive(Debug)]
struct Module {
    /// As the model calls it.
    name: String,
    down_key: String,
    down: HostTensor,
    up_key: String,
    up: HostTensor,
    /// From alpha and rank; the user's factor comes on top.
    scale: f64,
}

impl Module {
    fn rank(&self) -> usize {
        self.up.shape().last()
    }
}

impl Lora {
    /// Opens a LoRA file, or a folder with one.
    pub fn open(path: impl AsRef<Path>) -> Result<Lora> {
        Lora::new(WeightSource::open(path)?)
    }

    /// Reads a LoRA file that is already in memory; `name` stands for its path in messages.
    pub fn from_bytes(name: impl AsRef<Path>, data: Bytes) -> Result<Lora> {
        Lora::new(WeightSource::from_bytes(name, data)?)
    }

    fn new(source: WeightSource) -> Result<Lora> {
        let problem = |p| Error::Lora { file: source.path().to_owned(), problem: Box::new(p) };
        let keys: Vec<&str> = source.names().collect();
        keys::refuse_foreign(&keys).map_err(problem)?;
        let groups = keys::group(&keys).map_err(problem)?;
        let adapter = Adapter::read(source.metadata()).map_err(problem)?;
        let mut modules = Vec::with_capacity(groups.len());
        for (name, found) in groups {
            let (down_key, up_key) = found.pair().map_err(problem)?;
            let (down, up) = (source.tensor(down_key)?, source.tensor(up_key)?);
            let alpha = found.alpha.map(|key| Ok((key, source.tensor(key)?))).transpose()?;
            let rank = rank((down_key, &down), (up_key, &up)).map_err(problem)?;
            let alpha = alpha.map(|(key, tensor)| number(key, &tensor)).transpose().map_err(problem)?;
            let scale = scale(adapter.as_ref(), name, (down_key, rank), alpha).map_err(problem)?;
            let (name, down_key, up_key) = (name.to_owned(), down_key.to_owned(), up_key.to_owned());
            modules.push(Module { name, down_key, down, up_key, up, scale });
        }
        Ok(Lora { source, modules })
    }

    /// The file or folder that was opened.
    pub fn path(&self) -> &Path {
        self.source.path()
    }

    /// The modules of the model that it changes, sorted.
    pub fn modules(&self) -> impl Iterator<Item = &str> {
        self.modules.iter().map(|m| m.name.as_str())
    }

    /// The largest rank of its modules.
    pub fn rank(&self) -> usize {
        self.modules.iter().map(Module::rank).max().unwrap_or(0)
    }

    /// The factor that the file itself gives to `module`: 1 without an alpha.
    pub fn scale(&self, module: &str) -> Option<f64> {
        self.modules.iter().find(|m| m.name == module).map(|m| m.scale)
    }

    /// The file as plain tensors.
    pub fn source(&self) -> &WeightSource {
        &self.source
    }

    /// A SHA-256 in hex of what this LoRA does: of the tensors as in [`WeightSource::fingerprint`], and the scales.
    pub fn fingerprint(&self) -> Result<String> {
        let scales = self.modules.iter().map(|m| m.scale);
        Ok(fingerprint::with_scales(&self.source.fingerprint()?, scales))
    }
}

type Keyed<'a, T> = (&'a str, T);

/// The rank that both matrices have, checked to be matrices of real numbers.
fn rank(down: Keyed<'_, &HostTensor>, up: Keyed<'_, &HostTensor>) -> Result<usize, LoraProblem> {
    for (key, tensor) in [down, up] {
        check_float(key, tensor)?;
        if tensor.shape().rank() != 2 || tensor.numel() == 0 {
            let (key, found) = (key.to_owned(), tensor.shape().clone());
            return Err(LoraProblem::NotThatShape { key, found, expected: "a matrix that is not empty" });
        }
    }
    let rank = down.1.shape().rows();
    if up.1.shape().last() != rank {
        return Err(LoraProblem::Rank {
            down: down.0.to_owned(),
            rank,
            down_shape: down.1.shape().clone(),
            up: up.0.to_owned(),
            up_shape: up.1.shape().clone(),
        });
    }
    Ok(rank)
}

/// The one number in an `.alpha` tensor.
fn number(key: &str, tensor: &HostTensor) -> Result<f64, LoraProblem> {
    check_float(key, tensor)?;
    let key = key.to_owned();
    if tensor.numel() != 1 {
        return Err(LoraProblem::NotThatShape { key, found: tensor.shape().clone(), expected: "one number" });
    }
    match tensor.to_f32().ok().and_then(|values| values.first().copied()) {
        Some(value) if value.is_finite() => Ok(value.into()),
        found => Err(LoraProblem::Alpha { key, found: found.unwrap_or(f32::NAN) }),
    }
}

fn check_float(key: &str, tensor: &HostTensor) -> Result<(), LoraProblem> {
    match tensor.dtype() {
        DType::F32 | DType::BF16 | DType::F16 | DType::F64 => Ok(()),
        dtype => Err(LoraProblem::DType { key: key.to_owned(), dtype }),
    }
}

/// The factor of one module: its own alpha before the header's, and 1 without either.
fn scale(
    adapter: Option<&Adapter>,
    module: &str,
    (key, rank): Keyed<'_, usize>,
    alpha: Option<f64>,
) -> Result<f64, LoraProblem> {
    let Some(adapter) = adapter else {
        return Ok(alpha.map_or(1.0, |alpha| alpha / rank as f64));
    };
    let expected = adapter.rank(module);
    if expected != rank as f64 {
        let (module, key) = (module.to_owned(), key.to_owned());
        return Err(LoraProblem::MetadataRank { module, expected, key, found: rank });
    }
    Ok(adapter.scale(alpha.unwrap_or_else(|| adapter.alpha(module)), rank))
}
