use kiln_tensor::{bf16, f16};

use super::product::Finished;
use super::{Sink, emit};
use crate::Context;
use crate::element::Source;
use crate::simd::{Simd, dispatch, sum};
use crate::weight::{Format, Stack};

/// Up to so many rows are multiplied by streaming over the weight, without packing it.
pub(crate) const FEW_ROWS: usize = 5;

/// Weight rows a thread takes at a time.
const COLS_AT_ONCE: usize = 64;

/// `x[i] · w` for `ROWS` rows of `x`, each `w.len()` values, where `w` need not be aligned.
#[inline(always)]
fn dots<S: Simd, T: Source, const ROWS: usize>(s: S, w: &[u8], x: &[f32]) -> [f32; ROWS] {
    // Several sums a row, so that one addition does not wait for the other.
    const LANES_OF_SUMS: usize = 4;
    let depth = w.len() / size_of::<T>();
    assert!(x.len() >= ROWS * depth);
    let w = w.as_ptr().cast::<T>();
    let mut sums = [[s.splat(0.0); LANES_OF_SUMS]; ROWS];
    let step = LANES_OF_SUMS * S::LANES;
    let whole = depth / step * step;
    let mut k = 0;
    while k < whole {
        for lane in 0..LANES_OF_SUMS {
            let at = k + lane * S::LANES;
            // SAFETY: at + LANES <= depth, the length of w and of every row of x.
            unsafe {
                let w = T::load(s, w.add(at));
                for (i, sums) in sums.iter_mut().enumerate() {
                    sums[lane] = s.fma(w, s.load(x.as_ptr().add(i * depth + at)), sums[lane]);
                }
            }
        }
        k += step;
    }
    let mut out = [0.0; ROWS];
    for (i, sums) in sums.iter().enumerate() {
        out[i] = sum(s, s.add(s.add(sums[0], sums[1]), s.add(sums[2], sums[3])));
        for k in whole..depth {
            // SAFETY: k < depth.
            out[i] += unsafe { w.add(k).read_unaligned() }.widen() * x[i * depth + k];
        }
    }
    out
}

/// One of the products that add up to the result.
#[derive(Clone, Copy)]
pub(crate) struct FewTerm<'a> {
    /// `[rows, weight.cols]`.
    pub x: &'a [f32],
    pub weight: &'a Stack,
    /// The column of the result where the weight's first row goes.
    pub at: usize,
}

/// Adds the product with `count` weight rows from `first` on to `out`, whose rows are `COLS_AT_ONCE` apart.
#[inline(always)]
fn few_kernel<S: Simd>(s: S, term: FewTerm<'_>, rows: usize, first: usize, count: usize, out: &mut [f32]) {
    match term.weight.format {
        Format::F32 => few_of::<S, f32>(s, term, rows, first, count, out),
        Format::BF16 => few_of::<S, bf16>(s, term, rows, first, count, out),
        Format::F16 => few_of::<S, f16>(s, term, rows, first, count, out),
        Format::Packed => few_unpacked(s, term, rows, first, count, out),
        Format::I8 => unreachable!("bytes have kernels of their own"),
    }
}

#[inline(always)]
fn few_of<S: Simd, T: Source>(
    s: S,
    term: FewTerm<'_>,
    rows: usize,
    first: usize,
    count: usize,
    out: &mut [f32],
) {
    for j in 0..count {
        one::<S, T>(s, term.weight.row(first + j), term.x, rows, &mut out[j..]);
    }
}

/// [`few_of`] for a packed weight, a row after the other.
#[inline(always)]
fn few_unpacked<S: Simd>(s: S, term: FewTerm<'_>, rows: usize, first: usize, count: usize, out: &mut [f32]) {
    let mut w = vec![0f32; term.weight.cols];
    for j in 0..count {
        term.weight.unpack(s, first + j, 0, &mut w);
        one::<S, f32>(s, bytemuck::cast_slice(&w), term.x, rows, &mut out[j..]);
    }
}

/// Adds the products of one weight row.
#[inline(always)]
fn one<S: Simd, T: Source>(s: S, w: &[u8], x: &[f32], rows: usize, out: &mut [f32]) {
    match rows {
        1 => scatter(dots::<S, T, 1>(s, w, x), out),
        2 => scatter(dots::<S, T, 2>(s, w, x), out),
        3 => scatter(dots::<S, T, 3>(s, w, x), out),
        4 => scatter(dots::<S, T, 4>(s, w, x), out),
        FEW_ROWS => scatter(dots::<S, T, FEW_ROWS>(s, w, x), out),
        _ => unreachable!("1 to FEW_ROWS rows"),
    }
}

#[inline(always)]
fn scatter<const ROWS: usize>(sums: [f32; ROWS], out: &mut [f32]) {
    for (i, sum) in sums.into_iter().enumerate() {
        out[i * COLS_AT_ONCE] += sum;
    }
}

dispatch! {
    fn few_on(term: FewTerm<'_>, rows: usize, first: usize, count: usize, out: &mut [f32]) => few_kernel;
}

/// Hands `Σ term.x · term.weightᵀ`, `rows` × `cols` with `rows <= FEW_ROWS`, to the sink.
pub(crate) fn few_rows<K: Sink>(cx: &Context, terms: &[FewTerm<'_>], [rows, cols]: [usize; 2], sink: &K) {
    cx.pool.each(cols.div_ceil(COLS_AT_ONCE), |task| {
        let start = task * COLS_AT_ONCE;
        let end = cols.min(start + COLS_AT_ONCE);
        let mut sums = [0.0; FEW_ROWS * COLS_AT_ONCE];
        for term in terms {
            let (from, to) = (start.max(term.at), end.min(term.at + term.weight.rows));
            if from < to {
                few_on(cx.level, *term, rows, from - term.at, to - from, &mut sums[from - start..]);
            }
        }
        let done = Finished { rows: 0..rows, cols: start..end, sums: &sums, stride: COLS_AT_ONCE };
        emit(cx.level, sink, done);
    });
}
