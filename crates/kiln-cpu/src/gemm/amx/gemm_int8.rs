//! Linear layers of int8 in AMX tiles: tokens are left tiles, the weight is already packed as right ones.
//!
//! Per tile product on one thread (the tiles alone take 7.0 ns): 128 columns with resident tokens 9.2 to 9.8 ns, 256 columns
//! with tokens fetched per task 10.0; 13.2 without the load hint on the changing operand. Sums of 3 × 2, 4 × 1 or 6 × 1 tiles
//! instead of 2 × 2 are no faster (9.7, 11.4, 12.5).

use std::arch::x86_64::*;

use kiln_ops::Result;

use super::operand::TiledOperand;
use super::overlap::{FinishedQuad, ROWS_PER_STEP};
use super::packed_weight::PackedInt8Weight;
use super::prefetch::{BYTES_PER_STEP, LINES_PER_STEP, prefetch_step};
use super::sizes::{GROUP_COLS, KC_BYTES, MC, NC, PAIR, QUAD_SUMS, TILE_ROW_BYTES, block_sizes, row_pairs};
use crate::Context;
use crate::gemm::blocks::{Block, BlockGrid, BlockTask, Scratch, ScratchSizes};
use crate::gemm::{DirectOutput, Epilogue, PackedUpdates, RowSource, SumBlock, Term, run_epilogue};
use crate::isa::Amx;
use crate::simd::{Int8Tiles, LeftOperand, TileOperands, TileRegisters};

// The steps of a depth block write no more rows than a quad has.
const _: () = assert!(KC_BYTES / TILE_ROW_BYTES * ROWS_PER_STEP <= PAIR);

/// Bytes of a block's tokens that stay in the L2 cache from one task to the next if little else is there. Up to
/// this size, blocks have fewer columns and groups have more blocks.
const L2_TOKEN_BYTES: usize = 5 << 18;
/// Columns of a block, and column blocks per group, when the tokens stay in that cache.
const NC_RESIDENT: usize = 128;
const GROUP_COLS_RESIDENT: usize = 16;

/// Tokens whose sums are dequantized at once: they stay in the L1 cache until the epilogue has read them.
const TOKENS_PER_EPILOGUE: usize = 16;

/// `left · weightᵀ + Σ update.left · update.rightᵀ`.
pub(crate) struct AmxInt8Gemm<'a, R> {
    pub cx: &'a Context,
    pub amx: Amx,
    /// The tokens as left tiles of int8.
    pub left: &'a TiledOperand,
    pub weight: &'a PackedInt8Weight,
    /// The scale of each weight row.
    pub scales: &'a [f32],
    pub updates: &'a [Term<'a, R>],
}

/// Which tokens are in the L2 cache and need no prefetching.
struct ResidentTokens {
    /// This task's tokens, which the previous task used.
    this: bool,
    /// The next task's tokens, which this task uses.
    next: bool,
}

