//! Products with int8 weights: rotation and quantization of activations, and the fallback kernel.
//!
//! As in `fp8`, outputs of modulated norms are quantized by the kernel that computes them.

use std::ops::Range;

use kiln_ops::{Result, RowGroups, Tensor as _};
use kiln_tensor::DType;

use super::grid::THREADS;
use super::movement::Concatenated;
use super::norm::{ADA_LAYER_NORM_INT8, AdaLayerNormInt8, ROW_THREADS};
use crate::context::{Context, int};
use crate::gemm::{GemmShape, Operands};
use crate::kernels::kernels;
use crate::queue::DeviceBuffer;
use crate::sys::driver::DevicePtr;
use crate::tensor::CudaTensor;
use crate::weight::QuantizedMatrix;

kernels! {
    "int8" {
        QuantizeInt8(x: DevicePtr, x_cols: i32, y: DevicePtr, y_cols: i32, q: DevicePtr,
            scales: DevicePtr, padded: i32, group: i32):
            QUANTIZE_INT8 = "quantize_int8" by dtype;
        DequantizeInt8(q: DevicePtr, scales: DevicePtr, out: DevicePtr, cols: i32, padded: i32, group: i32):
            DEQUANTIZE_INT8 = "dequantize_int8" by dtype;
        GemmInt8(q: DevicePtr, q_scales: DevicePtr, w: DevicePtr, w_scales: DevicePtr, bias: DevicePtr,
            add: DevicePtr, out: DevicePtr, rows: i32, n: i32, depth: i32, ldadd: i64, ldo: i64):
            GEMM_INT8 = "gemm_int8" by dtype;
    }
}

/// Tile size of the kernel, in rows and in outputs.
const TILE: usize = 64;

/// Columns that a thread of the quantizing kernels keeps, as in `int8.cu`.
const KEPT_COLUMNS: usize = 32;

/// The largest block of the quantizing kernels, as in `int8.cu`: more threads would have too few registers.
const MAX_THREADS: usize = 768;

/// Threads of a block that quantizes a row of `cols` columns: those that keep all of it, if possible.
pub(super) fn quantize_threads(cols: usize) -> usize {
    cols.div_ceil(KEPT_COLUMNS).next_multiple_of(32).min(MAX_THREADS)
}

/// Activations in int8 with one scale per row.
pub(crate) struct Int8Operand {
    rows: usize,
    values: DeviceBuffer,
    scales: DeviceBuffer,
}

impl Int8Operand {
    /// Allocates uninitialised rows.
    fn allocate(cx: &Context, rows: usize, w: &QuantizedMatrix) -> Result<Int8Operand> {
        Ok(Int8Operand { rows, values: cx.allocate(rows * w.depth)?, scales: cx.allocate(rows * 4)? })
    }

    /// Rotates and quantizes activations, concatenated by columns to the weight's width.
    pub fn new(cx: &Context, xs: &[&CudaTensor], w: &QuantizedMatrix) -> Result<Int8Operand> {
        let Concatenated { rows, dtype, ptrs, widths, .. } = Concatenated::new(cx, xs)?;
        let operand = Int8Operand::allocate(cx, rows, w)?;
        let parameters = operand.quantize(cx, ptrs, widths, w)?;
        cx.launch(QUANTIZE_INT8.of(dtype), [rows, 1], quantize_threads(w.depth), 0, &parameters)?;
        Ok(operand)
    }

    fn quantize(
        &self,
        cx: &Context,
        [x, y]: [DevicePtr; 2],
        widths: [usize; 2],
        w: &QuantizedMatrix,
    ) -> Result<QuantizeInt8> {
        let size = |n: usize| int("linear", n);
        Ok(QuantizeInt8 {
            x,
            x_cols: size(widths[0])?,
            y,
            y_cols: size(widths[1])?,
            q: self.values.ptr(cx),
            scales: self.scales.ptr(cx),
            padded: size(w.depth)?,
            group: size(w.rotation.group())?,
        })
    }

