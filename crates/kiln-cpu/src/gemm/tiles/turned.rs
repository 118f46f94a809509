//! A weight of bytes that lies as the tiles want it.

use kiln_ops::Result;

use super::pack::{LINE, PAIR, right_tiles};
use crate::Context;
use crate::buffer::Buffer;
use crate::parallel::Disjoint;
use crate::simd::{Amx, TILE_BYTES};
use crate::weight::Stack;

/// Rows as right tiles: for every [`PAIR`] of them two tiles a step, zeros where there is nothing.
///
/// A weight in tiles is read from one end to the other, no product has to copy its rows, and the sums come out token by
/// token, as they are written. It takes the place of the rows, so that there is no second copy of the model.
pub(crate) struct Turned {
    data: Buffer<u8>,
    /// Steps of [`LINE`] bytes of a row.
    steps: usize,
}

impl Turned {
    /// Turns the rows of a stack of bytes.
    pub fn new(cx: &Context, amx: Amx, stack: &Stack) -> Result<Turned> {
        let steps = stack.cols.div_ceil(LINE);
        let area = steps * 2 * TILE_BYTES;
        let pairs = stack.rows.div_ceil(PAIR);
        let mut data = cx.buffer::<u8>(pairs.saturating_mul(area))?;
        // Rows of the scratch lie a line further apart, so that they don't share the few sets of a cache.
        let stride = (steps + 1) * LINE;
        let scratch = || {
            let mut lines = cx.buffer::<u8>(PAIR * stride)?;
            lines.fill(0);
            Ok(lines)
        };
        let out = Disjoint::new(&mut data);
        cx.pool.each_with(pairs, scratch, |pair, lines| {
            for (i, line) in lines.chunks_exact_mut(stride).enumerate() {
                match pair * PAIR + i < stack.rows {
                    true => line[..stack.cols].copy_from_slice(stack.row(pair * PAIR + i)),
                    false => line.fill(0),
                }
            }
            // SAFETY: every task has tiles of its own.
            let out = unsafe { out.slice(pair * area..(pair + 1) * area) };
            // SAFETY: the token proves AVX-512.
            unsafe { right_tiles(amx, lines, stride, steps, out) };
        })?;
        Ok(Turned { data, steps })
    }

    /// The tiles of the `pair`th [`PAIR`] of rows, of the block of columns that begins at byte `from`; none beyond the
    /// last one.
    pub fn tiles(&self, pair: usize, from: usize) -> &[u8] {
        let area = self.steps * 2 * TILE_BYTES;
        self.data.get(pair * area + from / LINE * 2 * TILE_BYTES..(pair + 1) * area).unwrap_or_default()
    }
}
