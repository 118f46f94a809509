//! Matrix products `out = alpha · x · wᵀ + bias + add`, by whichever of four ways fits: few rows, cuBLASLt, tensor cores
//! with Kiln's own kernel, or plain arithmetic.

pub(crate) mod lt;

use kiln_ops::Result;
use kiln_tensor::DType;

use crate::device::{Argument, launch};
use crate::sources::{CONV, FEW_ROWS};
use crate::sys::driver::DevicePtr;
use crate::weight::Matrix;
use crate::{Context, int};
use lt::{Lt, Operands};

/// Rows up to which the weight is read as it is stored, once.
const FEW: usize = 4;

/// Sizes and strides of a product: what a plan is made for. Strides are in elements, from row to row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Size {
    pub rows: usize,
    pub k: usize,
    pub n: usize,
    pub ldx: usize,
    pub ldw: usize,
    pub ldadd: usize,
    pub ldo: usize,
    /// Of the factors.
    pub dtype: DType,
    /// Of the result and of what is added.
    pub out: DType,
    pub add: bool,
    /// Products of the same x with weights, and into results, that many elements apart.
    pub batch: usize,
    pub stride_w: usize,
    pub stride_out: usize,
    /// Whether a row of w is one place of the sum, not one output.
    pub columns: bool,
}

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
        match cx.device.lt.is_ok() && Lt::takes(&self.size(), &self.operands(offset)) {
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
                match &cx.device.lt {
                    Ok(lt) => match lt.run(&cx.device, &self.size(), &self.operands(w)) {
                        // A size the library can't do is not the caller's trouble.
                        Err(crate::Error::Call { .. }) if self.batch == 1 => self.own(cx),
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
        let name = match (self.dtype, self.w.stored, self.out_dtype) {
            (DType::BF16, DType::BF16, DType::BF16) => "few_rows_bf16_bf16_bf16",
            (DType::BF16, DType::F16, DType::BF16) => "few_rows_bf16_f16_bf16",
            (DType::BF16, _, DType::BF16) => "few_rows_bf16_f32_bf16",
            (DType::BF16, DType::BF16, _) => "few_rows_bf16_bf16_f32",
            (DType::BF16, DType::F16, _) => "few_rows_bf16_f16_f32",
            (DType::BF16, _, _) => "few_rows_bf16_f32_f32",
            (_, DType::BF16, _) => "few_rows_f32_bf16_f32",
            (_, DType::F16, _) => "few_rows_f32_f16_f32",
            _ => "few_rows_f32_f32_f32",
        };
        let (add, ldadd) = self.add.unwrap_or((0, 0));
        let grid = [self.n.div_ceil(4), 1];
        cx.done(launch!(cx.device, FEW_ROWS, name, grid, 128, 0;
            self.x, self.ldx as i64, self.w.stored_at(self.first, self.column), self.w.cols as i64,
            int("linear", self.rows)?, int("linear", self.k)?, int("linear", self.n)?, self.alpha,
            self.bias.unwrap_or(0), add, ldadd as i64, self.out, self.ldo as i64))
    }

    fn own(&self, cx: &Context) -> Result<()> {
        debug_assert_eq!(self.batch, 1);
        let (add, ldadd) = self.add.unwrap_or((0, 0));
        let conv = ConvCall {
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
        conv.run(cx, self.dtype, self.out_dtype)
    }
}

/// What the convolution kernels take; `struct Conv` there.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct ConvCall {
    pub x: DevicePtr,
    pub w: DevicePtr,
    pub bias: DevicePtr,
    pub add: DevicePtr,
    pub out: DevicePtr,
    pub ldx: i64,
    pub ldw: i64,
    pub ldadd: i64,
    pub ldo: i64,
    pub alpha: f32,
    /// Height, width, channels.
    pub input: [i32; 3],
    pub output: [i32; 3],
    pub kernel: [i32; 2],
    pub stride: i32,
    /// Top and left.
    pub padding: [i32; 2],
    pub upsample: i32,
}

// SAFETY: the fields of `struct Conv`, in its order.
unsafe impl Argument for ConvCall {}

const _: () = assert!(size_of::<ConvCall>() == 128);

/// Pixels, depth and stages of a block of the tensor-core kernel, and elements between its rows.
const TILE_M: usize = 128;
const TILE_STAGES: usize = 3;
const TILE_PITCH: usize = 40;
/// Pixels and channels of a block of the plain kernel.
const PLAIN: usize = 64;

impl ConvCall {
    /// Whether 16 bytes are always of one tap and aligned.
    pub fn takes_tiles(&self, dtype: DType) -> bool {
        let vectors = [i64::from(self.input[2]), self.ldx, self.ldw].iter().all(|n| n % 8 == 0);
        dtype == DType::BF16 && vectors && self.x.is_multiple_of(16) && self.w.is_multiple_of(16)
    }

    /// Puts the kernel that fits on the stream.
    pub fn run(&self, cx: &Context, dtype: DType, out: DType) -> Result<()> {
        let pixels = self.output[0] as usize * self.output[1] as usize;
        let n = self.output[2] as usize;
        if self.takes_tiles(dtype) {
            // A block of 128 channels would be mostly empty for a picture's three.
            let (width, name) = match (n <= 32, out) {
                (true, DType::BF16) => (32, "conv_tiles_bf16_32"),
                (true, _) => (32, "conv_tiles_f32_32"),
                (false, DType::BF16) => (128, "conv_tiles_bf16_128"),
                (false, _) => (128, "conv_tiles_f32_128"),
            };
            let shared = TILE_STAGES * (TILE_M + width) * TILE_PITCH * 2;
            let grid = [pixels.div_ceil(TILE_M), n.div_ceil(width)];
            return cx.done(launch!(cx.device, CONV, name, grid, 256, shared; *self));
        }
        let name = match (dtype, out) {
            (DType::BF16, DType::BF16) => "conv_plain_bf16_bf16",
            (DType::BF16, _) => "conv_plain_bf16_f32",
            _ => "conv_plain_f32_f32",
        };
        let grid = [pixels.div_ceil(PLAIN), n.div_ceil(PLAIN)];
        cx.done(launch!(cx.device, CONV, name, grid, 256, 0; *self))
    }
}
