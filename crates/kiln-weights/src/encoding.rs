//! How the values of a tensor are encoded: plain elements, GGUF blocks, or fp8 and nvfp4 values with scales in other tensors.
//!
//! fp8 and nvfp4 have several conventions, recognized by names and shapes, layer by layer:
//!
//! | weights | scales beside `X.weight` | written by |
//! |---|---|---|
//! | fp8 | `X.weight_scale`, one, or one per row | Black Forest Labs, ComfyUI, diffusers |
//! | fp8 | `X.scale_weight`, one; a marker `scaled_fp8` | earlier versions of ComfyUI |
//! | fp8 | none | plain casts |
//! | nvfp4, two in a byte | `X.weight_scale`, fp8, one per 16 columns, and `X.weight_scale_2` | both below |
//!
//! nvfp4 pairs and block scales come in two orders that look alike. ComfyUI's, which Black Forest Labs use, has the first
//! value of a pair in the high half and the scales in tiles; ModelOpt's and diffusers' has it in the low half and the scales in
//! rows. ComfyUI's files are recognized by `X.comfy_quant`, an entry in their header, or fused tensor names.
//!
//! Scales of activations (`input_scale`) are ignored: Kiln computes its own.

use std::collections::{BTreeMap, BTreeSet};

use kiln_tensor::packed::{BlockScales, Format, PackedTensor};
use kiln_tensor::{DType, HostTensor};
use serde::Deserialize;

use crate::file::WeightFile;
use crate::header::TensorEntry;
use crate::{Error, Result};

/// How a tensor's values are encoded in its bytes.
#[derive(Clone, Debug)]
pub(crate) enum Encoding {
    /// Elements of the tensor's dtype.
    Dense,
    /// GGUF blocks.
    Blocks(Format),
    /// fp8 values with a scale, or with one per row.
    ScaledFp8(Box<TensorRef>),
    /// nvfp4 values, two in a byte.
    NvFp4(Box<NvFp4Scales>),
}

/// A tensor that another one depends on.
#[derive(Clone, Debug)]
pub(crate) struct TensorRef {
    pub file: usize,
    pub name: String,
    pub entry: TensorEntry,
}

/// The scales of an nvfp4 tensor.
#[derive(Clone, Debug)]
pub(crate) struct NvFp4Scales {
    blocks: TensorRef,
    global: Option<TensorRef>,
    /// Whether pairs and block scales are in ComfyUI's order.
    comfy_order: bool,
}

const WEIGHT: &str = ".weight";
/// Tensors that a quantized layer may have beside its weight.
const SCALE: &str = ".weight_scale";
const OLD_SCALE: &str = ".scale_weight";
const GLOBAL_SCALE: &str = ".weight_scale_2";
const COMFY_QUANT: &str = ".comfy_quant";
const IGNORED: [&str; 2] = [".input_scale", ".scale_input"];
/// Tensors that only mark the kind of file.
const MARKERS: [&str; 1] = ["scaled_fp8"];
/// The metadata key under which ComfyUI lists its quantized layers.
pub(crate) const COMFY_METADATA: &str = "_quantization_metadata";
/// The supported formats, as ComfyUI names them.
const SUPPORTED: [&str; 4] = ["float8_e4m3fn", "float8_e5m2", "nvfp4", "int8_tensorwise"];

type Tensors = BTreeMap<String, (usize, TensorEntry)>;

