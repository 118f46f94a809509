//! The tensors of the file to write, and which of the model's tensors go into each.

use std::collections::BTreeMap;

use kiln_tensor::packed::Format;
use kiln_tensor::{DType, Shape};

use super::options::{Container, Options, Storage, TensorNames};
use super::presets::TextEncoderInfo;
use super::row_order::RowOrder;
use super::rows::nvfp4_scale;
use crate::layout::{self, Component, View};
use crate::{Error, Result, WeightSource, int8};

/// A tensor to write.
#[derive(Debug)]
pub(super) struct PlannedTensor {
    pub name: String,
    pub shape: Shape,
    pub conversion: Conversion,
    /// Whether it is a layer that was to be quantized, which its rows may not allow.
    pub is_quantized_layer: bool,
    /// The model's tensors whose rows it stacks, and which slice of it each is.
    pub sources: Vec<(String, View)>,
    pub order: RowOrder,
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
    /// Copy int8 rows with their scales.
    CopyInt8,
}

impl Conversion {
    /// The name of the type that is written.
    pub fn storage_name(self) -> &'static str {
        match self {
            Conversion::Copy(dtype) | Conversion::Cast(dtype) => dtype.name(),
            Conversion::Quantize(format) | Conversion::CopyPacked(format) => format.name(),
            Conversion::CopyInt8 => int8::NAME,
        }
    }
}

pub(super) fn plan(source: &WeightSource, options: &Options) -> Result<Vec<PlannedTensor>> {
    let mut fused = BTreeMap::<String, BTreeMap<usize, (String, View)>>::new();
    // llama.cpp refuses a file with tensors that it does not know.
    let is_left_out = |name: &str| {
        options.container == Container::Gguf
            && layout::is_beside_layers(name)
            && !name.starts_with("lm_head.")
    };
    for name in source.names().filter(|name| !source.is_row_scale(name) && !is_left_out(name)) {
        let original = match options.names {
            TensorNames::Diffusers => None,
            TensorNames::Original => layout::to_original(options.component, source.family(), name),
        };
        let (file_name, view) = original.unwrap_or_else(|| (name.to_owned(), View::Whole));
        let position = if let View::Chunk(i, _) = view { i } else { 0 };
        fused.entry(file_name).or_default().insert(position, (name.to_owned(), view));
    }
    let info = TextEncoderInfo::of(source);
    let tensors = fused.into_iter();
    let plan: Vec<PlannedTensor> = tensors
        .map(|(name, sources)| plan_tensor(source, options, info, name, sources.into_values().collect()))
        .collect::<Result<_>>()?;
    if options.storage.quantizes() && !plan.iter().any(|t| t.is_quantized_layer) {
        return Err(Error::NothingToQuantize { file: source.path().to_owned(), already_int8: false });
    }
    Ok(plan)
}

fn plan_tensor(
    source: &WeightSource,
    options: &Options,
    info: TextEncoderInfo,
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
    let of_model = sources.first().map_or("", |(name, _)| name);
    let order = RowOrder::of(source, options, of_model, &first)?;
    let wanted = options.storage.format(options.component, source.family(), of_model, info);
    let wanted = wanted.filter(|_| is_quantized(options.component, of_model, &first));
    let conversion = match wanted.and_then(|format| fallback(format, first.last())) {
        Some(format) if !can_copy(source, options.container, &sources, format)? => {
            Conversion::Quantize(format)
        }
        Some(format) => Conversion::CopyPacked(format),
        None => match kept(source, options, &sources, &first)? {
            Conversion::Copy(dtype) if order != RowOrder::Same => Conversion::Cast(dtype),
            kept => kept,
        },
    };
    Ok(PlannedTensor { name, shape, conversion, is_quantized_layer: wanted.is_some(), sources, order })
}

