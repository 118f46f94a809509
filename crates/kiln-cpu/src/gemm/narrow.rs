use super::Rows;
use crate::simd::{MAX_LANES, Simd, dispatch, sum};

/// Up to so many columns are computed by dot products; a tile would be mostly empty.
pub(crate) const FEW_COLS: usize = 4;
/// Rows of the left operand taken together, so that a vector of the right one is read once for all of them.
const GROUP: usize = 4;

/// The distance between rows of `depth` values: whole vectors of any instruction set.
pub(crate) fn padded(depth: usize) -> usize {
    depth.next_multiple_of(MAX_LANES)
}

/// Values of scratch that [`narrow`] needs.
pub(crate) fn narrow_scratch(depth: usize) -> usize {
    GROUP * padded(depth)
}

/// `COLS` sums for each of the [`GROUP`] rows in `left`; `stride` is a multiple of every vector length.
#[inline(always)]
fn group<S: Simd, const COLS: usize>(
    s: S,
    left: &[f32],
    right: &[f32],
    stride: usize,
) -> [[f32; COLS]; GROUP] {
    assert!(stride.is_multiple_of(S::LANES) && left.len() >= GROUP * stride && right.len() >= COLS * stride);
    let mut sums = [[s.splat(0.0); COLS]; GROUP];
    for k in (0..stride).step_by(S::LANES) {
        // SAFETY: k + LANES <= stride, and the lengths were checked above.
        unsafe {
            let mut columns = [s.splat(0.0); COLS];
            for (j, column) in columns.iter_mut().enumerate() {
                *column = s.load(right.as_ptr().add(j * stride + k));
            }
            for (i, sums) in sums.iter_mut().enumerate() {
                let row = s.load(left.as_ptr().add(i * stride + k));
                for (sum, &column) in sums.iter_mut().zip(&columns) {
                    *sum = s.fma(row, column, *sum);
                }
            }
        }
    }
    let mut out = [[0.0; COLS]; GROUP];
    for (out, sums) in out.iter_mut().zip(sums) {
        for (out, v) in out.iter_mut().zip(sums) {
            *out = sum(s, v);
        }
    }
    out
}

/// What [`narrow`] multiplies.
pub(crate) struct Narrow<'a, R> {
    pub source: &'a R,
    pub depth: usize,
    /// `[cols, padded(depth)]`, zeros at the end of each row.
    pub right: &'a [f32],
    pub cols: usize,
}

#[inline(always)]
fn narrow_kernel<S: Simd, R: Rows>(
    s: S,
    by: &Narrow<'_, R>,
    first: usize,
    scratch: &mut [f32],
    out: &mut [f32],
) {
    let stride = padded(by.depth);
    let scratch = &mut scratch[..GROUP * stride];
    for (group, out) in out.chunks_mut(GROUP * FEW_COLS).enumerate() {
        let rows = out.len() / FEW_COLS;
        for (i, row) in scratch.chunks_exact_mut(stride).enumerate() {
            let (values, rest) = row.split_at_mut(by.depth);
            rest.fill(0.0);
            if i < rows {
                by.source.fill(s, first + group * GROUP + i, 0, values);
            }
        }
        match by.cols {
            1 => spread(self::group::<S, 1>(s, scratch, by.right, stride), out),
            2 => spread(self::group::<S, 2>(s, scratch, by.right, stride), out),
            3 => spread(self::group::<S, 3>(s, scratch, by.right, stride), out),
            FEW_COLS => spread(self::group::<S, FEW_COLS>(s, scratch, by.right, stride), out),
            _ => unreachable!("1 to FEW_COLS columns"),
        }
    }
}

#[inline(always)]
fn spread<const COLS: usize>(sums: [[f32; COLS]; GROUP], out: &mut [f32]) {
    for (out, sums) in out.chunks_exact_mut(FEW_COLS).zip(sums) {
        out[..COLS].copy_from_slice(&sums);
    }
}

dispatch! {
    /// Multiplies rows from `first` on, as many as `out` has room for at [`FEW_COLS`] a row.
    pub(crate) fn narrow<R: Rows>(
        by: &Narrow<'_, R>, first: usize, scratch: &mut [f32], out: &mut [f32],
    ) => narrow_kernel;
}
