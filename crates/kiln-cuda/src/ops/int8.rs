use std::ops::Range;

use kiln_ops::{Result, Tensor as _};
use kiln_tensor::DType;

use super::{THREADS, by_dtype};
use crate::device::{Block, launch};
use crate::sources::INT8;
use crate::sys::driver::DevicePtr;
use crate::weight::ByteRows;
use crate::{Context, CudaTensor, int};

/// Rows and outputs of a block of the kernel.
const TILE: usize = 64;

/// Activations in integers, with a scale for every row.
pub(crate) struct Rounded {
    rows: usize,
    integers: Block,
    scales: Block,
}

impl Rounded {
    /// `x`: `[rows, w.cols]`.
    pub fn new(cx: &Context, x: &CudaTensor, w: &ByteRows) -> Result<Rounded> {
        let rows = x.shape().rows();
        let (integers, scales) = (cx.block(rows * w.depth)?, cx.block(rows * 4)?);
        let name = by_dtype(x.dtype(), "quantise_f32", "quantise_bf16");
        cx.done(launch!(cx.device, INT8, name, [rows, 1], THREADS, 0;
            x.at(), integers.at(), scales.at(), int("linear", w.cols)?, int("linear", w.depth)?))?;
        Ok(Rounded { rows, integers, scales })
    }

    /// The product with some rows of the weight, by address: bias (for all rows), what is added, and the result.
    pub fn product(
        &self,
        cx: &Context,
        w: &ByteRows,
        outputs: &Range<usize>,
        [bias, add, out]: [Option<DevicePtr>; 3],
        dtype: DType,
    ) -> Result<()> {
        let name = by_dtype(dtype, "product_int8_f32", "product_int8_bf16");
        let [at, scales] = w.at(outputs.start);
        let n = outputs.len();
        let grid = [self.rows.div_ceil(TILE), n.div_ceil(TILE)];
        cx.done(launch!(cx.device, INT8, name, grid, 256, 0;
            self.integers.at(), self.scales.at(), at, scales, bias.unwrap_or(0), add.unwrap_or(0), out.unwrap_or(0),
            int("linear", self.rows)?, int("linear", n)?, int("linear", w.depth)?, n as i64, n as i64))
    }
}
