use std::ops::Range;

use kiln_ops::{Groups, Result, Tensor as _, shapes};
use kiln_tensor::DType;

use super::movement::concat_columns;
use super::norm::held_grid;
use super::{THREADS, by_dtype};
use crate::device::{Block, launch};
use crate::gemm::Size;
use crate::gemm::lt::{Lt, Operands, Scaled};
use crate::sources::{FP8, NORM};
use crate::sys::driver::DevicePtr;
use crate::weight::ByteRows;
use crate::{Context, CudaTensor, int};

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
        let at = parts.map(CudaTensor::at);
        round_rows(cx, first.dtype(), at, widths, rows, [short.bytes.at(), short.scales.at()], w.depth)?;
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
        let (left, left_cols) = left.map_or((0, 0), |left| (left.at(), left.shape().last()));
        let short = Short::empty(cx, rows, w)?;
        let name = by_dtype(x.dtype(), "quantise_swiglu_fp8_f32", "quantise_swiglu_fp8_bf16");
        let size = |n: usize| int("linear", n);
        cx.done(launch!(cx.device, FP8, name, [rows, 1], 256, row_bytes(w.cols, x.dtype());
            left, size(left_cols)?, x.at(), size(cols)?, short.bytes.at(), short.scales.at(), size(w.depth)?))?;
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
        let name = by_dtype(x.dtype(), "ada_layer_norm_fp8_f32", "ada_layer_norm_fp8_bf16");
        for (group, rows) in groups.ranges().enumerate() {
            let bytes = short.bytes.at() + (rows.start * w.depth) as u64;
            let scales = short.scales.at() + 4 * rows.start as u64;
            let (grid, threads) = held_grid(cx, rows.len());
            let size = |n: usize| int("linear", n);
            cx.done(launch!(cx.device, NORM, name, grid, threads, 0;
                x.row_at(rows.start), scale.row_at(group), shift.row_at(group), bytes, scales,
                size(rows.len())?, size(w.cols)?, size(w.depth)?, eps))?;
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
        let (n, [at, scales]) = (outputs.len(), w.at(outputs.start));
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
        let operands = Operands { w: at, x: self.bytes.at(), add: None, out, alpha: 1.0, scales: None };
        let scales = [scales, self.scales.at()];
        if let Ok(lt) = &cx.device.lt
            && Lt::takes(&size, &operands)
        {
            match lt.run_scaled(&cx.device, &size, &operands, scales) {
                Ok(Scaled::Yes) => return Ok(()),
                Ok(Scaled::No) => {
                    let name = by_dtype(dtype, "rescale_fp8_f32", "rescale_fp8_bf16");
                    let grid = [(self.rows * n).div_ceil(THREADS), 1];
                    return cx.done(launch!(cx.device, FP8, name, grid, THREADS, 0;
                        out, self.scales.at(), scales[0], self.rows as i64, int("linear", n)?));
                }
                // A size the library can't do is not the caller's trouble.
                Err(crate::Error::Call { .. }) => {}
                Err(e) => return cx.done(Err(e)),
            }
        }
        let name = by_dtype(dtype, "product_fp8_f32", "product_fp8_bf16");
        let grid = [self.rows.div_ceil(16), n.div_ceil(16)];
        cx.done(launch!(cx.device, FP8, name, grid, 256, 0;
            self.bytes.at(), self.scales.at(), at, scales[0], out,
            int("linear", self.rows)?, int("linear", n)?, int("linear", w.depth)?))
    }
}

/// Rounds rows of two matrices side by side: their addresses and widths, where bytes and scales go, bytes of a row.
pub(crate) fn round_rows(
    cx: &Context,
    dtype: DType,
    [x, y]: [DevicePtr; 2],
    widths: [usize; 2],
    rows: usize,
    [bytes, scales]: [DevicePtr; 2],
    depth: usize,
) -> Result<()> {
    let name = by_dtype(dtype, "quantise_fp8_f32", "quantise_fp8_bf16");
    let size = |n: usize| int("linear", n);
    cx.done(launch!(cx.device, FP8, name, [rows, 1], 256, 0;
        x, size(widths[0])?, y, size(widths[1])?, bytes, scales, size(depth)?))
}
