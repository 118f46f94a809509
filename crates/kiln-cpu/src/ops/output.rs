//! The last step of every product: bias, gate and residual are applied to the sums on their way to the result.

use kiln_ops::Groups;

use crate::element::{Element, read, write};
use crate::gemm::{Finished, ROWS_AHEAD, Sink};
use crate::parallel::Disjoint;
use crate::simd::Simd;

/// `residual + gate · (sums + bias)`, rounded to `T`; what is missing is left out.
pub(crate) struct Output<'a, T> {
    pub bias: Option<&'a [f32]>,
    /// `[groups, width]`.
    pub gate: Option<(&'a [f32], &'a Groups)>,
    /// `[rows, width]`.
    pub residual: Option<&'a [T]>,
    /// Columns of the product.
    pub width: usize,
    /// The tensors that the columns are cut into.
    pub parts: Vec<Part<'a, T>>,
}

/// A result that takes columns `start..start + width`.
pub(crate) struct Part<'a, T> {
    pub start: usize,
    pub width: usize,
    pub data: Disjoint<'a, T>,
}

impl<T: Element> Sink for Output<'_, T> {
    #[inline(always)]
    fn write<S: Simd>(&self, s: S, done: Finished<'_>) {
        for part in &self.parts {
            let cols = done.cols.start.max(part.start)..done.cols.end.min(part.start + part.width);
            if cols.is_empty() {
                continue;
            }
            let bias = self.bias.map(|b| &b[cols.clone()]);
            for row in done.rows.clone() {
                let place = |row: usize| row * part.width + cols.start - part.start;
                fetch(s, part.data.place(place(row + ROWS_AHEAD)), cols.len());
                if let Some(residual) = self.residual {
                    let place = (row + ROWS_AHEAD) * self.width + cols.start;
                    fetch(s, residual.as_ptr().wrapping_add(place), cols.len());
                }
                // SAFETY: every column of every row is written once, by the task that has its sums.
                let out = unsafe { part.data.slice(place(row)..place(row) + cols.len()) };
                let addends = Addends {
                    bias,
                    gate: self.gate.map(|(g, groups)| &g[groups.of_row(row) * self.width..][cols.clone()]),
                    residual: self.residual.map(|r| &r[row * self.width..][cols.clone()]),
                };
                finish(s, done.sums(row, cols.clone()), addends, out);
            }
        }
    }
}

/// Asks for so many elements, wherever they are.
#[inline(always)]
fn fetch<S: Simd, T>(s: S, from: *const T, count: usize) {
    const LINE: usize = 64;
    for i in (0..count).step_by(LINE / size_of::<T>()) {
        s.prefetch(from.wrapping_add(i).cast());
    }
}

/// What belongs to one piece of a row.
struct Addends<'a, T> {
    bias: Option<&'a [f32]>,
    gate: Option<&'a [f32]>,
    residual: Option<&'a [T]>,
}

#[inline(always)]
fn finish<S: Simd, T: Element>(s: S, sums: &[f32], with: Addends<'_, T>, out: &mut [T]) {
    let count = out.len();
    let short = |x: Option<&[f32]>| x.is_some_and(|x| x.len() < count);
    assert!(sums.len() >= count && !short(with.bias) && !short(with.gate));
    assert!(with.residual.is_none_or(|x| x.len() >= count));
    // SAFETY: everything is as long as `out`, as was just checked.
    unsafe {
        match count.is_multiple_of(S::LANES) {
            true => combine::<S, T, true>(s, sums, with, out),
            false => combine::<S, T, false>(s, sums, with, out),
        }
    }
}

/// [`finish`]; for `WHOLE` vectors without a look at what is left, since this runs beside the tiles' products.
///
/// # Safety
/// All slices are as long as `out`, which is whole vectors if `WHOLE`.
#[inline(always)]
unsafe fn combine<S: Simd, T: Element, const WHOLE: bool>(
    s: S,
    sums: &[f32],
    with: Addends<'_, T>,
    out: &mut [T],
) {
    /// # Safety
    /// If `WHOLE`, there is a vector at `i`.
    #[inline(always)]
    unsafe fn at<S: Simd, T: Element, const WHOLE: bool>(s: S, x: &[T], i: usize) -> S::V {
        match WHOLE {
            // SAFETY: the caller's promise.
            true => unsafe { T::load(s, x.as_ptr().add(i)) },
            false => read(s, x, i),
        }
    }
    for i in (0..out.len()).step_by(S::LANES) {
        // SAFETY: where vectors are whole, i + LANES is no more than the length of all.
        unsafe {
            let mut v = at::<S, f32, WHOLE>(s, sums, i);
            if let Some(bias) = with.bias {
                v = s.add(v, at::<S, f32, WHOLE>(s, bias, i));
            }
            if let Some(gate) = with.gate {
                let gate = at::<S, f32, WHOLE>(s, gate, i);
                v = match with.residual {
                    Some(residual) => s.fma(gate, v, at::<S, T, WHOLE>(s, residual, i)),
                    None => s.mul(gate, v),
                };
            } else if let Some(residual) = with.residual {
                v = s.add(at::<S, T, WHOLE>(s, residual, i), v);
            }
            match WHOLE {
                true => T::store(s, out.as_mut_ptr().add(i), v),
                false => write(s, out, i, v),
            }
        }
    }
}

/// Plain f32 sums times a factor, `[rows, width]`.
pub(crate) struct Scaled<'a> {
    pub scale: f32,
    pub width: usize,
    pub data: Disjoint<'a, f32>,
}

impl Sink for Scaled<'_> {
    #[inline(always)]
    fn write<S: Simd>(&self, s: S, done: Finished<'_>) {
        let scale = s.splat(self.scale);
        for row in done.rows.clone() {
            let place = |row: usize| row * self.width + done.cols.start;
            fetch(s, self.data.place(place(row + ROWS_AHEAD)), done.cols.len());
            // SAFETY: every column of every row is written once, by the task that has its sums.
            let out = unsafe { self.data.slice(place(row)..place(row) + done.cols.len()) };
            let sums = done.sums(row, done.cols.clone());
            for i in (0..out.len()).step_by(S::LANES) {
                write(s, out, i, s.mul(scale, read(s, sums, i)));
            }
        }
    }
}
