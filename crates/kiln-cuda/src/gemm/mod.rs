//! Matrix products `out = alpha · x · wᵀ + bias + add`, by whichever of four ways fits: few rows, cuBLASLt, tensor cores
//! with Kiln's own kernel, or plain arithmetic.

pub(crate) mod lt;
pub(crate) mod own;
mod size;

use kiln_ops::Result;
use kiln_tensor::DType;

use crate::context::{Context, int};
use crate::error;
use crate::kernels::{
    Conv, FEW_ROWS_BF16_BF16_BF16, FEW_ROWS_BF16_BF16_F32, FEW_ROWS_BF16_F16_BF16, FEW_ROWS_BF16_F16_F32,
    FEW_ROWS_BF16_F32_BF16, FEW_ROWS_BF16_F32_F32, FEW_ROWS_F32_BF16_F32, FEW_ROWS_F32_F16_F32,
    FEW_ROWS_F32_F32_F32, FewRows,
};
use crate::sys::driver::DevicePtr;
use crate::weight::Matrix;
use lt::{Lt, Operands};
pub(crate) use size::Size;

/// Rows up to which the weight is read as it is stored, once.
const FEW: usize = 4;

/// One product.
pub(crate) struct Product<'a> {
    pub x: DevicePtr,
    /// Of x.
    pub dtype: DType,
    pub rows: usize,
    pub ldx: usize,
    pub w: &'a Matrix,
    /// Rows of w, which are columns of the result.
    pub first: usize,
    pub n: usize,
    /// Columns of w.
    pub column: usize,
    pub k: usize,
    pub alpha: f32,
    /// Address of an f32 row.
    pub bias: Option<DevicePtr>,
    /// Address and stride of what is added, of the result's type.
    pub add: Option<(DevicePtr, usize)>,
    pub out: DevicePtr,
    pub ldo: usize,
    pub out_dtype: DType,
    /// How many products follow each other: the next `n` rows of w into the next `rows · ldo` elements.
    pub batch: usize,
}

/// Who computes a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    FewRows,
    CublasLt,
    Own,
}

impl Product<'_> {
    fn size(&self) -> Size {
        Size {
            rows: self.rows,
            k: self.k,
            n: self.n,
            ldx: self.ldx,
            ldw: self.w.cols,
            ldadd: self.add.map_or(self.ldo, |(_, ld)| ld),
            ldo: self.ldo,
            dtype: self.dtype,
            out: self.out_dtype,
            add: self.add.is_some(),
            batch: self.batch,
            stride_w: self.n * self.w.cols,
            stride_out: self.rows * self.ldo,
            columns: false,
        }
    }

    fn operands(&self, w: DevicePtr) -> Operands {
        let add = self.add.map(|(at, _)| at);
        Operands { w, x: self.x, add, out: self.out, alpha: self.alpha, scales: None }
    }

    fn way(&self, cx: &Context) -> Way {
        if self.rows <= FEW {
            return Way::FewRows;
        }
        // Another form of the weight begins at the same place of a block, so this one's alignment tells that one's.
        let offset = ((self.first * self.w.cols + self.column) * self.dtype.size()) as u64;
        match cx.shared().lt.is_ok() && Lt::takes(&self.size(), &self.operands(offset)) {
            true => Way::CublasLt,
            false => Way::Own,
        }
    }

    /// Whether a bias would be added on the way; otherwise it has to be added later.
    pub fn adds_bias(&self, cx: &Context) -> bool {
        self.way(cx) != Way::CublasLt
    }

    /// Whether several weights are multiplied at once.
    pub fn batches(&self, cx: &Context) -> bool {
        self.way(cx) == Way::CublasLt
    }

    /// Computes it.
    pub fn run(&self, cx: &Context) -> Result<()> {
        if self.rows == 0 || self.n == 0 {
            return Ok(());
        }
        match self.way(cx) {
            Way::FewRows => self.few_rows(cx),
            Way::CublasLt if self.bias.is_none() => {
                let w = self.w.at(cx, self.dtype, self.first, self.column)?;
                match &cx.shared().lt {
                    Ok(lt) => match lt.run(cx, &self.size(), &self.operands(w)) {
                        // A size the library can't do is not the caller's trouble.
                        Err(error::Error::Call { .. }) if self.batch == 1 => self.own(cx),
                        result => cx.done(result),
                    },
                    Err(_) => self.own(cx),
                }
            }
            _ => self.own(cx),
        }
    }

    fn few_rows(&self, cx: &Context) -> Result<()> {
        debug_assert_eq!(self.batch, 1);
        let kernel = match (self.dtype, self.w.stored, self.out_dtype) {
            (DType::BF16, DType::BF16, DType::BF16) => FEW_ROWS_BF16_BF16_BF16,
            (DType::BF16, DType::F16, DType::BF16) => FEW_ROWS_BF16_F16_BF16,
            (DType::BF16, _, DType::BF16) => FEW_ROWS_BF16_F32_BF16,
            (DType::BF16, DType::BF16, _) => FEW_ROWS_BF16_BF16_F32,
            (DType::BF16, DType::F16, _) => FEW_ROWS_BF16_F16_F32,
            (DType::BF16, _, _) => FEW_ROWS_BF16_F32_F32,
            (_, DType::BF16, _) => FEW_ROWS_F32_BF16_F32,
            (_, DType::F16, _) => FEW_ROWS_F32_F16_F32,
            _ => FEW_ROWS_F32_F32_F32,
        };
        let (add, ldadd) = self.add.unwrap_or((0, 0));
        let grid = [self.n.div_ceil(4), 1];
        let size = |n: usize| int("linear", n);
        let parameters = FewRows {
            x: self.x,
            ldx: self.ldx as i64,
            w: self.w.stored_at(cx, self.first, self.column),
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
        cx.launch(kernel, grid, 128, 0, &parameters)
    }

    fn own(&self, cx: &Context) -> Result<()> {
        debug_assert_eq!(self.batch, 1);
        let (add, ldadd) = self.add.unwrap_or((0, 0));
        let conv = Conv {
            x: self.x,
            w: self.w.at(cx, self.dtype, self.first, self.column)?,
            bias: self.bias.unwrap_or(0),
            add,
            out: self.out,
            ldx: self.ldx as i64,
            ldw: self.w.cols as i64,
            ldadd: ldadd as i64,
            ldo: self.ldo as i64,
            alpha: self.alpha,
            input: [int("linear", self.rows)?, 1, int("linear", self.k)?],
            output: [int("linear", self.rows)?, 1, int("linear", self.n)?],
            kernel: [1, 1],
            stride: 1,
            padding: [0, 0],
            upsample: 0,
        };
        own::run(cx, &conv, self.dtype, self.out_dtype)
    }
}
