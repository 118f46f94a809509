//! How the values of a tensor are encoded: plain elements, GGUF blocks, or int8, fp8 and nvfp4 values with scales in other
//! tensors.
//!
//! int8, fp8 and nvfp4 have several conventions, recognized by names and shapes, layer by layer:
//!
//! | weights | scales beside `X.weight` | written by |
//! |---|---|---|
//! | fp8 | `X.weight_scale`, one, or one per row | Black Forest Labs, ComfyUI, diffusers, ModelOpt, compressed-tensors |
//! | fp8 | `X.weight_scale_inv`, one per tile of 128 × 128, or one | transformers (Qwen3's and DeepSeek's fp8) |
//! | fp8 | `X.scale_weight`, one; a marker `scaled_fp8` | earlier versions of ComfyUI |
//! | fp8 | none | plain casts |
//! | int8 | `X.weight_scale`, one, or one per row | ComfyUI, compressed-tensors, Kiln |
//! | nvfp4, two in a byte | `X.weight_scale`, fp8, one per 16 columns, and `X.weight_scale_2` | see `nvfp4` |
//!
//! Scales of activations (`input_scale`) are ignored: Kiln computes its own. Whatever else would change the values, in a
//! tensor (`foreign`), in ComfyUI's description of a layer (`comfy`) or in a `quantization_config` (`config`), is an error.

mod attach;
mod comfy;
mod config;
mod foreign;
mod nvfp4;
mod read;

use std::collections::BTreeMap;
use std::ops::Range;

use kiln_tensor::packed::Format;
use kiln_tensor::{DType, Shape};

pub(crate) use attach::{attach_scales, unknown_bytes};
pub(crate) use comfy::METADATA as COMFY_METADATA;
pub(crate) use config::{HEADER_CONFIG, QuantizationConfig};
pub(crate) use read::read_packed;

/// A tensor in a file.
#[derive(Clone, Debug)]
pub(crate) struct TensorEntry {
    pub dtype: DType,
    pub shape: Shape,
    /// Its bytes in the file.
    pub range: Range<usize>,
    pub encoding: Encoding,
}

/// Tensors by name, each with the number of its file.
pub(crate) type Tensors = BTreeMap<String, (usize, TensorEntry)>;

/// How a tensor's values are encoded in its bytes.
#[derive(Clone, Debug)]
pub(crate) enum Encoding {
    /// Elements of the tensor's dtype.
    Dense,
    /// GGUF blocks.
    Blocks(Format),
    /// fp8 values with scales.
    ScaledFp8(Box<Fp8Scales>),
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

/// The scales of an fp8 tensor.
#[derive(Clone, Debug)]
pub(crate) struct Fp8Scales {
    scales: TensorRef,
    layout: ScaleLayout,
}

/// Which values share a scale.
#[derive(Clone, Copy, Debug, PartialEq)]
enum ScaleLayout {
    Tensor,
    Row,
    /// Rows and columns of a tile.
    Tile([usize; 2]),
}

/// The scales of an nvfp4 tensor.
#[derive(Clone, Debug)]
pub(crate) struct NvFp4Scales {
    blocks: TensorRef,
    global: TensorRef,
    order: nvfp4::Order,
    /// Whether activations must not be rounded for the product.
    full_precision: bool,
}

impl ScaleLayout {
    /// Rows and columns of a tile in fp8 files that don't state it.
    const USUAL_TILE: usize = 128;

