//! Weights as safetensors, those packed as ComfyUI and Black Forest Labs store them.

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;

use kiln_tensor::packed::{BlockScales, Format};
use kiln_tensor::{DType, HostTensor, Shape};
use serde_json::json;

use super::Work;
use super::plan::{How, Planned};
use super::produce;
use crate::save::{self, stream, write_whole};
use crate::{Error, Result, WeightSource};

/// The header's word on which layers are stored how.
const HEADER: &str = "_quantization_metadata";

pub(super) fn write(out: &Path, plan: &[Planned], source: &WeightSource, work: &mut Work<'_>) -> Result<u64> {
    let files = tensors(out, plan, source)?;
    one(out, plan.iter().zip(&files), metadata(source, plan), work)
}

pub(super) fn write_shards(
    folder: &Path,
    stem: &str,
    shard: u64,
    plan: &[Planned],
    source: &WeightSource,
    work: &mut Work<'_>,
) -> Result<u64> {
    let files = tensors(folder, plan, source)?;
    let size = |planned: &[save::Planned]| planned.iter().map(save::Planned::bytes_or_most).sum::<u64>();
    let mut shards: Vec<Vec<usize>> = vec![Vec::new()];
    let mut room = shard;
    for (i, tensors) in files.iter().enumerate() {
        let bytes = size(tensors);
        match shards.last_mut() {
            Some(last) if last.is_empty() || bytes <= room => last.push(i),
            _ => {
                shards.push(vec![i]);
                room = shard;
            }
        }
        room = room.saturating_sub(bytes);
    }
    let (mut total, mut map) = (0, BTreeMap::new());
    for (number, tensors) in shards.iter().enumerate() {
        let name = format!("{stem}-{:05}-of-{:05}.safetensors", number + 1, shards.len());
        let chosen = tensors.iter().map(|&i| (&plan[i], &files[i]));
        map.extend(chosen.clone().flat_map(|(_, f)| f).map(|p| (p.name.clone(), name.clone())));
        total += one(&folder.join(&name), chosen, metadata(source, plan), work)?;
    }
    let index = json!({ "metadata": { "total_size": total }, "weight_map": map });
    let path = folder.join(format!("{stem}.safetensors.index.json"));
    write_whole(&path, format!("{index:#}\n").as_bytes())?;
    Ok(total)
}

fn one<'p>(
    out: &Path,
    tensors: impl Iterator<Item = (&'p Planned, &'p Vec<save::Planned>)>,
    metadata: BTreeMap<String, String>,
    work: &mut Work<'_>,
) -> Result<u64> {
    let chosen: Vec<_> = tensors.collect();
    let all: Vec<save::Planned> = chosen.iter().flat_map(|(_, f)| f.iter().cloned()).collect();
    // A tensor and its scales are made together and asked for one after the other.
    let (mut next, mut ready) = (chosen.iter(), VecDeque::new());
    stream(out, &all, &metadata, &mut |wanted| {
        if ready.is_empty()
            && let Some((planned, files)) = next.next()
        {
            let made = work.produce(planned)?;
            let blocks = made.blocks.map(bytes::Bytes::from);
            let scale = made.scale.map(|s| s.bytes().clone());
            ready.extend([Some(made.bytes), blocks, scale].into_iter().flatten().zip(files.iter()));
        }
        let (bytes, planned) = ready.pop_front().ok_or_else(|| Error::SaveName {
            file: out.to_owned(),
            tensor: wanted.name.clone(),
            reason: "not planned",
        })?;
        HostTensor::new(planned.dtype, &planned.shape, bytes).map_err(|source| Error::Tensor {
            file: out.to_owned(),
            tensor: planned.name.clone(),
            source,
        })
    })?;
    Ok(all.iter().map(save::Planned::bytes_or_most).sum())
}

/// The tensors of the file that each of the plan becomes: itself, scales of blocks, and a factor.
fn tensors(out: &Path, plan: &[Planned], source: &WeightSource) -> Result<Vec<Vec<save::Planned>>> {
    plan.iter().map(|planned| of(out, planned, source)).collect()
}

fn of(out: &Path, planned: &Planned, source: &WeightSource) -> Result<Vec<save::Planned>> {
    let beside = |suffix: &str, dtype, shape: Shape| {
        let module = planned.name.strip_suffix(".weight").unwrap_or(&planned.name);
        save::Planned { name: format!("{module}{suffix}"), dtype, shape }
    };
    let own =
        |dtype, shape: &Shape| save::Planned { name: planned.name.clone(), dtype, shape: shape.clone() };
    let shape = &planned.shape;
    Ok(match planned.how {
        How::Same(dtype) | How::Plain(dtype) => vec![own(dtype, shape)],
        How::Packed(Format::F8E4M3) => {
            vec![own(DType::F8E4M3, shape), beside(".weight_scale", DType::F32, [0; 0].into())]
        }
        How::Kept(format @ (Format::F8E4M3 | Format::F8E5M2)) => {
            let dtype = if format == Format::F8E5M2 { DType::F8E5M2 } else { DType::F8E4M3 };
            let scale = produce::scale_shape(source, planned)?;
            vec![own(dtype, shape), beside(".weight_scale", DType::F32, scale.into())]
        }
        How::Packed(Format::NvFp4) => {
            let [rows, cols] = [shape.rows(), shape.last()];
            let scales =
                BlockScales { scales: Default::default(), swizzled: true, high_first: true, all: 1.0 };
            let across = (cols / 16).next_multiple_of(4);
            let down = scales.count([rows, cols]).unwrap_or(0) / across.max(1);
            vec![
                own(DType::U8, &[rows, cols / 2].into()),
                beside(".weight_scale", DType::F8E4M3, [down, across].into()),
                beside(".weight_scale_2", DType::F32, [0; 0].into()),
            ]
        }
        How::Packed(format) | How::Kept(format) => {
            return Err(Error::NotInSafetensors { file: out.to_owned(), format });
        }
    })
}

/// The source's own words, without those that were about its way of storing, and which layers are packed.
fn metadata(source: &WeightSource, plan: &[Planned]) -> BTreeMap<String, String> {
    let mut metadata = BTreeMap::new();
    if !source.is_gguf() {
        let own = |key: &str| key != HEADER && key != crate::quantise::MARK && !key.contains('/');
        metadata
            .extend(source.metadata().iter().filter(|(k, _)| own(k)).map(|(k, v)| (k.clone(), v.clone())));
    }
    let name = |format| match format {
        Format::F8E4M3 => Some("float8_e4m3fn"),
        Format::F8E5M2 => Some("float8_e5m2"),
        Format::NvFp4 => Some("nvfp4"),
        _ => None,
    };
    let layers: BTreeMap<&str, serde_json::Value> = plan
        .iter()
        .filter_map(|planned| match planned.how {
            How::Packed(format) | How::Kept(format) => {
                Some((planned.name.strip_suffix(".weight")?, json!({ "format": name(format)? })))
            }
            _ => None,
        })
        .collect();
    if !layers.is_empty() {
        let text = json!({ "format_version": "1.0", "layers": layers }).to_string();
        metadata.insert(HEADER.into(), text);
    }
    metadata
}
