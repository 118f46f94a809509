use std::ops::Range;

use kiln_ops::{Groups, Result, Tensor as _, shapes};
use kiln_tensor::DType;

use super::movement::concat_columns;
use super::norm::held_grid;
use super::round_fp8::round_rows;
use super::{THREADS, by_dtype};
use crate::context::{Context, int};
use crate::error;
use crate::gemm::Size;
use crate::gemm::lt::{Lt, Operands, Scaled};
use crate::kernels::{
    ADA_LAYER_NORM_FP8_BF16, ADA_LAYER_NORM_FP8_F32, AdaLayerNormFp8, PRODUCT_FP8_BF16, PRODUCT_FP8_F32,
    ProductFp8, QUANTISE_SWIGLU_FP8_BF16, QUANTISE_SWIGLU_FP8_F32, QuantiseSwigluFp8, RESCALE_FP8_BF16,
    RESCALE_FP8_F32, RescaleFp8,
};
use crate::queue::Block;
use crate::sys::driver::DevicePtr;
use crate::tensor::CudaTensor;
use crate::weight::ByteRows;

/// Bytes of shared memory that every GPU gives a block unasked.
const UNASKED: usize = 48 << 10;

/// What a block keeps of a row until its scale is known.
fn row_bytes(cols: usize, dtype: DType) -> usize {
    cols.next_multiple_of(8) * dtype.size()
}

/// Rows of 8-bit floats, with a scale each.
pub(crate) struct Short {
    rows: usize,
    bytes: Block,
    scales: Block,
}

impl Short {
    /// Rows to be written.
    fn empty(cx: &Context, rows: usize, w: &ByteRows) -> Result<Short> {
        Ok(Short { rows, bytes: cx.block(rows * w.depth)?, scales: cx.block(rows * 4)? })
    }

    /// The activations side by side, as many columns as the weight has.
    pub fn new(cx: &Context, xs: &[&CudaTensor], w: &ByteRows) -> Result<Short> {
        let joined;
        let (first, second) = match xs {
            [x] => (*x, None),
            [x, y] => (*x, Some(*y)),
            _ => {
                joined = concat_columns(cx, xs)?;
                (&joined, None)
            }
        };
        let rows = first.shape().rows();
        let short = Short::empty(cx, rows, w)?;
        let parts = [first, second.unwrap_or(first)];
        let widths = [first.shape().last(), second.map_or(0, |y| y.shape().last())];
        let at = parts.map(|x| x.at(cx));
        round_rows(cx, first.dtype(), at, widths, rows, [short.bytes.at(cx), short.scales.at(cx)], w.depth)?;
        Ok(short)
    }

    /// Whether rows of a weight's width are short enough for [`Short::of_swiglu`].
    pub fn takes_swiglu(w: &ByteRows, dtype: DType) -> bool {
        row_bytes(w.cols, dtype) <= UNASKED
    }

    /// `left` and beside it SwiGLU of `x`, in one pass.
    pub fn of_swiglu(cx: &Context, left: Option<&CudaTensor>, x: &CudaTensor, w: &ByteRows) -> Result<Short> {
        let shape = shapes::swiglu(x)?;
        let (rows, cols) = (shape.rows(), shape.last());
        let (left, left_cols) = left.map_or((0, 0), |left| (left.at(cx), left.shape().last()));
        let short = Short::empty(cx, rows, w)?;
        let kernel = by_dtype(x.dtype(), QUANTISE_SWIGLU_FP8_F32, QUANTISE_SWIGLU_FP8_BF16);
        let size = |n: usize| int("linear", n);
        let parameters = QuantiseSwigluFp8 {
            x: left,
            x_cols: size(left_cols)?,
            y: x.at(cx),
            y_cols: size(cols)?,
            q: short.bytes.at(cx),
            scales: short.scales.at(cx),
            padded: size(w.depth)?,
        };
        cx.launch(kernel, [rows, 1], 256, row_bytes(w.cols, x.dtype()), &parameters)?;
        Ok(short)
    }

