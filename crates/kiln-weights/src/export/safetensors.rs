//! Writes safetensors files, with quantized layers stored as ComfyUI and Black Forest Labs do.

use std::collections::{BTreeMap, VecDeque};
use std::io::Write;
use std::path::Path;

use kiln_base::AtomicFile;
use kiln_tensor::packed::{BlockScales, Format};
use kiln_tensor::{DType, HostTensor, Shape};
use serde_json::json;

use super::convert::scale_shape;
use super::exporter::Exporter;
use super::metadata::{PRECISION_KEY, kept_metadata};
use super::plan::{Conversion, PlannedTensor};
use crate::encoding::COMFY_METADATA;
use crate::save::{TensorSpec, stream, write_with};
use crate::{Error, Result, WeightSource, int8};

pub(super) fn write(
    out: &Path,
    plan: &[PlannedTensor],
    source: &WeightSource,
    exporter: &mut Exporter<'_>,
) -> Result<u64> {
    let specs = all_specs(out, plan, source)?;
    write_file(out, plan.iter().zip(&specs), metadata(source, plan), exporter)
}

pub(super) fn write_shards(
    folder: &Path,
    stem: &str,
    shard_bytes: u64,
    plan: &[PlannedTensor],
    source: &WeightSource,
    exporter: &mut Exporter<'_>,
) -> Result<u64> {
    let specs = all_specs(folder, plan, source)?;
    let size = |specs: &[TensorSpec]| specs.iter().map(TensorSpec::bytes_saturating).sum::<u64>();
    let mut shards: Vec<Vec<usize>> = vec![Vec::new()];
    let mut room = shard_bytes;
    for (i, specs) in specs.iter().enumerate() {
        let bytes = size(specs);
        match shards.last_mut() {
            Some(last) if last.is_empty() || bytes <= room => last.push(i),
            _ => {
                shards.push(vec![i]);
                room = shard_bytes;
            }
        }
        room = room.saturating_sub(bytes);
    }
    let (mut total, mut weight_map) = (0, BTreeMap::new());
    for (number, tensors) in shards.iter().enumerate() {
        let name = format!("{stem}-{:05}-of-{:05}.safetensors", number + 1, shards.len());
        let tensors = tensors.iter().map(|&i| (&plan[i], &specs[i]));
        weight_map
            .extend(tensors.clone().flat_map(|(_, specs)| specs).map(|s| (s.name.clone(), name.clone())));
        total += write_file(&folder.join(&name), tensors, metadata(source, plan), exporter)?;
    }
    let index = json!({ "metadata": { "total_size": total }, "weight_map": weight_map });
    let path = folder.join(format!("{stem}.safetensors.index.json"));
    let io = |source| Error::Io { doing: "write", file: path.clone(), source };
    write_with(&path, AtomicFile::commit, &mut |file| {
        file.write_all(format!("{index:#}\n").as_bytes()).map_err(io)
    })?;
    Ok(total)
}

/// Writes one file, and returns the bytes of its tensors.
fn write_file<'p>(
    out: &Path,
    tensors: impl Iterator<Item = (&'p PlannedTensor, &'p Vec<TensorSpec>)>,
    metadata: BTreeMap<String, String>,
    exporter: &mut Exporter<'_>,
) -> Result<u64> {
    let tensors: Vec<_> = tensors.collect();
    let all: Vec<TensorSpec> = tensors.iter().flat_map(|(_, specs)| specs.iter().cloned()).collect();
    // A tensor and its scales are converted together and written one after the other.
    let (mut next, mut ready) = (tensors.iter(), VecDeque::new());
    stream(out, &all, &metadata, &mut |wanted| {
        if ready.is_empty()
            && let Some((planned, specs)) = next.next()
        {
            let converted = exporter.convert(planned)?;
            let block_scales = converted.block_scales.map(bytes::Bytes::from);
            let scale = converted.scale.map(|s| s.bytes().clone());
            ready
                .extend([Some(converted.bytes), block_scales, scale].into_iter().flatten().zip(specs.iter()));
        }
        let (bytes, spec) = ready.pop_front().ok_or_else(|| Error::InvalidTensor {
            file: out.to_owned(),
            tensor: wanted.name.clone(),
            reason: "it was not planned",
        })?;
        HostTensor::new(spec.dtype, &spec.shape, bytes).map_err(|source| Error::Tensor {
            file: out.to_owned(),
            tensor: spec.name.clone(),
            source,
        })
    })?;
    Ok(all.iter().map(TensorSpec::bytes_saturating).sum())
}

