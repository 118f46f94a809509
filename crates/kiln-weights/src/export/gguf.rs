//! Weights as a GGUF file, version 3.

use std::io::Write;
use std::path::Path;

use kiln_tensor::Shape;
use kiln_tensor::packed::Format;

use super::plan::{How, Planned};
use super::{Options, Work};
use crate::gguf::{MAGIC, Stored, number_of};
use crate::save::whole_file;
use crate::{Component, Error, Result, WeightSource};

const VERSION: u32 = 3;
const ALIGNMENT: u64 = 32;
/// Of the blocks, as llama.cpp counts it.
const QUANTIZATION_VERSION: u32 = 2;

pub(super) fn write(
    out: &Path,
    plan: &[Planned],
    source: &WeightSource,
    options: &Options,
    work: &mut Work<'_>,
) -> Result<u64> {
    let io = |source| Error::Io { doing: "write", file: out.to_owned(), source };
    let (header, sizes) = header(out, plan, source, options)?;
    whole_file(out, &mut |file| {
        file.write_all(&header).map_err(io)?;
        for (planned, size) in plan.iter().zip(&sizes) {
            let made = work.produce(planned)?;
            if made.bytes.len() as u64 != *size {
                let (found, expected) = ([made.bytes.len()].into(), [*size as usize].into());
                return Err(Error::Shape {
                    file: out.to_owned(),
                    tensor: planned.name.clone(),
                    found,
                    expected,
                });
            }
            file.write_all(&made.bytes).map_err(io)?;
            file.write_all(&vec![0; (size.next_multiple_of(ALIGNMENT) - size) as usize]).map_err(io)?;
        }
        Ok(())
    })?;
    Ok(sizes.iter().sum())
}

/// The header, and the bytes of every tensor behind it.
fn header(
    out: &Path,
    plan: &[Planned],
    source: &WeightSource,
    options: &Options,
) -> Result<(Vec<u8>, Vec<u64>)> {
    let settings = settings(source, options);
    let mut bytes = MAGIC.to_vec();
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend((plan.len() as u64).to_le_bytes());
    bytes.extend((settings.len() as u64).to_le_bytes());
    for (key, value) in settings {
        text(&mut bytes, &key);
        match value {
            Value::Text(value) => {
                bytes.extend(8u32.to_le_bytes());
                text(&mut bytes, &value);
            }
            Value::Number(value) => {
                bytes.extend(4u32.to_le_bytes());
                bytes.extend(value.to_le_bytes());
            }
            Value::Float(value) => {
                bytes.extend(6u32.to_le_bytes());
                bytes.extend(value.to_le_bytes());
            }
        }
    }
    let (mut sizes, mut offset) = (Vec::new(), 0u64);
    for planned in plan {
        let stored = match planned.how {
            How::Same(dtype) | How::Plain(dtype) => Stored::Plain(dtype),
            How::Packed(format) | How::Kept(format) => plain_or_blocks(format),
        };
        let not = |reason| Error::SaveName { file: out.to_owned(), tensor: planned.name.clone(), reason };
        let number = number_of(stored).ok_or_else(|| not("of a type that GGUF has not"))?;
        let size = size(stored, &planned.shape).ok_or_else(|| not("too large"))?;
        let dims = planned.shape.dims();
        if dims.len() > 4 {
            return Err(not("of more dimensions than GGUF has"));
        }
        text(&mut bytes, &planned.name);
        bytes.extend((dims.len() as u32).to_le_bytes());
        bytes.extend(dims.iter().rev().flat_map(|&d| (d as u64).to_le_bytes()));
        bytes.extend(number.to_le_bytes());
        bytes.extend(offset.to_le_bytes());
        offset += size.next_multiple_of(ALIGNMENT);
        sizes.push(size);
    }
    bytes.resize(bytes.len().next_multiple_of(ALIGNMENT as usize), 0);
    Ok((bytes, sizes))
}

fn plain_or_blocks(format: Format) -> Stored {
    use kiln_tensor::DType;
    match format {
        Format::F32 => Stored::Plain(DType::F32),
        Format::BF16 => Stored::Plain(DType::BF16),
        Format::F16 => Stored::Plain(DType::F16),
        format => Stored::Blocks(format),
    }
}

fn size(stored: Stored, shape: &Shape) -> Option<u64> {
    let bytes = match stored {
        Stored::Plain(dtype) => shape.checked_numel()?.checked_mul(dtype.size())?,
        Stored::Blocks(format) => format.row_bytes(shape.last())?.checked_mul(shape.rows())?,
    };
    u64::try_from(bytes).ok()
}

fn text(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
}

enum Value {
    Text(String),
    Number(u32),
    Float(f32),
}

/// What other programs want to know: the family of the model, and of a text encoder its sizes.
fn settings(source: &WeightSource, options: &Options) -> Vec<(String, Value)> {
    let family = match options.component {
        Component::Transformer => "flux",
        Component::TextEncoder => "qwen3",
        Component::Vae => "vae",
    };
    let mut settings = vec![
        ("general.architecture".to_owned(), Value::Text(family.to_owned())),
        ("general.quantization_version".to_owned(), Value::Number(QUANTIZATION_VERSION)),
        ("general.alignment".to_owned(), Value::Number(ALIGNMENT as u32)),
    ];
    if options.component == Component::TextEncoder {
        let side = |name: &str, axis: usize| source.entry(name)?.1.dims().get(axis).map(|&n| n as u32);
        let layer = |leaf: &str| format!("model.layers.0.{leaf}.weight");
        let layers =
            (0..).take_while(|i| source.contains(&format!("model.layers.{i}.input_layernorm.weight")));
        let head = side(&layer("self_attn.q_norm"), 0);
        let heads = |leaf: &str| Some(side(&layer(leaf), 0)? / head?.max(1));
        let numbers = [
            ("block_count", Some(layers.count() as u32)),
            ("embedding_length", side("model.embed_tokens.weight", 1)),
            ("feed_forward_length", side(&layer("mlp.gate_proj"), 0)),
            ("attention.head_count", heads("self_attn.q_proj")),
            ("attention.head_count_kv", heads("self_attn.k_proj")),
            ("attention.key_length", head),
            ("attention.value_length", head),
            ("context_length", Some(40960)),
        ];
        let numbers = numbers.into_iter().filter_map(|(key, n)| Some((key, Value::Number(n?))));
        let known = |key: &str, usual| {
            let own = source.metadata().get(key).and_then(|text| text.parse::<f32>().ok());
            Value::Float(own.unwrap_or(usual))
        };
        let floats = [
            ("attention.layer_norm_rms_epsilon", known("rms_norm_eps", 1e-6)),
            ("rope.freq_base", known("rope_theta", 1e6)),
        ];
        settings.extend(numbers.chain(floats).map(|(key, value)| (format!("{family}.{key}"), value)));
    }
    settings
}
