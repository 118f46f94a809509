//! Sums that are the same to the bit on every instruction set with fused multiply-adds.

use super::{MAX_LANES, Simd, reduce_add};

/// [`MAX_LANES`] partial sums, however long vectors are: value `i` belongs to partial sum `i % MAX_LANES`, and they are
/// added up in one order. Shorter vectors hold them in several parts, which don't wait for each other.
#[derive(Clone, Copy)]
pub(crate) struct Sum<S: Simd> {
    /// The first [`Sum::PARTS`] are used, always with an index that is known when the loop over them is unrolled.
    parts: [S::V; MAX_PARTS],
}

/// Vectors of [`MAX_LANES`] values where they are shortest.
const MAX_PARTS: usize = 4;

impl<S: Simd> Sum<S> {
    /// Vectors that make up [`MAX_LANES`] values.
    pub const PARTS: usize = MAX_LANES / S::LANES;

    #[inline(always)]
    pub fn zero(s: S) -> Sum<S> {
        const { assert!(Self::PARTS <= MAX_PARTS && Self::PARTS * S::LANES == MAX_LANES) }
        Sum { parts: [s.splat(0.0); MAX_PARTS] }
    }

    /// Adds vector `part` of [`MAX_LANES`] values.
    #[inline(always)]
    pub fn add(&mut self, s: S, part: usize, v: S::V) {
        self.parts[part] = s.add(self.parts[part], v);
    }

    /// Adds `a · b` to part `part`.
    #[inline(always)]
    pub fn add_product(&mut self, s: S, part: usize, a: S::V, b: S::V) {
        self.parts[part] = s.fma(a, b, self.parts[part]);
    }

    /// The sum of two, partial sum by partial sum.
    #[inline(always)]
    pub fn plus(mut self, s: S, other: Sum<S>) -> Sum<S> {
        for part in 0..Self::PARTS {
            self.add(s, part, other.parts[part]);
        }
        self
    }

    /// The sum of all values.
    #[inline(always)]
    pub fn total(self, s: S) -> f32 {
        let p = self.parts;
        // As `reduce_add` would of one long vector: the upper half to the lower one.
        let v = match Self::PARTS {
            1 => p[0],
            2 => s.add(p[0], p[1]),
            _ => s.add(s.add(p[0], p[2]), s.add(p[1], p[3])),
        };
        reduce_add(s, v)
    }
}
