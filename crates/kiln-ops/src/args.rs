//! The types of arguments of [`Backend`]'s operations.

use std::ops::Range;

use crate::{Backend, Result, Tensor};

/// Consecutive groups of rows, each with its own row of parameters.
///
/// Used where the tokens of one step have different modulations: in the KV model, reference tokens use the modulation of
/// t = 0. An ordinary step has one group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowGroups {
    ends: Vec<usize>,
}

impl RowGroups {
    /// One group of all `rows` rows.
    pub fn single(rows: usize) -> Self {
        RowGroups { ends: vec![rows] }
    }

    /// Groups of these lengths, in order.
    pub fn from_lengths(lengths: &[usize]) -> Self {
        let mut end = 0;
        let ends = lengths.iter().map(|n| {
            end += n;
            end
        });
        RowGroups { ends: ends.collect() }
    }

    /// Number of groups.
    pub fn count(&self) -> usize {
        self.ends.len()
    }

    /// Total number of rows.
    pub fn rows(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// The group of row `row`.
    pub fn group_of(&self, row: usize) -> usize {
        self.ends.partition_point(|&end| end <= row)
    }

    /// The row range of each group.
    pub fn ranges(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        starts.zip(&self.ends).map(|(start, &end)| start..end)
    }
}

/// Which keys a query attends to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AttentionMask {
    /// Every query attends to every key.
    None,
    /// Query `i` attends to key `j` if `j <= i` and `j < valid`: a causal language model over right-padded text.
    Causal {
        /// Number of leading keys that are real tokens; at least 1.
        valid: usize,
    },
    /// Queries in `rows` attend only to keys in `rows`; all others attend to every key.
    Isolated {
        /// The isolated rows, the same range of queries and keys.
        rows: Range<usize>,
    },
}

/// The heads and mask of an attention.
#[derive(Clone, Debug)]
pub struct AttentionSpec {
    /// Number of query heads.
    pub heads: usize,
    /// Number of key and value heads; divides `heads`. Query head `h` uses key head `h / (heads / kv_heads)`.
    pub kv_heads: usize,
    /// Which keys a query attends to.
    pub mask: AttentionMask,
    /// Whether queries, keys, values and weights may be rounded to 8 bits. A backend that gains nothing from it does not.
    pub eight_bits: bool,
}

impl AttentionSpec {
    /// The attention in full precision.
    pub fn new(heads: usize, kv_heads: usize, mask: AttentionMask) -> AttentionSpec {
        AttentionSpec { heads, kv_heads, mask, eight_bits: false }
    }
}

/// An element-wise activation function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x / (1 + exp(-x))`.
    Silu,
    /// `max(x, 0)`.
    Relu,
    /// `3 · tanh(x / 3)`.
    SoftClamp,
    /// `x · Φ(x)` with the normal distribution `Φ(x) = erfc(-x / √2) / 2`, not its approximation by tanh.
    Gelu,
}

/// Stride, padding and upsampling of a convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvGeometry {
    /// Stride in both directions.
    pub stride: usize,
    /// Zeros added at the top, bottom, left and right.
    pub padding: [usize; 4],
    /// Whether the input is first upsampled 2× (nearest neighbor).
    pub upsample: bool,
}

impl ConvGeometry {
    /// Stride 1, padded so that the output has the input's size, for an odd `kernel`.
    pub const fn same(kernel: usize) -> Self {
        ConvGeometry { stride: 1, padding: [kernel / 2; 4], upsample: false }
    }

    /// Height or width of the input after upsampling.
    const fn upsampled(&self, size: usize) -> usize {
        if self.upsample { size * 2 } else { size }
    }

    /// Output height and width, or `None` if the padded input is smaller than the kernel.
    pub fn output(&self, height: usize, width: usize, kernel: [usize; 2]) -> Option<[usize; 2]> {
        let [top, bottom, left, right] = self.padding;
        let output = |size: usize, pad: usize, k: usize| {
            (self.upsampled(size) + pad).checked_sub(k).map(|room| room / self.stride + 1)
        };
        Some([output(height, top + bottom, kernel[0])?, output(width, left + right, kernel[1])?])
    }
}

/// Which two elements of a head are rotated together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeLayout {
    /// Elements `2i` and `2i + 1` (FLUX.2).
    Interleaved,
    /// Elements `i` and `i + head_dim / 2` (Qwen3).
    HalfSplit,
}

/// Cosines and sines of the rotary embedding, one angle per pair: both f32, `[tokens, head_dim / 2]`.
pub struct RopeTable<T> {
    /// Cosines.
    pub cos: T,
    /// Sines.
    pub sin: T,
    /// Which elements form a pair.
    pub pairs: RopeLayout,
}

/// Queries and keys of the same tokens, and what norms and rotates their heads.
pub struct HeadBlock<'a, T> {
    /// Queries `[tokens, heads · head_dim]` and keys `[tokens, kv_heads · head_dim]`.
    pub qk: [&'a T; 2],
    /// Weights of their norms, `[head_dim]` each.
    pub weights: [&'a T; 2],
    /// The angles of the tokens.
    pub rope: &'a RopeTable<T>,
}

impl<T: Tensor> HeadBlock<'_, T> {
    /// The normed and rotated queries and keys.
    pub fn norm_rope<B: Backend<Tensor = T>>(&self, b: &B, eps: f32) -> Result<[T; 2]> {
        b.qk_norm_rope(self.qk, Some(self.weights), self.rope, eps)
    }
}

impl<T: Tensor> RopeTable<T> {
    /// The table of the tokens in `range`.
    pub fn rows<B: Backend<Tensor = T>>(&self, b: &B, range: Range<usize>) -> Result<Self> {
        Ok(RopeTable {
            cos: b.slice_rows(&self.cos, range.clone())?,
            sin: b.slice_rows(&self.sin, range)?,
            pairs: self.pairs,
        })
    }
}