/// Finds the scales of every layer, and removes them from the list of tensors.
pub(crate) fn attach_scales(
    tensors: &mut Tensors,
    files: &[WeightFile],
    metadata: &BTreeMap<String, String>,
) -> Result<()> {
    let may_have_scales = |entry: &TensorEntry| {
        let one_byte = matches!(entry.dtype, DType::F8E4M3 | DType::F8E5M2 | DType::U8 | DType::I8);
        one_byte && matches!(entry.encoding, Encoding::Dense)
    };
    let candidates = tensors.iter().filter(|(_, (_, entry))| may_have_scales(entry));
    let modules: Vec<String> =
        candidates.filter_map(|(name, _)| Some(name.strip_suffix(WEIGHT)?.to_owned())).collect();
    if modules.is_empty() {
        return Ok(());
    }
    let listed = listed_layers(metadata);
    let is_comfy = |name: &String| name.contains("_attn.qkv.") || name.ends_with(COMFY_QUANT);
    let comfy_order = tensors.keys().any(is_comfy) || metadata.contains_key(COMFY_METADATA);
    let mut used = BTreeSet::new();
    for module in modules {
        let quant = comfy_quant(tensors, files, &module)?.or_else(|| listed.get(&module).cloned());
        if let Some(quant) = &quant {
            let path = |file: usize| files.get(file).map(|f| f.path.clone()).unwrap_or_default();
            let file = tensors.get(&format!("{module}{WEIGHT}")).map_or(0, |(file, _)| *file);
            quant.check().map_err(|problem| Error::UnsupportedQuantization {
                file: path(file),
                module: module.clone(),
                problem,
            })?;
        }
        let tensor = |suffix: &str| {
            let name = format!("{module}{suffix}");
            tensors.get(&name).map(|(file, entry)| TensorRef { file: *file, name, entry: entry.clone() })
        };
        let scale = tensor(SCALE).or_else(|| tensor(OLD_SCALE));
        let Some((_, weight)) = tensors.get(&format!("{module}{WEIGHT}")) else { continue };
        let encoding = match (weight.dtype, scale) {
            (DType::F8E4M3 | DType::F8E5M2, Some(scale)) => Encoding::ScaledFp8(Box::new(scale)),
            (DType::U8, Some(blocks)) if blocks.entry.dtype == DType::F8E4M3 && weight.shape.rank() == 2 => {
                Encoding::NvFp4(Box::new(NvFp4Scales { blocks, global: tensor(GLOBAL_SCALE), comfy_order }))
            }
            // The scales of int8 rows are found by name.
            _ => Encoding::Dense,
        };
        let is_nvfp4 = matches!(encoding, Encoding::NvFp4(_));
        if !matches!(encoding, Encoding::Dense) {
            used.extend([SCALE, OLD_SCALE, GLOBAL_SCALE].map(|suffix| format!("{module}{suffix}")));
        }
        used.extend([COMFY_QUANT, IGNORED[0], IGNORED[1]].map(|suffix| format!("{module}{suffix}")));
        if let Some((_, entry)) = tensors.get_mut(&format!("{module}{WEIGHT}")) {
            entry.encoding = encoding;
            if is_nvfp4 && let &[rows, bytes] = entry.shape.dims() {
                entry.shape = [rows, bytes.saturating_mul(2)].into();
            }
        }
    }
    tensors.retain(|name, _| !used.contains(name) && !MARKERS.contains(&name.as_str()));
    Ok(())
}

/// ComfyUI's description of a quantized layer.
#[derive(Clone, Debug, Deserialize)]
struct ComfyQuant {
    format: String,
    #[serde(default)]
    convrot: bool,
}

impl ComfyQuant {
    fn check(&self) -> Result<(), String> {
        if !SUPPORTED.contains(&self.format.as_str()) {
            return Err(format!("is stored as `{}`; Kiln reads {}", self.format, SUPPORTED.join(", ")));
        }
        if self.convrot {
            return Err(format!("is stored as `{}` after a rotation, which Kiln can't undo", self.format));
        }
        Ok(())
    }
}

/// Reads `X.comfy_quant`, JSON in a tensor of bytes.
fn comfy_quant(tensors: &Tensors, files: &[WeightFile], module: &str) -> Result<Option<ComfyQuant>> {
    let name = format!("{module}{COMFY_QUANT}");
    let Some((file, entry)) = tensors.get(&name) else { return Ok(None) };
    let file = &files[*file];
    // Some writers pad the text with zeros.
    let text = file.bytes(entry).trim_ascii_end();
    let end = text.iter().rposition(|b| *b != 0).map_or(0, |last| last + 1);
    let invalid = |e: serde_json::Error| Error::UnsupportedQuantization {
        file: file.path.clone(),
        module: module.to_owned(),
        problem: format!("has a `{name}` that is not JSON of its format: {e}"),
    };
    serde_json::from_slice(&text[..end]).map(Some).map_err(invalid)
}

