//! Products of bf16 in AMX tiles whose right operand is small and packed as a whole: convolutions.
//!
//! Here the rows of the left operand come as left tiles, packed a [`PAIR`] at a time and used at once, so that sums
//! come out row by row and a convolution's patches are never stored as a whole.

use std::ops::Range;

use kiln_ops::Result;
use kiln_tensor::bf16;

use super::pack::{LINE, PAIR, SUMS, left_line};
use super::panels::{BLOCK, Halves, Panels};
use crate::Context;
use crate::buffer::Buffer;
use crate::gemm::{Finished, Sink, emit};
use crate::simd::{Amx, Left, OfHalves, Pair};

/// Sums that a thread collects at once (512 KiB), over which a block of the right operand (512 KiB for 512 columns)
/// stays in the second-level cache.
const SUMS_AT_ONCE: usize = 1 << 17;

/// A thread's own memory.
struct Scratch {
    /// [`PAIR`] rows of a block of columns as left tiles.
    left: Buffer<u8>,
    /// Squares of sums: for every pair of rows, for every pair of columns.
    tiles: Buffer<f32>,
    /// The sums of [`PAIR`] rows.
    sums: Buffer<f32>,
}

/// Hands `left · rightᵀ`, this many rows of it, to the sink.
pub(crate) fn product_by_rows<K: Sink>(
    cx: &Context,
    amx: Amx,
    left: &impl Halves,
    rows: usize,
    right: &Panels,
    sink: &K,
) -> Result<()> {
    let pairs = right.rows.len().div_ceil(PAIR);
    let stride = pairs * PAIR;
    let fair = rows.div_ceil(4 * cx.pool.threads());
    let strip = (SUMS_AT_ONCE / stride).clamp(PAIR, 1024).min(fair).next_multiple_of(PAIR);
    let scratch = || {
        Ok(Scratch {
            left: cx.buffer(PAIR * BLOCK)?,
            tiles: cx.buffer(strip * stride)?,
            sums: cx.buffer(PAIR * stride)?,
        })
    };
    cx.pool.each_with(rows.div_ceil(strip), scratch, |task, scratch| {
        let first = task * strip;
        let end = rows.min(first + strip);
        let mut tiles = amx.tiles();
        for from in (0..right.depth).step_by(BLOCK) {
            let columns = from..right.depth.min(from + BLOCK);
            let steps = columns.len().div_ceil(LINE);
            for (row, squares) in (first..end).step_by(PAIR).zip(scratch.tiles.chunks_exact_mut(pairs * SUMS))
            {
                // SAFETY: the token proves AVX-512.
                unsafe { pack(left, row..end, columns.clone(), &mut scratch.left) };
                for (pair, sums) in squares.chunks_exact_mut(SUMS).enumerate() {
                    let (a, b) = (Left::Tiles(scratch.left.as_ptr()), right.tiles(from, pair).as_ptr());
                    let pair = Pair { a, b, c: sums.as_mut_ptr().cast(), steps, add: from > 0 };
                    // SAFETY: two tiles a step in the packed rows and in b, four tiles of sums.
                    unsafe { tiles.multiply::<OfHalves>(pair, |_| ()) };
                }
            }
        }
        drop(tiles);
        let squares = scratch.tiles.chunks_exact(pairs * SUMS);
        for (row, squares) in (first..end).step_by(PAIR).zip(squares) {
            // SAFETY: the token proves AVX-512.
            unsafe { line_up(squares, &mut scratch.sums) };
            let rows = row..end.min(row + PAIR);
            emit(cx.level, sink, Finished { rows, cols: right.rows.clone(), sums: &scratch.sums, stride });
        }
    })
}

/// Makes left tiles of bytes `columns` of up to [`PAIR`] rows, zeros where there is nothing.
///
/// # Safety
/// The machine has AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn pack(left: &impl Halves, rows: Range<usize>, columns: Range<usize>, out: &mut [u8]) {
    let mut line = [bf16::ZERO; BLOCK / 2];
    for i in 0..PAIR {
        let inside = if rows.start + i < rows.end { columns.len() / 2 } else { 0 };
        left.copy(rows.start + i, columns.start / 2, &mut line[..inside]);
        left_line(bytemuck::cast_slice(&line[..inside]), i, columns.len().div_ceil(LINE), out);
    }
}

/// Puts the rows of squares of sums side by side.
///
/// # Safety
/// The machine has AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn line_up(squares: &[f32], out: &mut [f32]) {
    let stride = squares.len() / PAIR;
    for (pair, square) in squares.chunks_exact(SUMS).enumerate() {
        for (tile, values) in square.chunks_exact(256).enumerate() {
            for (i, values) in values.chunks_exact(16).enumerate() {
                let at = (tile / 2 * 16 + i) * stride + pair * PAIR + tile % 2 * 16;
                out[at..at + 16].copy_from_slice(values);
            }
        }
    }
}
