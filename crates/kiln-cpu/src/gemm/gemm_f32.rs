//! The blocked product in f32 vectors, for every weight format that is widened to f32.

use std::ops::Range;

use kiln_ops::Result;

use super::blocks::{BlockGrid, BlockSizes, BlockTask, ScratchSizes};
use super::{
    Epilogue, GemmSize, PackedLeft, RowSource, SumBlock, multiply, pack_right, pack_right_kn, run_epilogue,
};
use crate::Context;
use crate::simd::KC;

/// How the right operand of a product is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Orientation {
    /// A row for every column of the result, as in a linear layer.
    ColsByDepth,
    /// A row for every step of the sum, as in its gradient.
    DepthByCols,
}

/// One of the products that add up to the result; `right` has a row for every column of the result, or for every step of the
/// sum ([`Orientation`]).
pub(crate) struct Term<'a, R> {
    pub left: &'a PackedLeft,
    pub right: R,
    /// The columns of the result to which it contributes.
    pub cols: Range<usize>,
}

impl<R> Term<'_, R> {
    /// Whether it contributes to some of these columns.
    pub fn reaches(&self, cols: &Range<usize>) -> bool {
        self.cols.start < cols.end && cols.start < self.cols.end
    }
}

/// Columns of a block. Their panels (196 KiB) and sums stay in the L2 cache.
const NC: usize = 128;
/// Rows of a block: the weight is packed once per block of rows.
pub(crate) const MC: usize = 1344;

/// Computes `Σ term.left · term.rightᵀ`, the `rows` that every left operand has by the first `cols` columns.
pub(crate) fn gemm_f32<R: RowSource + Send, E: Epilogue>(
    cx: &Context,
    terms: &[Term<'_, R>],
    rows: Range<usize>,
    cols: usize,
    epilogue: &E,
) -> Result<()> {
    gemm_f32_of(cx, terms, rows, cols, Orientation::ColsByDepth, epilogue)
}

/// [`gemm_f32`] with right operands of this orientation.
pub(crate) fn gemm_f32_of<R: RowSource + Send, E: Epilogue>(
    cx: &Context,
    terms: &[Term<'_, R>],
    rows: Range<usize>,
    cols: usize,
    orientation: Orientation,
    epilogue: &E,
) -> Result<()> {
    let (tile_rows, tile_cols) = (cx.level.tile_rows(), cx.level.tile_cols());
    let sizes = BlockSizes {
        tile_rows,
        max_rows: MC,
        min_rows: 4 * tile_rows,
        max_cols: NC,
        min_cols: NC,
        group_cols: 1,
    };
    let grid = BlockGrid::balanced(cx.pool.threads(), [rows.len(), cols], &sizes);
    let stride = grid.block_cols.next_multiple_of(tile_cols);
    let scratch = ScratchSizes {
        packed: stride * KC * size_of::<f32>(),
        sums: grid.block_rows * stride,
        ..ScratchSizes::default()
    };
    grid.run(cx, scratch, |BlockTask { block, .. }, scratch| {
        let cols = block.cols;
        let rows = rows.start + block.rows.start..rows.start + block.rows.end;
        let panels: &mut [f32] = bytemuck::cast_slice_mut(&mut scratch.packed);
        let count = cols.len().div_ceil(tile_cols);
        let mut add = false;
        for term in terms.iter().filter(|term| term.reaches(&cols)) {
            for (from, depth, left) in term.left.blocks(rows.clone()) {
                let panels = &mut panels[..count * tile_cols * depth];
                match orientation {
                    Orientation::ColsByDepth => {
                        pack_right(cx.level, &term.right, cols.start, from, depth, panels);
                    }
                    Orientation::DepthByCols => {
                        let width = cols.len();
                        pack_right_kn(cx.level, &term.right, from, cols.start, width, depth, panels);
                    }
                }
                let size = GemmSize { rows: rows.len(), panels: count, depth, stride };
                multiply(cx.level, size, left, panels, &mut scratch.sums, add);
                add = true;
            }
        }
        run_epilogue(cx.level, epilogue, SumBlock { rows, cols, sums: &scratch.sums, stride });
    })
}
