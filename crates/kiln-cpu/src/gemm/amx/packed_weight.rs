//! An int8 weight in the layout of AMX tiles.
//!
//! With it, and the direct output of `overlap`, a layer of 1536 × 3072 → 27648 takes 53 instead of 72 ms on two cores.

use kiln_ops::Result;

use super::pack::pack_right_tiles;
use super::sizes::{PAIR, TILE_ROW_BYTES};
use crate::Context;
use crate::buffer::Buffer;
use crate::isa::Amx;
use crate::parallel::DisjointMut;
use crate::simd::TILE_BYTES;

/// An int8 weight packed as right tiles: for every [`PAIR`] of rows two tiles per step, padded with zeros.
///
/// A product reads such a weight sequentially without copying its rows, and its sums come out row by row, as they are
/// written. The tiles replace the rows, so that there is no second copy of the model.
pub(crate) struct PackedInt8Weight {
    data: Buffer<u8>,
    /// Steps of [`TILE_ROW_BYTES`] per row.
    steps: usize,
}

impl PackedInt8Weight {
    /// Packs an int8 matrix of this size, whose rows `row` reads.
    pub fn new<'a>(
        cx: &Context,
        amx: Amx,
        [rows, cols]: [usize; 2],
        row: impl Fn(usize) -> &'a [u8] + Sync,
    ) -> Result<PackedInt8Weight> {
        let steps = cols.div_ceil(TILE_ROW_BYTES);
        let area = steps * 2 * TILE_BYTES;
        let pairs = rows.div_ceil(PAIR);
        let mut data = cx.buffer::<u8>(pairs.saturating_mul(area))?;
        // The rows of the scratch lie one line further apart, so that they don't share a few cache sets.
        let stride = (steps + 1) * TILE_ROW_BYTES;
        let scratch = || {
            let mut lines = cx.buffer::<u8>(PAIR * stride)?;
            lines.fill(0);
            Ok(lines)
        };
        let out = DisjointMut::new(&mut data);
        cx.pool.for_each_with(pairs, scratch, |pair, lines| {
            for (i, line) in lines.chunks_exact_mut(stride).enumerate() {
                if pair * PAIR + i < rows {
                    line[..cols].copy_from_slice(row(pair * PAIR + i));
                } else {
                    line.fill(0);
                }
            }
            // SAFETY: every task has tiles of its own.
            let out = unsafe { out.slice(pair * area..(pair + 1) * area) };
            // SAFETY: the token proves AVX-512.
            unsafe { pack_right_tiles(amx, lines, stride, steps, out) };
        })?;
        Ok(PackedInt8Weight { data, steps })
    }

    /// The tiles of the `pair`th [`PAIR`] of rows from byte `from` of a row on; empty past the last pair.
    pub fn tiles(&self, pair: usize, from: usize) -> &[u8] {
        let area = self.steps * 2 * TILE_BYTES;
        self.data
            .get(pair * area + from / TILE_ROW_BYTES * 2 * TILE_BYTES..(pair + 1) * area)
            .unwrap_or_default()
    }

    /// Writes `scale` times a row, from column `from` on: what gradients through the weight read. A line of a tile has four
    /// columns of 16 rows, so that neighbouring rows find it in the cache.
    pub fn dequantize_row(&self, row: usize, from: usize, scale: f32, out: &mut [f32]) {
        let tiles = &self.tiles(row / PAIR, 0)[row % PAIR / 16 * TILE_BYTES..];
        let mut out = out.iter_mut();
        let mut skip = from % 4;
        for group in from / 4.. {
            let line = group / 16 * 2 * TILE_BYTES + group % 16 * TILE_ROW_BYTES;
            let Some(columns) = tiles.get(line + row % 16 * 4..).and_then(|rest| rest.get(skip..4)) else {
                return;
            };
            for &column in columns {
                let Some(out) = out.next() else { return };
                *out = f32::from(column as i8) * scale;
            }
            skip = 0;
        }
    }
}
