//! Attention, block of keys by block of keys: scores are never stored beyond one block. What was summed before is
//! rescaled whenever a larger score turns up.
//!
//! `vectors` computes in f32, whatever the dtype; `tiles` multiplies bf16 in AMX tiles.

mod softmax;
#[cfg(target_arch = "x86_64")]
mod tiles;
mod vectors;
#[cfg(target_arch = "x86_64")]
mod weigh;

use std::ops::Range;

use kiln_ops::shapes::AttentionSize;
use kiln_ops::{AttentionSpec, Mask, Result, Tensor, shapes};
#[cfg(target_arch = "x86_64")]
use kiln_tensor::{DType, bf16};

use crate::Context;
#[cfg(target_arch = "x86_64")]
use crate::isa::Level;
use crate::parallel::Disjoint;
use crate::tensor::{CpuTensor, Stored, by_dtype};

pub(crate) fn attention(
    cx: &Context,
    q: &[&CpuTensor],
    k: &[&CpuTensor],
    v: &[&CpuTensor],
    spec: &AttentionSpec,
) -> Result<CpuTensor> {
    let size = shapes::attention(q, k, v, spec)?;
    #[cfg(target_arch = "x86_64")]
    if let (Level::Amx(amx), DType::BF16) = (cx.level, q[0].dtype()) {
        let mut out = cx.buffer::<bf16>(size.result().numel())?;
        tiles::run(&Job::new(cx, size, spec, [q, k, v]), amx, &Disjoint::new(&mut out))?;
        return Ok(bf16::wrap(out, size.result()));
    }
    by_dtype!(q[0], T => {
        let mut out = cx.buffer::<T>(size.result().numel())?;
        vectors::run(&Job::<T>::new(cx, size, spec, [q, k, v]), &Disjoint::new(&mut out))?;
        Ok(T::wrap(out, size.result()))
    })
}

/// Packed keys and values kept at a time, in elements; heads are worked on in groups that stay below.
const PACKED_AT_ONCE: usize = 1 << 25;

/// One call.
struct Job<'a, T> {
    cx: &'a Context,
    size: AttentionSize,
    mask: &'a Mask,
    q: Blocks<'a, T>,
    k: Blocks<'a, T>,
    v: Blocks<'a, T>,
}

impl<'a, T: Stored> Job<'a, T> {
    fn new(
        cx: &'a Context,
        size: AttentionSize,
        spec: &'a AttentionSpec,
        qkv: [&[&'a CpuTensor]; 3],
    ) -> Self {
        let [q, k, v] = qkv.map(Blocks::<T>::new);
        Job { cx, size, mask: &spec.mask, q, k, v }
    }

    /// The keys that a query sees.
    fn seen(&self, query: usize) -> Range<usize> {
        match self.mask {
            Mask::Causal { valid } => 0..(query + 1).min(*valid),
            Mask::Isolated { rows } if rows.contains(&query) => rows.clone(),
            _ => 0..self.size.keys,
        }
    }

    /// The blocks of `width` keys that some of the queries see.
    fn blocks_seen(&self, queries: Range<usize>, width: usize) -> Range<usize> {
        let ranges = queries.map(|query| self.seen(query)).filter(|seen| !seen.is_empty());
        let (start, end) = ranges.fold((self.size.keys, 0), |(a, b), r| (a.min(r.start), b.max(r.end)));
        start / width..end.div_ceil(width)
    }

    /// What a query sees of the `count` keys from `first` on, counted from there.
    fn seen_of(&self, query: usize, first: usize, count: usize) -> Range<usize> {
        let seen = self.seen(query);
        let inside = |key: usize| key.clamp(first, first + count) - first;
        inside(seen.start)..inside(seen.end)
    }
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

impl<'a, T> Blocks<'a, T> {
    #[inline(always)]
    fn row(&self, row: usize) -> &'a [T] {
        let part = self.parts.partition_point(|&(end, _)| end <= row);
        let first = if part == 0 { 0 } else { self.parts[part - 1].0 };
        &self.parts[part].1[(row - first) * self.width..][..self.width]
    }
}
