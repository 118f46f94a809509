//! Attention of bf16 in AMX tiles: scores from bf16 queries and keys, softmax and all sums in f32, softmax weights rounded
//! to bf16 for the product with the values.
//!
//! A step takes [`PAIR`] queries and a block of keys. Queries are left tiles; keys and values are packed as right tiles
//! once for all queries. Scores come out row by row, so that the softmax weights are stored directly as the left tiles of
//! the product with the values.
//!
//! No gain: blocks of 128 or 512 keys; the softmax of one query at a time between the products of others, which is 11 % slower,
//! since it takes rows one by one and keeps twice the scores in the L1 cache.

use std::ops::Range;

use kiln_ops::Result;
use kiln_ops::shapes::AttentionSize;
use kiln_tensor::bf16;

use super::amx_softmax::{
    MaskedRow, ROW_GROUP, UnmaskedRows, divide, softmax_masked_row, softmax_unmasked_rows,
};
use super::call::{AttentionCall, MAX_PACKED_ELEMENTS};
use super::softmax::SoftmaxState;
use crate::buffer::Buffer;
use crate::gemm::{
    PAIR, QUAD_SUMS, TILE_ROW_BF16, TILE_ROW_BYTES, pack_left_row, pack_right_row_pair, pack_right_tiles,
};
use crate::isa::Amx;
use crate::parallel::DisjointMut;
use crate::simd::{Bf16Tiles, LeftOperand, TILE_BF16, TileOperands, TileRegisters};

/// Keys of a block: the scores of a step (32 KiB) are read again from the L1 and L2 caches.
const KEY_BLOCK: usize = 256;
/// Queries of a task while a head's keys and values fit the L2 cache: few, so that their sums stay in L1.
const QUERY_BLOCK: usize = 64;
/// Queries of a task when they don't fit: more, since every block of keys comes from memory once per task.
const LARGE_QUERY_BLOCK: usize = 256;
/// Bytes of a head's keys and values that fit.
const L2_KV_BYTES: usize = 1 << 20;

/// Keys and values of some heads as right tiles, for each head, for each block of [`KEY_BLOCK`] keys: keys for every
/// [`PAIR`] of keys, values for every [`PAIR`] of a head's elements.
struct PackedHeads {
    keys: Buffer<bf16>,
    values: Buffer<bf16>,
}

/// The buffers of one thread: `queries`, `sums` and `states` of a task's queries, scores and weights of [`PAIR`] of them.
struct Scratch {
    queries: Buffer<bf16>,
    scores: Buffer<f32>,
    weights: Buffer<bf16>,
    sums: Buffer<f32>,
    states: Vec<SoftmaxState>,
}

pub(super) fn run(call: &AttentionCall<'_, bf16>, amx: Amx, out: &DisjointMut<'_, bf16>) -> Result<()> {
    let AttentionSize { queries, heads, kv_heads, keys, head_dim } = call.size;
    if queries == 0 {
        return Ok(());
    }
    let dim = head_dim.next_multiple_of(PAIR);
    let heads_per_kv = heads / kv_heads;
    let packed_keys = keys.next_multiple_of(PAIR);
    let group = (MAX_PACKED_ELEMENTS / (2 * packed_keys * dim).max(1)).clamp(1, kv_heads);
    let query_block = if 4 * packed_keys * dim > L2_KV_BYTES { LARGE_QUERY_BLOCK } else { QUERY_BLOCK };
    let blocks = queries.div_ceil(query_block);
    let rows = query_block.min(queries.next_multiple_of(PAIR));
    let scratch = || {
        Ok(Scratch {
            queries: call.cx.buffer(rows * dim)?,
            scores: call.cx.buffer(PAIR * KEY_BLOCK)?,
            weights: call.cx.buffer(PAIR * KEY_BLOCK)?,
            sums: call.cx.buffer(rows * dim)?,
            states: vec![SoftmaxState::START; rows],
        })
    };
    for first in (0..kv_heads).step_by(group) {
        let kv = first..kv_heads.min(first + group);
        let packed = pack(call, amx, kv.clone())?;
        call.cx.pool.for_each_with(kv.len() * heads_per_kv * blocks, scratch, |task, scratch| {
            let (head, block) = (first * heads_per_kv + task / blocks, task % blocks);
            let rows = block * query_block..queries.min((block + 1) * query_block);
            let at = (head / heads_per_kv - first) * packed_keys * dim;
            let [keys, values] = [&packed.keys, &packed.values].map(|b| &b[at..][..packed_keys * dim]);
            QueryBlock { call, amx, head, dim, rows, keys, values }.run(scratch, out);
        })?;
    }
    Ok(())
}

