//! Converting weights: to other names, dtypes and quantizations, in one file or several.
//!
//! Tensors are read, converted and written one at a time, so memory holds at most the largest tensor, before and
//! after conversion. Files are written atomically.

mod convert;
mod encode;
mod gguf;
mod plan;
mod presets;
mod row_order;
mod safetensors;

use std::collections::BTreeMap;
use std::path::Path;

use kiln_tensor::DType;
use kiln_tensor::packed::Format;

use crate::encoding::{COMFY_METADATA, HEADER_CONFIG};
use crate::layout::GGUF_SETTINGS;
use crate::quantize::{ErrorSums, PRECISION_KEY, Report, layer_kind};
use crate::{Component, Error, Result, WeightSource, int8};
use kiln_family::Family;
pub use presets::{Preset, TextEncoderInfo, file_type};

/// The naming scheme of the written tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorNames {
    /// That of diffusers and transformers.
    Diffusers,
    /// That of Black Forest Labs for the transformer, with q, k and v fused; of llama.cpp for the text encoder, with its
    /// order of rows; of latent diffusion for the autoencoder.
    Original,
}

/// How values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    /// Unchanged, if the container supports it; else bf16. ([`Report::changed`] says which changed.)
    Keep,
    /// All floats in this dtype.
    Dense(DType),
    /// The linear layers inside the blocks in this format; the rest unchanged.
    Quantized(Format),
    /// The same with a mix of formats.
    Preset(Preset),
}

impl Storage {
    /// The format of a layer that is quantized; `None` if none are.
    fn format(
        self,
        component: Component,
        family: &Family,
        name: &str,
        info: TextEncoderInfo,
    ) -> Option<Format> {
        match self {
            Storage::Keep | Storage::Dense(_) => None,
            Storage::Quantized(format) => Some(format),
            Storage::Preset(preset) => Some(preset.format(component, family, name, info)),
        }
    }

    fn quantizes(self) -> bool {
        matches!(self, Storage::Quantized(_) | Storage::Preset(_))
    }
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

/// Called with the number of tensors done and the total; an error, such as [`Error::Cancelled`], ends the export and
/// leaves no file behind.
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

/// Converts one tensor after the other, and reports progress.
struct Exporter<'a> {
    source: &'a WeightSource,
    threads: usize,
    /// By the layers' kind and type.
    groups: BTreeMap<(String, &'static str), ErrorSums>,
    layers: BTreeMap<&'static str, usize>,
    changed: BTreeMap<(&'static str, &'static str), usize>,
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
        Exporter {
            source,
            threads: options.threads,
            groups: BTreeMap::new(),
            layers: BTreeMap::new(),
            changed: BTreeMap::new(),
            done: 0,
            total,
            progress,
        }
    }

    /// The bytes to write for a tensor.
    fn convert(&mut self, planned: &plan::PlannedTensor) -> Result<convert::ConvertedTensor> {
        let converted = convert::convert(self.source, planned, self.threads)?;
        let storage = planned.conversion.storage_name();
        if let Some(squares) = converted.squares {
            if !squares[1].is_finite() {
                let (file, tensor) = (self.source.path().to_owned(), planned.name.clone());
                return Err(Error::NotFinite { file, tensor });
            }
            let name = planned.sources.first().map_or(planned.name.as_str(), |(name, _)| name);
            let sums = self.groups.entry((layer_kind(name), storage)).or_default();
            sums.add(planned.shape.numel() as u64, squares);
        }
        self.count(planned, storage);
        planned.sources.iter().for_each(|(name, _)| self.source.release(name));
        self.done += 1;
        (self.progress)(self.done, self.total)?;
        Ok(converted)
    }

    /// Counts a tensor by the type that it was written in.
    fn count(&mut self, planned: &plan::PlannedTensor, storage: &'static str) {
        if planned.is_quantized_layer {
            *self.layers.entry(storage).or_default() += 1;
            return;
        }
        let stored = |name: &str| {
            if self.source.is_int8(name) { Some(int8::NAME) } else { self.source.storage_name(name) }
        };
        let mut before = planned.sources.iter().filter_map(|(name, _)| stored(name));
        if let Some(before) = before.find(|before| *before != storage) {
            *self.changed.entry((before, storage)).or_default() += 1;
        }
    }

    fn report(self, after: u64) -> Report {
        let layers: usize = self.groups.values().map(|g| g.layers).sum();
        let groups = self.groups.into_iter();
        Report {
            groups: groups.map(|((name, storage), sums)| sums.group(name, storage)).collect(),
            layers: self.layers,
            changed: self.changed,
            copied: self.total - layers,
            bytes: [self.source.bytes(), after],
        }
    }
}
