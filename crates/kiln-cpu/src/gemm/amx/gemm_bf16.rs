//! Linear layers of bf16 in AMX tiles.
//!
//! Computed as `yᵀ = W · xᵀ`: the rows of the weight already have the layout of left tiles and need no transpose; only
//! the activations are rearranged, once for all weight rows. A step multiplies 32 weight rows by 32 tokens over 64
//! bytes of each. Steps are summed in the same order whatever the blocks.
//!
//! A step takes 48 ns (the tiles alone 28), and 53 if weight rows are copied before the products. No gain: copying the next
//! rows between products (57 ns), strips of tokens that stay in the L2 cache (60 to 90), 512 weight rows at once,
//! prefetching every other line; writing sums between the next quad's products makes a layer 5 to 10 % slower.

use std::arch::x86_64::_mm_sfence;
use std::ops::Range;

use kiln_ops::Result;
use kiln_tensor::bf16;

use super::operand::TiledOperand;
use super::pack::pack_left_row;
use super::prefetch::{BYTES_PER_STEP, prefetch_rows, prefetch_step};
use super::sizes::{GROUP_COLS, KC_BYTES, NC, PAIR, QUAD_SUMS, TILE_ROW_BYTES, block_sizes, row_pairs};
use super::transpose::transpose_quad;
use crate::Context;
use crate::element::convert;
use crate::gemm::blocks::{Block, BlockGrid, BlockTask, Scratch, ScratchSizes};
use crate::gemm::{Epilogue, PackedUpdates, RowSource, SumBlock, Term, run_epilogue};
use crate::isa::Amx;
use crate::matrix::{Format, StackedMatrix};
use crate::simd::{Bf16Tiles, LeftOperand, TileOperands, TileRegisters};

/// `left · weightᵀ + Σ update.left · update.rightᵀ`.
pub(crate) struct AmxBf16Gemm<'a, R> {
    pub cx: &'a Context,
    pub amx: Amx,
    /// The tokens as right tiles of bf16.
    pub left: &'a TiledOperand,
    /// In bf16 or packed.
    pub weight: &'a StackedMatrix,
    pub updates: &'a [Term<'a, R>],
}

