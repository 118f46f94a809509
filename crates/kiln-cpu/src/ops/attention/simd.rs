//! Attention in vectors, for every dtype: with operands in f32, or in bf16 where vectors multiply it.
//!
//! Keys and values of a head are packed as right operands once. A task then takes a block of queries of one head over all
//! blocks of keys: scores, softmax, product with the values.

use std::ops::{Deref, Range};

use kiln_ops::Result;
use kiln_ops::shapes::AttentionSize;

use super::call::{AttentionCall, MAX_PACKED_ELEMENTS, RowConcat};
use super::softmax::{SoftmaxState, softmax_step};
use crate::buffer::Buffer;
use crate::element::{Element, Scalar, convert, read, write};
use crate::gemm::{GemmSize, PackedFormat, RowSource};
use crate::parallel::DisjointMut;
use crate::simd::{KC, Simd, dispatch};
use crate::tensor::TensorElement;

/// Keys of a block. Equal to the depth of a packed block, so that the softmax weights already have the layout of a left
/// operand for the product with the values.
const KEY_BLOCK: usize = KC;

/// Elements of a head summed in one go. A long running sum loses bits of large scores, and every bit of a score counts in
/// its exponential.
const DIM_BLOCK: usize = 64;
const _: () = assert!(KC.is_multiple_of(DIM_BLOCK));

/// Keys and values of some heads as panels: for each head, for each block of [`KEY_BLOCK`] keys.
struct PackedHeads<E> {
    keys: Buffer<E>,
    values: Buffer<E>,
}

/// The buffers of one thread.
struct Scratch<E> {
    queries: Buffer<E>,
    scores: Buffer<f32>,
    /// Scores turned into weights and rounded; empty if the format is f32.
    weights: Buffer<E>,
    sums: Buffer<f32>,
    states: Vec<SoftmaxState>,
}

/// A call with operands packed in a format.
pub(super) struct PackedAttention<'a, T, P> {
    pub call: AttentionCall<'a, T>,
    pub format: P,
}

impl<'a, T, P> Deref for PackedAttention<'a, T, P> {
    type Target = AttentionCall<'a, T>;

    fn deref(&self) -> &AttentionCall<'a, T> {
        &self.call
    }
}

