use std::ops::Range;

use kiln_ops::Result;
use kiln_ops::shapes::AttentionSize;

use super::softmax::{Running, step};
use super::{Blocks, Job, PACKED_AT_ONCE};
use crate::buffer::Buffer;
use crate::element::{Element, Source, convert, read, write};
use crate::gemm::{DEPTH, Extent, Rows, multiply, pack_left, pack_plain, pack_right};
use crate::parallel::Disjoint;
use crate::simd::{Simd, dispatch};
use crate::tensor::Stored;

/// Keys a query looks at at once. Equal to the depth of a packed block, so that the weights of one block of keys lie
/// just as the left operand of the product with the values must lie.
const KEYS: usize = DEPTH;

/// Elements of a head that are summed in one go. A long running sum loses bits of large scores, and every bit of a score
/// counts in its exponential.
const DIM_AT_ONCE: usize = 64;
const _: () = assert!(DEPTH.is_multiple_of(DIM_AT_ONCE));

/// Keys and values of some heads as panels: for each head, for each block of [`KEYS`] keys.
struct PackedHeads {
    keys: Buffer<f32>,
    values: Buffer<f32>,
}

/// A thread's own memory.
struct Scratch {
    queries: Buffer<f32>,
    scores: Buffer<f32>,
    sums: Buffer<f32>,
    running: Vec<Running>,
}

pub(super) fn run<T: Stored>(job: &Job<'_, T>, out: &Disjoint<'_, T>) -> Result<()> {
    job.run(out)
}

