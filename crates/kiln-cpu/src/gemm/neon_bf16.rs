//! Operands of bf16 for the matrix instructions of 64-bit ARM.
//!
//! The left one keeps its rows. The right one becomes panels of [`MMLA_TILE`] rows, which
//! [`pair_columns`] arranges in squares of 4 × 4 words of two values. Sums are f32.

use kiln_tensor::bf16;

use super::{GemmSize, PackedFormat, RowSource};
use crate::element::convert;
use crate::isa::Bf16;
use crate::simd::{KC, MMLA_TILE, WordTileArgs, mmla_tile, pair_columns};

/// Values of a word.
const PER_WORD: usize = 2;
/// Values of the four words that a square has of each row.
const STEP: usize = 4 * PER_WORD;

/// Writes the rows of a panel, [`KC`] apart and with zeros up to `depth`, as the microkernel reads them.
fn pair_panel(rows: &[bf16; MMLA_TILE * KC], depth: usize, out: &mut [bf16]) {
    assert!(depth <= KC && depth.is_multiple_of(STEP) && out.len() >= MMLA_TILE * depth);
    for k in (0..depth).step_by(STEP) {
        for j in (0..MMLA_TILE).step_by(4) {
            // SAFETY: four rows of four words inside both: k + STEP <= depth <= KC, j + 4 <= MMLA_TILE.
            unsafe {
                let from = rows.as_ptr().add(j * KC + k).cast();
                let to = out.as_mut_ptr().cast::<u32>().add(k / PER_WORD * MMLA_TILE + j);
                pair_columns(from, KC / PER_WORD, to, MMLA_TILE);
            }
        }
    }
}

impl PackedFormat for Bf16 {
    type Element = bf16;
    const DEPTH_STEP: usize = STEP;
    const ROUNDS: bool = true;

    fn tile_rows(self) -> usize {
        MMLA_TILE
    }

    fn tile_cols(self) -> usize {
        MMLA_TILE
    }

    fn pack_left<R: RowSource>(self, source: &R, first: usize, from: usize, depth: usize, out: &mut [bf16]) {
        for (i, out) in out.chunks_mut(KC).enumerate() {
            source.read_row_bf16(self.neon(), first + i, from, &mut out[..depth]);
            out[depth..depth.next_multiple_of(STEP)].fill(bf16::ZERO);
        }
    }

    fn pack_right<R: RowSource>(self, source: &R, first: usize, from: usize, depth: usize, out: &mut [bf16]) {
        let padded = depth.next_multiple_of(STEP);
        let mut rows = [bf16::ZERO; MMLA_TILE * KC];
        for (panel, out) in out.chunks_exact_mut(MMLA_TILE * padded).enumerate() {
            for (j, row) in rows.chunks_mut(KC).enumerate() {
                source.read_row_bf16(self.neon(), first + panel * MMLA_TILE + j, from, &mut row[..depth]);
            }
            pair_panel(&rows, padded, out);
        }
    }

    fn pack_right_kn<R: RowSource>(
        self,
        source: &R,
        first: usize,
        from: usize,
        width: usize,
        depth: usize,
        out: &mut [bf16],
    ) {
        let padded = depth.next_multiple_of(STEP);
        let mut rows = [bf16::ZERO; MMLA_TILE * KC];
        for (panel, out) in out.chunks_exact_mut(MMLA_TILE * padded).enumerate() {
            let col = panel * MMLA_TILE;
            let inside = MMLA_TILE.min(width.saturating_sub(col));
            for k in 0..depth {
                let mut values = [bf16::ZERO; MMLA_TILE];
                source.read_row_bf16(self.neon(), first + k, from + col, &mut values[..inside]);
                for (j, value) in values.into_iter().enumerate() {
                    rows[j * KC + k] = value;
                }
            }
            pair_panel(&rows, padded, out);
        }
    }

    fn round_left<'a>(self, rows: &'a [f32], count: usize, depth: usize, out: &'a mut [bf16]) -> &'a [bf16] {
        for (row, out) in rows.chunks(KC).zip(out.chunks_mut(KC)).take(count) {
            convert(self.neon(), &row[..depth], &mut out[..depth]);
            out[depth..depth.next_multiple_of(STEP)].fill(bf16::ZERO);
        }
        out
    }

    fn multiply(self, size: GemmSize, a: &[bf16], b: &[bf16], c: &mut [f32], add: bool) {
        // SAFETY: the token proves the instructions.
        unsafe { multiply(self, size, a, b, c, add) }
    }
}

/// # Safety
/// The machine multiplies matrices of bf16, as the token proves.
#[target_feature(enable = "neon,bf16")]
unsafe fn multiply(unit: Bf16, size: GemmSize, a: &[bf16], b: &[bf16], c: &mut [f32], add: bool) {
    let GemmSize { rows, panels, depth, stride } = size;
    if rows == 0 || panels == 0 {
        return;
    }
    let depth = depth.next_multiple_of(STEP);
    assert!(depth <= KC && a.len() >= (rows - 1) * KC + depth);
    assert!(b.len() >= panels * depth * MMLA_TILE);
    assert!(stride >= panels * MMLA_TILE && c.len() >= (rows - 1) * stride + panels * MMLA_TILE);
    for row in (0..rows).step_by(MMLA_TILE) {
        for panel in 0..panels {
            // SAFETY: the lengths were checked above.
            unsafe {
                let args = WordTileArgs {
                    a: a.as_ptr().add(row * KC).cast(),
                    a_stride: KC / PER_WORD,
                    b: b.as_ptr().add(panel * depth * MMLA_TILE).cast(),
                    c: c.as_mut_ptr().add(row * stride + panel * MMLA_TILE).cast(),
                    stride,
                    depth: depth / PER_WORD,
                    add,
                };
                mmla_tile(unit, args, MMLA_TILE.min(rows - row));
            }
        }
    }
}
