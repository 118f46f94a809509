//! Converting weights: to other names, dtypes and quantizations, in one file or several.
//!
//! Tensors are read, converted and written one at a time, so memory holds at most the largest tensor, before and
//! after conversion. Files are written atomically.

mod blocks;
mod convert;
mod encode;
mod gguf;
mod k_blocks;
mod k_search;
mod lanes;
mod plan;
mod presets;
mod safetensors;

use std::collections::BTreeMap;
use std::path::Path;

use kiln_tensor::DType;
use kiln_tensor::packed::Format;

use crate::quantize::{ErrorSums, LayerGroup, Report, layer_kind};
use crate::{Component, Error, Result, WeightSource};
pub use presets::{Preset, TextEncoderInfo, file_type};

/// The naming scheme of the written tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorNames {
    /// That of diffusers and transformers.
    Diffusers,
    /// That of Black Forest Labs for the transformer, with q, k and v fused; of llama.cpp for the text encoder; of latent
    /// diffusion for the autoencoder.
    Original,
}

/// How values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    /// Unchanged, if the container supports it; else bf16.
    Keep,
    /// All floats in this dtype.
    Dense(DType),
    /// The linear layers inside the blocks in this format; the rest unchanged.
    Quantized(Format),
}

/// The file format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Container {
    /// safetensors.
    Safetensors,
    /// GGUF, version 3.
    Gguf,
}

/// How to write weights.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The component to write.
    pub component: Component,
    /// The file format.
    pub container: Container,
    /// The naming scheme.
    pub names: TensorNames,
    /// How values are stored.
    pub storage: Storage,
    /// Number of threads that encode; 0 counts as 1.
    pub threads: usize,
}

/// Called with the number of tensors done and the total; an error cancels the export and leaves no file behind.
pub type Progress<'a> = &'a mut dyn FnMut(usize, usize) -> Result<()>;

/// Writes one component of a model, from [`WeightSource::component`], to the file `out`.
///
/// ```
/// use kiln_tensor::HostTensor;
/// use kiln_weights::export::{Container, TensorNames, Options, Storage, export};
/// use kiln_weights::{Component, WeightSource, save};
///
/// let dir = tempfile::tempdir()?;
/// let (from, to) = (dir.path().join("a.safetensors"), dir.path().join("b.gguf"));
/// let weights = [("single_transformer_blocks.0.attn.to_out.weight", HostTensor::zeros([4, 64]))];
/// save::save(&from, &weights, &Default::default())?;
/// let options = Options {
///     component: Component::Transformer,
///     container: Container::Gguf,
///     names: TensorNames::Original,
///     storage: Storage::Quantized(kiln_tensor::packed::Format::Q8_0),
///     threads: 1,
/// };
/// export(&WeightSource::open(&from)?, &to, &options, &mut |_, _| Ok(()))?;
/// let written = WeightSource::open(&to)?;
/// assert_eq!(written.storage_name("single_blocks.0.linear2.weight"), Some("q8_0"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn export(
    source: &WeightSource,
    out: &Path,
    options: &Options,
    progress: Progress<'_>,
) -> Result<Report> {
    let plan = plan::plan(source, options)?;
    let mut exporter = Exporter::new(source, options, plan.len(), progress);
    let after = match options.container {
        Container::Safetensors => safetensors::write(out, &plan, source, &mut exporter)?,
        Container::Gguf => gguf::write(out, &plan, source, options, &mut exporter)?,
    };
    Ok(exporter.report(after))
}

/// [`export`] to safetensors shards of at most `shard_bytes` each (but at least one tensor) and a list of them, named after
/// `stem`, in the folder `out`, which must exist.
pub fn export_shards(
    source: &WeightSource,
    out: &Path,
    (stem, shard_bytes): (&str, u64),
    options: &Options,
    progress: Progress<'_>,
) -> Result<Report> {
    let plan = plan::plan(source, options)?;
    let mut exporter = Exporter::new(source, options, plan.len(), progress);
    let after = safetensors::write_shards(out, stem, shard_bytes, &plan, source, &mut exporter)?;
    Ok(exporter.report(after))
}

/// Converts one tensor after the other, and reports progress.
struct Exporter<'a> {
    source: &'a WeightSource,
    threads: usize,
    groups: BTreeMap<String, ErrorSums>,
    done: usize,
    total: usize,
    progress: Progress<'a>,
}

impl<'a> Exporter<'a> {
    fn new(
        source: &'a WeightSource,
        options: &Options,
        total: usize,
        progress: Progress<'a>,
    ) -> Exporter<'a> {
        Exporter { source, threads: options.threads, groups: BTreeMap::new(), done: 0, total, progress }
    }

    /// The bytes to write for a tensor.
    fn convert(&mut self, planned: &plan::PlannedTensor) -> Result<convert::ConvertedTensor> {
        let converted = convert::convert(self.source, planned, self.threads)?;
        if let Some(squares) = converted.squares {
            if !squares[1].is_finite() {
                let (file, tensor) = (self.source.path().to_owned(), planned.name.clone());
                return Err(Error::NotFinite { file, tensor });
            }
            let name = planned.sources.first().map_or(planned.name.as_str(), |(name, _)| name);
            let sums = self.groups.entry(layer_kind(name)).or_default();
            sums.add(planned.shape.numel() as u64, squares);
        }
        planned.sources.iter().for_each(|(name, _)| self.source.release(name));
        self.done += 1;
        (self.progress)(self.done, self.total)?;
        Ok(converted)
    }

    fn report(self, after: u64) -> Report {
        let layers: usize = self.groups.values().map(|g| g.layers).sum();
        let groups: Vec<LayerGroup> = self.groups.into_iter().map(|(name, sums)| sums.group(name)).collect();
        Report { groups, copied: self.total - layers, bytes: [self.source.bytes(), after] }
    }
}