/// The layers that the header lists. Invalid JSON is ignored, since the tensors hold the same information.
fn listed_layers(metadata: &BTreeMap<String, String>) -> BTreeMap<String, ComfyQuant> {
    #[derive(Deserialize)]
    struct Listing {
        #[serde(default)]
        layers: BTreeMap<String, ComfyQuant>,
    }
    let listing = metadata.get(COMFY_METADATA).and_then(|text| serde_json::from_str::<Listing>(text).ok());
    listing.map(|l| l.layers).unwrap_or_default()
}

impl Encoding {
    /// The packed format of a tensor of this dtype; `None` if it is dense.
    pub fn format(&self, dtype: DType) -> Option<Format> {
        match self {
            Encoding::Dense => None,
            Encoding::Blocks(format) => Some(*format),
            Encoding::ScaledFp8(_) if dtype == DType::F8E5M2 => Some(Format::F8E5M2),
            Encoding::ScaledFp8(_) => Some(Format::F8E4M3),
            Encoding::NvFp4(_) => Some(Format::NvFp4),
        }
    }

    /// The tensors that hold its scales.
    pub fn scales(&self) -> impl Iterator<Item = &TensorRef> {
        let scales = match self {
            Encoding::Dense | Encoding::Blocks(_) => [None, None],
            Encoding::ScaledFp8(scale) => [Some(&**scale), None],
            Encoding::NvFp4(scales) => [Some(&scales.blocks), scales.global.as_ref()],
        };
        scales.into_iter().flatten()
    }
}

/// The tensor at `entry` of `files[file]` as a packed matrix, with its last dimension as columns.
pub(crate) fn read_packed(
    files: &[WeightFile],
    file: usize,
    name: &str,
    entry: &TensorEntry,
) -> Result<PackedTensor> {
    let source = &files[file];
    let unusable =
        |error| Error::Tensor { file: source.path.clone(), tensor: name.to_owned(), source: error };
    let Some(format) = entry.encoding.format(entry.dtype) else {
        return PackedTensor::from_dense(&source.tensor(name, entry)?).map_err(unusable);
    };
    let shape = [entry.shape.rows(), entry.shape.last()];
    let matrix = PackedTensor::new(format, shape, source.data(entry)).map_err(unusable)?;
    match &entry.encoding {
        Encoding::Dense | Encoding::Blocks(_) => Ok(matrix),
        Encoding::ScaledFp8(scale) => match &read_scales(files, scale)?[..] {
            [one] => Ok(matrix.with_scale(*one)),
            rows => matrix.with_row_scales(rows).map_err(unusable),
        },
        Encoding::NvFp4(scales) => {
            let global = match &scales.global {
                None => 1.0,
                Some(global) => match read_scales(files, global)?[..] {
                    [one] => one,
                    ref several => {
                        return Err(Error::UnsupportedQuantization {
                            file: source.path.clone(),
                            module: name.to_owned(),
                            problem: format!(
                                "has {} scales in `{}`, expected one",
                                several.len(),
                                global.name
                            ),
                        });
                    }
                },
            };
            let comfy = scales.comfy_order;
            let bytes = files[scales.blocks.file].data(&scales.blocks.entry);
            let mut blocks = BlockScales { scales: bytes, swizzled: comfy, high_first: comfy, global };
            // If the number of scales fits only the other order, use that one: only ComfyUI's tiles round rows up.
            if blocks.expected_len(shape) != Some(blocks.scales.len()) {
                (blocks.swizzled, blocks.high_first) = (!comfy, !comfy);
            }
            matrix.with_block_scales(blocks).map_err(unusable)
        }
    }
}

/// Reads scales, which may have any float dtype.
fn read_scales(files: &[WeightFile], scale: &TensorRef) -> Result<Vec<f32>> {
    let file = &files[scale.file];
    let tensor: HostTensor = file.tensor(&scale.name, &scale.entry)?;
    let values = tensor.to_f32().map(|values| values.into_owned());
    values.map_err(|source| Error::Tensor { file: file.path.clone(), tensor: scale.name.clone(), source })
}
