//! Matrix products.
//!
//! Everything that multiplies (linear layers, attention, convolutions) computes `C[i][j] = Σ_k A[i][k] · B[j][k]`
//! from two packed operands, both f32:
//!
//! - the left one, `A`, row by row in blocks of [`DEPTH`] columns, so that packing is a widening copy;
//! - the right one, `B`, in panels of `tile_cols` rows, transposed, so that one `k` of a panel is two vectors.
//!
//! The [`tile`] of `tile_rows × tile_cols` sums stays in registers for a whole block. Blocks are always summed in the
//! same order, wherever a thread's share begins. Another number format brings its own packing and its own tile: `tiles`
//! multiplies bf16 or bytes on AMX, `int8` bytes in vectors.

mod cut;
mod dots;
mod int8;
mod narrow;
mod pack;
mod product;
#[cfg(target_arch = "x86_64")]
mod tiles;
mod updates;

pub(crate) use dots::{FEW_ROWS, FewTerm, few_rows};
pub(crate) use int8::{Int8, product_of_bytes};
pub(crate) use narrow::{FEW_COLS, Narrow, narrow, narrow_scratch, padded};
pub(crate) use pack::{Packed, Rows, pack_left, pack_plain, pack_right, widen_rows};
pub(crate) use product::{Finished, ROWS_AHEAD, ROWS_AT_ONCE, Sink, Term, emit, product};
#[cfg(target_arch = "x86_64")]
pub(crate) use product::{Onto, Plain};
#[cfg(target_arch = "x86_64")]
pub(crate) use tiles::{
    ByteProduct, Halves, LINE, PAIR, Panels, STEP, SUMS, TileProduct, Turned, interleave_pair, left_line,
    product_by_rows, right_tiles,
};
pub(crate) use updates::Updates;

use crate::isa::Level;
#[cfg(target_arch = "aarch64")]
use crate::simd::Neon;
#[cfg(target_arch = "x86_64")]
use crate::simd::{Avx2, Avx512};
use crate::simd::{Portable, Simd, Tile, dispatch};

/// Columns of one block of the left operand, and its distance between rows.
///
/// A tile's rows (14 × 1.5 KiB with AVX-512) stay in the first-level cache while the panels of the right operand go by.
/// Not a power of two, which would put the rows into the same few cache sets.
pub(crate) const DEPTH: usize = 384;

impl Level {
    /// Rows of the register tile.
    pub fn tile_rows(self) -> usize {
        match self {
            Level::Portable => Portable::TILE_ROWS,
            #[cfg(target_arch = "aarch64")]
            Level::Neon(_) => Neon::TILE_ROWS,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2(_) => Avx2::TILE_ROWS,
            #[cfg(target_arch = "x86_64")]
            Level::Avx512(_) | Level::Amx(_) => Avx512::TILE_ROWS,
        }
    }

    /// Columns of the register tile: the width of a panel.
    pub fn tile_cols(self) -> usize {
        match self {
            Level::Portable => Portable::TILE_COLS,
            #[cfg(target_arch = "aarch64")]
            Level::Neon(_) => Neon::TILE_COLS,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2(_) => Avx2::TILE_COLS,
            #[cfg(target_arch = "x86_64")]
            Level::Avx512(_) | Level::Amx(_) => Avx512::TILE_COLS,
        }
    }
}

/// One register tile of `ROWS` rows.
///
/// # Safety
/// As [`Simd::tile`] with `rows = ROWS`.
#[inline(always)]
pub(crate) unsafe fn tile<S: Simd, const ROWS: usize>(s: S, t: Tile) {
    const LINE: usize = 16;
    let mut sums = [[s.splat(0.0); 2]; ROWS];
    for i in 0..ROWS {
        s.prefetch(t.c.wrapping_add(i * t.stride));
        s.prefetch(t.c.wrapping_add(i * t.stride + LINE));
    }
    for k in 0..t.depth {
        s.prefetch(t.next.wrapping_add(k * LINE));
        // SAFETY: row k of b and column k of a lie inside what the caller promises.
        unsafe {
            let b = t.b.add(k * S::TILE_COLS);
            let (b0, b1) = (s.load(b), s.load(b.add(S::LANES)));
            for (i, sum) in sums.iter_mut().enumerate() {
                let a = s.splat(*t.a.add(i * DEPTH + k));
                sum[0] = s.fma(a, b0, sum[0]);
                sum[1] = s.fma(a, b1, sum[1]);
            }
        }
    }
    for (i, sum) in sums.iter().enumerate() {
        for (j, &sum) in sum.iter().enumerate() {
            // SAFETY: the tile's row i lies inside what the caller promises.
            unsafe {
                let c = t.c.add(i * t.stride + j * S::LANES);
                s.store(c, if t.add { s.add(s.load(c), sum) } else { sum });
            }
        }
    }
}

/// The sizes of one [`multiply`].
#[derive(Clone, Copy)]
pub(crate) struct Extent {
    /// Rows of the left operand.
    pub rows: usize,
    /// Panels of the right operand.
    pub panels: usize,
    /// Summed columns, at most [`DEPTH`].
    pub depth: usize,
    /// Distance between the rows of the result.
    pub stride: usize,
}

/// Writes (or with `add` adds) the product of a packed block `a` and the packed panels `b` to `c`.
#[inline(always)]
fn multiply_kernel<S: Simd>(s: S, size: Extent, a: &[f32], b: &[f32], c: &mut [f32], add: bool) {
    let Extent { rows, panels, depth, stride } = size;
    if rows == 0 || panels == 0 {
        return;
    }
    assert!(depth <= DEPTH && a.len() >= (rows - 1) * DEPTH + depth);
    assert!(b.len() >= panels * depth * S::TILE_COLS);
    assert!(stride >= panels * S::TILE_COLS && c.len() >= (rows - 1) * stride + panels * S::TILE_COLS);
    let mut row = 0;
    while row < rows {
        let count = S::TILE_ROWS.min(rows - row);
        for panel in 0..panels {
            // SAFETY: the lengths were checked above; count is 1 to TILE_ROWS.
            unsafe {
                let here = a.as_ptr().add(row * DEPTH);
                // The following rows come from far; the panels are near since they were packed.
                let next = if panel == 0 { here.wrapping_add(count * DEPTH) } else { here };
                let tile = Tile {
                    a: here,
                    next,
                    b: b.as_ptr().add(panel * depth * S::TILE_COLS),
                    c: c.as_mut_ptr().add(row * stride + panel * S::TILE_COLS),
                    depth,
                    stride,
                    add,
                };
                s.tile(tile, count);
            }
        }
        row += count;
    }
}

dispatch! {
    /// Writes (or with `add` adds) to `c` the product of a block of the left operand and panels of the right one.
    pub(crate) fn multiply(size: Extent, a: &[f32], b: &[f32], c: &mut [f32], add: bool) => multiply_kernel;
}
