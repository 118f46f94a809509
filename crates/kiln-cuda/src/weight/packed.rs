//! Weights that stay on the device as their file packs them, and are written out just before a product: for a moment one
//! layer is there in full, never the model.

use kiln_ops::Result;
use kiln_tensor::DType;
use kiln_tensor::packed::{Factors, Format, Packed};

use crate::context::{Context, int};
use crate::kernels::{self, WIDEN_BF16, WIDEN_F32, Widen};
use crate::ops::{THREADS, by_dtype, by_rows};
use crate::queue::Block;
use crate::sys::driver::DevicePtr;

/// Packed matrices of one width below each other, each in a format of its own.
pub(crate) struct PackedMatrix {
    pub rows: usize,
    pub cols: usize,
    slabs: Vec<Slab>,
    bytes: usize,
    block: Block,
    factors: Block,
}

/// One of them; places are counted from the beginning of the block, or of the factors.
#[derive(Clone, Copy, Debug)]
struct Slab {
    format: Format,
    rows: usize,
    row_bytes: usize,
    place: usize,
    scale: f32,
    row_scales: Option<usize>,
    block_scales: Option<usize>,
    high_first: bool,
}

/// Slabs and scales begin where any of the kernels' types may.
const ALIGNMENT: usize = 16;

impl PackedMatrix {
    pub fn new(cx: &Context, matrices: &[Packed], [rows, cols]: [usize; 2]) -> Result<PackedMatrix> {
        let mut slabs = Vec::with_capacity(matrices.len());
        let (mut bytes, mut factors) = (0usize, Vec::<u8>::new());
        for matrix in matrices {
            let mut slab = Slab {
                format: matrix.format(),
                rows: matrix.row_count(),
                row_bytes: matrix.bytes().len() / matrix.row_count().max(1),
                place: bytes.next_multiple_of(ALIGNMENT),
                scale: 1.0,
                row_scales: None,
                block_scales: None,
                high_first: false,
            };
            factors.resize(factors.len().next_multiple_of(ALIGNMENT), 0);
            let place = factors.len();
            match matrix.factors() {
                Factors::All(scale) => slab.scale = scale,
                Factors::Rows(scales) => {
                    slab.row_scales = Some(place);
                    factors.extend_from_slice(bytemuck::cast_slice(&scales));
                }
                Factors::Blocks { all, scales, high_first } => {
                    (slab.scale, slab.block_scales, slab.high_first) = (all, Some(place), high_first);
                    factors.extend_from_slice(&scales);
                }
            }
            bytes = slab.place + matrix.bytes().len();
            slabs.push(slab);
        }
        let (block, scales) = (cx.block(bytes)?, cx.block(factors.len())?);
        for (slab, matrix) in slabs.iter().zip(matrices) {
            cx.done(cx.upload(matrix.bytes(), block.at(cx) + slab.place as u64))?;
        }
        cx.done(cx.upload(&factors, scales.at(cx)))?;
        Ok(PackedMatrix { rows, cols, slabs, bytes, block, factors: scales })
    }

    /// Address and size of all but the factors.
    pub fn bulk(&self, cx: &Context) -> (DevicePtr, usize) {
        (self.block.at(cx), self.bytes)
    }

    /// The same with that elsewhere.
    pub fn moved(&self, block: Block) -> PackedMatrix {
        let (slabs, factors) = (self.slabs.clone(), self.factors.clone());
        PackedMatrix { rows: self.rows, cols: self.cols, slabs, bytes: self.bytes, block, factors }
    }

    /// All values, as f32 or bf16.
    pub fn widen(&self, cx: &Context, dtype: DType) -> Result<Block> {
        let out = cx.block(self.rows * self.cols * dtype.size())?;
        let mut at = out.at(cx);
        for slab in &self.slabs {
            let factors = |place: Option<usize>| place.map_or(0, |place| self.factors.at(cx) + place as u64);
            let w = kernels::Packed {
                data: self.block.at(cx) + slab.place as u64,
                row_scales: factors(slab.row_scales),
                block_scales: factors(slab.block_scales),
                rows: slab.rows as i64,
                row_bytes: slab.row_bytes as i64,
                cols: int("linear", self.cols)?,
                format: slab.format as i32,
                scale: slab.scale,
                high_first: slab.high_first.into(),
            };
            if slab.rows * self.cols > 0 {
                let kernel = by_dtype(dtype, WIDEN_F32, WIDEN_BF16);
                let grid = by_rows(slab.rows, self.cols);
                cx.launch(kernel, grid, THREADS, 0, &Widen { w, out: at })?;
            }
            at += (slab.rows * self.cols * dtype.size()) as u64;
        }
        Ok(out)
    }
}
