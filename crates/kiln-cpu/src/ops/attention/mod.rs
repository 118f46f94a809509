//! Flash attention: scores exist for one block of keys at a time, and the sums so far are rescaled whenever a larger score
//! turns up (online softmax).
//!
//! `simd` computes in f32, whatever the dtype; `amx` multiplies bf16 in AMX tiles.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod amx_softmax;
mod simd;
pub(super) mod softmax;

use std::ops::Range;

use kiln_ops::shapes::AttentionSize;
use kiln_ops::{AttentionMask, AttentionSpec, Result, Tensor, shapes};
#[cfg(target_arch = "x86_64")]
use kiln_tensor::{DType, bf16};

use crate::Context;
#[cfg(target_arch = "x86_64")]
use crate::isa::Level;
use crate::parallel::DisjointMut;
use crate::tensor::{CpuTensor, TensorElement, by_dtype};

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
        amx::run(&AttentionCall::new(cx, size, spec, [q, k, v]), amx, &DisjointMut::new(&mut out))?;
        return Ok(bf16::into_tensor(out, size.result()));
    }
    by_dtype!(q[0], T => {
        let mut out = cx.buffer::<T>(size.result().numel())?;
        simd::run(&AttentionCall::<T>::new(cx, size, spec, [q, k, v]), &DisjointMut::new(&mut out))?;
        Ok(T::into_tensor(out, size.result()))
    })
}

/// Maximum packed keys and values kept at a time, in elements; heads are processed in groups below this limit.
const MAX_PACKED_ELEMENTS: usize = 1 << 25;

/// The arguments of one call.
struct AttentionCall<'a, T> {
    cx: &'a Context,
    size: AttentionSize,
    mask: &'a AttentionMask,
    q: RowConcat<'a, T>,
    k: RowConcat<'a, T>,
    v: RowConcat<'a, T>,
}

impl<'a, T: TensorElement> AttentionCall<'a, T> {
    fn new(
        cx: &'a Context,
        size: AttentionSize,
        spec: &'a AttentionSpec,
        qkv: [&[&'a CpuTensor]; 3],
    ) -> Self {
        let [q, k, v] = qkv.map(RowConcat::<T>::new);
        AttentionCall { cx, size, mask: &spec.mask, q, k, v }
    }

    /// The keys that a query attends to.
    fn visible_keys(&self, query: usize) -> Range<usize> {
        match self.mask {
            AttentionMask::Causal { valid } => 0..(query + 1).min(*valid),
            AttentionMask::Isolated { rows } if rows.contains(&query) => rows.clone(),
            _ => 0..self.size.keys,
        }
    }

    /// The blocks of `width` keys that any of the queries attends to.
    fn visible_blocks(&self, queries: Range<usize>, width: usize) -> Range<usize> {
        let ranges = queries.map(|query| self.visible_keys(query)).filter(|keys| !keys.is_empty());
        let (start, end) = ranges.fold((self.size.keys, 0), |(a, b), r| (a.min(r.start), b.max(r.end)));
        start / width..end.div_ceil(width)
    }

    /// The keys that a query attends to among the `count` keys from `first` on, relative to `first`.
    fn visible_in_block(&self, query: usize, first: usize, count: usize) -> Range<usize> {
        let keys = self.visible_keys(query);
        let relative = |key: usize| key.clamp(first, first + count) - first;
        relative(keys.start)..relative(keys.end)
    }
}

/// Matrices below each other, read as one.
struct RowConcat<'a, T> {
    /// The elements of each, with the row past its last one.
    parts: Vec<(usize, &'a [T])>,
    width: usize,
}

impl<'a, T: TensorElement> RowConcat<'a, T> {
    fn new(matrices: &[&'a CpuTensor]) -> Self {
        let mut end = 0;
        let mut parts = Vec::with_capacity(matrices.len());
        for matrix in matrices {
            end += matrix.shape().rows();
            parts.push((end, T::elements(matrix)));
        }
        RowConcat { parts, width: matrices[0].shape().last() }
    }
}

impl<'a, T> RowConcat<'a, T> {
    #[inline(always)]
    fn row(&self, row: usize) -> &'a [T] {
        let part = self.parts.partition_point(|&(end, _)| end <= row);
        let first = if part == 0 { 0 } else { self.parts[part - 1].0 };
        &self.parts[part].1[(row - first) * self.width..][..self.width]
    }
}