impl<R: RowSource + Send> AmxInt8Gemm<'_, R> {
    /// Computes all rows of `left`.
    pub fn run<E: Epilogue>(&self, epilogue: &E) -> Result<()> {
        let AmxInt8Gemm { cx, left, .. } = *self;
        // Packed weights don't push the tokens out of the cache.
        let resident = MC * left.depth <= L2_TOKEN_BYTES;
        let sizes = if resident {
            block_sizes(NC_RESIDENT, GROUP_COLS_RESIDENT)
        } else {
            block_sizes(NC, GROUP_COLS)
        };
        let grid = BlockGrid::balanced(cx.pool.threads(), [left.rows.len(), self.scales.len()], &sizes);
        let scratch = ScratchSizes {
            tile_sums: grid.block_rows * grid.block_cols,
            sums: TOKENS_PER_EPILOGUE * grid.block_cols,
            updates: PackedUpdates::panels_len(self.updates, grid.block_cols),
            col_scales: grid.block_cols,
            ..ScratchSizes::default()
        };
        grid.run(cx, scratch, |task, scratch| {
            let BlockTask { block, next, previous_rows } = task;
            let resident = ResidentTokens {
                this: resident && previous_rows == block.rows,
                next: resident && next.rows == block.rows,
            };
            let mut tiles = self.amx.configure_tiles();
            // SAFETY: the token proves AVX-512.
            let written = unsafe { self.multiply(&mut tiles, [&block, &next], resident, scratch, epilogue) };
            drop(tiles);
            if !written {
                self.finish(block, scratch, epilogue);
            }
            // Results may be written by non-temporal stores; other threads must see them once the task is over.
            // SAFETY: every machine with AMX has this instruction.
            unsafe { _mm_sfence() };
        })
    }

    /// Computes the sums of a block, in quads: for every pair of columns, for every pair of tokens. If the epilogue gives
    /// a direct output, writes the results, too, those of one quad while the tiles compute the next one; returns whether
    /// it did.
    ///
    /// # Safety
    /// The machine has AVX-512.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn multiply<E: Epilogue>(
        &self,
        tiles: &mut TileRegisters,
        [block, next]: [&Block; 2],
        resident: ResidentTokens,
        scratch: &mut Scratch,
        epilogue: &E,
    ) -> bool {
        let s = self.amx.avx512();
        let outputs = self.direct_outputs(block, epilogue);
        let mut done: Option<FinishedQuad> = None;
        let AmxInt8Gemm { left, weight, .. } = *self;
        let (tokens, cols) = (row_pairs(block), block.cols.start / PAIR..block.cols.end.div_ceil(PAIR));
        // The next weight tiles, `PAIR` lines per step, are shared out among the products of a pair of columns: a product
        // prefetches `share` times `LINES_PER_STEP` of them per step, all but the first of which before it begins.
        let share = (PAIR / LINES_PER_STEP).div_ceil(tokens.len());
        for from in (0..left.depth).step_by(KC_BYTES) {
            let end = left.depth.min(from + KC_BYTES);
            let steps = (end - from).div_ceil(TILE_ROW_BYTES);
            let last = end == left.depth;
            // The next tokens to be read, which may be far away, are prefetched during this depth block.
            let next_tokens = match (last, &resident) {
                (false, ResidentTokens { this: true, .. }) | (true, ResidentTokens { next: true, .. }) => &[],
                (false, _) => left.block(end, tokens.clone()),
                (true, _) => left.block(0, row_pairs(next)),
            };
            for (j, col) in cols.clone().enumerate() {
                let right = weight.tiles(col, from);
                let next_weight = match (col + 1 < cols.end, last) {
                    (true, _) => weight.tiles(col + 1, from),
                    (false, false) => weight.tiles(cols.start, end),
                    (false, true) => weight.tiles(next.cols.start / PAIR, 0),
                };
                for (i, pair) in tokens.clone().enumerate() {
                    let quad = j * tokens.len() + i;
                    let bytes = |products: usize| products * steps * BYTES_PER_STEP;
                    let weight_ahead = bytes(i * share)..bytes(PAIR / LINES_PER_STEP);
                    let weight_ahead = next_weight.get(weight_ahead).unwrap_or_default();
                    let tokens_ahead = next_tokens.get(bytes(quad)..).unwrap_or_default();
                    (steps..steps * share).for_each(|step| prefetch_step(weight_ahead, step));
                    let prefetch = Prefetch { weight: weight_ahead, tokens: tokens_ahead };
                    let operands = TileOperands {
                        a: LeftOperand::Tiles(left.tiles(from, pair).as_ptr()),
                        b: right.as_ptr(),
                        c: scratch.tile_sums[quad * QUAD_SUMS..][..QUAD_SUMS].as_mut_ptr().cast(),
                        steps,
                        add: from > 0,
                    };
                    let output = if last { outputs.get(quad) } else { None };
                    let finished = output.map(|&output| self.finished_quad(&operands, output, [pair, col]));
                    // SAFETY: two tiles per step in both operands, four tiles of sums; a weight is packed as tiles only
                    // where AMX multiplies int8. The previous quad is finished, and a depth block has no more steps than
                    // that quad has rows to write.
                    unsafe {
                        match (&finished, &done) {
                            (Some(finished), Some(done)) if finished.output.gated.is_some() => tiles
                                .multiply::<Int8Tiles>(operands, |step| {
                                    prefetch.step(step);
                                    finished.prefetch(step * ROWS_PER_STEP);
                                    done.write::<true>(s, step * ROWS_PER_STEP);
                                }),
                            (Some(_), Some(done)) => tiles.multiply::<Int8Tiles>(operands, |step| {
                                prefetch.step(step);
                                done.write::<false>(s, step * ROWS_PER_STEP);
                            }),
                            _ => tiles.multiply::<Int8Tiles>(operands, |step| prefetch.step(step)),
                        }
                        if let Some(done) = &done {
                            done.write_rest(s, steps * ROWS_PER_STEP);
                        }
                    }
                    done = finished;
                }
            }
        }
        if let Some(done) = &done {
            // SAFETY: the last quad is finished.
            unsafe { done.write_rest(s, 0) };
        }
        done.is_some()
    }

    /// The outputs of a block's quads, if all of them have one and there are no updates to add; else empty.
    fn direct_outputs<E: Epilogue>(&self, block: &Block, epilogue: &E) -> Vec<DirectOutput> {
        if !self.updates.is_empty() || !block.rows.len().is_multiple_of(PAIR) {
            return Vec::new();
        }
        let start = self.left.rows.start;
        let rows = |pair: usize| start + pair * PAIR..start + (pair + 1) * PAIR;
        let quads =
            block.cols.clone().step_by(PAIR).flat_map(|col| row_pairs(block).map(move |pair| (pair, col)));
        let output = |(pair, col): (usize, usize)| {
            let whole = col + PAIR <= block.cols.end;
            if whole { epilogue.direct_output(rows(pair), col..col + PAIR) } else { None }
        };
        quads.map(output).collect::<Option<_>>().unwrap_or_default()
    }

    /// The finished quad of these pairs of tokens and columns.
    fn finished_quad(
        &self,
        operands: &TileOperands,
        output: DirectOutput,
        [pair, col]: [usize; 2],
    ) -> FinishedQuad {
        let row_scales = self.left.scales.as_deref().unwrap_or_default();
        let [row_scales, col_scales] =
            [&row_scales[pair * PAIR..][..PAIR], &self.scales[col * PAIR..][..PAIR]].map(|x| x.as_ptr());
        FinishedQuad { sums: operands.c.cast(), row_scales, col_scales, output }
    }

    /// Dequantizes the sums of a block, adds the updates and applies the epilogue.
    fn finish<E: Epilogue>(&self, Block { rows, cols }: Block, scratch: &mut Scratch, epilogue: &E) {
        let AmxInt8Gemm { cx, left, .. } = *self;
        let width = cols.len().next_multiple_of(PAIR);
        scratch.load_col_scales(&self.scales[cols.clone()], width);
        let col_scales = &scratch.col_scales[..width];
        let row_scales = left.scales.as_deref().unwrap_or_default();
        let pairs = rows.len().div_ceil(PAIR);
        let updates = PackedUpdates::pack(cx, self.updates, &cols, width, &mut scratch.updates);
        for row in rows.clone().step_by(TOKENS_PER_EPILOGUE) {
            let first = row - rows.start;
            let quads =
                QuadRow { data: &scratch.tile_sums[first / PAIR * QUAD_SUMS..], stride: pairs * QUAD_SUMS };
            let row_scales = &row_scales[row..row + TOKENS_PER_EPILOGUE];
            // SAFETY: the token proves AVX-512.
            unsafe { dequantize(quads, first % PAIR, row_scales, col_scales, &mut scratch.sums) };
            let rows = left.rows.start + row..left.rows.start + rows.end.min(row + TOKENS_PER_EPILOGUE);
            updates.add(cx, &rows, width, &scratch.updates, &mut scratch.sums);
            let sums = SumBlock { rows, cols: cols.clone(), sums: &scratch.sums, stride: width };
            run_epilogue(cx.level, epilogue, sums);
        }
    }
}