    /// Fuses [`ada_layer_norm`](super::norm::ada_layer_norm), rotation and quantization, for rows that fit registers.
    pub fn from_ada_layer_norm(
        cx: &Context,
        x: &CudaTensor,
        [scale, shift]: [&CudaTensor; 2],
        groups: &RowGroups,
        eps: f32,
        w: &QuantizedMatrix,
    ) -> Result<Int8Operand> {
        let operand = Int8Operand::allocate(cx, x.shape().rows(), w)?;
        let size = |n: usize| int("linear", n);
        for (group, rows) in groups.ranges().enumerate() {
            let parameters = AdaLayerNormInt8 {
                x: x.row_ptr(cx, rows.start),
                scale: scale.row_ptr(cx, group),
                shift: shift.row_ptr(cx, group),
                q: operand.values.ptr(cx) + (rows.start * w.depth) as u64,
                scales: operand.scales.ptr(cx) + 4 * rows.start as u64,
                dim: size(w.cols)?,
                padded: size(w.depth)?,
                group: size(w.rotation.group())?,
                eps,
            };
            let kernel = ADA_LAYER_NORM_INT8.of(x.dtype());
            cx.launch(kernel, [rows.len(), 1], ROW_THREADS, 0, &parameters)?;
        }
        Ok(operand)
    }

    /// The product with some rows of the weight: its shape and its operands.
    fn product(
        &self,
        cx: &Context,
        w: &QuantizedMatrix,
        outputs: &Range<usize>,
        [bias, add, out]: [Option<DevicePtr>; 3],
        dtype: DType,
    ) -> (GemmShape, Operands) {
        let [at, scales] = w.ptr(cx, outputs.start);
        let size = [self.rows, outputs.len(), w.depth];
        let shape = GemmShape::packed(size, DType::I8, dtype, add.is_some());
        let scales = Some([scales, self.scales.ptr(cx)]);
        let plain = Operands::new(self.values.ptr(cx), at, out.unwrap_or(0));
        (shape, Operands { add, bias, scales, ..plain })
    }

    /// The product with some rows of the weight that ends with SwiGLU, in bf16: the first half gates the second.
    pub fn swiglu_product(
        &self,
        cx: &Context,
        w: &QuantizedMatrix,
        outputs: &Range<usize>,
        out: DevicePtr,
    ) -> (GemmShape, Operands) {
        let (shape, operands) = self.product(cx, w, outputs, [None, None, Some(out)], DType::BF16);
        (shape.with_swiglu(), operands)
    }

    /// Multiplies with some rows of the weight. Takes the addresses of the bias, the summand and the result.
    pub fn gemm(
        &self,
        cx: &Context,
        w: &QuantizedMatrix,
        outputs: &Range<usize>,
        [bias, add, out]: [Option<DevicePtr>; 3],
        dtype: DType,
    ) -> Result<()> {
        let [at, scales] = w.ptr(cx, outputs.start);
        let n = outputs.len();
        if self.rows == 0 || n == 0 {
            return Ok(());
        }
        let (shape, operands) = self.product(cx, w, outputs, [bias, add, out], dtype);
        if cx.shared().gemm.supports(cx, &shape, &operands) {
            return cx.check(cx.shared().gemm.run(cx, &shape, &operands)).map(drop);
        }
        cx.note_slow_product(&shape);
        let kernel = GEMM_INT8.of(dtype);
        let grid = [self.rows.div_ceil(TILE), n.div_ceil(TILE)];
        let parameters = GemmInt8 {
            q: self.values.ptr(cx),
            q_scales: self.scales.ptr(cx),
            w: at,
            w_scales: scales,
            bias: bias.unwrap_or(0),
            add: add.unwrap_or(0),
            out: out.unwrap_or(0),
            rows: int("linear", self.rows)?,
            n: int("linear", n)?,
            depth: int("linear", w.depth)?,
            ldadd: n as i64,
            ldo: n as i64,
        };
        cx.launch(kernel, grid, 256, 0, &parameters)
    }
}

/// The values of an int8 weight, `[rows, cols]` in f32 or bf16.
pub(crate) fn dequantize_int8(cx: &Context, w: &QuantizedMatrix, dtype: DType) -> Result<DeviceBuffer> {
    let out = cx.allocate(w.rows * w.cols * dtype.size())?;
    let [q, scales] = w.ptr(cx, 0);
    let size = |n: usize| int("linear_backward", n);
    let parameters = DequantizeInt8 {
        q,
        scales,
        out: out.ptr(cx),
        cols: size(w.cols)?,
        padded: size(w.depth)?,
        group: size(w.rotation.group())?,
    };
    cx.launch(DEQUANTIZE_INT8.of(dtype), [w.rows, 1], THREADS, 0, &parameters)?;
    Ok(out)
}
