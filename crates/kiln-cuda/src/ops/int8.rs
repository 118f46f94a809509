//! Products with int8 weights.

use std::ops::Range;

use kiln_ops::{Result, Tensor as _};
use kiln_tensor::DType;

use super::grid::THREADS;
use crate::context::{Context, int};
use crate::gemm::{GemmShape, Operands};
use crate::kernels::kernels;
use crate::queue::DeviceBuffer;
use crate::sys::driver::DevicePtr;
use crate::tensor::CudaTensor;
use crate::weight::QuantizedMatrix;

kernels! {
    "int8" {
        QuantizeInt8(x: DevicePtr, q: DevicePtr, scales: DevicePtr, cols: i32, padded: i32):
            QUANTIZE_INT8 = "quantize_int8" by dtype;
        GemmInt8(q: DevicePtr, q_scales: DevicePtr, w: DevicePtr, w_scales: DevicePtr, bias: DevicePtr,
            add: DevicePtr, out: DevicePtr, rows: i32, n: i32, depth: i32, ldadd: i64, ldo: i64):
            GEMM_INT8 = "gemm_int8" by dtype;
    }
}

/// Tile size of the kernel, in rows and in outputs.
const TILE: usize = 64;

/// Activations in int8 with one scale per row.
pub(crate) struct Int8Operand {
    rows: usize,
    values: DeviceBuffer,
    scales: DeviceBuffer,
}

impl Int8Operand {
    /// Quantizes `x`: `[rows, w.cols]`.
    pub fn new(cx: &Context, x: &CudaTensor, w: &QuantizedMatrix) -> Result<Int8Operand> {
        let rows = x.shape().rows();
        let (values, scales) = (cx.allocate(rows * w.depth)?, cx.allocate(rows * 4)?);
        let kernel = QUANTIZE_INT8.of(x.dtype());
        let parameters = QuantizeInt8 {
            x: x.ptr(cx),
            q: values.ptr(cx),
            scales: scales.ptr(cx),
            cols: int("linear", w.cols)?,
            padded: int("linear", w.depth)?,
        };
        cx.launch(kernel, [rows, 1], THREADS, 0, &parameters)?;
        Ok(Int8Operand { rows, values, scales })
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
        let shape = GemmShape::packed([self.rows, n, w.depth], DType::I8, dtype, add.is_some());
        let operands = Operands {
            w: at,
            x: self.values.ptr(cx),
            add,
            out: out.unwrap_or(0),
            alpha: 1.0,
            bias,
            scales: Some([scales, self.scales.ptr(cx)]),
        };
        if cx.shared().gemm.supports(cx, &shape, &operands) {
            return cx.check(cx.shared().gemm.run(cx, &shape, &operands)).map(drop);
        }
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
