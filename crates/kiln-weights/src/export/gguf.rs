//! Writes GGUF files, version 3.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use kiln_base::AtomicFile;
use kiln_tensor::packed::Format;
use kiln_tensor::{DType, Shape};

use super::exporter::Exporter;
use super::metadata::{NAME_KEY, kept_metadata};
use super::options::{Options, Storage};
use super::plan::{Conversion, PlannedTensor};
use super::presets::file_type;
use crate::gguf::MAGIC;
use crate::gguf_types::{GgufType, type_id};
use crate::layout::Q_NORM;
use crate::save::write_with;
use crate::{Component, Error, Result, WeightSource};

const VERSION: u32 = 3;
const ALIGNMENT: u64 = 32;
/// llama.cpp's version of the block formats.
const QUANTIZATION_VERSION: u32 = 2;

pub(super) fn write(
    out: &Path,
    plan: &[PlannedTensor],
    source: &WeightSource,
    options: &Options,
    exporter: &mut Exporter<'_>,
) -> Result<u64> {
    let io = |source| Error::Io { doing: "write", file: out.to_owned(), source };
    let (header, sizes) = header(out, plan, source, options)?;
    write_with(out, AtomicFile::commit_unless_changed, &mut |file| {
        file.write_all(&header).map_err(io)?;
        for (planned, size) in plan.iter().zip(&sizes) {
            let converted = exporter.convert(planned)?;
            if converted.bytes.len() as u64 != *size {
                let (found, expected) = ([converted.bytes.len()].into(), [*size as usize].into());
                return Err(Error::Shape {
                    file: out.to_owned(),
                    tensor: planned.name.clone(),
                    found,
                    expected,
                });
            }
            file.write_all(&converted.bytes).map_err(io)?;
            file.write_all(&vec![0; (size.next_multiple_of(ALIGNMENT) - size) as usize]).map_err(io)?;
        }
        Ok(())
    })?;
    Ok(sizes.iter().sum())
}

/// The header, and the size of every tensor after it.
fn header(
    out: &Path,
    plan: &[PlannedTensor],
    source: &WeightSource,
    options: &Options,
) -> Result<(Vec<u8>, Vec<u64>)> {
    let metadata = metadata(plan, source, options);
    let mut bytes = MAGIC.to_vec();
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend((plan.len() as u64).to_le_bytes());
    bytes.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata {
        push_string(&mut bytes, &key);
        match value {
            Value::String(value) => {
                bytes.extend(8u32.to_le_bytes());
                push_string(&mut bytes, &value);
            }
            Value::U32(value) => {
                bytes.extend(4u32.to_le_bytes());
                bytes.extend(value.to_le_bytes());
            }
            Value::F32(value) => {
                bytes.extend(6u32.to_le_bytes());
                bytes.extend(value.to_le_bytes());
            }
        }
    }
    let (mut sizes, mut offset) = (Vec::new(), 0u64);
    for planned in plan {
        let gguf_type = match planned.conversion {
            Conversion::Copy(dtype) | Conversion::Cast(dtype) => GgufType::Dense(dtype),
            Conversion::Quantize(format) | Conversion::CopyPacked(format) => format_type(format),
            Conversion::CopyInt8 => GgufType::Dense(DType::I8),
        };
        let invalid =
            |reason| Error::InvalidTensor { file: out.to_owned(), tensor: planned.name.clone(), reason };
        if let GgufType::Blocks(format @ (Format::F8E4M3 | Format::F8E5M2 | Format::NvFp4)) = gguf_type {
            return Err(Error::RequiresSafetensors { file: out.to_owned(), format });
        }
        let id = type_id(gguf_type).ok_or_else(|| invalid("GGUF does not have its dtype"))?;
        let size = size(gguf_type, &planned.shape).ok_or_else(|| invalid("it is too large"))?;
        let dims = planned.shape.dims();
        if dims.len() > 4 {
            return Err(invalid("GGUF allows no more than 4 dimensions"));
        }
        push_string(&mut bytes, &planned.name);
        bytes.extend((dims.len() as u32).to_le_bytes());
        bytes.extend(dims.iter().rev().flat_map(|&d| (d as u64).to_le_bytes()));
        bytes.extend(id.to_le_bytes());
        bytes.extend(offset.to_le_bytes());
        offset += size.next_multiple_of(ALIGNMENT);
        sizes.push(size);
    }
    bytes.resize(bytes.len().next_multiple_of(ALIGNMENT as usize), 0);
    Ok((bytes, sizes))
}

fn format_type(format: Format) -> GgufType {
    match format {
        Format::F32 => GgufType::Dense(DType::F32),
        Format::BF16 => GgufType::Dense(DType::BF16),
        Format::F16 => GgufType::Dense(DType::F16),
        format => GgufType::Blocks(format),
    }
}

