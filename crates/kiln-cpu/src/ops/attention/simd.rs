//! Attention in f32 vectors, for every dtype.
//!
//! Keys and values of a head are packed as right operands once. A task then takes a block of queries of one head over all
//! blocks of keys: scores, softmax, product with the values.

use std::ops::Range;

use kiln_ops::Result;
use kiln_ops::shapes::AttentionSize;

use super::call::{AttentionCall, MAX_PACKED_ELEMENTS, RowConcat};
use super::softmax::{SoftmaxState, softmax_step};
use crate::buffer::Buffer;
use crate::element::{Element, Scalar, convert, read, write};
use crate::gemm::{GemmSize, RowSource, multiply, pack_left, pack_right, pack_right_kn};
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
struct PackedHeads {
    keys: Buffer<f32>,
    values: Buffer<f32>,
}

/// The buffers of one thread.
struct Scratch {
    queries: Buffer<f32>,
    scores: Buffer<f32>,
    sums: Buffer<f32>,
    states: Vec<SoftmaxState>,
}

pub(super) fn run<T: TensorElement>(call: &AttentionCall<'_, T>, out: &DisjointMut<'_, T>) -> Result<()> {
    call.run(out)
}

impl<T: TensorElement> AttentionCall<'_, T> {
    fn run(&self, out: &DisjointMut<'_, T>) -> Result<()> {
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
        let tile = self.cx.level.tile_rows();
        128usize.next_multiple_of(tile).min(self.size.queries.next_multiple_of(tile))
    }

    /// Panel columns of one block of keys, and of one row of values.
    fn widths(&self) -> [usize; 2] {
        let cols = self.cx.level.tile_cols();
        [KEY_BLOCK, self.size.head_dim].map(|n| n.next_multiple_of(cols))
    }

    /// Elements of the packed keys of one head.
    fn key_panels(&self) -> usize {
        self.size.keys.div_ceil(KEY_BLOCK) * self.widths()[0] * self.size.head_dim
    }

    /// Elements of the packed values of one head.
    fn value_panels(&self) -> usize {
        self.size.keys.div_ceil(KEY_BLOCK) * KEY_BLOCK * self.widths()[1]
    }

    fn pack(&self, heads: Range<usize>) -> Result<PackedHeads> {
        let dim = self.size.head_dim;
        let (level, [key_width, value_width]) = (self.cx.level, self.widths());
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
            let at = head * self.key_panels() + block * key_width * dim;
            // SAFETY: every task has a block of its own.
            let out = unsafe { to_keys.slice(at..at + key_width * dim) };
            for from in (0..dim).step_by(DIM_BLOCK) {
                let depth = DIM_BLOCK.min(dim - from);
                let panels = &mut out[key_width * from..][..key_width * depth];
                pack_right(level, &k, first, from, depth, panels);
            }
            let v = Head { matrix: &self.v, column, scale: 1.0, end: self.size.keys };
            let at = head * self.value_panels() + block * KEY_BLOCK * value_width;
            // SAFETY: as above.
            let out = unsafe { to_values.slice(at..at + count * value_width) };
            pack_right_kn(level, &v, first, 0, dim, count, out);
        });
        Ok(PackedHeads { keys, values })
    }

    fn scratch(&self, rows: usize) -> Result<Scratch> {
        let [key_width, value_width] = self.widths();
        debug_assert_eq!(key_width, KEY_BLOCK);
        Ok(Scratch {
            queries: self.cx.buffer(rows * KC * self.size.head_dim.div_ceil(KC))?,
            scores: self.cx.buffer(rows * KEY_BLOCK)?,
            sums: self.cx.buffer(rows * value_width)?,
            states: vec![SoftmaxState::START; rows],
        })
    }

    /// Computes some queries of one head over all keys they attend to.
    fn run_block(
        &self,
        packed: &PackedHeads,
        first_head: usize,
        head: usize,
        rows: Range<usize>,
        scratch: &mut Scratch,
        out: &DisjointMut<'_, T>,
    ) {
        let AttentionSize { keys, heads, kv_heads, head_dim: dim, .. } = self.size;
        let (level, [key_width, value_width]) = (self.cx.level, self.widths());
        let packed_head = head / (heads / kv_heads) - first_head;
        let q = Head { matrix: &self.q, column: head * dim, scale: 1.0 / (dim as f32).sqrt(), end: rows.end };
        let area = rows.len() * KC;
        for (block, from) in (0..dim).step_by(KC).enumerate() {
            let left = &mut scratch.queries[block * area..][..area];
            pack_left(level, &q, rows.start, from, KC.min(dim - from), left);
        }
        scratch.sums.fill(0.0);
        scratch.states.fill(SoftmaxState::START);
        for block in self.visible_blocks(rows.clone(), KEY_BLOCK) {
            let first = block * KEY_BLOCK;
            let count = KEY_BLOCK.min(keys - first);
            let at = packed_head * self.key_panels() + block * key_width * dim;
            for from in (0..dim).step_by(DIM_BLOCK) {
                let depth = DIM_BLOCK.min(dim - from);
                let panels = count.div_ceil(level.tile_cols());
                let size = GemmSize { rows: rows.len(), panels, depth, stride: KEY_BLOCK };
                let left = &scratch.queries[from / KC * area + from % KC..];
                let right = &packed.keys[at + key_width * from..][..key_width * depth];
                multiply(level, size, left, right, &mut scratch.scores, from > 0);
            }
            for (i, query) in rows.clone().enumerate() {
                let visible = self.visible_in_block(query, first, count);
                let scores = &mut scratch.scores[i * KEY_BLOCK..][..count];
                let sums = &mut scratch.sums[i * value_width..][..value_width];
                softmax_step(level, scores, visible, &mut scratch.states[i], sums);
            }
            let panels = value_width / level.tile_cols();
            let size = GemmSize { rows: rows.len(), panels, depth: count, stride: value_width };
            let at = packed_head * self.value_panels() + block * KEY_BLOCK * value_width;
            let right = &packed.values[at..][..count * value_width];
            multiply(level, size, &scratch.scores, right, &mut scratch.sums, true);
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
