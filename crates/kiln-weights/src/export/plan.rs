//! The tensors of the file to write, and which of the model's tensors go into each.

use std::collections::BTreeMap;

use kiln_tensor::packed::Format;
use kiln_tensor::{DType, Shape};

use super::{Container, Options, Storage, TensorNames};
use crate::layout::{self, Component, View};
use crate::{Error, Result, WeightSource, int8};

/// A tensor to write.
#[derive(Debug)]
pub(super) struct PlannedTensor {
    pub name: String,
    pub shape: Shape,
    pub conversion: Conversion,
    /// The model's tensors whose rows it stacks, and which slice of it each is.
    pub sources: Vec<(String, View)>,
}

/// What is done to the values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Conversion {
    /// Copy the bytes.
    Copy(DType),
    /// Convert to this float dtype, or stack tensors of it.
    Cast(DType),
    /// Quantize.
    Quantize(Format),
    /// Copy packed values with their own scales.
    CopyPacked(Format),
}

pub(super) fn plan(source: &WeightSource, options: &Options) -> Result<Vec<PlannedTensor>> {
    let mut fused = BTreeMap::<String, BTreeMap<usize, (String, View)>>::new();
    for name in source.names().filter(|name| !source.is_row_scale(name)) {
        let original = match options.names {
            TensorNames::Diffusers => None,
            TensorNames::Original => layout::to_original(options.component, name),
        };
        let (file_name, view) = original.unwrap_or_else(|| (name.to_owned(), View::Whole));
        let position = if let View::Chunk(i, _) = view { i } else { 0 };
        fused.entry(file_name).or_default().insert(position, (name.to_owned(), view));
    }
    fused
        .into_iter()
        .map(|(name, sources)| plan_tensor(source, options, name, sources.into_values().collect()))
        .collect()
}

fn plan_tensor(
    source: &WeightSource,
    options: &Options,
    name: String,
    sources: Vec<(String, View)>,
) -> Result<PlannedTensor> {
    let shapes: Vec<&Shape> = sources.iter().filter_map(|(name, _)| Some(source.entry(name)?.1)).collect();
    let first = shapes.first().copied().cloned().unwrap_or_default();
    let shape: Shape = match (&sources[..], first.dims()) {
        ([(_, View::Whole)], _) => first.clone(),
        ([(_, View::SwappedHalves)], [rows, ..]) if rows.is_multiple_of(2) => first.clone(),
        ([(_, View::Squeezed)], &[rows, cols]) => [rows, cols, 1, 1].into(),
        ([(_, View::Squeezed)], _) => first.clone(),
        ([(_, View::Chunk(_, count)), ..], [rows, rest @ ..])
            if sources.len() == *count && shapes.iter().all(|s| **s == first) =>
        {
            [&[rows * count], rest].concat().into()
        }
        _ => {
            return Err(Error::CannotSplit {
                file: source.path().to_owned(),
                tensor: name,
                found: first,
                parts: "the layers that the file fuses".into(),
            });
        }
    };
    let conversion = conversion(source, options, &sources, &first);
    Ok(PlannedTensor { name, shape, conversion, sources })
}

fn conversion(
    source: &WeightSource,
    options: &Options,
    sources: &[(String, View)],
    shape: &Shape,
) -> Conversion {
    let Some((name, view)) = sources.first() else { return Conversion::Copy(DType::F32) };
    let Some((dtype, _)) = source.entry(name) else { return Conversion::Copy(DType::F32) };
    let formats: Vec<Option<Format>> = sources.iter().map(|(name, _)| source.packed_format(name)).collect();
    let is_tiled = sources.iter().any(|(name, _)| source.has_tile_scales(name));
    let is_gguf = options.container == Container::Gguf;
    let is_float = matches!(dtype, DType::F32 | DType::BF16 | DType::F16 | DType::F64) || dtype.is_fp8();
    if !is_float && formats[0].is_none() && !source.is_int8(name) {
        return Conversion::Copy(dtype);
    }
    let is_vector = shape.rank() < 2;
    match (options.storage, formats[0]) {
        (Storage::Quantized(format), _) if !is_vector && is_quantized(options.component, name, shape) => {
            match fallback(format, shape.last()) {
                Some(format) => Conversion::Quantize(format),
                None => Conversion::Cast(DType::BF16),
            }
        }
        // GGUF files have f32 vectors.
        _ if is_gguf && is_vector => Conversion::Cast(DType::F32),
        (Storage::Dense(dtype), _) => Conversion::Cast(dtype),
        (_, Some(format))
            if formats.iter().all(|f| *f == Some(format)) && can_copy(format, is_gguf) && !is_tiled =>
        {
            Conversion::CopyPacked(format)
        }
        (_, Some(_)) => Conversion::Cast(DType::BF16),
        _ if source.is_int8(name) => Conversion::Cast(DType::BF16),
        _ if dtype == DType::F64 => Conversion::Cast(DType::F32),
        _ if dtype.is_fp8() && is_gguf => Conversion::Cast(DType::BF16),
        _ if *view == View::Whole && sources.len() == 1 => Conversion::Copy(dtype),
        // Only matrices are fp8 in memory.
        _ if dtype.is_fp8() && shape.rank() != 2 => Conversion::Cast(DType::BF16),
        _ => Conversion::Cast(dtype),
    }
}

/// Whether packed values can be copied to this container. nvfp4 can't: the order of its scales depends on the names.
fn can_copy(format: Format, is_gguf: bool) -> bool {
    match format {
        Format::F8E4M3 | Format::F8E5M2 => !is_gguf,
        Format::NvFp4 | Format::I8 => false,
        _ => is_gguf,
    }
}

/// Whether a tensor is quantized: matrices inside the blocks, and a text encoder's embedding.
fn is_quantized(component: Component, name: &str, shape: &Shape) -> bool {
    let Some(module) = name.strip_suffix(".weight").filter(|_| shape.rank() == 2) else { return false };
    match component {
        Component::Transformer => int8::is_block_layer(module),
        Component::TextEncoder => module.starts_with("model.layers.") || module == "model.embed_tokens",
        Component::Vae => false,
    }
}

/// The format for rows of this length: Q8_0 instead of blocks of 256, and `None` if the rows don't fit its blocks either.
fn fallback(format: Format, cols: usize) -> Option<Format> {
    let smaller = if format.block_values() == 256 { Some(Format::Q8_0) } else { None };
    [Some(format), smaller].into_iter().flatten().find(|f| cols.is_multiple_of(f.block_values()))
}
