//! The blocked product of operands packed in f32 or another [`PackedFormat`], for every weight format that is widened to it.

use std::ops::Range;

use kiln_ops::Result;

use super::blocks::{BlockGrid, BlockSizes, BlockTask, ScratchSizes};
use super::{Epilogue, GemmSize, PackedFormat, PackedUpdates, RowSource, SumBlock, Term, run_epilogue};
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

/// Columns of a block. Their panels (196 KiB) and sums stay in the L2 cache.
const NC: usize = 128;
/// Rows of a block: the weight is packed once per block of rows.
pub(crate) const MC: usize = 1344;

/// `term.left · term.rightᵀ + Σ update.left · update.rightᵀ`, of a term that contributes to all columns, from 0 on.
pub(crate) struct PackedGemm<'a, P: PackedFormat, R> {
    pub cx: &'a Context,
    pub format: P,
    pub term: Term<'a, R, P>,
    pub orientation: Orientation,
    /// Stored as [`Orientation::ColsByDepth`].
    pub updates: &'a [Term<'a, R>],
}

impl<P: PackedFormat, R: RowSource + Send> PackedGemm<'_, P, R> {
    /// Computes these rows, which every left operand has.
    pub fn run<E: Epilogue>(&self, rows: Range<usize>, epilogue: &E) -> Result<()> {
        let PackedGemm { cx, format, ref term, orientation, updates } = *self;
        let (tile_rows, tile_cols) = (format.tile_rows(), format.tile_cols());
        let sizes = BlockSizes {
            tile_rows,
            max_rows: MC,
            min_rows: 4 * tile_rows,
            max_cols: NC,
            min_cols: NC,
            group_cols: 1,
        };
        let grid = BlockGrid::balanced(cx.pool.threads(), [rows.len(), term.cols.len()], &sizes);
        let stride = grid.block_cols.next_multiple_of(tile_cols);
        let scratch = ScratchSizes {
            packed: stride * KC * size_of::<P::Element>(),
            sums: grid.block_rows * stride,
            updates: PackedUpdates::panels_len(updates, stride),
            ..ScratchSizes::default()
        };
        grid.run(cx, scratch, |BlockTask { block, .. }, scratch| {
            let cols = block.cols;
            let rows = rows.start + block.rows.start..rows.start + block.rows.end;
            let panels: &mut [P::Element] = bytemuck::cast_slice_mut(&mut scratch.packed);
            let count = cols.len().div_ceil(tile_cols);
            for (from, depth, left) in term.left.blocks(rows.clone()) {
                let panels = &mut panels[..format.panels_len(count, depth)];
                match orientation {
                    Orientation::ColsByDepth => {
                        format.pack_right(&term.right, cols.start, from, depth, panels);
                    }
                    Orientation::DepthByCols => {
                        let width = cols.len();
                        format.pack_right_kn(&term.right, from, cols.start, width, depth, panels);
                    }
                }
                let size = GemmSize { rows: rows.len(), panels: count, depth, stride };
                format.multiply(size, left, panels, &mut scratch.sums, from > 0);
            }
            let updates = PackedUpdates::pack(cx, updates, &cols, stride, &mut scratch.updates);
            updates.add(cx, &rows, stride, &scratch.updates, &mut scratch.sums);
            run_epilogue(cx.level, epilogue, SumBlock { rows, cols, sums: &scratch.sums, stride });
        })
    }
}