impl<T: Stored> Job<'_, T> {
    fn run(&self, out: &Disjoint<'_, T>) -> Result<()> {
        let AttentionSize { queries, heads, kv_heads, .. } = self.size;
        if queries == 0 {
            return Ok(());
        }
        let shared = heads / kv_heads;
        let at_once = (PACKED_AT_ONCE / (self.key_panels() + self.value_panels())).clamp(1, kv_heads);
        let rows = self.rows_at_once();
        let strips = queries.div_ceil(rows);
        for first in (0..kv_heads).step_by(at_once) {
            let kv = first..kv_heads.min(first + at_once);
            let packed = self.pack(kv.clone())?;
            let tasks = kv.len() * shared * strips;
            self.cx.pool.each_with(
                tasks,
                || self.scratch(rows),
                |task, scratch| {
                    let (head, strip) = (first * shared + task / strips, task % strips);
                    let rows = strip * rows..queries.min((strip + 1) * rows);
                    self.strip(&packed, first, head, rows, scratch, out);
                },
            )?;
        }
        Ok(())
    }

    /// Queries a thread works on at a time: whole tiles, about as many as their scores fit the second-level cache.
    fn rows_at_once(&self) -> usize {
        let tile = self.cx.level.tile_rows();
        128usize.next_multiple_of(tile).min(self.size.queries.next_multiple_of(tile))
    }

    /// Panel columns that hold one block of keys, and one row of values.
    fn widths(&self) -> [usize; 2] {
        let cols = self.cx.level.tile_cols();
        [KEYS, self.size.head_dim].map(|n| n.next_multiple_of(cols))
    }

    /// Elements of the packed keys of one head.
    fn key_panels(&self) -> usize {
        self.size.keys.div_ceil(KEYS) * self.widths()[0] * self.size.head_dim
    }

    /// Elements of the packed values of one head.
    fn value_panels(&self) -> usize {
        self.size.keys.div_ceil(KEYS) * KEYS * self.widths()[1]
    }

    fn pack(&self, heads: Range<usize>) -> Result<PackedHeads> {
        let dim = self.size.head_dim;
        let (level, [key_width, value_width]) = (self.cx.level, self.widths());
        let mut keys = self.cx.buffer(heads.len() * self.key_panels())?;
        let mut values = self.cx.buffer(heads.len() * self.value_panels())?;
        let (to_keys, to_values) = (Disjoint::new(&mut keys), Disjoint::new(&mut values));
        let blocks = self.size.keys.div_ceil(KEYS);
        self.cx.pool.each(heads.len() * blocks, |task| {
            let (head, block) = (task / blocks, task % blocks);
            let first = block * KEYS;
            let count = KEYS.min(self.size.keys - first);
            let column = (heads.start + head) * dim;
            let k = Head { blocks: &self.k, column, scale: 1.0, end: self.size.keys };
            let at = head * self.key_panels() + block * key_width * dim;
            // SAFETY: every task has a block of its own.
            let out = unsafe { to_keys.slice(at..at + key_width * dim) };
            for from in (0..dim).step_by(DIM_AT_ONCE) {
                let depth = DIM_AT_ONCE.min(dim - from);
                let panels = &mut out[key_width * from..][..key_width * depth];
                pack_right(level, &k, first, from, depth, panels);
            }
            let v = Head { blocks: &self.v, column, scale: 1.0, end: self.size.keys };
            let at = head * self.value_panels() + block * KEYS * value_width;
            // SAFETY: as above.
            let out = unsafe { to_values.slice(at..at + count * value_width) };
            pack_plain(level, &v, first, 0, dim, count, out);
        });
        Ok(PackedHeads { keys, values })
    }

    fn scratch(&self, rows: usize) -> Result<Scratch> {
        let [key_width, value_width] = self.widths();
        debug_assert_eq!(key_width, KEYS);
        Ok(Scratch {
            queries: self.cx.buffer(rows * DEPTH * self.size.head_dim.div_ceil(DEPTH))?,
            scores: self.cx.buffer(rows * KEYS)?,
            sums: self.cx.buffer(rows * value_width)?,
            running: vec![Running::START; rows],
        })
    }

    /// Some queries of one head over all keys they see.
    fn strip(
        &self,
        packed: &PackedHeads,
        first_head: usize,
        head: usize,
        rows: Range<usize>,
        scratch: &mut Scratch,
        out: &Disjoint<'_, T>,
    ) {
        let AttentionSize { keys, heads, kv_heads, head_dim: dim, .. } = self.size;
        let (level, [key_width, value_width]) = (self.cx.level, self.widths());
        let packed_head = head / (heads / kv_heads) - first_head;
        let q = Head { blocks: &self.q, column: head * dim, scale: 1.0 / (dim as f32).sqrt(), end: rows.end };
        let area = rows.len() * DEPTH;
        for (block, from) in (0..dim).step_by(DEPTH).enumerate() {
            let left = &mut scratch.queries[block * area..][..area];
            pack_left(level, &q, rows.start, from, DEPTH.min(dim - from), left);
        }
        scratch.sums.fill(0.0);
        scratch.running.fill(Running::START);
        for block in self.blocks_seen(rows.clone(), KEYS) {
            let first = block * KEYS;
            let count = KEYS.min(keys - first);
            let at = packed_head * self.key_panels() + block * key_width * dim;
            for from in (0..dim).step_by(DIM_AT_ONCE) {
                let depth = DIM_AT_ONCE.min(dim - from);
                let panels = count.div_ceil(level.tile_cols());
                let size = Extent { rows: rows.len(), panels, depth, stride: KEYS };
                let left = &scratch.queries[from / DEPTH * area + from % DEPTH..];
                let right = &packed.keys[at + key_width * from..][..key_width * depth];
                multiply(level, size, left, right, &mut scratch.scores, from > 0);
            }
            for (i, query) in rows.clone().enumerate() {
                let seen = self.seen_of(query, first, count);
                let scores = &mut scratch.scores[i * KEYS..][..count];
                let sums = &mut scratch.sums[i * value_width..][..value_width];
                step(level, scores, seen, &mut scratch.running[i], sums);
            }
            let panels = value_width / level.tile_cols();
            let size = Extent { rows: rows.len(), panels, depth: count, stride: value_width };
            let at = packed_head * self.value_panels() + block * KEYS * value_width;
            let right = &packed.values[at..][..count * value_width];
            multiply(level, size, &scratch.scores, right, &mut scratch.sums, true);
        }
        for (i, query) in rows.enumerate() {
            let at = (query * heads + head) * dim;
            // SAFETY: every head of every query belongs to one task.
            let out = unsafe { out.slice(at..at + dim) };
            divide(level, &scratch.sums[i * value_width..][..dim], scratch.running[i].total, out);
        }
    }
}

#[inline(always)]
fn divide_kernel<S: Simd, T: Element>(s: S, x: &[f32], by: f32, out: &mut [T]) {
    let by = s.splat(1.0 / by);
    for i in (0..x.len()).step_by(S::LANES) {
        write(s, out, i, s.mul(read(s, x, i), by));
    }
}

dispatch! {
    fn divide<T: Element>(x: &[f32], by: f32, out: &mut [T]) => divide_kernel;
}

/// One head of all rows, times a factor; zeros from row `end` on.
struct Head<'a, T> {
    blocks: &'a Blocks<'a, T>,
    column: usize,
    scale: f32,
    end: usize,
}

impl<T: Source> Rows for Head<'_, T> {
    #[inline(always)]
    fn fill<S: Simd>(&self, s: S, row: usize, from: usize, out: &mut [f32]) {
        if row >= self.end {
            return out.fill(0.0);
        }
        let x = &self.blocks.row(row)[self.column + from..][..out.len()];
        if self.scale == 1.0 {
            return convert(s, x, out);
        }
        let scale = s.splat(self.scale);
        for i in (0..x.len()).step_by(S::LANES) {
            write(s, out, i, s.mul(read(s, x, i), scale));
        }
    }
}
