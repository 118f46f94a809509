//! The register tile of a matrix product, whose sums stay in registers.

use super::{MicrokernelArgs, Simd};

/// Columns of one block of the left operand, and the distance between its rows.
///
/// A tile's rows (14 × 1.5 KiB with AVX-512) stay in the L1 cache while the panels of the right operand are streamed.
/// Not a power of two, which would put the rows into the same few cache sets.
pub(crate) const KC: usize = 384;

/// One register tile of `ROWS` rows.
///
/// # Safety
/// As [`Simd::microkernel`] with `rows = ROWS`.
#[inline(always)]
pub(crate) unsafe fn microkernel<S: Simd, const ROWS: usize>(s: S, t: MicrokernelArgs) {
    /// f32 values of a cache line.
    const LINE: usize = 16;
    let mut sums = [[s.splat(0.0); 2]; ROWS];
    for i in 0..ROWS {
        s.prefetch(t.c.wrapping_add(i * t.stride));
        s.prefetch(t.c.wrapping_add(i * t.stride + LINE));
    }
    for k in 0..t.depth {
        s.prefetch(t.next.wrapping_add(k * LINE));
        // SAFETY: row k of b and column k of a lie inside what the caller promises.
        unsafe {
            let b = t.b.add(k * S::TILE_COLS);
            let (b0, b1) = (s.load(b), s.load(b.add(S::LANES)));
            for (i, sum) in sums.iter_mut().enumerate() {
                let a = s.splat(*t.a.add(i * KC + k));
                sum[0] = s.fma(a, b0, sum[0]);
                sum[1] = s.fma(a, b1, sum[1]);
            }
        }
    }
    for (i, sum) in sums.iter().enumerate() {
        for (j, &sum) in sum.iter().enumerate() {
            // SAFETY: the tile's row i lies inside what the caller promises.
            unsafe {
                let c = t.c.add(i * t.stride + j * S::LANES);
                s.store(c, if t.add { s.add(s.load(c), sum) } else { sum });
            }
        }
    }
}

/// Selects the microkernel compiled for a row count that is known only at run time.
macro_rules! microkernel_by_rows {
    ($s:expr, $args:expr, $rows:expr; $($n:literal)+) => {
        match $rows {
            // SAFETY: upheld by the caller.
            $($n => unsafe { $crate::simd::microkernel::microkernel::<Self, $n>($s, $args) },)+
            _ => unreachable!("a tile has 1 to {} rows", Self::TILE_ROWS),
        }
    };
}
pub(crate) use microkernel_by_rows;
