//! Attention of bf16 in AMX tiles: scores from bf16 queries and keys, softmax and all sums in f32, weights rounded to
//! bf16 before they meet the values.
//!
//! A step works on [`PAIR`] queries and a block of keys: queries are left tiles as they lie, keys are turned into right
//! tiles once for all queries, and so are values. Scores come out row by row, so that the weights made of them lie as
//! the left tiles of the product with the values must lie.

use std::ops::Range;

use kiln_ops::Result;
use kiln_ops::shapes::AttentionSize;
use kiln_tensor::bf16;

use super::softmax::Running;
use super::weigh::{ROWS, Row, Rows, divide, weigh, weigh_all};
use super::{Job, PACKED_AT_ONCE};
use crate::buffer::Buffer;
use crate::gemm::{LINE, PAIR, STEP, SUMS, interleave_pair, left_line, right_tiles};
use crate::parallel::Disjoint;
use crate::simd::{Amx, Left, OfHalves, Pair, TILE, Tiles};

/// Keys a query looks at at once: the scores of a step (32 KiB) are read again from the nearest caches.
const KEYS: usize = 256;
/// Queries that a thread works on at a time: few, whose sums stay near, while a head's keys and values fit the
/// second-level cache, else more, for each of which a block of keys comes from afar once.
const QUERIES: [usize; 2] = [64, 256];
/// Bytes of a head's keys and values that fit.
const NEAR: usize = 1 << 20;

/// Keys and values of some heads as right tiles, for each head, for each block of [`KEYS`] keys: keys for every
/// [`PAIR`] of keys, values for every [`PAIR`] of a head's elements.
struct PackedHeads {
    keys: Buffer<bf16>,
    values: Buffer<bf16>,
}

/// A thread's own memory: `queries` and `sums` of all its queries, scores and weights of [`PAIR`] of them.
struct Scratch {
    queries: Buffer<bf16>,
    scores: Buffer<f32>,
    weights: Buffer<bf16>,
    sums: Buffer<f32>,
    running: Vec<Running>,
}

pub(super) fn run(job: &Job<'_, bf16>, amx: Amx, out: &Disjoint<'_, bf16>) -> Result<()> {
    let AttentionSize { queries, heads, kv_heads, keys, head_dim } = job.size;
    if queries == 0 {
        return Ok(());
    }
    let dim = head_dim.next_multiple_of(PAIR);
    let shared = heads / kv_heads;
    let packed_keys = keys.next_multiple_of(PAIR);
    let at_once = (PACKED_AT_ONCE / (2 * packed_keys * dim).max(1)).clamp(1, kv_heads);
    let together = QUERIES[usize::from(4 * packed_keys * dim > NEAR)];
    let strips = queries.div_ceil(together);
    let rows = together.min(queries.next_multiple_of(PAIR));
    let scratch = || {
        Ok(Scratch {
            queries: job.cx.buffer(rows * dim)?,
            scores: job.cx.buffer(PAIR * KEYS)?,
            weights: job.cx.buffer(PAIR * KEYS)?,
            sums: job.cx.buffer(rows * dim)?,
            running: vec![Running::START; rows],
        })
    };
    for first in (0..kv_heads).step_by(at_once) {
        let kv = first..kv_heads.min(first + at_once);
        let packed = pack(job, amx, kv.clone())?;
        job.cx.pool.each_with(kv.len() * shared * strips, scratch, |task, scratch| {
            let (head, strip) = (first * shared + task / strips, task % strips);
            let rows = strip * together..queries.min((strip + 1) * together);
            let at = (head / shared - first) * packed_keys * dim;
            let of_head = [&packed.keys, &packed.values].map(|b| &b[at..][..packed_keys * dim]);
            Strip { job, amx, head, dim, rows, of_head }.run(scratch, out);
        })?;
    }
    Ok(())
}