/// For each planned tensor, the tensors of the file: itself, block scales, and a scale.
fn all_specs(out: &Path, plan: &[PlannedTensor], source: &WeightSource) -> Result<Vec<Vec<TensorSpec>>> {
    plan.iter().map(|planned| specs(out, planned, source)).collect()
}

fn specs(out: &Path, planned: &PlannedTensor, source: &WeightSource) -> Result<Vec<TensorSpec>> {
    let with_suffix = |suffix: &str, dtype, shape: Shape| {
        let module = planned.name.strip_suffix(".weight").unwrap_or(&planned.name);
        TensorSpec { name: format!("{module}{suffix}"), dtype, shape }
    };
    let own = |dtype, shape: &Shape| TensorSpec { name: planned.name.clone(), dtype, shape: shape.clone() };
    let shape = &planned.shape;
    Ok(match planned.conversion {
        Conversion::Copy(dtype) | Conversion::Cast(dtype) => vec![own(dtype, shape)],
        Conversion::Quantize(Format::F8E4M3) => {
            vec![own(DType::F8E4M3, shape), with_suffix(".weight_scale", DType::F32, [0; 0].into())]
        }
        Conversion::CopyPacked(format @ (Format::F8E4M3 | Format::F8E5M2)) => {
            let dtype = if format == Format::F8E5M2 { DType::F8E5M2 } else { DType::F8E4M3 };
            let scale = scale_shape(source, planned)?;
            vec![own(dtype, shape), with_suffix(".weight_scale", DType::F32, scale.into())]
        }
        Conversion::CopyInt8 => {
            let scale = TensorSpec {
                name: int8::scale_name(&planned.name),
                dtype: DType::F32,
                // Attention matrices of an autoencoder are written as 1×1 convolutions.
                shape: shape.dims().get(..1).unwrap_or(&[]).into(),
            };
            vec![own(DType::I8, shape), scale]
        }
        Conversion::Quantize(Format::NvFp4) | Conversion::CopyPacked(Format::NvFp4) => {
            let [rows, cols] = [shape.rows(), shape.last()];
            let scales =
                BlockScales { scales: Default::default(), swizzled: true, high_first: true, global: 1.0 };
            let across = (cols / 16).next_multiple_of(4);
            let down = scales.expected_len([rows, cols]).unwrap_or(0) / across.max(1);
            vec![
                own(DType::U8, &[rows, cols / 2].into()),
                with_suffix(".weight_scale", DType::F8E4M3, [down, across].into()),
                with_suffix(".weight_scale_2", DType::F32, [0; 0].into()),
            ]
        }
        Conversion::Quantize(format) | Conversion::CopyPacked(format) => {
            return Err(Error::RequiresGguf { file: out.to_owned(), format });
        }
    })
}

/// The source's metadata, with the list of quantized layers instead of its own description of them.
fn metadata(source: &WeightSource, plan: &[PlannedTensor]) -> BTreeMap<String, String> {
    let mut metadata = kept_metadata(source);
    let precision = source.metadata().get(PRECISION_KEY);
    if let Some(precision) = precision.filter(|_| plan.iter().any(|t| t.conversion == Conversion::CopyInt8)) {
        metadata.insert(PRECISION_KEY.into(), precision.clone());
    }
    let format_name = |format| match format {
        Format::F8E4M3 => Some("float8_e4m3fn"),
        Format::F8E5M2 => Some("float8_e5m2"),
        Format::NvFp4 => Some("nvfp4"),
        _ => None,
    };
    let layers: BTreeMap<&str, serde_json::Value> = plan
        .iter()
        .filter_map(|planned| match planned.conversion {
            Conversion::Quantize(format) | Conversion::CopyPacked(format) => {
                let module = planned.name.strip_suffix(".weight")?;
                Some((module, json!({ "format": format_name(format)? })))
            }
            Conversion::Copy(_) | Conversion::Cast(_) | Conversion::CopyInt8 => None,
        })
        .collect();
    if !layers.is_empty() {
        let text = json!({ "format_version": "1.0", "layers": layers }).to_string();
        metadata.insert(COMFY_METADATA.into(), text);
    }
    metadata
}