/// What a product prefetches into the L2 cache.
struct Prefetch<'a> {
    /// Weight tiles that are read soon.
    weight: &'a [u8],
    /// Tokens that are read later.
    tokens: &'a [u8],
}

impl Prefetch<'_> {
    #[inline(always)]
    fn step(&self, step: usize) {
        if !self.weight.is_empty() {
            prefetch_step(self.weight, step);
        }
        if !self.tokens.is_empty() {
            prefetch_step(self.tokens, step);
        }
    }
}

/// Quads of integer sums of the same tokens, one for every [`PAIR`] of columns.
struct QuadRow<'a> {
    data: &'a [f32],
    stride: usize,
}

/// Writes `sum · row scale · column scale` for some tokens, from the `first` of a quad on, row by row.
///
/// # Safety
/// The machine has AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn dequantize(
    quads: QuadRow<'_>,
    first: usize,
    row_scales: &[f32],
    col_scales: &[f32],
    out: &mut [f32],
) {
    let width = col_scales.len();
    assert!(first + row_scales.len() <= PAIR && width.is_multiple_of(PAIR));
    assert!(out.len() >= row_scales.len() * width);
    for (i, (row_scale, out)) in row_scales.iter().zip(out.chunks_exact_mut(width)).enumerate() {
        let line = (first + i) / 16 * 512 + (first + i) % 16 * 16;
        let pairs = out.as_chunks_mut::<PAIR>().0.iter_mut().zip(col_scales.as_chunks::<PAIR>().0);
        for (j, (out, col_scales)) in pairs.enumerate() {
            let quad = &quads.data[j * quads.stride..][..QUAD_SUMS];
            for half in 0..2 {
                // SAFETY: 16 values of a row of the quad, and 16 of the 32 columns.
                unsafe {
                    let sums = _mm512_loadu_si512(quad.as_ptr().add(line + half * 256).cast());
                    let sums = _mm512_mul_ps(_mm512_cvtepi32_ps(sums), _mm512_set1_ps(*row_scale));
                    let col_scales = _mm512_loadu_ps(col_scales.as_ptr().add(half * 16));
                    _mm512_storeu_ps(out.as_mut_ptr().add(half * 16), _mm512_mul_ps(sums, col_scales));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_multiplied_by_both_scales() {
        if Amx::detect().is_none() {
            return;
        }
        // Two quads of integers, by token and column.
        let index = |token: usize, col: usize| {
            col / PAIR * QUAD_SUMS + (token / 16 * 2 + col % PAIR / 16) * 256 + token % 16 * 16 + col % 16
        };
        let mut data = vec![0f32; 2 * QUAD_SUMS];
        for i in 0..2 * QUAD_SUMS {
            data[index(i / 64, i % 64)] = f32::from_bits(i as u32);
        }
        let row_scales: Vec<f32> = (0..16).map(|i| i as f32 + 0.5).collect();
        let col_scales: Vec<f32> = (0..64).map(|i| 2.0 / (i + 1) as f32).collect();
        let mut out = vec![0f32; 16 * 64];
        let quads = QuadRow { data: &data, stride: QUAD_SUMS };
        // SAFETY: a machine with AMX has AVX-512.
        unsafe { dequantize(quads, 16, &row_scales, &col_scales, &mut out) };
        for (i, &found) in out.iter().enumerate() {
            let (token, col) = (i / 64, i % 64);
            assert_eq!(found, ((16 + token) * 64 + col) as f32 * row_scales[token] * col_scales[col]);
        }
    }
}