/// The keys and values of these heads as tiles, zeros where there is nothing.
fn pack(job: &Job<'_, bf16>, amx: Amx, heads: Range<usize>) -> Result<PackedHeads> {
    let AttentionSize { keys: count, head_dim, .. } = job.size;
    let dim = head_dim.next_multiple_of(PAIR);
    let per_head = count.next_multiple_of(PAIR) * dim;
    let mut keys = job.cx.buffer(heads.len() * per_head)?;
    let mut values = job.cx.buffer(heads.len() * per_head)?;
    let (to_keys, to_values) = (Disjoint::new(&mut keys), Disjoint::new(&mut values));
    let blocks = count.div_ceil(KEYS);
    let scratch = || job.cx.buffer::<bf16>(PAIR * dim);
    job.cx.pool.each_with(heads.len() * blocks, scratch, |task, lines| {
        let (head, first) = (task / blocks, task % blocks * KEYS);
        let width = KEYS.min(count - first).next_multiple_of(PAIR);
        let at = head * per_head + first * dim..head * per_head + (first + width) * dim;
        // SAFETY: every task has a block of its own.
        let (keys, values) = unsafe { (to_keys.slice(at.clone()), to_values.slice(at)) };
        let block = Block { first, width, head: heads.start + head };
        // SAFETY: the token proves AVX-512.
        unsafe { pack_block(job, amx, block, lines, keys, values) };
    })?;
    Ok(PackedHeads { keys, values })
}

/// Some keys of one head.
struct Block {
    first: usize,
    /// How many, whole tiles of them.
    width: usize,
    head: usize,
}

/// Turns a block of keys and of values into tiles; `lines` is room for [`PAIR`] keys.
///
/// # Safety
/// The machine has AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn pack_block(
    job: &Job<'_, bf16>,
    amx: Amx,
    block: Block,
    lines: &mut [bf16],
    keys: &mut [bf16],
    values: &mut [bf16],
) {
    let AttentionSize { keys: count, head_dim, .. } = job.size;
    let Block { first, width, head } = block;
    let (column, dim) = (head * head_dim, lines.len() / PAIR);
    lines.fill(bf16::ZERO);
    for (step, keys) in keys.chunks_exact_mut(PAIR * dim).enumerate() {
        let row = first + step * PAIR;
        for (i, line) in lines.chunks_exact_mut(dim).enumerate() {
            match row + i < count {
                true => line[..head_dim].copy_from_slice(&job.k.row(row + i)[column..][..head_dim]),
                false => line.fill(bf16::ZERO),
            }
        }
        // SAFETY: the caller's promise.
        unsafe {
            right_tiles(amx, bytemuck::cast_slice(lines), 2 * dim, dim / STEP, bytemuck::cast_slice_mut(keys))
        };
    }
    for row in (0..width).step_by(2) {
        let rows = [first + row, first + row + 1].map(|row| match row < count {
            true => &job.v.row(row)[column..][..head_dim],
            false => &[],
        });
        for (part, values) in values.chunks_exact_mut(PAIR * width).enumerate() {
            let mut cut = [[bf16::ZERO; PAIR]; 2];
            let [first, second] = &mut cut;
            let pair = [piece(rows[0], part * PAIR, first), piece(rows[1], part * PAIR, second)];
            let tiles = &mut values[row / STEP * 2 * TILE..];
            // SAFETY: as above.
            unsafe { interleave_pair(pair, row % STEP / 2, tiles) };
        }
    }
}

/// The elements from `from` on; where the row ends before, in `cut`, with the zeros that are there.
#[inline(always)]
fn piece<'a>(row: &'a [bf16], from: usize, cut: &'a mut [bf16; PAIR]) -> &'a [bf16; PAIR] {
    let rest = &row[from.min(row.len())..];
    if let Some(whole) = rest.first_chunk() {
        return whole;
    }
    cut[..rest.len()].copy_from_slice(rest);
    cut
}

/// Some queries of one head.
struct Strip<'a> {
    job: &'a Job<'a, bf16>,
    amx: Amx,
    head: usize,
    /// Elements of a head, whole tiles of them.
    dim: usize,
    rows: Range<usize>,
    /// The head's keys and values as tiles.
    of_head: [&'a [bf16]; 2],
}

