//! Rows quantized to int8, fp8 and nvfp4, and rotated rows.

use kiln_ops::{Result, Tensor};
use kiln_tensor::{DType, Rotation};

use super::elementwise::ELEMENT_COST;
use crate::context::{Context, Launch, Param, u};
use crate::kernels::{ACTIVATIONS, Kernel, WORKGROUP, Word};
use crate::tensor::WgpuTensor;

pub(super) const QUANTIZE: Kernel = Kernel {
    name: "quantize",
    source: include_str!("../../kernels/quantize.wgsl"),
    constants: &[("X", ACTIVATIONS), ("FORMAT", &[Word("int8"), Word("e4m3"), Word("fp8"), Word("nvfp4")])],
};

pub(super) const ROTATE: Kernel = Kernel {
    name: "rotate",
    source: include_str!("../../kernels/rotate.wgsl"),
    constants: &[("T", ACTIVATIONS)],
};

/// What rows are quantized to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Quantized {
    /// Integers, four to a word.
    Int8,
    /// The bytes of an fp8 weight, four to a word.
    E4m3,
    /// fp8 values as bf16.
    Fp8,
    /// nvfp4 values times their blocks' scales, as bf16.
    Nvfp4,
}

impl Quantized {
    fn name(self) -> &'static str {
        match self {
            Quantized::Int8 => "int8",
            Quantized::E4m3 => "e4m3",
            Quantized::Fp8 => "fp8",
            Quantized::Nvfp4 => "nvfp4",
        }
    }
}

/// Quantizes the rows of a matrix. Returns them, words as f32, and their scales.
pub(crate) fn quantize_rows(cx: &Context, x: &WgpuTensor, to: Quantized) -> Result<[WgpuTensor; 2]> {
    let (rows, columns) = (x.shape().rows(), x.shape().last());
    let (width, dtype) = match to {
        Quantized::Int8 | Quantized::E4m3 => (columns.div_ceil(4), DType::F32),
        Quantized::Fp8 | Quantized::Nvfp4 => (columns, DType::BF16),
    };
    let y = WgpuTensor::new(cx, [rows, width], dtype)?;
    let scales = WgpuTensor::new(cx, [rows], DType::F32)?;
    let cost = columns as u64 * 2 * ELEMENT_COST;
    for chunk in cx.row_chunks(0..rows, columns * x.dtype().size(), cost) {
        cx.launch(&Launch {
            kernel: &QUANTIZE,
            values: &[x.element(), Word(to.name())],
            tensors: &[x.rows(&chunk, columns), y.rows(&chunk, width), scales.rows(&chunk, 1)],
            params: &[
                ("rows", u(chunk.len())),
                ("columns", u(columns)),
                ("nan", Param::U32(f32::NAN.to_bits())),
            ],
            groups: chunk.len(),
            cost: chunk.len() as u64 * cost,
        })?;
    }
    Ok([y, scales])
}

/// Rotates the rows of a matrix, in f32.
pub(crate) fn rotate_rows(cx: &Context, x: &WgpuTensor, rotation: Rotation) -> Result<WgpuTensor> {
    let y = WgpuTensor::new(cx, x.shape(), DType::F32)?;
    let group = rotation.group();
    let columns = x.shape().last();
    let cost = columns as u64 * ELEMENT_COST;
    for chunk in cx.row_chunks(0..x.shape().rows(), columns * 4, cost) {
        let count = chunk.len() * columns;
        cx.launch(&Launch {
            kernel: &ROTATE,
            values: &[x.element()],
            tensors: &[x.rows(&chunk, columns), y.rows(&chunk, columns)],
            params: &[
                ("count", u(count)),
                ("strides", u(group)),
                ("factor", Param::F32(1.0 / (group as f32).sqrt())),
            ],
            groups: count.div_ceil(WORKGROUP),
            cost: chunk.len() as u64 * cost,
        })?;
    }
    Ok(y)
}