/// Packs the keys and values of these heads as tiles, padded with zeros.
fn pack(call: &AttentionCall<'_, bf16>, amx: Amx, heads: Range<usize>) -> Result<PackedHeads> {
    let AttentionSize { keys: count, head_dim, .. } = call.size;
    let dim = head_dim.next_multiple_of(PAIR);
    let per_head = count.next_multiple_of(PAIR) * dim;
    let mut keys = call.cx.buffer(heads.len() * per_head)?;
    let mut values = call.cx.buffer(heads.len() * per_head)?;
    let (to_keys, to_values) = (DisjointMut::new(&mut keys), DisjointMut::new(&mut values));
    let blocks = count.div_ceil(KEY_BLOCK);
    let scratch = || call.cx.buffer::<bf16>(PAIR * dim);
    call.cx.pool.for_each_with(heads.len() * blocks, scratch, |task, lines| {
        let (head, first) = (task / blocks, task % blocks * KEY_BLOCK);
        let width = KEY_BLOCK.min(count - first).next_multiple_of(PAIR);
        let at = head * per_head + first * dim..head * per_head + (first + width) * dim;
        // SAFETY: every task has a block of its own.
        let (keys, values) = unsafe { (to_keys.slice(at.clone()), to_values.slice(at)) };
        let block = KeyBlock { first, width, head: heads.start + head };
        // SAFETY: the token proves AVX-512.
        unsafe { pack_block(call, amx, block, lines, keys, values) };
    })?;
    Ok(PackedHeads { keys, values })
}

/// A block of keys of one head.
struct KeyBlock {
    first: usize,
    /// The number of keys, in whole pairs.
    width: usize,
    head: usize,
}

/// Packs a block of keys and of values as tiles; `lines` is scratch for [`PAIR`] keys.
///
/// # Safety
/// The machine has AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn pack_block(
    call: &AttentionCall<'_, bf16>,
    amx: Amx,
    block: KeyBlock,
    lines: &mut [bf16],
    keys: &mut [bf16],
    values: &mut [bf16],
) {
    let AttentionSize { keys: count, head_dim, .. } = call.size;
    let KeyBlock { first, width, head } = block;
    let (column, dim) = (head * head_dim, lines.len() / PAIR);
    lines.fill(bf16::ZERO);
    for (step, keys) in keys.chunks_exact_mut(PAIR * dim).enumerate() {
        let row = first + step * PAIR;
        for (i, line) in lines.chunks_exact_mut(dim).enumerate() {
            if row + i < count {
                line[..head_dim].copy_from_slice(&call.k.row(row + i)[column..][..head_dim]);
            } else {
                line.fill(bf16::ZERO);
            }
        }
        // SAFETY: upheld by the caller.
        unsafe {
            let (lines, keys) = (bytemuck::cast_slice(lines), bytemuck::cast_slice_mut(keys));
            pack_right_tiles(amx, lines, 2 * dim, dim / TILE_ROW_BF16, keys);
        }
    }
    for row in (0..width).step_by(2) {
        let rows = [first + row, first + row + 1]
            .map(|row| if row < count { &call.v.row(row)[column..][..head_dim] } else { &[] });
        for (pair, values) in values.chunks_exact_mut(PAIR * width).enumerate() {
            let mut padded = [[bf16::ZERO; PAIR]; 2];
            let [first, second] = &mut padded;
            let columns = [columns(rows[0], pair * PAIR, first), columns(rows[1], pair * PAIR, second)];
            let tiles = &mut values[row / TILE_ROW_BF16 * 2 * TILE_BF16..];
            // SAFETY: as above.
            unsafe { pack_right_row_pair(columns, row % TILE_ROW_BF16 / 2, tiles) };
        }
    }
}

/// [`PAIR`] columns of a row from `from` on; if it ends before, a copy in `padded`, which holds zeros.
#[inline(always)]
fn columns<'a>(row: &'a [bf16], from: usize, padded: &'a mut [bf16; PAIR]) -> &'a [bf16; PAIR] {
    let rest = &row[from.min(row.len())..];
    if let Some(whole) = rest.first_chunk() {
        return whole;
    }
    padded[..rest.len()].copy_from_slice(rest);
    padded
}

/// A task: some queries of one head.
struct QueryBlock<'a> {
    call: &'a AttentionCall<'a, bf16>,
    amx: Amx,
    head: usize,
    /// Elements of a head, in whole tiles.
    dim: usize,
    rows: Range<usize>,
    /// The head's keys and values as tiles.
    keys: &'a [bf16],
    values: &'a [bf16],
}