/// The conversion of tensors that are not quantized: the source's type, if the container has it.
fn kept(
    source: &WeightSource,
    options: &Options,
    sources: &[(String, View)],
    shape: &Shape,
) -> Result<Conversion> {
    let Some((name, view)) = sources.first() else { return Ok(Conversion::Copy(DType::F32)) };
    let Some((dtype, _)) = source.entry(name) else { return Ok(Conversion::Copy(DType::F32)) };
    let is_gguf = options.container == Container::Gguf;
    let is_packed = |name: &str| source.packed_format(name).is_some() || source.is_int8(name);
    let is_float = matches!(dtype, DType::F32 | DType::BF16 | DType::F16 | DType::F64) || dtype.is_fp8();
    let all = |test: &dyn Fn(&str) -> bool| sources.iter().all(|(name, _)| test(name));
    if !is_float && !is_packed(name) {
        return Ok(Conversion::Copy(dtype));
    }
    // GGUF files have f32 vectors.
    if is_gguf && shape.rank() < 2 {
        return Ok(Conversion::Cast(DType::F32));
    }
    if let Storage::Dense(dtype) = options.storage {
        return Ok(Conversion::Cast(dtype));
    }
    let is_matrix = shape.rank() == 2;
    if let Some(format) = source.packed_format(name)
        && (is_matrix || is_gguf)
        && can_copy(source, options.container, sources, format)?
    {
        return Ok(Conversion::CopyPacked(format));
    }
    if !is_gguf && is_matrix && all(&|name| source.is_int8(name)) {
        return Ok(Conversion::CopyInt8);
    }
    if sources.iter().any(|(name, _)| is_packed(name)) {
        // Only f32 has every value of nvfp4, which a fused layer can't hold if its parts have unlike scales, and of
        // parts in unlike formats.
        let format = source.packed_format(name);
        let is_one_format = all(&|other| source.packed_format(other) == format) && !source.is_int8(name);
        let is_exact = !is_gguf && (!is_one_format || format == Some(Format::NvFp4));
        return Ok(Conversion::Cast(if is_exact { DType::F32 } else { DType::BF16 }));
    }
    let is_same = all(&|name| source.entry(name).is_some_and(|(other, _)| other == dtype));
    Ok(match dtype {
        _ if !is_same => Conversion::Cast(DType::F32),
        DType::F64 => Conversion::Cast(DType::F32),
        _ if dtype.is_fp8() && is_gguf => Conversion::Cast(DType::BF16),
        _ if *view == View::Whole && sources.len() == 1 => Conversion::Copy(dtype),
        // Only matrices are fp8 in memory.
        _ if dtype.is_fp8() && shape.rank() != 2 => Conversion::Cast(DType::BF16),
        _ => Conversion::Cast(dtype),
    })
}

/// Whether packed tensors of this format can be copied to one tensor of this container.
fn can_copy(
    source: &WeightSource,
    container: Container,
    sources: &[(String, View)],
    format: Format,
) -> Result<bool> {
    if sources.iter().any(|(name, _)| source.packed_format(name) != Some(format)) {
        return Ok(false);
    }
    let is_gguf = container == Container::Gguf;
    match format {
        Format::F8E4M3 | Format::F8E5M2 => {
            Ok(!is_gguf && sources.iter().all(|(name, _)| !source.has_tile_scales(name)))
        }
        Format::NvFp4 => Ok(!is_gguf && nvfp4_scale(source, sources)?.is_some()),
        Format::I8 => Ok(false),
        _ => Ok(is_gguf),
    }
}

/// Whether a tensor is quantized: matrices inside the blocks, and a text encoder's embedding and output layer.
fn is_quantized(component: Component, name: &str, shape: &Shape) -> bool {
    let Some(module) = name.strip_suffix(".weight").filter(|_| shape.rank() == 2) else { return false };
    match component {
        Component::Transformer => int8::is_block_layer(module),
        Component::TextEncoder => {
            module.starts_with("model.layers.") || ["model.embed_tokens", "lm_head"].contains(&module)
        }
        Component::Vae => false,
    }
}

/// The format for rows of this length: Q8_0 instead of blocks of 256, and `None` if the rows don't fit its blocks either.
fn fallback(format: Format, cols: usize) -> Option<Format> {
    let smaller = if format.block_values() == 256 { Some(Format::Q8_0) } else { None };
    [Some(format), smaller].into_iter().flatten().find(|f| cols.is_multiple_of(f.block_values()))
}