    /// [`ada_layer_norm`](super::norm::ada_layer_norm) of rows that fit a warp's registers, in one pass.
    pub fn of_ada_layer_norm(
        cx: &Context,
        x: &CudaTensor,
        [scale, shift]: [&CudaTensor; 2],
        groups: &Groups,
        eps: f32,
        w: &ByteRows,
    ) -> Result<Short> {
        let short = Short::empty(cx, x.shape().rows(), w)?;
        let kernel = by_dtype(x.dtype(), ADA_LAYER_NORM_FP8_F32, ADA_LAYER_NORM_FP8_BF16);
        for (group, rows) in groups.ranges().enumerate() {
            let bytes = short.bytes.at(cx) + (rows.start * w.depth) as u64;
            let scales = short.scales.at(cx) + 4 * rows.start as u64;
            let (grid, threads) = held_grid(cx, rows.len());
            let size = |n: usize| int("linear", n);
            let parameters = AdaLayerNormFp8 {
                x: x.row_at(cx, rows.start),
                scale: scale.row_at(cx, group),
                shift: shift.row_at(cx, group),
                q: bytes,
                scales,
                rows: size(rows.len())?,
                dim: size(w.cols)?,
                padded: size(w.depth)?,
                eps,
            };
            cx.launch(kernel, grid, threads, 0, &parameters)?;
        }
        Ok(short)
    }

    /// The product with some rows of the weight.
    pub fn product(
        &self,
        cx: &Context,
        w: &ByteRows,
        outputs: &Range<usize>,
        out: DevicePtr,
        dtype: DType,
    ) -> Result<()> {
        let (n, [at, scales]) = (outputs.len(), w.at(cx, outputs.start));
        if self.rows == 0 || n == 0 {
            return Ok(());
        }
        let size = Size {
            rows: self.rows,
            k: w.depth,
            n,
            ldx: w.depth,
            ldw: w.depth,
            ldadd: n,
            ldo: n,
            dtype: DType::F8E4M3,
            out: dtype,
            add: false,
            batch: 1,
            stride_w: 0,
            stride_out: 0,
            columns: false,
        };
        let operands = Operands { w: at, x: self.bytes.at(cx), add: None, out, alpha: 1.0, scales: None };
        let scales = [scales, self.scales.at(cx)];
        if let Ok(lt) = &cx.shared().lt
            && Lt::takes(&size, &operands)
        {
            match lt.run_scaled(cx, &size, &operands, scales) {
                Ok(Scaled::Yes) => return Ok(()),
                Ok(Scaled::No) => {
                    let kernel = by_dtype(dtype, RESCALE_FP8_F32, RESCALE_FP8_BF16);
                    let grid = [(self.rows * n).div_ceil(THREADS), 1];
                    let parameters = RescaleFp8 {
                        out,
                        x_scales: self.scales.at(cx),
                        w_scales: scales[0],
                        rows: self.rows as i64,
                        n: int("linear", n)?,
                    };
                    return cx.launch(kernel, grid, THREADS, 0, &parameters);
                }
                // A size the library can't do is not the caller's trouble.
                Err(error::Error::Call { .. }) => {}
                Err(e) => return cx.done(Err(e)),
            }
        }
        let kernel = by_dtype(dtype, PRODUCT_FP8_F32, PRODUCT_FP8_BF16);
        let grid = [self.rows.div_ceil(16), n.div_ceil(16)];
        let parameters = ProductFp8 {
            x: self.bytes.at(cx),
            x_scales: self.scales.at(cx),
            w: at,
            w_scales: scales[0],
            out,
            rows: int("linear", self.rows)?,
            n: int("linear", n)?,
            depth: int("linear", w.depth)?,
        };
        cx.launch(kernel, grid, 256, 0, &parameters)
    }
}