    /// The layout of scales of this shape, or what is wrong with it. `tile` is what the model's configuration states.
    fn new(weight: &Shape, scales: &Shape, tile: Option<[usize; 2]>) -> Result<ScaleLayout, String> {
        if scales.checked_numel() == Some(1) {
            return Ok(ScaleLayout::Tensor);
        }
        let unfit = |expected: &str| {
            format!("scales of shape {scales} for a weight of {weight}, expected {expected}")
        };
        let &[rows, cols] = weight.dims() else { return Err(unfit("one")) };
        let fits = |[high, wide]: [usize; 2], dims: [usize; 2]| {
            high > 0 && wide > 0 && dims == [rows.div_ceil(high), cols.div_ceil(wide)]
        };
        match (scales.dims(), tile) {
            (&[count] | &[count, 1], _) if count == rows => Ok(ScaleLayout::Row),
            (&[down, across], Some(tile)) if fits(tile, [down, across]) => Ok(ScaleLayout::Tile(tile)),
            (_, Some([high, wide])) => {
                Err(unfit(&format!("one per {high} × {wide} values, as its config.json says")))
            }
            (&[down, across], None) => {
                let square = |side: usize| fits([side; 2], [down, across]);
                let mut others = (4..16).map(|power| 1 << power).filter(|side| square(*side));
                match (others.next(), others.next()) {
                    _ if square(ScaleLayout::USUAL_TILE) => {
                        Ok(ScaleLayout::Tile([ScaleLayout::USUAL_TILE; 2]))
                    }
                    (Some(side), None) => Ok(ScaleLayout::Tile([side; 2])),
                    _ => Err(unfit("one, one per row, or one per 128 × 128 values")),
                }
            }
            _ => Err(unfit("one, one per row, or one per 128 × 128 values")),
        }
    }
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

    /// Whether tiles of rows and columns have their own scales.
    pub fn has_tiles(&self) -> bool {
        matches!(self, Encoding::ScaledFp8(scales) if matches!(scales.layout, ScaleLayout::Tile(_)))
    }

    /// Whether the layer may be multiplied in nvfp4.
    pub fn has_nvfp4_product(&self) -> bool {
        matches!(self, Encoding::NvFp4(scales) if !scales.full_precision)
    }

    /// Everything about it but the values of its scales, in words.
    pub fn description(&self) -> String {
        match self {
            Encoding::Dense => "dense".into(),
            Encoding::Blocks(format) => format.name().into(),
            Encoding::ScaledFp8(fp8) => format!("fp8 {:?}", fp8.layout),
            Encoding::NvFp4(nvfp4) => format!("nvfp4 {:?}", nvfp4.order),
        }
    }

    /// The tensors that hold its scales.
    pub fn scales(&self) -> impl Iterator<Item = &TensorRef> {
        let scales = match self {
            Encoding::Dense | Encoding::Blocks(_) => [None, None],
            Encoding::ScaledFp8(fp8) => [Some(&fp8.scales), None],
            Encoding::NvFp4(scales) => [Some(&scales.blocks), Some(&scales.global)],
        };
        scales.into_iter().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shape_of_scales_says_what_shares_one() {
        let layout = |weight: [usize; 2], scales: &[usize], tile| {
            ScaleLayout::new(&weight.into(), &scales.into(), tile).ok()
        };
        let tile = |side: usize| Some(ScaleLayout::Tile([side; 2]));
        assert_eq!(layout([300, 200], &[1, 1], None), Some(ScaleLayout::Tensor));
        assert_eq!(layout([300, 200], &[300, 1], None), Some(ScaleLayout::Row));
        assert_eq!(layout([300, 200], &[3, 2], None), tile(128), "the usual size, though others fit");
        assert_eq!(layout([300, 200], &[5, 4], None), tile(64));
        assert_eq!(layout([300, 200], &[2, 1], None), tile(256));
        assert_eq!(layout([300, 200], &[1, 2], None), None);
        assert_eq!(layout([300, 200], &[200], None), None, "one per column");
        assert_eq!(layout([300, 200], &[2, 3], None), None, "transposed");
        assert_eq!(layout([2, 1 << 14], &[1, 2], None), tile(1 << 13));
        assert_eq!(layout([300, 200], &[10, 5], Some([32, 40])), Some(ScaleLayout::Tile([32, 40])));
        assert_eq!(layout([300, 200], &[3, 2], Some([64, 64])), None);
        assert_eq!(layout([300, 200], &[3, 2], Some([0, 64])), None);
    }
}
