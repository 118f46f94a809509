//! The last step of every product: bias, gate and residual are applied to the sums on their way to the result.

use std::ops::Range;

use kiln_ops::Groups;

use crate::element::{Element, read, write};
use crate::gemm::Sink;
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
    fn write<S: Simd>(&self, s: S, row: usize, col: usize, sums: &[f32]) {
        let end = col + sums.len();
        for part in &self.parts {
            let (from, to) = (col.max(part.start), end.min(part.start + part.width));
            if from >= to {
                continue;
            }
            let at = row * part.width;
            // SAFETY: every column of every row is written once, by the task that has its sums.
            let out = unsafe { part.data.slice(at + from - part.start..at + to - part.start) };
            let addends = Addends {
                bias: self.bias.map(|b| &b[from..to]),
                gate: self.gate.map(|(g, groups)| &g[groups.of_row(row) * self.width..][from..to]),
                residual: self.residual.map(|r| &r[row * self.width..][from..to]),
            };
            finish(s, &sums[from - col..to - col], addends, out);
        }
    }

    #[inline(always)]
    fn near<S: Simd>(&self, s: S, row: usize, cols: Range<usize>) {
        for part in &self.parts {
            let (from, to) = (cols.start.max(part.start), cols.end.min(part.start + part.width));
            if from < to {
                fetch(s, part.data.place(row * part.width + from - part.start), to - from);
                if let Some(residual) = self.residual {
                    fetch(s, residual.as_ptr().wrapping_add(row * self.width + from), to - from);
                }
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
    for i in (0..out.len()).step_by(S::LANES) {
        let mut v = read(s, sums, i);
        if let Some(bias) = with.bias {
            v = s.add(v, read(s, bias, i));
        }
        v = match (with.gate, with.residual) {
            (Some(gate), Some(residual)) => s.fma(read(s, gate, i), v, read(s, residual, i)),
            (None, Some(residual)) => s.add(read(s, residual, i), v),
            (Some(gate), None) => s.mul(read(s, gate, i), v),
            (None, None) => v,
        };
        write(s, out, i, v);
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
    fn write<S: Simd>(&self, s: S, row: usize, col: usize, sums: &[f32]) {
        let at = row * self.width + col;
        // SAFETY: every column of every row is written once, by the task that has its sums.
        let out = unsafe { self.data.slice(at..at + sums.len()) };
        let scale = s.splat(self.scale);
        for i in (0..out.len()).step_by(S::LANES) {
            write(s, out, i, s.mul(scale, read(s, sums, i)));
        }
    }

    #[inline(always)]
    fn near<S: Simd>(&self, s: S, row: usize, cols: Range<usize>) {
        fetch(s, self.data.place(row * self.width + cols.start), cols.len());
    }
}
