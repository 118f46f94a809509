//! Matrix products `out = gate · (alpha · x · wᵀ + bias) + add`: `gemv.cu` for few rows, cuBLASLt or Kiln's own kernels for aligned
//! sizes, and otherwise Kiln's own implicit GEMM.
//!
//! On a cold H200 cuBLASLt reaches 806 TFLOP/s in bf16 for 4096 × 3072 → 9216 and 829 for 18432 (PyTorch 783 and 787); in
//! f32, without TF32, 50 to 52.

pub(crate) mod cublaslt;
pub(crate) mod fast;
mod hopper;
pub(crate) mod implicit_gemm;
mod mma;
pub(crate) mod nvfp4;
pub(crate) mod product;
pub(crate) mod shape;
#[cfg(test)]
mod test_product;
mod tilings;

use kiln_ops::Result;
use kiln_tensor::DType;

use crate::context::{Context, int};
use crate::error;
use crate::kernels::{ConvArgs, kernels};
use crate::sys::driver::DevicePtr;
use crate::weight::Matrix;
pub(crate) use shape::{GemmShape, Operands};

kernels! {
    "gemv" {
        Gemv(x: DevicePtr, ldx: i64, w: DevicePtr, ldw: i64, rows: i32, k: i32, n: i32, alpha: f32,
            bias: DevicePtr, add: DevicePtr, ldadd: i64, out: DevicePtr, ldo: i64):
            GEMV_F32_F32_F32 = "gemv_f32_f32_f32", GEMV_F32_BF16_F32 = "gemv_f32_bf16_f32",
            GEMV_F32_F16_F32 = "gemv_f32_f16_f32", GEMV_BF16_F32_BF16 = "gemv_bf16_f32_bf16",
            GEMV_BF16_BF16_BF16 = "gemv_bf16_bf16_bf16", GEMV_BF16_F16_BF16 = "gemv_bf16_f16_bf16",
            GEMV_BF16_F32_F32 = "gemv_bf16_f32_f32", GEMV_BF16_BF16_F32 = "gemv_bf16_bf16_f32",
            GEMV_BF16_F16_F32 = "gemv_bf16_f16_f32";
    }
}

/// Maximum rows for `gemv.cu`, which reads the weight once, as stored; columns and threads of a block there.
const MAX_GEMV_ROWS: usize = 4;
const GEMV_COLUMNS: usize = 8;
const GEMV_THREADS: usize = 128;

/// A matrix product.
pub(crate) struct Gemm<'a> {
    pub x: DevicePtr,
    /// Dtype of `x`.
    pub dtype: DType,
    pub rows: usize,
    pub ldx: usize,
    pub w: &'a Matrix,
    /// Rows `first_row..first_row + n` of `w`, which are the result's columns.
    pub first_row: usize,
    pub n: usize,
    /// Columns `first_column..first_column + k` of `w`.
    pub first_column: usize,
    pub k: usize,
    pub alpha: f32,
    /// Address of an f32 row.
    pub bias: Option<DevicePtr>,
    /// Address and row stride of a summand in the result's dtype.
    pub add: Option<(DevicePtr, usize)>,
    pub out: DevicePtr,
    pub ldo: usize,
    pub out_dtype: DType,
    /// Number of products: each with the next `n` rows of `w`, into the next `rows · ldo` elements.
    pub batch: usize,
    /// Address of an f32 row that the product and its bias are multiplied with; see [`GemmShape::is_fused`].
    pub gate: Option<DevicePtr>,
    /// Address and width of the last columns of `x`, if they lie in a packed matrix of their own; see there.
    pub right: Option<(DevicePtr, usize)>,
    /// Whether the result is SwiGLU of the product with `2 · n` rows of `w`; see there.
    pub swiglu: bool,
}

/// The implementation for a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GemmKernel {
    Gemv,
    Fast,
    ImplicitGemm,
}