impl QueryBlock<'_> {
    fn run(&self, scratch: &mut Scratch, out: &DisjointMut<'_, bf16>) {
        let AttentionSize { heads, head_dim, keys, .. } = self.call.size;
        let area = PAIR * self.dim;
        // SAFETY: the token proves AVX-512.
        unsafe { self.pack_queries(&mut scratch.queries) };
        scratch.sums.fill(0.0);
        scratch.states.fill(SoftmaxState::START);
        let mut tiles = self.amx.configure_tiles();
        for block in self.call.visible_blocks(self.rows.clone(), KEY_BLOCK) {
            let first = block * KEY_BLOCK;
            let block = first..keys.min(first + KEY_BLOCK);
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
            unsafe { divide(self.amx, sums, i % PAIR, scratch.states[i].total, out) };
        }
    }

    /// Packs the queries as left tiles, padded with zeros.
    ///
    /// # Safety
    /// The machine has AVX-512.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn pack_queries(&self, out: &mut [bf16]) {
        let head_dim = self.call.size.head_dim;
        let (area, column) = (PAIR * self.dim, self.head * head_dim);
        for i in 0..self.rows.len().next_multiple_of(PAIR) {
            let row = self.rows.start + i;
            let query: &[bf16] =
                if row < self.rows.end { &self.call.q.row(row)[column..][..head_dim] } else { &[] };
            let out = bytemuck::cast_slice_mut(&mut out[i / PAIR * area..][..area]);
            pack_left_row(bytemuck::cast_slice(query), i % PAIR, 2 * self.dim / TILE_ROW_BYTES, out);
        }
    }

    /// Processes one block of keys for the `step`th [`PAIR`] of queries.
    fn step(&self, tiles: &mut TileRegisters, block: Range<usize>, step: usize, scratch: &mut Scratch) {
        let (dim, area) = (self.dim, PAIR * self.dim);
        let width = block.len().next_multiple_of(PAIR);
        let queries = &scratch.queries[step * area..][..area];
        let sums = &mut scratch.sums[step * area..][..area];
        let [keys, values] = [self.keys, self.values].map(|tiles| &tiles[block.start * dim..][..width * dim]);
        let rows = self.rows.start + step * PAIR..self.rows.end.min(self.rows.start + (step + 1) * PAIR);
        if !self.call.visible_blocks(rows.clone(), KEY_BLOCK).contains(&(block.start / KEY_BLOCK)) {
            return;
        }
        for (keys, scores) in keys.chunks_exact(area).zip(scratch.scores.chunks_exact_mut(QUAD_SUMS)) {
            multiply(tiles, queries, keys, scores, false);
        }
        let scale = (self.call.size.head_dim as f32).sqrt().recip() * std::f32::consts::LOG2_E;
        let visible = |i: usize| {
            let row = rows.start + i;
            if row < rows.end { self.call.visible_in_block(row, block.start, block.len()) } else { 0..0 }
        };
        let (groups, _) = scratch.states[step * PAIR..][..PAIR].as_chunks_mut::<ROW_GROUP>();
        for (group, states) in groups.iter_mut().enumerate() {
            let first = group * ROW_GROUP;
            // SAFETY: the token proves AVX-512 with bf16.
            unsafe {
                if (first..first + ROW_GROUP).all(|i| visible(i) == (0..width)) {
                    let rows = UnmaskedRows { first, width, scale, states };
                    softmax_unmasked_rows(self.amx, rows, &scratch.scores, &mut scratch.weights, sums);
                    continue;
                }
                for (i, state) in (first..).zip(states) {
                    let row = MaskedRow { i, visible: visible(i), width, scale, state };
                    softmax_masked_row(self.amx, row, &scratch.scores, &mut scratch.weights, sums);
                }
            }
        }
        let weights = &scratch.weights[..PAIR * width];
        for (values, sums) in values.chunks_exact(PAIR * width).zip(sums.chunks_exact_mut(QUAD_SUMS)) {
            multiply(tiles, weights, values, sums, true);
        }
    }
}

/// The product of two left and two right tiles per step.
#[inline(always)]
fn multiply(tiles: &mut TileRegisters, a: &[bf16], b: &[bf16], c: &mut [f32], add: bool) {
    let steps = a.len() / (2 * TILE_BF16);
    assert!(steps > 0 && b.len() >= steps * 2 * TILE_BF16 && c.len() >= QUAD_SUMS);
    let a = LeftOperand::Tiles(a.as_ptr().cast());
    let operands = TileOperands { a, b: b.as_ptr().cast(), c: c.as_mut_ptr().cast(), steps, add };
    // SAFETY: the lengths were just checked.
    unsafe { tiles.multiply::<Bf16Tiles>(operands, |_| ()) };
}
