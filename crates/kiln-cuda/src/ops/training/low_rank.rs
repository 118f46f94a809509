//! Products of activations and gradients with the matrices of a low-rank update, with `low_rank.cu`.

use kiln_ops::{Result, Tensor as _};
use kiln_tensor::DType;

use crate::context::{Context, int};
use crate::kernels::{LowRankArgs, kernels};
use crate::ops::grid::THREADS;
use crate::queue::DeviceBuffer;
use crate::sys::driver::DevicePtr;
use crate::tensor::CudaTensor;

kernels! {
    "low_rank" {
        LowRankProducts(args: LowRankArgs):
            LOW_RANK_16 = "low_rank_16", LOW_RANK_32 = "low_rank_32";
        LowRankRows(partials: DevicePtr, out: DevicePtr, n: i64, count: i32, scale: f32):
            LOW_RANK_ROWS = "low_rank_rows";
        LowRankColumns(partials: DevicePtr, add: DevicePtr, out: DevicePtr, cols: i32, rank: i32,
            count: i32, scale: f32, by_rank: i32):
            LOW_RANK_COLUMNS = "low_rank_columns";
    }
}

/// Matrices side by side, the largest rank, and tile sizes, as in `low_rank.cu`.
const MAX_MATRICES: usize = 4;
const MAX_RANK: usize = 32;
const TILE: usize = 128;
const ROW_TILES: usize = 2;
/// A block's columns: few enough that two blocks share a multiprocessor.
const MAX_COLUMN_TILES: usize = 4;

/// The other operand of a product: `[cols, rank]` and so on, or its transpose.
#[derive(Clone, Copy)]
pub(super) struct Thin<'a> {
    pub x: &'a CudaTensor,
    /// Whether it is `[rank, cols]`.
    pub by_rank: bool,
}

/// Wide matrices side by side, `[rows, cols]`, and what they are multiplied with.
pub(super) struct WideProducts<'a> {
    xs: &'a [&'a CudaTensor],
    rows: usize,
    cols: usize,
    rank: usize,
}

/// Partial sums, and how many there are of each element.
struct Partials {
    buffer: DeviceBuffer,
    count: usize,
}

/// Blocks of a launch along rows and columns.
struct Grid {
    row_blocks: usize,
    column_blocks: usize,
    column_tiles: usize,
}

