//! Products with fp8 weights: quantization of activations, cuBLASLt, and the fallback kernel.
//!
//! Outputs of modulated norms are quantized by the kernel that computes them. Two inputs are quantized as one, so that the output
//! projection of a single block is one product.

use std::ops::Range;

use kiln_ops::{Result, RowGroups, Tensor as _};
use kiln_tensor::DType;

use super::grid::THREADS;
use super::movement::{Concatenated, concat_columns};
use super::norm::{ADA_LAYER_NORM_FP8, AdaLayerNormFp8, ROW_THREADS};
use super::quantize_fp8::{
    GEMM_FP8, GemmFp8, QUANTIZE_GRADIENT_FP8, QuantizeGradientFp8, RESCALE_FP8, RescaleFp8, quantize_rows,
};
use crate::context::{Context, int};
use crate::error;
use crate::gemm::cublaslt::RowScaling;
use crate::gemm::{GemmShape, Operands};
use crate::kernels::GradientArgs;
use crate::queue::DeviceBuffer;
use crate::sys::driver::DevicePtr;
use crate::tensor::CudaTensor;
use crate::weight::QuantizedMatrix;

/// Gradients that are quantized as one matrix without a copy.
const MAX_GRADIENTS: usize = 4;

/// Rows of gradients per block, as in `fp8.cu`.
const GRADIENT_ROWS: usize = 4;

/// Activations in fp8 with one scale per row.
pub(crate) struct Fp8Operand {
    rows: usize,
    bytes: DeviceBuffer,
    scales: DeviceBuffer,
}

impl Fp8Operand {
    /// Allocates uninitialised rows.
    fn allocate(cx: &Context, rows: usize, w: &QuantizedMatrix) -> Result<Fp8Operand> {
        Ok(Fp8Operand { rows, bytes: cx.allocate(rows * w.depth)?, scales: cx.allocate(rows * 4)? })
    }

    /// Quantizes activations, concatenated by columns to the weight's width.
    pub fn new(cx: &Context, xs: &[&CudaTensor], w: &QuantizedMatrix) -> Result<Fp8Operand> {
        let Concatenated { rows, dtype, ptrs, widths, .. } = Concatenated::new(cx, xs)?;
        let operand = Fp8Operand::allocate(cx, rows, w)?;
        let to = [operand.bytes.ptr(cx), operand.scales.ptr(cx)];
        quantize_rows(cx, dtype, ptrs, widths, rows, to, w.depth)?;
        Ok(operand)
    }

    /// Fuses [`ada_layer_norm`](super::norm::ada_layer_norm) and quantization, for rows that fit registers.
    pub fn from_ada_layer_norm(
        cx: &Context,
        x: &CudaTensor,
        [scale, shift]: [&CudaTensor; 2],
        groups: &RowGroups,
        eps: f32,
        w: &QuantizedMatrix,
    ) -> Result<Fp8Operand> {
        let operand = Fp8Operand::allocate(cx, x.shape().rows(), w)?;
        let kernel = ADA_LAYER_NORM_FP8.of(x.dtype());
        for (group, rows) in groups.ranges().enumerate() {
            let bytes = operand.bytes.ptr(cx) + (rows.start * w.depth) as u64;
            let scales = operand.scales.ptr(cx) + 4 * rows.start as u64;
            let size = |n: usize| int("linear", n);
            let parameters = AdaLayerNormFp8 {
                x: x.row_ptr(cx, rows.start),
                scale: scale.row_ptr(cx, group),
                shift: shift.row_ptr(cx, group),
                q: bytes,
                scales,
                dim: size(w.cols)?,
                padded: size(w.depth)?,
                eps,
            };
            cx.launch(kernel, [rows.len(), 1], ROW_THREADS, 0, &parameters)?;
        }
        Ok(operand)
    }

    /// Quantizes gradients of a layer's outputs, concatenated by columns and multiplied by the scales of the weight's
    /// rows. `transposed`: the weight's transpose, for the width.
    pub fn from_gradients(
        cx: &Context,
        dys: &[&CudaTensor],
        w: &QuantizedMatrix,
        transposed: &QuantizedMatrix,
    ) -> Result<Fp8Operand> {
        let concatenated;
        let dys = if dys.len() <= MAX_GRADIENTS {
            dys
        } else {
            concatenated = concat_columns(cx, dys)?;
            &[&concatenated]
        };
        let rows = dys[0].shape().rows();
        let operand = Fp8Operand::allocate(cx, rows, transposed)?;
        let [_, column_scales] = w.ptr(cx, 0);
        let size = |n: usize| int("linear_backward", n);
        let mut args = GradientArgs {
            x: [0; MAX_GRADIENTS],
            end: [0; MAX_GRADIENTS],
            column_scales,
            q: operand.bytes.ptr(cx),
            scales: operand.scales.ptr(cx),
            count: size(dys.len())?,
            rows: size(rows)?,
            padded: size(transposed.depth)?,
            unused: 0,
        };
        let mut end = 0;
        for (i, dy) in dys.iter().enumerate() {
            end += dy.shape().last();
            (args.x[i], args.end[i]) = (dy.ptr(cx), size(end)?);
        }
        let kernel = QUANTIZE_GRADIENT_FP8.of(dys[0].dtype());
        cx.launch(kernel, [rows.div_ceil(GRADIENT_ROWS), 1], 256, 0, &QuantizeGradientFp8 { args })?;
        Ok(operand)
    }