fn size(gguf_type: GgufType, shape: &Shape) -> Option<u64> {
    let bytes = match gguf_type {
        GgufType::Dense(dtype) => shape.checked_numel()?.checked_mul(dtype.size())?,
        GgufType::Blocks(format) => format.row_bytes(shape.last())?.checked_mul(shape.rows())?,
    };
    u64::try_from(bytes).ok()
}

fn push_string(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
}

enum Value {
    String(String),
    U32(u32),
    F32(f32),
}

/// The metadata that other programs need, and Kiln's own.
fn metadata(plan: &[PlannedTensor], source: &WeightSource, options: &Options) -> Vec<(String, Value)> {
    let architecture = match options.component {
        Component::Transformer => source.family().transformer.architecture,
        Component::TextEncoder => {
            let mut encoders = kiln_family::text_encoders();
            let has_norms = source.contains(Q_NORM);
            encoders.find(|one| one.has_qk_norms == has_norms).map_or("", |one| one.architectures[0])
        }
        Component::Vae => "vae",
    };
    let text = |key: &str, value: &str| (key.to_owned(), Value::String(value.to_owned()));
    let number = |key: &str, value: u32| (key.to_owned(), Value::U32(value));
    let mut metadata = vec![
        text("general.architecture", architecture),
        text("general.type", "model"),
        number("general.quantization_version", QUANTIZATION_VERSION),
        number("general.alignment", ALIGNMENT as u32),
    ];
    let stem = || Some(source.path().file_stem()?.to_string_lossy().into_owned());
    let name = source.metadata().get(NAME_KEY).cloned().or_else(stem);
    metadata.extend(name.map(|name| text(NAME_KEY, &name)));
    metadata.extend(plan_file_type(plan, options).map(|n| number("general.file_type", n)));
    if options.component == Component::TextEncoder {
        metadata.extend(text_encoder_metadata(architecture, source));
    }
    let own = kept_metadata(source).into_iter().filter(|(key, _)| key.starts_with("kiln."));
    metadata.extend(own.map(|(key, value)| (key, Value::String(value))));
    metadata
}

/// llama.cpp's number for the preset, or for the format of most weights.
fn plan_file_type(plan: &[PlannedTensor], options: &Options) -> Option<u32> {
    if let Storage::Preset(preset) = options.storage {
        return Some(preset.file_type());
    }
    let mut weights = BTreeMap::<Format, usize>::new();
    for planned in plan {
        let format = match planned.conversion {
            Conversion::Quantize(format) | Conversion::CopyPacked(format) => format,
            Conversion::Copy(DType::F32) | Conversion::Cast(DType::F32) => Format::F32,
            Conversion::Copy(DType::BF16) | Conversion::Cast(DType::BF16) => Format::BF16,
            Conversion::Copy(DType::F16) | Conversion::Cast(DType::F16) => Format::F16,
            _ => continue,
        };
        *weights.entry(format).or_default() += planned.shape.numel();
    }
    file_type(weights.into_iter().max_by_key(|(_, count)| *count)?.0)
}

/// The sizes and settings by which llama.cpp builds a text encoder.
fn text_encoder_metadata(architecture: &str, source: &WeightSource) -> Vec<(String, Value)> {
    let dim = |name: &str, axis: usize| source.entry(name)?.1.dims().get(axis).map(|&n| n as u32);
    let layer = |leaf: &str| format!("model.layers.0.{leaf}.weight");
    let layers = (0..).take_while(|i| source.contains(&format!("model.layers.{i}.input_layernorm.weight")));
    let head_dim = source.head_dim().map(|dim| dim as u32);
    let is_qwen3 = source.contains(Q_NORM);
    let heads = |leaf: &str| Some(dim(&layer(leaf), 0)? / head_dim?.max(1));
    let numbers = [
        ("block_count", Some(layers.count() as u32)),
        ("embedding_length", dim("model.embed_tokens.weight", 1)),
        ("vocab_size", dim("model.embed_tokens.weight", 0)),
        ("feed_forward_length", dim(&layer("mlp.gate_proj"), 0)),
        ("attention.head_count", heads("self_attn.q_proj")),
        ("attention.head_count_kv", heads("self_attn.k_proj")),
        ("attention.key_length", head_dim),
        ("attention.value_length", head_dim),
        ("rope.dimension_count", head_dim.filter(|_| !is_qwen3)),
        ("context_length", Some(if is_qwen3 { 40960 } else { 131_072 })),
    ];
    let numbers = numbers.into_iter().filter_map(|(key, n)| Some((key, Value::U32(n?))));
    let setting = |key: &str, default| {
        let own = source.metadata().get(key).and_then(|text| text.parse::<f32>().ok());
        Value::F32(own.unwrap_or(default))
    };
    let (eps, theta) = if is_qwen3 { (1e-6, 1e6) } else { (1e-5, 1e9) };
    let floats = [
        ("attention.layer_norm_rms_epsilon", setting("rms_norm_eps", eps)),
        ("rope.freq_base", setting("rope_theta", theta)),
    ];
    numbers.chain(floats).map(|(key, value)| (format!("{architecture}.{key}"), value)).collect()
}