impl<R: RowSource + Send> AmxBf16Gemm<'_, R> {
    /// Computes all rows of `left`.
    pub fn run<E: Epilogue>(&self, epilogue: &E) -> Result<()> {
        let AmxBf16Gemm { cx, left, weight, .. } = *self;
        let sizes = block_sizes(NC, GROUP_COLS);
        let grid = BlockGrid::balanced(cx.pool.threads(), [left.rows.len(), weight.rows], &sizes);
        let scratch = ScratchSizes {
            packed: PAIR * KC_BYTES,
            tile_sums: grid.block_rows * grid.block_cols,
            sums: PAIR * grid.block_cols,
            updates: PackedUpdates::panels_len(self.updates, grid.block_cols),
            ..ScratchSizes::default()
        };
        grid.run(cx, scratch, |BlockTask { block, next, .. }, scratch| {
            let mut tiles = self.amx.configure_tiles();
            self.multiply(&mut tiles, &block, &next, scratch);
            drop(tiles);
            self.finish(block, scratch, epilogue);
            // The epilogue may use non-temporal stores; other threads must see them once the task is over.
            // SAFETY: every machine with AMX has this instruction.
            unsafe { _mm_sfence() };
        })
    }

    /// Computes the sums of a block, in quads: for every pair of weight rows, for every pair of tokens.
    fn multiply(&self, tiles: &mut TileRegisters, block: &Block, next: &Block, scratch: &mut Scratch) {
        let AmxBf16Gemm { left, weight, .. } = *self;
        let (cols, pairs) = (&block.cols, row_pairs(block));
        for from in (0..left.depth).step_by(KC_BYTES) {
            let depth = from..left.depth.min(from + KC_BYTES);
            let last = depth.end == left.depth;
            // The next tokens to be read, which are far away, are prefetched during this depth block.
            let next_tokens =
                if last { left.block(0, row_pairs(next)) } else { left.block(depth.end, pairs.clone()) };
            for (j, col) in cols.clone().step_by(PAIR).enumerate() {
                let in_place = self.rows_in_place(col..cols.end, depth.clone());
                if in_place.is_none() {
                    let out = &mut scratch.packed;
                    // SAFETY: the token proves AVX-512.
                    unsafe { pack_left_tiles(self.amx, weight, col..cols.end, depth.clone(), out) };
                }
                let next_rows = match (col + PAIR < cols.end, last) {
                    (true, _) => self.rows_in_place(col + PAIR..cols.end, depth.clone()),
                    (false, false) => self.rows_in_place(cols.clone(), depth.end..left.depth),
                    (false, true) => self.rows_in_place(next.cols.clone(), 0..left.depth),
                };
                for (i, pair) in pairs.clone().enumerate() {
                    let quad = j * pairs.len() + i;
                    let tokens_ahead = quad * KC_BYTES / TILE_ROW_BYTES * BYTES_PER_STEP;
                    let tokens_ahead = next_tokens.get(tokens_ahead..).unwrap_or_default();
                    // The next weight rows are shared out among the products of this pair of rows.
                    let share = |i: usize| i * PAIR / pairs.len();
                    let rows_ahead = share(i)..share(i + 1);
                    let packed = scratch.packed.as_mut_ptr();
                    let a = match in_place {
                        // The first product copies the rows into tiles for the others.
                        Some((rows, stride)) if i == 0 => {
                            LeftOperand::Rows { first: rows.as_ptr(), stride, tiles: packed }
                        }
                        _ => LeftOperand::Tiles(packed),
                    };
                    let operands = TileOperands {
                        a,
                        b: left.tiles(from, pair).as_ptr(),
                        c: scratch.tile_sums[quad * QUAD_SUMS..][..QUAD_SUMS].as_mut_ptr().cast(),
                        steps: depth.len().div_ceil(TILE_ROW_BYTES),
                        add: from > 0,
                    };
                    let prefetch = |step| {
                        if let Some((rows, stride)) = next_rows {
                            prefetch_rows(rows, stride, rows_ahead.clone(), step);
                        }
                        prefetch_step(tokens_ahead, step);
                    };
                    // SAFETY: two tiles per step in the packed weight and in b, or rows of as many bytes; four tiles of
                    // sums.
                    unsafe { tiles.multiply::<Bf16Tiles>(operands, prefetch) };
                }
            }
        }
    }

    /// Transposes the sums of a block, adds the updates and applies the epilogue.
    fn finish<E: Epilogue>(&self, Block { rows, cols }: Block, scratch: &mut Scratch, epilogue: &E) {
        let AmxBf16Gemm { cx, left, .. } = *self;
        let width = cols.len().next_multiple_of(PAIR);
        let pairs = rows.len().div_ceil(PAIR);
        let updates = PackedUpdates::pack(cx, self.updates, &cols, width, &mut scratch.updates);
        for (i, row) in rows.clone().step_by(PAIR).enumerate() {
            for j in 0..width / PAIR {
                let quad = &scratch.tile_sums[(j * pairs + i) * QUAD_SUMS..][..QUAD_SUMS];
                // SAFETY: the token proves AVX-512.
                unsafe { transpose_quad(quad, width, &mut scratch.sums[j * PAIR..]) };
            }
            let rows = left.rows.start + row..left.rows.start + rows.end.min(row + PAIR);
            updates.add(cx, &rows, width, &scratch.updates, &mut scratch.sums);
            let sums = SumBlock { rows, cols: cols.clone(), sums: &scratch.sums, stride: width };
            run_epilogue(cx.level, epilogue, sums);
        }
    }

    /// Bytes `depth` of the first [`PAIR`] of some weight rows, and their stride, if tiles can be loaded directly from
    /// the weight: all rows and whole 64-byte lines of them must be there.
    fn rows_in_place(&self, rows: Range<usize>, depth: Range<usize>) -> Option<(&[u8], usize)> {
        if self.weight.format == Format::Packed
            || rows.len() < PAIR
            || !depth.len().is_multiple_of(TILE_ROW_BYTES)
        {
            return None;
        }
        let (bytes, stride) = self.weight.contiguous_rows(rows.start..rows.start + PAIR)?;
        Some((&bytes[depth.start..], stride))
    }
}

/// Packs bytes `columns` of up to [`PAIR`] rows of a weight as left tiles, with zeros for rows that are missing.
///
/// Tiles are not loaded from the weight's own rows every time: these lie a multiple of a large power of two apart, so
/// that the L1 cache can't hold 32 of them, they begin anywhere in a cache line, and they are read once for
/// every [`PAIR`] of tokens.
///
/// # Safety
/// The machine has AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn pack_left_tiles(
    amx: Amx,
    weight: &StackedMatrix,
    rows: Range<usize>,
    columns: Range<usize>,
    out: &mut [u8],
) {
    if weight.format == Format::Packed {
        return pack_left_tiles_unpacked(amx, weight, rows, columns, out);
    }
    for i in 0..PAIR {
        let inside = rows.start + i < rows.end;
        let bytes = if inside { &weight.row(rows.start + i)[columns.clone()] } else { &[] };
        pack_left_row(bytes, i, columns.len().div_ceil(TILE_ROW_BYTES), out);
    }
}

/// [`pack_left_tiles`] for a packed weight, whose values are rounded to bf16.
#[inline(always)]
fn pack_left_tiles_unpacked(
    amx: Amx,
    weight: &StackedMatrix,
    rows: Range<usize>,
    columns: Range<usize>,
    out: &mut [u8],
) {
    let (mut wide, mut row) = ([0f32; KC_BYTES / 2], [bf16::ZERO; KC_BYTES / 2]);
    for i in 0..PAIR {
        let inside = if rows.start + i < rows.end { columns.len() / 2 } else { 0 };
        if inside > 0 {
            weight.unpack(amx.avx512(), rows.start + i, columns.start / 2, &mut wide[..inside]);
            convert(amx.avx512(), &wide[..inside], &mut row[..inside]);
        }
        pack_left_row(bytemuck::cast_slice(&row[..inside]), i, columns.len().div_ceil(TILE_ROW_BYTES), out);
    }
}