impl<T: TensorElement, P: PackedFormat> PackedAttention<'_, T, P> {
    pub fn run(&self, out: &DisjointMut<'_, T>) -> Result<()> {
        let AttentionSize { queries, heads, kv_heads, .. } = self.size;
        if queries == 0 {
            return Ok(());
        }
        let heads_per_kv = heads / kv_heads;
        let group = (MAX_PACKED_ELEMENTS / (self.key_panels() + self.value_panels())).clamp(1, kv_heads);
        let rows = self.query_block();
        let blocks = queries.div_ceil(rows);
        for first in (0..kv_heads).step_by(group) {
            let kv = first..kv_heads.min(first + group);
            let packed = self.pack(kv.clone())?;
            let tasks = kv.len() * heads_per_kv * blocks;
            self.cx.pool.for_each_with(
                tasks,
                || self.scratch(rows),
                |task, scratch| {
                    let (head, block) = (first * heads_per_kv + task / blocks, task % blocks);
                    let rows = block * rows..queries.min((block + 1) * rows);
                    self.run_block(&packed, first, head, rows, scratch, out);
                },
            )?;
        }
        Ok(())
    }

    /// Queries of a task: whole tiles, about as many as their scores fit the L2 cache.
    fn query_block(&self) -> usize {
        let tile = self.format.tile_rows();
        128usize.next_multiple_of(tile).min(self.size.queries.next_multiple_of(tile))
    }

    /// Panel columns of one block of keys, and of one row of values.
    fn widths(&self) -> [usize; 2] {
        let cols = self.format.tile_cols();
        [KEY_BLOCK, self.size.head_dim].map(|n| n.next_multiple_of(cols))
    }

    /// Elements of a packed query or key.
    fn packed_dim(&self) -> usize {
        self.size.head_dim.next_multiple_of(P::DEPTH_STEP)
    }

    /// Elements of the packed keys of one head.
    fn key_panels(&self) -> usize {
        self.size.keys.div_ceil(KEY_BLOCK) * self.widths()[0] * self.packed_dim()
    }

    /// Elements of the packed values of one head.
    fn value_panels(&self) -> usize {
        self.size.keys.div_ceil(KEY_BLOCK) * KEY_BLOCK * self.widths()[1]
    }

    fn pack(&self, heads: Range<usize>) -> Result<PackedHeads<P::Element>> {
        let dim = self.size.head_dim;
        let (format, [key_width, value_width]) = (self.format, self.widths());
        let mut keys = self.cx.buffer(heads.len() * self.key_panels())?;
        let mut values = self.cx.buffer(heads.len() * self.value_panels())?;
        let (to_keys, to_values) = (DisjointMut::new(&mut keys), DisjointMut::new(&mut values));
        let blocks = self.size.keys.div_ceil(KEY_BLOCK);
        self.cx.pool.for_each(heads.len() * blocks, |task| {
            let (head, block) = (task / blocks, task % blocks);
            let first = block * KEY_BLOCK;
            let count = KEY_BLOCK.min(self.size.keys - first);
            let column = (heads.start + head) * dim;
            let k = Head { matrix: &self.k, column, scale: 1.0, end: self.size.keys };
            let at = head * self.key_panels() + block * key_width * self.packed_dim();
            // SAFETY: every task has a block of its own.
            let out = unsafe { to_keys.slice(at..at + key_width * self.packed_dim()) };
            for from in (0..dim).step_by(DIM_BLOCK) {
                let depth = DIM_BLOCK.min(dim - from);
                let panels = &mut out[key_width * from..][..self.key_block(depth)];
                format.pack_right(&k, first, from, depth, panels);
            }
            let v = Head { matrix: &self.v, column, scale: 1.0, end: self.size.keys };
            let at = head * self.value_panels() + block * KEY_BLOCK * value_width;
            // SAFETY: as above.
            let out = unsafe { to_values.slice(at..at + self.value_block(count)) };
            format.pack_right_kn(&v, first, 0, dim, count, out);
        });
        Ok(PackedHeads { keys, values })
    }

    /// Elements of the packed keys of a block, over this many of a head's elements.
    fn key_block(&self, depth: usize) -> usize {
        self.format.panels_len(self.widths()[0] / self.format.tile_cols(), depth)
    }

    /// Elements of the packed values of a block of this many keys.
    fn value_block(&self, keys: usize) -> usize {
        self.format.panels_len(self.widths()[1] / self.format.tile_cols(), keys)
    }

    fn scratch(&self, rows: usize) -> Result<Scratch<P::Element>> {
        let [key_width, value_width] = self.widths();
        debug_assert_eq!(key_width, KEY_BLOCK);
        Ok(Scratch {
            queries: self.cx.buffer(rows * KC * self.size.head_dim.div_ceil(KC))?,
            scores: self.cx.buffer(rows * KEY_BLOCK)?,
            weights: self.cx.buffer(if P::ROUNDS { rows * KEY_BLOCK } else { 0 })?,
            sums: self.cx.buffer(rows * value_width)?,
            states: vec![SoftmaxState::START; rows],
        })
    }

    /// Computes some queries of one head over all keys they attend to.
    fn run_block(
        &self,
        packed: &PackedHeads<P::Element>,
        first_head: usize,
        head: usize,
        rows: Range<usize>,
        scratch: &mut Scratch<P::Element>,
        out: &DisjointMut<'_, T>,
    ) {
        let AttentionSize { keys, heads, kv_heads, head_dim: dim, .. } = self.size;
        let (level, format, [key_width, value_width]) = (self.cx.level, self.format, self.widths());
        let packed_head = head / (heads / kv_heads) - first_head;
        let scale = 1.0 / (dim as f32).sqrt();
        // Scores are scaled where scaled queries would be rounded.
        let [query_scale, score_scale] = if P::ROUNDS { [1.0, scale] } else { [scale, 1.0] };
        let q = Head { matrix: &self.q, column: head * dim, scale: query_scale, end: rows.end };
        let area = rows.len() * KC;
        for (block, from) in (0..dim).step_by(KC).enumerate() {
            let left = &mut scratch.queries[block * area..][..area];
            format.pack_left(&q, rows.start, from, KC.min(dim - from), left);
        }
        scratch.sums.fill(0.0);
        scratch.states.fill(SoftmaxState::START);
        for block in self.visible_blocks(rows.clone(), KEY_BLOCK) {
            let first = block * KEY_BLOCK;
            let count = KEY_BLOCK.min(keys - first);
            let at = packed_head * self.key_panels() + block * key_width * self.packed_dim();
            for from in (0..dim).step_by(DIM_BLOCK) {
                let depth = DIM_BLOCK.min(dim - from);
                let panels = count.div_ceil(format.tile_cols());
                let size = GemmSize { rows: rows.len(), panels, depth, stride: KEY_BLOCK };
                let left = &scratch.queries[from / KC * area + from % KC..];
                let right = &packed.keys[at + key_width * from..][..self.key_block(depth)];
                format.multiply(size, left, right, &mut scratch.scores, from > 0);
            }
            for (i, query) in rows.clone().enumerate() {
                let visible = self.visible_in_block(query, first, count);
                let scores = &mut scratch.scores[i * KEY_BLOCK..][..count];
                let sums = &mut scratch.sums[i * value_width..][..value_width];
                if score_scale != 1.0 {
                    scale_row(level, scores, score_scale);
                }
                softmax_step(level, scores, visible, &mut scratch.states[i], sums);
            }
            let panels = value_width / format.tile_cols();
            let size = GemmSize { rows: rows.len(), panels, depth: count, stride: value_width };
            let at = packed_head * self.value_panels() + block * KEY_BLOCK * value_width;
            let right = &packed.values[at..][..self.value_block(count)];
            let weights = format.round_left(&scratch.scores, rows.len(), count, &mut scratch.weights);
            format.multiply(size, weights, right, &mut scratch.sums, true);
        }
        for (i, query) in rows.enumerate() {
            let at = (query * heads + head) * dim;
            // SAFETY: every head of every query belongs to one task.
            let out = unsafe { out.slice(at..at + dim) };
            divide(level, &scratch.sums[i * value_width..][..dim], scratch.states[i].total, out);
        }
    }
}

