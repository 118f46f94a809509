use std::ops::Range;

use kiln_ops::shapes::AttentionSize;
use kiln_ops::{AttentionSpec, Mask, Result, Tensor, shapes};

use super::softmax::{Running, step};
use crate::Context;
use crate::buffer::Buffer;
use crate::element::{Element, Source, convert, read, write};
use crate::gemm::{DEPTH, Extent, Rows, multiply, pack_left, pack_plain, pack_right};
use crate::parallel::Disjoint;
use crate::simd::{Simd, dispatch};
use crate::tensor::{CpuTensor, Stored, by_dtype};

/// Keys a query looks at at once. Equal to the depth of a packed block, so that the weights of one block of keys lie
/// just as the left operand of the product with the values must lie.
const KEYS: usize = DEPTH;

/// Elements of a head that are summed in one go. A long running sum loses bits of large scores, and every bit of a score
/// counts in its exponential.
const DIM_AT_ONCE: usize = 64;
const _: () = assert!(DEPTH.is_multiple_of(DIM_AT_ONCE));

/// Packed keys and values kept at a time, in elements; heads are worked on in groups that stay below.
const PACKED_AT_ONCE: usize = 1 << 25;

pub(crate) fn attention(
    cx: &Context,
    q: &[&CpuTensor],
    k: &[&CpuTensor],
    v: &[&CpuTensor],
    spec: &AttentionSpec,
) -> Result<CpuTensor> {
    let size = shapes::attention(q, k, v, spec)?;
    by_dtype!(q[0], T => {
        let mut out = cx.buffer::<T>(size.result().numel())?;
        let [q, k, v] = [q, k, v].map(Blocks::<T>::new);
        let job = Job { cx, size, mask: &spec.mask, q, k, v };
        job.run(&Disjoint::new(&mut out))?;
        Ok(T::wrap(out, size.result()))
    })
}

/// The keys that a query sees.
fn seen(mask: &Mask, query: usize, keys: usize) -> Range<usize> {
    match mask {
        Mask::Causal { valid } => 0..(query + 1).min(*valid),
        Mask::Isolated { rows } if rows.contains(&query) => rows.clone(),
        _ => 0..keys,
    }
}

struct Job<'a, T> {
    cx: &'a Context,
    size: AttentionSize,
    mask: &'a Mask,
    q: Blocks<'a, T>,
    k: Blocks<'a, T>,
    v: Blocks<'a, T>,
}

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
        let ranges = rows.clone().map(|query| seen(self.mask, query, keys));
        let (start, end) = ranges.fold((keys, 0), |(a, b), r| (a.min(r.start), b.max(r.end)));
        for block in start / KEYS..end.div_ceil(KEYS) {
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
                let seen = seen(self.mask, query, keys);
                let seen = seen.start.clamp(first, first + count) - first
                    ..seen.end.clamp(first, first + count) - first;
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

/// Matrices below each other, read as one.
struct Blocks<'a, T> {
    /// The row past each block's last one, and its elements.
    parts: Vec<(usize, &'a [T])>,
    width: usize,
}

impl<'a, T: Stored> Blocks<'a, T> {
    fn new(blocks: &[&'a CpuTensor]) -> Self {
        let mut end = 0;
        let mut parts = Vec::with_capacity(blocks.len());
        for block in blocks {
            end += block.shape().rows();
            parts.push((end, T::of(block)));
        }
        Blocks { parts, width: blocks[0].shape().last() }
    }
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
        let parts = &self.blocks.parts;
        let part = parts.partition_point(|&(end, _)| end <= row);
        let first = if part == 0 { 0 } else { parts[part - 1].0 };
        let at = (row - first) * self.blocks.width + self.column + from;
        let x = &parts[part].1[at..][..out.len()];
        if self.scale == 1.0 {
            return convert(s, x, out);
        }
        let scale = s.splat(self.scale);
        for i in (0..x.len()).step_by(S::LANES) {
            write(s, out, i, s.mul(read(s, x, i), scale));
        }
    }
}
