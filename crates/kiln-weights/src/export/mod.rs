//! Converting weights: to other names, dtypes and quantizations, in one file or several.
//!
//! Tensors are read, converted and written one at a time, so memory holds at most the largest tensor, before and
//! after conversion. Files are written atomically.

mod convert;
mod encode;
mod exporter;
mod gguf;
pub(crate) mod metadata;
mod options;
mod plan;
mod presets;
pub(crate) mod report;
mod row_order;
mod rows;
mod safetensors;

use std::path::Path;

use crate::{Result, WeightSource};
use exporter::Exporter;
pub use exporter::Progress;
pub use metadata::{NAME_KEY, PRECISION_KEY};
pub use options::{Container, Options, Storage, TensorNames};
pub use presets::{Preset, TextEncoderInfo, file_type};
pub use report::{LayerGroup, Report};

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