#[inline(always)]
fn divide_kernel<S: Simd, T: Element>(s: S, x: &[f32], total: f32, out: &mut [T]) {
    let factor = s.splat(1.0 / total);
    for i in (0..x.len()).step_by(S::LANES) {
        write(s, out, i, s.mul(read(s, x, i), factor));
    }
}

#[inline(always)]
fn scale_kernel<S: Simd>(s: S, x: &mut [f32], factor: f32) {
    let factor = s.splat(factor);
    for i in (0..x.len()).step_by(S::LANES) {
        let v = s.mul(read(s, x, i), factor);
        write(s, x, i, v);
    }
}

dispatch! {
    fn scale_row(x: &mut [f32], factor: f32) => scale_kernel;
}

dispatch! {
    fn divide<T: Element>(x: &[f32], total: f32, out: &mut [T]) => divide_kernel;
}

/// One head of all rows, times a factor; zero from row `end` on.
struct Head<'a, T> {
    matrix: &'a RowConcat<'a, T>,
    column: usize,
    scale: f32,
    end: usize,
}

impl<T: Scalar> RowSource for Head<'_, T> {
    #[inline(always)]
    fn read_row<S: Simd>(&self, s: S, row: usize, from: usize, out: &mut [f32]) {
        if row >= self.end {
            return out.fill(0.0);
        }
        let x = &self.matrix.row(row)[self.column + from..][..out.len()];
        if self.scale == 1.0 {
            return convert(s, x, out);
        }
        let scale = s.splat(self.scale);
        for i in (0..x.len()).step_by(S::LANES) {
            write(s, out, i, s.mul(read(s, x, i), scale));
        }
    }
}
