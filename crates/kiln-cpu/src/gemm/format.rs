//! The number formats that operands are packed in: f32 in the vectors of every instruction set, bf16 where vectors multiply it.

use bytemuck::Pod;

use super::multiply::multiply;
use super::pack::{pack_left, pack_right, pack_right_kn};
use super::{GemmSize, RowSource};
use crate::isa::Level;

/// How operands are packed, and the product of two of them. A value of the type proves that the machine has the
/// instructions.
pub(crate) trait PackedFormat: Copy + Send + Sync {
    type Element: Pod + Send + Sync;
    /// The depth of a packed block is a multiple of this; zeros pad it.
    const DEPTH_STEP: usize;
    /// Whether packing rounds f32.
    const ROUNDS: bool;

    /// Rows of the register tile (MR).
    fn tile_rows(self) -> usize;

    /// Columns of the register tile (NR): the width of a panel.
    fn tile_cols(self) -> usize;

    /// Packs columns `from..from + depth` of the rows from `first` on, [`KC`](crate::simd::KC) apart, as many as `out` has
    /// room for.
    fn pack_left<R: RowSource>(
        self,
        source: &R,
        first: usize,
        from: usize,
        depth: usize,
        out: &mut [Self::Element],
    );

    /// Packs columns `from..from + depth` of the rows from `first` on, as many panels as `out` has room for.
    fn pack_right<R: RowSource>(
        self,
        source: &R,
        first: usize,
        from: usize,
        depth: usize,
        out: &mut [Self::Element],
    );

    /// Packs a right operand stored as `[depth, columns]`: `depth` rows from `first` on, the first `width` columns from
    /// `from` on, as many panels as `out` has room for.
    fn pack_right_kn<R: RowSource>(
        self,
        source: &R,
        first: usize,
        from: usize,
        width: usize,
        depth: usize,
        out: &mut [Self::Element],
    );

    /// Writes (or with `add` adds) to `c` the product of a block of the left operand and panels of the right one.
    fn multiply(self, size: GemmSize, a: &[Self::Element], b: &[Self::Element], c: &mut [f32], add: bool);

    /// Rows of f32, [`KC`](crate::simd::KC) apart, as a left operand of this depth: as they are, or rounded to `out`.
    fn round_left<'a>(
        self,
        rows: &'a [f32],
        count: usize,
        depth: usize,
        out: &'a mut [Self::Element],
    ) -> &'a [Self::Element];

    /// The length of this many panels of a right operand.
    fn panels_len(self, panels: usize, depth: usize) -> usize {
        panels * self.tile_cols() * depth.next_multiple_of(Self::DEPTH_STEP)
    }
}

impl PackedFormat for Level {
    type Element = f32;
    const DEPTH_STEP: usize = 1;
    const ROUNDS: bool = false;

    fn tile_rows(self) -> usize {
        Level::tile_rows(self)
    }

    fn tile_cols(self) -> usize {
        Level::tile_cols(self)
    }

    fn pack_left<R: RowSource>(self, source: &R, first: usize, from: usize, depth: usize, out: &mut [f32]) {
        pack_left(self, source, first, from, depth, out);
    }

    fn pack_right<R: RowSource>(self, source: &R, first: usize, from: usize, depth: usize, out: &mut [f32]) {
        pack_right(self, source, first, from, depth, out);
    }

    fn pack_right_kn<R: RowSource>(
        self,
        source: &R,
        first: usize,
        from: usize,
        width: usize,
        depth: usize,
        out: &mut [f32],
    ) {
        pack_right_kn(self, source, first, from, width, depth, out);
    }

    fn round_left<'a>(self, rows: &'a [f32], _: usize, _: usize, _: &'a mut [f32]) -> &'a [f32] {
        rows
    }

    fn multiply(self, size: GemmSize, a: &[f32], b: &[f32], c: &mut [f32], add: bool) {
        multiply(self, size, a, b, c, add);
    }
}