impl Gemm<'_> {
    fn shape(&self) -> GemmShape {
        GemmShape {
            rows: self.rows,
            k: self.k,
            n: self.n,
            ldx: self.ldx,
            ldw: self.w.cols,
            ldadd: self.add.map_or(self.ldo, |(_, ld)| ld),
            ldo: self.ldo,
            dtype: self.dtype,
            out_dtype: self.out_dtype,
            add: self.add.is_some(),
            batch: self.batch,
            stride_w: self.n * self.w.cols,
            stride_out: self.rows * self.ldo,
            w_is_k_by_n: false,
            x_is_k_by_rows: false,
            right: self.right.map_or(0, |(_, width)| width),
            gate: self.gate.is_some(),
            swiglu: self.swiglu,
        }
    }

    fn operands(&self, w: DevicePtr) -> Operands {
        Operands {
            x_right: self.right.map(|(at, _)| at),
            gate: self.gate,
            add: self.add.map(|(at, _)| at),
            alpha: self.alpha,
            bias: self.bias,
            ..Operands::new(self.x, w, self.out)
        }
    }

    /// Shape and operands of a product for [`FastGemm::fuses`](fast::FastGemm::fuses); `None` for few rows, for which `gemv.cu`
    /// reads the weight at the memory's speed, and as stored.
    pub fn fused(&self, cx: &Context) -> Result<Option<(GemmShape, Operands)>> {
        if self.rows <= MAX_GEMV_ROWS {
            return Ok(None);
        }
        let w = self.w.ptr(cx, self.dtype, self.first_row, self.first_column)?;
        Ok(Some((self.shape(), self.operands(w))))
    }

    /// Whether a fast implementation takes the product with this bias.
    fn is_fast(&self, cx: &Context, bias: Option<DevicePtr>) -> bool {
        // Converted copies start at a buffer's beginning like the stored matrix, so the offset alone decides alignment.
        let offset = ((self.first_row * self.w.cols + self.first_column) * self.dtype.size()) as u64;
        cx.shared().gemm.supports(cx, &self.shape(), &Operands { bias, ..self.operands(offset) })
    }

    fn kernel(&self, cx: &Context) -> GemmKernel {
        match self.rows {
            ..=MAX_GEMV_ROWS => GemmKernel::Gemv,
            _ if self.is_fast(cx, self.bias) => GemmKernel::Fast,
            _ => GemmKernel::ImplicitGemm,
        }
    }

    /// Whether the bias is best added by the product; otherwise by the epilogue.
    pub fn fuses_bias(&self, cx: &Context) -> bool {
        self.kernel(cx) != GemmKernel::ImplicitGemm || !self.is_fast(cx, None)
    }

    /// Whether `batch` may be more than 1.
    pub fn supports_batch(&self, cx: &Context) -> bool {
        self.kernel(cx) == GemmKernel::Fast
    }

    /// Launches the product.
    pub fn run(&self, cx: &Context) -> Result<()> {
        if self.rows == 0 || self.n == 0 {
            return Ok(());
        }
        match self.kernel(cx) {
            GemmKernel::Gemv => self.gemv(cx),
            GemmKernel::Fast => {
                let w = self.w.ptr(cx, self.dtype, self.first_row, self.first_column)?;
                match cx.shared().gemm.run(cx, &self.shape(), &self.operands(w)) {
                    // Fall back for sizes that the library does not support.
                    Err(error::Error::Call { .. }) if self.batch == 1 => self.implicit_gemm(cx),
                    result => cx.check(result).map(drop),
                }
            }
            GemmKernel::ImplicitGemm => self.implicit_gemm(cx),
        }
    }

    fn gemv(&self, cx: &Context) -> Result<()> {
        debug_assert_eq!(self.batch, 1);
        let kernel = match (self.dtype, self.w.stored, self.out_dtype) {
            (DType::BF16, DType::BF16, DType::BF16) => GEMV_BF16_BF16_BF16,
            (DType::BF16, DType::F16, DType::BF16) => GEMV_BF16_F16_BF16,
            (DType::BF16, _, DType::BF16) => GEMV_BF16_F32_BF16,
            (DType::BF16, DType::BF16, _) => GEMV_BF16_BF16_F32,
            (DType::BF16, DType::F16, _) => GEMV_BF16_F16_F32,
            (DType::BF16, _, _) => GEMV_BF16_F32_F32,
            (_, DType::BF16, _) => GEMV_F32_BF16_F32,
            (_, DType::F16, _) => GEMV_F32_F16_F32,
            _ => GEMV_F32_F32_F32,
        };
        let (add, ldadd) = self.add.unwrap_or((0, 0));
        let grid = [self.n.div_ceil(GEMV_COLUMNS), 1];
        let size = |n: usize| int("linear", n);
        let parameters = Gemv {
            x: self.x,
            ldx: self.ldx as i64,
            w: self.w.stored_ptr(cx, self.first_row, self.first_column),
            ldw: self.w.cols as i64,
            rows: size(self.rows)?,
            k: size(self.k)?,
            n: size(self.n)?,
            alpha: self.alpha,
            bias: self.bias.unwrap_or(0),
            add,
            ldadd: ldadd as i64,
            out: self.out,
            ldo: self.ldo as i64,
        };
        cx.launch(kernel, grid, GEMV_THREADS, 0, &parameters)
    }

    fn implicit_gemm(&self, cx: &Context) -> Result<()> {
        debug_assert_eq!(self.batch, 1);
        cx.note_slow_product(&self.shape());
        let (add, ldadd) = self.add.unwrap_or((0, 0));
        let w = self.w.ptr(cx, self.dtype, self.first_row, self.first_column)?;
        let size = |n: usize| int("linear", n);
        let conv = ConvArgs {
            bias: self.bias.unwrap_or(0),
            add,
            ldx: self.ldx as i64,
            ldw: self.w.cols as i64,
            ldadd: ldadd as i64,
            ldo: self.ldo as i64,
            alpha: self.alpha,
            ..ConvArgs::product([self.x, w, self.out], [size(self.rows)?, size(self.n)?, size(self.k)?])
        };
        implicit_gemm::run(cx, &conv, self.dtype, self.out_dtype)
    }
}