impl Strip<'_> {
    fn run(&self, scratch: &mut Scratch, out: &Disjoint<'_, bf16>) {
        let AttentionSize { heads, head_dim, keys, .. } = self.job.size;
        let area = PAIR * self.dim;
        // SAFETY: the token proves AVX-512.
        unsafe { self.pack(&mut scratch.queries) };
        scratch.sums.fill(0.0);
        scratch.running.fill(Running::START);
        let mut tiles = self.amx.tiles();
        for block in self.job.blocks_seen(self.rows.clone(), KEYS) {
            let first = block * KEYS;
            let block = first..keys.min(first + KEYS);
            for step in 0..self.rows.len().div_ceil(PAIR) {
                self.step(&mut tiles, block.clone(), step, scratch);
            }
        }
        drop(tiles);
        for (i, row) in self.rows.clone().enumerate() {
            let at = (row * heads + self.head) * head_dim;
            // SAFETY: every head of every query belongs to one task.
            let out = unsafe { out.slice(at..at + head_dim) };
            let sums = &scratch.sums[i / PAIR * area..][..area];
            // SAFETY: the token proves AVX-512.
            unsafe { divide(self.amx, sums, i % PAIR, scratch.running[i].total, out) };
        }
    }

    /// Turns the queries into tiles, zeros where there is nothing.
    ///
    /// # Safety
    /// The machine has AVX-512.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn pack(&self, out: &mut [bf16]) {
        let head_dim = self.job.size.head_dim;
        let (area, column) = (PAIR * self.dim, self.head * head_dim);
        for i in 0..self.rows.len().next_multiple_of(PAIR) {
            let query: &[bf16] = match self.rows.start + i < self.rows.end {
                true => &self.job.q.row(self.rows.start + i)[column..][..head_dim],
                false => &[],
            };
            let out = bytemuck::cast_slice_mut(&mut out[i / PAIR * area..][..area]);
            left_line(bytemuck::cast_slice(query), i % PAIR, 2 * self.dim / LINE, out);
        }
    }

    /// Takes the `step`th [`PAIR`] of queries one block of keys further.
    fn step(&self, tiles: &mut Tiles, block: Range<usize>, step: usize, scratch: &mut Scratch) {
        let (dim, area) = (self.dim, PAIR * self.dim);
        let width = block.len().next_multiple_of(PAIR);
        let queries = &scratch.queries[step * area..][..area];
        let sums = &mut scratch.sums[step * area..][..area];
        let [keys, values] = self.of_head.map(|tiles| &tiles[block.start * dim..][..width * dim]);
        let rows = self.rows.start + step * PAIR..self.rows.end.min(self.rows.start + (step + 1) * PAIR);
        if !self.job.blocks_seen(rows.clone(), KEYS).contains(&(block.start / KEYS)) {
            return;
        }
        for (keys, scores) in keys.chunks_exact(area).zip(scratch.scores.chunks_exact_mut(SUMS)) {
            multiply(tiles, queries, keys, scores, false);
        }
        let scale = (self.job.size.head_dim as f32).sqrt().recip() * std::f32::consts::LOG2_E;
        let seen = |i: usize| match rows.start + i < rows.end {
            true => self.job.seen_of(rows.start + i, block.start, block.len()),
            false => 0..0,
        };
        let (groups, _) = scratch.running[step * PAIR..][..PAIR].as_chunks_mut::<ROWS>();
        for (group, running) in groups.iter_mut().enumerate() {
            let first = group * ROWS;
            // SAFETY: the token proves AVX-512 with bf16.
            unsafe {
                if (first..first + ROWS).all(|i| seen(i) == (0..width)) {
                    let rows = Rows { i: first, width, scale, running };
                    weigh_all(self.amx, rows, &scratch.scores, &mut scratch.weights, sums);
                    continue;
                }
                for (i, running) in (first..).zip(running) {
                    let row = Row { i, seen: seen(i), width, scale, running };
                    weigh(self.amx, row, &scratch.scores, &mut scratch.weights, sums);
                }
            }
        }
        let weights = &scratch.weights[..PAIR * width];
        for (values, sums) in values.chunks_exact(PAIR * width).zip(sums.chunks_exact_mut(SUMS)) {
            multiply(tiles, weights, values, sums, true);
        }
    }
}

/// The product of two left and two right tiles a step.
#[inline(always)]
fn multiply(tiles: &mut Tiles, a: &[bf16], b: &[bf16], c: &mut [f32], add: bool) {
    let steps = a.len() / (2 * TILE);
    assert!(steps > 0 && b.len() >= steps * 2 * TILE && c.len() >= SUMS);
    let a = Left::Tiles(a.as_ptr().cast());
    let pair = Pair { a, b: b.as_ptr().cast(), c: c.as_mut_ptr().cast(), steps, add };
    // SAFETY: the lengths were just checked.
    unsafe { tiles.multiply::<OfHalves>(pair, |_| ()) };
}
