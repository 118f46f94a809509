use std::ops::Range;

use kiln_ops::{Result, Tensor as _};
use kiln_tensor::DType;

use super::{THREADS, by_dtype};
use crate::context::{Context, int};
use crate::kernels::{
    PRODUCT_INT8_BF16, PRODUCT_INT8_F32, ProductInt8, QUANTISE_BF16, QUANTISE_F32, Quantise,
};
use crate::queue::Block;
use crate::sys::driver::DevicePtr;
use crate::tensor::CudaTensor;
use crate::weight::ByteRows;

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
        let kernel = by_dtype(x.dtype(), QUANTISE_F32, QUANTISE_BF16);
        let parameters = Quantise {
            x: x.at(cx),
            q: integers.at(cx),
            scales: scales.at(cx),
            cols: int("linear", w.cols)?,
            padded: int("linear", w.depth)?,
        };
        cx.launch(kernel, [rows, 1], THREADS, 0, &parameters)?;
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
        let kernel = by_dtype(dtype, PRODUCT_INT8_F32, PRODUCT_INT8_BF16);
        let [at, scales] = w.at(cx, outputs.start);
        let n = outputs.len();
        let grid = [self.rows.div_ceil(TILE), n.div_ceil(TILE)];
        let parameters = ProductInt8 {
            q: self.integers.at(cx),
            q_scales: self.scales.at(cx),
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