    /// Multiplies with some rows of the weight and adds a tensor; `None` if that needs more than one launch.
    pub fn gemm_onto(
        &self,
        cx: &Context,
        w: &QuantizedMatrix,
        outputs: &Range<usize>,
        [add, out]: [DevicePtr; 2],
        dtype: DType,
    ) -> Option<Result<()>> {
        let (shape, operands) = self.product(cx, w, outputs, Some(add), out, dtype);
        if self.rows == 0 || shape.n == 0 {
            return Some(Ok(()));
        }
        let gemm = &cx.shared().gemm;
        let supported = gemm.supports(cx, &shape, &operands);
        let complete = supported.then(|| gemm.applies_scales(cx, &shape, &operands))?;
        match complete.and_then(|complete| complete.then(|| gemm.run(cx, &shape, &operands)).transpose()) {
            Ok(Some(_)) => Some(Ok(())),
            Ok(None) | Err(error::Error::Call { .. }) => None,
            Err(e) => Some(cx.check(Err(e))),
        }
    }

    /// The product with some rows of the weight that ends with SwiGLU, in bf16: the first half gates the second.
    pub fn swiglu_product(
        &self,
        cx: &Context,
        w: &QuantizedMatrix,
        outputs: &Range<usize>,
        out: DevicePtr,
    ) -> (GemmShape, Operands) {
        let (shape, operands) = self.product(cx, w, outputs, None, out, DType::BF16);
        (shape.with_swiglu(), operands)
    }

    /// The product with some rows of the weight: its shape and its operands.
    fn product(
        &self,
        cx: &Context,
        w: &QuantizedMatrix,
        outputs: &Range<usize>,
        add: Option<DevicePtr>,
        out: DevicePtr,
        dtype: DType,
    ) -> (GemmShape, Operands) {
        let (n, [at, scales]) = (outputs.len(), w.ptr(cx, outputs.start));
        let shape = GemmShape::packed([self.rows, n, w.depth], DType::F8E4M3, dtype, add.is_some());
        let scales = Some([scales, self.scales.ptr(cx)]);
        (shape, Operands { add, scales, ..Operands::new(self.bytes.ptr(cx), at, out) })
    }

    /// Multiplies with some rows of the weight.
    pub fn gemm(
        &self,
        cx: &Context,
        w: &QuantizedMatrix,
        outputs: &Range<usize>,
        out: DevicePtr,
        dtype: DType,
    ) -> Result<()> {
        let (size, operands) = self.product(cx, w, outputs, None, out, dtype);
        let (n, [at, w_scales]) = (size.n, w.ptr(cx, outputs.start));
        if self.rows == 0 || n == 0 {
            return Ok(());
        }
        if cx.shared().gemm.supports(cx, &size, &operands) {
            match cx.shared().gemm.run(cx, &size, &operands) {
                Ok(RowScaling::Applied) => return Ok(()),
                Ok(RowScaling::Unsupported) => {
                    let kernel = RESCALE_FP8.of(dtype);
                    let grid = [(self.rows * n).div_ceil(THREADS), 1];
                    let parameters = RescaleFp8 {
                        out,
                        x_scales: self.scales.ptr(cx),
                        w_scales,
                        rows: self.rows as i64,
                        n: int("linear", n)?,
                    };
                    return cx.launch(kernel, grid, THREADS, 0, &parameters);
                }
                // Fall back for sizes that the library does not support.
                Err(error::Error::Call { .. }) => {}
                Err(e) => return cx.check(Err(e)),
            }
        }
        cx.note_slow_product(&size);
        let kernel = GEMM_FP8.of(dtype);
        let grid = [self.rows.div_ceil(16), n.div_ceil(16)];
        let parameters = GemmFp8 {
            x: self.bytes.ptr(cx),
            x_scales: self.scales.ptr(cx),
            w: at,
            w_scales,
            out,
            rows: int("linear", self.rows)?,
            n: int("linear", n)?,
            depth: int("linear", w.depth)?,
        };
        cx.launch(kernel, grid, 256, 0, &parameters)
    }
}
