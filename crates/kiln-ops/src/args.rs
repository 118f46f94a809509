use std::ops::Range;

use crate::{Backend, Result};

/// Consecutive runs of rows, each with its own row of parameters.
///
/// The tokens of one step may be modulated differently: in the KV model reference tokens use the modulation of
/// t = 0. A plain step has one group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Groups {
    ends: Vec<usize>,
}

impl Groups {
    /// All `rows` rows in one group.
    pub fn one(rows: usize) -> Self {
        Groups { ends: vec![rows] }
    }

    /// Groups of these lengths, in order.
    pub fn of_lengths(lengths: &[usize]) -> Self {
        let mut end = 0;
        let ends = lengths.iter().map(|n| {
            end += n;
            end
        });
        Groups { ends: ends.collect() }
    }

    /// Number of groups.
    pub fn count(&self) -> usize {
        self.ends.len()
    }

    /// Number of rows in all groups together.
    pub fn rows(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// The group that row `row` belongs to.
    pub fn of_row(&self, row: usize) -> usize {
        self.ends.partition_point(|&end| end <= row)
    }

    /// The row range of each group.
    pub fn ranges(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        starts.zip(&self.ends).map(|(start, &end)| start..end)
    }
}

/// Which keys a query sees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mask {
    /// Every query sees every key.
    None,
    /// Query `i` sees key `j` when `j <= i` and `j < valid`: a causal language model over right-padded text.
    Causal {
        /// How many leading keys are real tokens; at least 1.
        valid: usize,
    },
    /// Queries inside `rows` see only the keys inside `rows`; all others see everything.
    Isolated {
        /// The isolated rows, the same range of queries and keys.
        rows: Range<usize>,
    },
}

/// How attention is to be computed.
#[derive(Clone, Debug)]
pub struct AttentionSpec {
    /// Number of query heads.
    pub heads: usize,
    /// Number of key and value heads; divides `heads`. Query head `h` uses key head `h / (heads / kv_heads)`.
    pub kv_heads: usize,
    /// Which keys a query sees.
    pub mask: Mask,
}

/// An element-wise function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x / (1 + exp(-x))`.
    Silu,
    /// `max(x, 0)`.
    Relu,
    /// `3 · tanh(x / 3)`.
    SoftClamp,
}

/// How a convolution walks over its input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvGeometry {
    /// Step in both directions.
    pub stride: usize,
    /// Zeros added at the top, bottom, left and right.
    pub padding: [usize; 4],
    /// Whether the input is first doubled in both directions by repeating pixels.
    pub upsample: bool,
}

impl ConvGeometry {
    /// Stride 1, padded so that the output has the input's size, for an odd `kernel`.
    pub const fn same(kernel: usize) -> Self {
        ConvGeometry { stride: 1, padding: [kernel / 2; 4], upsample: false }
    }

    /// Height or width of the input as the kernel sees it.
    pub const fn virtual_size(&self, size: usize) -> usize {
        if self.upsample { size * 2 } else { size }
    }

    /// Output height and width, or `None` when the padded input is smaller than the kernel.
    pub fn output(&self, height: usize, width: usize, kernel: [usize; 2]) -> Option<[usize; 2]> {
        let [top, bottom, left, right] = self.padding;
        let along = |size: usize, pad: usize, k: usize| {
            (self.virtual_size(size) + pad).checked_sub(k).map(|room| room / self.stride + 1)
        };
        Some([along(height, top + bottom, kernel[0])?, along(width, left + right, kernel[1])?])
    }
}

/// Which two elements of a head one angle turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopePairs {
    /// Elements `2i` and `2i + 1` (FLUX.2).
    Adjacent,
    /// Elements `i` and `i + head_dim / 2` (Qwen3).
    Halves,
}

/// Cosines and sines of the rotary embedding, one angle a pair: both f32, `[tokens, head_dim / 2]`.
pub struct RopeTable<B: Backend> {
    /// Cosines.
    pub cos: B::Tensor,
    /// Sines.
    pub sin: B::Tensor,
    /// Which elements form a pair.
    pub pairs: RopePairs,
}

impl<B: Backend> RopeTable<B> {
    /// The table of the tokens in `range`.
    pub fn rows(&self, b: &B, range: Range<usize>) -> Result<Self> {
        Ok(RopeTable {
            cos: b.slice_rows(&self.cos, range.clone())?,
            sin: b.slice_rows(&self.sin, range)?,
            pairs: self.pairs,
        })
    }
}
