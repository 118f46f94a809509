//! Products of matrices that lie in memory either way round: `out = alpha · x · wᵀ + add`, for gradients.

use kiln_ops::Result;
use kiln_tensor::DType;

use super::{GemmShape, Operands, implicit_gemm};
use crate::context::{Context, int};
use crate::error::Error;
use crate::kernels::ConvArgs;
use crate::ops::{TRANSPOSE_2, TRANSPOSE_4, Transpose};
use crate::queue::DeviceBuffer;
use crate::sys::driver::DevicePtr;

/// A matrix in memory.
#[derive(Clone, Copy)]
pub(crate) struct Operand {
    pub at: DevicePtr,
    /// Whether the sum runs down its columns instead of along its rows.
    pub by_columns: bool,
}

/// A product of two dense matrices: `[rows, k]` or `[k, rows]`, and `[n, k]` or `[k, n]`.
pub(crate) struct Product {
    pub x: Operand,
    pub w: Operand,
    /// Dtype of `x` and `w`.
    pub dtype: DType,
    pub rows: usize,
    pub n: usize,
    pub k: usize,
    pub alpha: f32,
    /// Address of a summand in the result's dtype.
    pub add: Option<DevicePtr>,
    pub out: DevicePtr,
    pub out_dtype: DType,
}

impl Product {
    /// `x · wᵀ` with `[rows, n, k]`, in one dtype.
    pub fn new(x: Operand, w: Operand, [rows, n, k]: [usize; 3], dtype: DType, out: DevicePtr) -> Product {
        Product { x, w, dtype, rows, n, k, alpha: 1.0, add: None, out, out_dtype: dtype }
    }

    fn shape(&self) -> GemmShape {
        let size = [self.rows, self.n, self.k];
        GemmShape {
            ldx: if self.x.by_columns { self.rows } else { self.k },
            ldw: if self.w.by_columns { self.n } else { self.k },
            w_is_k_by_n: self.w.by_columns,
            x_is_k_by_rows: self.x.by_columns,
            ..GemmShape::packed(size, self.dtype, self.out_dtype, self.add.is_some())
        }
    }

    /// Launches the product.
    pub fn run(&self, cx: &Context) -> Result<()> {
        if self.rows == 0 || self.n == 0 {
            return Ok(());
        }
        let (shape, [x, w]) = (self.shape(), [self.x.at, self.w.at]);
        let operands = Operands { add: self.add, alpha: self.alpha, ..Operands::new(x, w, self.out) };
        let gemm = &cx.shared().gemm;
        if self.k > 0 && gemm.supports(cx, &shape, &operands) {
            match gemm.run(cx, &shape, &operands) {
                // Fall back for sizes that the library does not support.
                Err(Error::Call { .. }) => {}
                result => return cx.check(result).map(drop),
            }
        }
        let mut transposed = Vec::new();
        let [x, w] = [(self.x, self.rows), (self.w, self.n)].map(|(operand, rows)| -> Result<DevicePtr> {
            if !operand.by_columns {
                return Ok(operand.at);
            }
            let buffer = transpose(cx, operand.at, [self.k, rows], self.dtype)?;
            let at = buffer.ptr(cx);
            transposed.push(buffer);
            Ok(at)
        });
        let (x, w) = (x?, w?);
        if !transposed.is_empty() {
            let product = Product {
                x: Operand { at: x, by_columns: false },
                w: Operand { at: w, by_columns: false },
                ..*self
            };
            return product.run(cx);
        }
        cx.note_slow_product(&shape);
        let size = |n: usize| int("matmul", n);
        let product = ConvArgs::product([x, w, self.out], [size(self.rows)?, size(self.n)?, size(self.k)?]);
        let args = ConvArgs { add: self.add.unwrap_or(0), alpha: self.alpha, ..product };
        implicit_gemm::run(cx, &args, self.dtype, self.out_dtype)
    }
}

/// A matrix `[rows, cols]` as `[cols, rows]`.
fn transpose(cx: &Context, x: DevicePtr, [rows, cols]: [usize; 2], dtype: DType) -> Result<DeviceBuffer> {
    let buffer = cx.allocate(rows * cols * dtype.size())?;
    let kernel = if dtype.size() == 2 { TRANSPOSE_2 } else { TRANSPOSE_4 };
    let grid = [cols.div_ceil(32), rows.div_ceil(32)];
    let parameters =
        Transpose { x, out: buffer.ptr(cx), rows: int("matmul", rows)?, cols: int("matmul", cols)? };
    cx.launch(kernel, grid, 256, 0, &parameters)?;
    Ok(buffer)
}