impl<'a> WideProducts<'a> {
    /// `None` if there is no kernel for these sizes.
    pub fn new(xs: &'a [&'a CudaTensor], rank: usize) -> Option<WideProducts<'a>> {
        let first = xs.first()?;
        let fits = |x: &&CudaTensor| {
            let width = x.shape().last();
            x.dtype() == DType::BF16 && x.is_aligned() && width > 0 && width.is_multiple_of(TILE)
        };
        let rows = first.shape().rows();
        let fits =
            rows > 0 && (1..=MAX_RANK).contains(&rank) && xs.len() <= MAX_MATRICES && xs.iter().all(fits);
        fits.then(|| WideProducts { xs, rows, cols: xs.iter().map(|x| x.shape().last()).sum(), rank })
    }

    fn grid(&self, cx: &Context) -> Grid {
        let (row_blocks, tiles) = (self.rows.div_ceil(ROW_TILES * TILE), self.cols / TILE);
        // Two blocks for every multiprocessor, if there are enough tiles.
        let wanted = 2 * cx.gpu().multiprocessors.max(1) as usize;
        let column_tiles = (row_blocks * tiles / wanted).clamp(1, MAX_COLUMN_TILES);
        Grid { row_blocks, column_blocks: tiles.div_ceil(column_tiles), column_tiles }
    }

    /// Room for the partial sums of `x · up`.
    fn row_partials(&self, cx: &Context) -> Result<Partials> {
        let count = self.grid(cx).column_blocks;
        Ok(Partials { buffer: cx.allocate(4 * count * self.rows * self.rank)?, count })
    }

    /// Room for the partial sums of `xᵀ · inner`.
    fn column_partials(&self, cx: &Context) -> Result<Partials> {
        let count = self.grid(cx).row_blocks;
        Ok(Partials { buffer: cx.allocate(4 * count * self.cols * self.rank)?, count })
    }

    /// Computes the partial sums of `x · up`, `xᵀ · inner`, or both. `up`: f32; `inner`: bf16 `[rows, rank]`.
    fn launch(
        &self,
        cx: &Context,
        up: Option<(Thin<'_>, &Partials)>,
        inner: Option<(&CudaTensor, &Partials)>,
    ) -> Result<()> {
        let Grid { row_blocks, column_blocks, column_tiles } = self.grid(cx);
        let number = |n: usize| int("low_rank", n);
        let (up, along_rows) = up.unzip();
        let (inner, along_columns) = inner.unzip();
        let mut args = LowRankArgs {
            x: [0; MAX_MATRICES],
            end: [0; MAX_MATRICES],
            up: up.map_or(0, |up| up.x.ptr(cx)),
            inner: inner.map_or(0, |inner| inner.ptr(cx)),
            along_rows: along_rows.map_or(0, |sums| sums.buffer.ptr(cx)),
            along_columns: along_columns.map_or(0, |sums| sums.buffer.ptr(cx)),
            count: number(self.xs.len())?,
            rows: number(self.rows)?,
            rank: number(self.rank)?,
            by_rank: up.is_some_and(|up| up.by_rank).into(),
            column_tiles: number(column_tiles)?,
            unused: 0,
        };
        let mut end = 0;
        for (i, x) in self.xs.iter().enumerate() {
            end += x.shape().last();
            (args.x[i], args.end[i]) = (x.ptr(cx), number(end)?);
        }
        let (kernel, padded) = if self.rank <= 16 { (LOW_RANK_16, 16) } else { (LOW_RANK_32, 32) };
        let shared = 2 * (2 * TILE * (TILE + 8) + (ROW_TILES + column_tiles) * TILE * (padded + 8));
        cx.launch(kernel, [row_blocks, column_blocks], 2 * TILE, shared, &LowRankProducts { args })
    }

    /// `scale · Σ partials`, bf16 `[rows, rank]`.
    fn sum_rows(&self, cx: &Context, partials: &Partials, scale: f32) -> Result<CudaTensor> {
        let out = CudaTensor::new(cx, [self.rows, self.rank], DType::BF16)?;
        let n = self.rows * self.rank;
        let parameters = LowRankRows {
            partials: partials.buffer.ptr(cx),
            out: out.ptr(cx),
            n: n as i64,
            count: int("low_rank", partials.count)?,
            scale,
        };
        cx.launch(LOW_RANK_ROWS, [n.div_ceil(THREADS), 1], THREADS, 0, &parameters)?;
        Ok(out)
    }

    /// `add + scale · Σ partials`, f32 `[cols, rank]`, or `[rank, cols]`.
    fn sum_columns(
        &self,
        cx: &Context,
        partials: &Partials,
        scale: f32,
        add: Option<&CudaTensor>,
        by_rank: bool,
    ) -> Result<CudaTensor> {
        let shape = if by_rank { [self.rank, self.cols] } else { [self.cols, self.rank] };
        let out = CudaTensor::new(cx, shape, DType::F32)?;
        let number = |n: usize| int("low_rank", n);
        let parameters = LowRankColumns {
            partials: partials.buffer.ptr(cx),
            add: add.map_or(0, |add| add.ptr(cx)),
            out: out.ptr(cx),
            cols: number(self.cols)?,
            rank: number(self.rank)?,
            count: number(partials.count)?,
            scale,
            by_rank: by_rank.into(),
        };
        cx.launch(LOW_RANK_COLUMNS, [(self.cols * self.rank).div_ceil(THREADS), 1], THREADS, 0, &parameters)?;
        Ok(out)
    }

    /// `scale · x · up`.
    pub fn multiply(&self, cx: &Context, up: Thin<'_>, scale: f32) -> Result<CudaTensor> {
        let sums = self.row_partials(cx)?;
        self.launch(cx, Some((up, &sums)), None)?;
        self.sum_rows(cx, &sums, scale)
    }

    /// `add + scale · innerᵀ · x`, `[rank, cols]`.
    pub fn multiply_transposed(
        &self,
        cx: &Context,
        inner: &CudaTensor,
        scale: f32,
        add: Option<&CudaTensor>,
    ) -> Result<CudaTensor> {
        let sums = self.column_partials(cx)?;
        self.launch(cx, None, Some((inner, &sums)))?;
        self.sum_columns(cx, &sums, scale, add, true)
    }

    /// `scale · x · up`, and `add + scale · xᵀ · inner`, `[cols, rank]`.
    pub fn multiply_both(
        &self,
        cx: &Context,
        up: &CudaTensor,
        inner: &CudaTensor,
        scale: f32,
        add: Option<&CudaTensor>,
    ) -> Result<[CudaTensor; 2]> {
        let (rows, columns) = (self.row_partials(cx)?, self.column_partials(cx)?);
        self.launch(cx, Some((Thin { x: up, by_rank: false }, &rows)), Some((inner, &columns)))?;
        Ok([self.sum_rows(cx, &rows, scale)?, self.sum_columns(cx, &columns, scale, add, false)?])
    }
}
