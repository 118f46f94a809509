//! Which tensors a file gets, and what of the model goes into each.

use std::collections::BTreeMap;

use kiln_tensor::packed::Format;
use kiln_tensor::{DType, Shape};

use super::{Container, Names, Options, Storage};
use crate::layout::{self, Component, View};
use crate::{Error, Result, WeightSource, int8};

/// A tensor to be written.
#[derive(Debug)]
pub(super) struct Planned {
    pub name: String,
    pub shape: Shape,
    pub how: How,
    /// The model's tensors that it is made of, below each other, and how it sees each.
    pub pieces: Vec<(String, View)>,
}

/// What is stored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum How {
    /// Whatever it is, byte by byte.
    Same(DType),
    /// Floats of another type, or put together.
    Plain(DType),
    /// Packed anew.
    Packed(Format),
    /// As it is packed already, with its own scales.
    Kept(Format),
}

pub(super) fn plan(source: &WeightSource, options: &Options) -> Result<Vec<Planned>> {
    let mut fused = BTreeMap::<String, BTreeMap<usize, (String, View)>>::new();
    for name in source.names().filter(|name| !source.is_row_scale(name)) {
        let (theirs, view) = match options.names {
            Names::Diffusers => None,
            Names::Original => layout::restore(options.component, name),
        }
        .unwrap_or_else(|| (name.to_owned(), View::Whole));
        let part = if let View::Part(i, _) = view { i } else { 0 };
        fused.entry(theirs).or_default().insert(part, (name.to_owned(), view));
    }
    fused
        .into_iter()
        .map(|(name, pieces)| tensor(source, options, name, pieces.into_values().collect()))
        .collect()
}

fn tensor(
    source: &WeightSource,
    options: &Options,
    name: String,
    pieces: Vec<(String, View)>,
) -> Result<Planned> {
    let shapes: Vec<&Shape> = pieces.iter().filter_map(|(name, _)| Some(source.entry(name)?.1)).collect();
    let first = shapes.first().copied().cloned().unwrap_or_default();
    let wrong = |parts: String| Error::Cut {
        file: source.path().to_owned(),
        tensor: name.clone(),
        found: first.clone(),
        parts,
    };
    let shape: Shape = match (&pieces[..], first.dims()) {
        ([(_, View::Whole)], _) => first.clone(),
        ([(_, View::Swapped)], [rows, ..]) if rows.is_multiple_of(2) => first.clone(),
        ([(_, View::Squeezed)], &[rows, cols]) => [rows, cols, 1, 1].into(),
        ([(_, View::Squeezed)], _) => first.clone(),
        ([(_, View::Part(_, count)), ..], [rows, rest @ ..])
            if pieces.len() == *count && shapes.iter().all(|s| **s == first) =>
        {
            [&[rows * count], rest].concat().into()
        }
        _ => return Err(wrong("what the file wants together".into())),
    };
    let how = how(source, options, &pieces, &first);
    Ok(Planned { name, shape, how, pieces })
}

fn how(source: &WeightSource, options: &Options, pieces: &[(String, View)], shape: &Shape) -> How {
    let Some((name, view)) = pieces.first() else { return How::Same(DType::F32) };
    let Some((dtype, _)) = source.entry(name) else { return How::Same(DType::F32) };
    let packings: Vec<Option<Format>> = pieces.iter().map(|(name, _)| source.packing(name)).collect();
    let gguf = options.container == Container::Gguf;
    let floats =
        matches!(dtype, DType::F32 | DType::BF16 | DType::F16 | DType::F64) || dtype.is_small_float();
    let values = floats || packings[0].is_some() || source.is_int8(name);
    if !values {
        return How::Same(dtype);
    }
    let vector = shape.rank() < 2;
    match (options.storage, packings[0]) {
        (Storage::Packed(format), _) if !vector && packs(options.component, name, shape) => {
            match fallback(format, shape.last()) {
                Some(format) => How::Packed(format),
                None => How::Plain(DType::BF16),
            }
        }
        // GGUF files have their vectors so.
        _ if gguf && vector => How::Plain(DType::F32),
        (Storage::Plain(dtype), _) => How::Plain(dtype),
        (_, Some(format)) if packings.iter().all(|p| *p == Some(format)) && kept(format, gguf) => {
            How::Kept(format)
        }
        (_, Some(_)) => How::Plain(DType::BF16),
        _ if source.is_int8(name) => How::Plain(DType::BF16),
        _ if dtype == DType::F64 => How::Plain(DType::F32),
        _ if dtype.is_small_float() && gguf => How::Plain(DType::BF16),
        _ if *view == View::Whole && pieces.len() == 1 => How::Same(dtype),
        _ => How::Plain(dtype),
    }
}

/// Whether a file can hold what is packed so already. (4-bit floats have scales whose order depends on the names.)
fn kept(format: Format, gguf: bool) -> bool {
    match format {
        Format::F8E4M3 | Format::F8E5M2 => !gguf,
        Format::NvFp4 => false,
        _ => gguf,
    }
}

/// Whether a layer is packed: matrices inside the blocks, and of a text encoder the embedding.
fn packs(component: Component, name: &str, shape: &Shape) -> bool {
    let Some(module) = name.strip_suffix(".weight").filter(|_| shape.rank() == 2) else { return false };
    match component {
        Component::Transformer => int8::takes(module),
        Component::TextEncoder => module.starts_with("model.layers.") || module == "model.embed_tokens",
        Component::Vae => false,
    }
}

/// The format for rows of this length: blocks of 256 give way to blocks of 32, and these to plain floats.
fn fallback(format: Format, cols: usize) -> Option<Format> {
    let smaller = if format.block_values() == 256 { Some(Format::Q8_0) } else { None };
    [Some(format), smaller].into_iter().flatten().find(|f| cols.is_multiple_of(f.block_values()))
}
