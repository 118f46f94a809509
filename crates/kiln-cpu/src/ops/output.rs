//! The last step of every product: bias, gate and residual are applied to the sums on their way to the result.

#[cfg(target_arch = "x86_64")]
use std::ops::Range;

use kiln_ops::Groups;
#[cfg(target_arch = "x86_64")]
use kiln_tensor::{DType, bf16};

use crate::element::{Element, read, write};
use crate::gemm::{Finished, ROWS_AHEAD, Sink};
#[cfg(target_arch = "x86_64")]
use crate::gemm::{Onto, Plain};
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
    /// Whether results are written past the caches, so that these keep what is worked on. The product sees to it that
    /// others find them.
    pub stream: bool,
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
                if !self.stream {
                    fetch(s, part.data.place(place(row + ROWS_AHEAD)), cols.len());
                }
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
                finish(s, done.sums(row, cols.clone()), addends, self.stream, out);
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn plain(&self, rows: Range<usize>, cols: Range<usize>) -> Option<Plain> {
        if !self.stream || self.bias.is_some() || T::DTYPE != DType::BF16 {
            return None;
        }
        let inside = |part: &&Part<'_, T>| part.start <= cols.start && cols.end <= part.start + part.width;
        let part = self.parts.iter().find(inside)?;
        // SAFETY: rows and columns of the result, of which this task alone writes these.
        let to = unsafe { part.data.slice(rows.start * part.width..rows.end * part.width) };
        let to: *mut bf16 = to[cols.start - part.start..].as_mut_ptr().cast();
        let lines = to.addr().is_multiple_of(64) && part.width.is_multiple_of(32);
        let onto = match (self.gate, self.residual) {
            (None, None) => None,
            (Some((gate, groups)), Some(residual)) if part.width == self.width => {
                let group = groups.of_row(rows.start);
                if rows.clone().any(|row| groups.of_row(row) != group) {
                    return None;
                }
                let residual =
                    residual[rows.start * self.width..rows.end * self.width][cols.start..].as_ptr();
                let gate = gate[group * self.width..][cols].as_ptr();
                Some(Onto { residual: residual.cast(), gate })
            }
            _ => return None,
        };
        lines.then_some(Plain { to, stride: part.width, onto })
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
fn finish<S: Simd, T: Element>(s: S, sums: &[f32], with: Addends<'_, T>, stream: bool, out: &mut [T]) {
    let count = out.len();
    let short = |x: Option<&[f32]>| x.is_some_and(|x| x.len() < count);
    assert!(sums.len() >= count && !short(with.bias) && !short(with.gate));
    assert!(with.residual.is_none_or(|x| x.len() >= count));
    let whole = count / (2 * S::LANES) * (2 * S::LANES);
    for i in (0..whole).step_by(2 * S::LANES) {
        // SAFETY: i + 2 · LANES is no more than the length of all, as was just checked.
        unsafe {
            let (a, b) = (combine(s, sums, &with, i), combine(s, sums, &with, i + S::LANES));
            let to = out.as_mut_ptr().add(i);
            match stream && to.addr().is_multiple_of(64) {
                true => T::stream_two(s, to, a, b),
                false => T::store_two(s, to, a, b),
            }
        }
    }
    for i in (whole..count).step_by(S::LANES) {
        let mut v = read(s, sums, i);
        if let Some(bias) = with.bias {
            v = s.add(v, read(s, bias, i));
        }
        v = match (with.gate, with.residual) {
            (Some(gate), Some(residual)) => s.fma(read(s, gate, i), v, read(s, residual, i)),
            (Some(gate), None) => s.mul(read(s, gate, i), v),
            (None, Some(residual)) => s.add(read(s, residual, i), v),
            (None, None) => v,
        };
        write(s, out, i, v);
    }
}

/// One vector of the result, without a look at where things end, since this runs beside the tiles' products.
///
/// # Safety
/// There is a vector at `i` in everything.
#[inline(always)]
unsafe fn combine<S: Simd, T: Element>(s: S, sums: &[f32], with: &Addends<'_, T>, i: usize) -> S::V {
    // SAFETY: the caller's promise.
    unsafe {
        let mut v = s.load(sums.as_ptr().add(i));
        if let Some(bias) = with.bias {
            v = s.add(v, s.load(bias.as_ptr().add(i)));
        }
        match (with.gate, with.residual) {
            (Some(gate), Some(residual)) => {
                s.fma(s.load(gate.as_ptr().add(i)), v, T::load(s, residual.as_ptr().add(i)))
            }
            (Some(gate), None) => s.mul(s.load(gate.as_ptr().add(i)), v),
            (None, Some(residual)) => s.add(T::load(s, residual.as_ptr().add(i)), v),
            (None, None) => v,
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

    #[cfg(target_arch = "x86_64")]
    fn plain(&self, _: Range<usize>, _: Range<usize>) -> Option<Plain> {
        None
    }
}
