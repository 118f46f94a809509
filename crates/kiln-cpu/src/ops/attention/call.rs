//! The arguments of an attention, as its kernels read them.

use std::ops::Range;

use kiln_ops::shapes::AttentionSize;
use kiln_ops::{AttentionMask, AttentionSpec, Tensor};

use crate::Context;
use crate::tensor::{CpuTensor, TensorElement};

/// Maximum packed keys and values kept at a time, in elements; heads are processed in groups below this limit.
pub(super) const MAX_PACKED_ELEMENTS: usize = 1 << 25;

/// The arguments of one call.
pub(super) struct AttentionCall<'a, T> {
    pub cx: &'a Context,
    pub size: AttentionSize,
    pub mask: &'a AttentionMask,
    pub q: RowConcat<'a, T>,
    pub k: RowConcat<'a, T>,
    pub v: RowConcat<'a, T>,
}

impl<'a, T: TensorElement> AttentionCall<'a, T> {
    pub fn new(
        cx: &'a Context,
        size: AttentionSize,
        spec: &'a AttentionSpec,
        qkv: [&[&'a CpuTensor]; 3],
    ) -> Self {
        let [q, k, v] = qkv.map(RowConcat::<T>::new);
        AttentionCall { cx, size, mask: &spec.mask, q, k, v }
    }

    /// The keys that a query attends to.
    pub fn visible_keys(&self, query: usize) -> Range<usize> {
        match self.mask {
            AttentionMask::Causal { valid } => 0..(query + 1).min(*valid),
            AttentionMask::Isolated { rows } if rows.contains(&query) => rows.clone(),
            _ => 0..self.size.keys,
        }
    }

    /// The blocks of `width` keys that any of the queries attends to.
    pub fn visible_blocks(&self, queries: Range<usize>, width: usize) -> Range<usize> {
        let ranges = queries.map(|query| self.visible_keys(query)).filter(|keys| !keys.is_empty());
        let (start, end) = ranges.fold((self.size.keys, 0), |(a, b), r| (a.min(r.start), b.max(r.end)));
        start / width..end.div_ceil(width)
    }

    /// The keys that a query attends to among the `count` keys from `first` on, relative to `first`.
    pub fn visible_in_block(&self, query: usize, first: usize, count: usize) -> Range<usize> {
        let keys = self.visible_keys(query);
        let relative = |key: usize| key.clamp(first, first + count) - first;
        relative(keys.start)..relative(keys.end)
    }
}

/// Matrices below each other, read as one.
pub(super) struct RowConcat<'a, T> {
    /// The elements of each, with the row past its last one.
    parts: Vec<(usize, &'a [T])>,
    width: usize,
}

impl<'a, T: TensorElement> RowConcat<'a, T> {
    pub fn new(matrices: &[&'a CpuTensor]) -> Self {
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
    pub fn row(&self, row: usize) -> &'a [T] {
        let part = self.parts.partition_point(|&(end, _)| end <= row);
        let first = if part == 0 { 0 } else { self.parts[part - 1].0 };
        &self.parts[part].1[(row - first) * self.width..][..self.width]
    }
}
