//! Weights written again: under other names, in other types, packed, in one file or several.
//!
//! Every tensor is read, changed and written before the next: memory holds the largest and what it becomes. A file gets its
//! name when it is whole.

mod blocks;
mod encode;
mod gguf;
mod k_blocks;
mod lanes;
mod plan;
mod produce;
mod safetensors;

use std::collections::BTreeMap;
use std::path::Path;

use kiln_tensor::DType;
use kiln_tensor::packed::Format;

use crate::quantise::{Group, Report, Sums, kind};
use crate::{Component, Error, Result, WeightSource};

/// Whose names the tensors get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Names {
    /// diffusers' and transformers', the model's own.
    Diffusers,
    /// Black Forest Labs' for the transformer, with q, k and v in one; llama.cpp's for the text encoder; latent diffusion's
    /// for the autoencoder.
    Original,
}

/// What the values become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    /// What they are, as far as the file's kind can hold it; else bf16.
    Keep,
    /// All floats this type.
    Plain(DType),
    /// The linear layers inside the blocks this; the rest is kept.
    Packed(Format),
}

/// The kind of file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Container {
    /// safetensors.
    Safetensors,
    /// GGUF, version 3.
    Gguf,
}

/// How weights are written.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The part of a model that they are.
    pub component: Component,
    /// The kind of file.
    pub container: Container,
    /// Whose names they get.
    pub names: Names,
    /// What they become.
    pub storage: Storage,
    /// Threads that encode; at least one does.
    pub threads: usize,
}

/// Told how many tensors of how many are done; an error stops the work, and leaves nothing behind.
pub type Progress<'a> = &'a mut dyn FnMut(usize, usize) -> Result<()>;

/// Writes one part of a model, as [`WeightSource::component`] gives it, to the file `out`.
///
/// ```
/// use kiln_tensor::HostTensor;
/// use kiln_weights::export::{Container, Names, Options, Storage, export};
/// use kiln_weights::{Component, WeightSource, save};
///
/// let dir = tempfile::tempdir()?;
/// let (ours, theirs) = (dir.path().join("a.safetensors"), dir.path().join("b.gguf"));
/// let weights = [("single_transformer_blocks.0.attn.to_out.weight", HostTensor::zeros([4, 64]))];
/// save::save(&ours, &weights, &Default::default())?;
/// let options = Options {
///     component: Component::Transformer,
///     container: Container::Gguf,
///     names: Names::Original,
///     storage: Storage::Packed(kiln_tensor::packed::Format::Q8_0),
///     threads: 1,
/// };
/// export(&WeightSource::open(&ours)?, &theirs, &options, &mut |_, _| Ok(()))?;
/// let written = WeightSource::open(&theirs)?;
/// assert_eq!(written.storage("single_blocks.0.linear2.weight"), Some("q8_0"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn export(
    source: &WeightSource,
    out: &Path,
    options: &Options,
    progress: Progress<'_>,
) -> Result<Report> {
    let plan = plan::plan(source, options)?;
    let mut work = Work::new(source, options, plan.len(), progress);
    let after = match options.container {
        Container::Safetensors => safetensors::write(out, &plan, source, &mut work)?,
        Container::Gguf => gguf::write(out, &plan, source, options, &mut work)?,
    };
    Ok(work.report(after))
}

/// [`export`] to several safetensors files of at most `shard` bytes (but of one tensor at least) and a list of them, named
/// after `stem`, in the folder `out`, which must exist.
pub fn export_shards(
    source: &WeightSource,
    out: &Path,
    (stem, shard): (&str, u64),
    options: &Options,
    progress: Progress<'_>,
) -> Result<Report> {
    let plan = plan::plan(source, options)?;
    let mut work = Work::new(source, options, plan.len(), progress);
    let after = safetensors::write_shards(out, stem, shard, &plan, source, &mut work)?;
    Ok(work.report(after))
}

/// What is done to one tensor after the other.
struct Work<'a> {
    source: &'a WeightSource,
    threads: usize,
    groups: BTreeMap<String, Sums>,
    done: usize,
    total: usize,
    progress: Progress<'a>,
}

impl<'a> Work<'a> {
    fn new(source: &'a WeightSource, options: &Options, total: usize, progress: Progress<'a>) -> Work<'a> {
        Work { source, threads: options.threads, groups: BTreeMap::new(), done: 0, total, progress }
    }

    /// The bytes of a tensor.
    fn produce(&mut self, planned: &plan::Planned) -> Result<produce::Produced> {
        let made = produce::produce(self.source, planned, self.threads)?;
        if let Some(squares) = made.squares {
            if !squares[1].is_finite() {
                let (file, tensor) = (self.source.path().to_owned(), planned.name.clone());
                return Err(Error::NotFinite { file, tensor });
            }
            let name = planned.pieces.first().map_or(planned.name.as_str(), |(name, _)| name);
            let sums = self.groups.entry(kind(name)).or_default();
            sums.add(planned.shape.numel() as u64, squares);
        }
        planned.pieces.iter().for_each(|(name, _)| self.source.release(name));
        self.done += 1;
        (self.progress)(self.done, self.total)?;
        Ok(made)
    }

    fn report(self, after: u64) -> Report {
        let layers: usize = self.groups.values().map(|g| g.layers).sum();
        let groups: Vec<Group> = self.groups.into_iter().map(|(name, sums)| sums.group(name)).collect();
        Report { groups, copied: self.total - layers, bytes: [self.source.bytes(), after] }
    }
}
