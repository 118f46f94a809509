//! The epilogues of products: bias, gate and residual are fused into the store of the result.

#[cfg(target_arch = "x86_64")]
use std::ops::Range;

use kiln_ops::RowGroups;
#[cfg(target_arch = "x86_64")]
use kiln_tensor::{DType, bf16};

use crate::element::{Element, read, write};
#[cfg(target_arch = "x86_64")]
use crate::gemm::{DirectOutput, GatedResidual};
use crate::gemm::{Epilogue, PREFETCH_ROWS, SumBlock};
use crate::parallel::DisjointMut;
use crate::simd::Simd;

/// `residual + gate · (sums + bias)`, rounded to `T`; absent operands are left out.
pub(crate) struct FusedEpilogue<'a, T> {
    pub bias: Option<&'a [f32]>,
    /// `[groups, width]`.
    pub gate: Option<(&'a [f32], &'a RowGroups)>,
    /// `[rows, width]`.
    pub residual: Option<&'a [T]>,
    /// Columns of the product.
    pub width: usize,
    /// The tensors that the columns are split into.
    pub outputs: Vec<OutputColumns<'a, T>>,
    /// Whether to use non-temporal stores, so that the caches keep the operands. The product must execute an `sfence`.
    pub stream: bool,
}

/// A tensor that takes columns `start..start + width` of a product.
pub(crate) struct OutputColumns<'a, T> {
    pub start: usize,
    pub width: usize,
    pub data: DisjointMut<'a, T>,
}

impl<T: Element> Epilogue for FusedEpilogue<'_, T> {
    #[inline(always)]
    fn apply<S: Simd>(&self, s: S, block: SumBlock<'_>) {
        for output in &self.outputs {
            let cols = block.cols.start.max(output.start)..block.cols.end.min(output.start + output.width);
            if cols.is_empty() {
                continue;
            }
            let bias = self.bias.map(|b| &b[cols.clone()]);
            for row in block.rows.clone() {
                let offset = |row: usize| row * output.width + cols.start - output.start;
                if !self.stream {
                    prefetch(s, output.data.ptr(offset(row + PREFETCH_ROWS)), cols.len());
                }
                if let Some(residual) = self.residual {
                    let offset = (row + PREFETCH_ROWS) * self.width + cols.start;
                    prefetch(s, residual.as_ptr().wrapping_add(offset), cols.len());
                }
                // SAFETY: every column of every row is written once, by the task that has its sums.
                let out = unsafe { output.data.slice(offset(row)..offset(row) + cols.len()) };
                let operands = RowOperands {
                    bias,
                    gate: self.gate.map(|(g, groups)| &g[groups.group_of(row) * self.width..][cols.clone()]),
                    residual: self.residual.map(|r| &r[row * self.width..][cols.clone()]),
                };
                apply_row(s, block.row(row, cols.clone()), operands, self.stream, out);
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn direct_output(&self, rows: Range<usize>, cols: Range<usize>) -> Option<DirectOutput> {
        if !self.stream || self.bias.is_some() || T::DTYPE != DType::BF16 {
            return None;
        }
        let inside = |o: &&OutputColumns<'_, T>| o.start <= cols.start && cols.end <= o.start + o.width;
        let output = self.outputs.iter().find(inside)?;
        // SAFETY: these rows and columns of the result are written by this task alone.
        let to = unsafe { output.data.slice(rows.start * output.width..rows.end * output.width) };
        let to: *mut bf16 = to[cols.start - output.start..].as_mut_ptr().cast();
        let aligned = to.addr().is_multiple_of(64) && output.width.is_multiple_of(32);
        let gated = match (self.gate, self.residual) {
            (None, None) => None,
            (Some((gate, groups)), Some(residual)) if output.width == self.width => {
                let group = groups.group_of(rows.start);
                if rows.clone().any(|row| groups.group_of(row) != group) {
                    return None;
                }
                let residual =
                    residual[rows.start * self.width..rows.end * self.width][cols.start..].as_ptr();
                let gate = gate[group * self.width..][cols].as_ptr();
                Some(GatedResidual { residual: residual.cast(), gate })
            }
            _ => return None,
        };
        aligned.then_some(DirectOutput { to, stride: output.width, gated })
    }
}

/// Prefetches `count` elements; any address will do.
#[inline(always)]
fn prefetch<S: Simd, T>(s: S, from: *const T, count: usize) {
    const LINE: usize = 64;
    for i in (0..count).step_by(LINE / size_of::<T>()) {
        s.prefetch(from.wrapping_add(i).cast());
    }
}

/// The operands of some columns of a row.
struct RowOperands<'a, T> {
    bias: Option<&'a [f32]>,
    gate: Option<&'a [f32]>,
    residual: Option<&'a [T]>,
}

#[inline(always)]
fn apply_row<S: Simd, T: Element>(
    s: S,
    sums: &[f32],
    operands: RowOperands<'_, T>,
    stream: bool,
    out: &mut [T],
) {
    let count = out.len();
    let RowOperands { bias, gate, residual } = operands;
    assert!(sums.len() >= count && bias.is_none_or(|x| x.len() >= count));
    assert!(gate.is_none_or(|x| x.len() >= count) && residual.is_none_or(|x| x.len() >= count));
    let whole = count / (2 * S::LANES) * (2 * S::LANES);
    for i in (0..whole).step_by(2 * S::LANES) {
        // SAFETY: i + 2 · LANES is at most the length of all, as just checked.
        unsafe {
            let (a, b) =
                (apply_vector(s, sums, &operands, i), apply_vector(s, sums, &operands, i + S::LANES));
            let to = out.as_mut_ptr().add(i);
            if stream && to.addr().is_multiple_of(64) {
                T::stream_two(s, to, a, b);
            } else {
                T::store_two(s, to, a, b);
            }
        }
    }
    for i in (whole..count).step_by(S::LANES) {
        let mut v = read(s, sums, i);
        if let Some(bias) = bias {
            v = s.add(v, read(s, bias, i));
        }
        v = match (gate, residual) {
            (Some(gate), Some(residual)) => s.fma(read(s, gate, i), v, read(s, residual, i)),
            (Some(gate), None) => s.mul(read(s, gate, i), v),
            (None, Some(residual)) => s.add(read(s, residual, i), v),
            (None, None) => v,
        };
        write(s, out, i, v);
    }
}

/// One vector of the result, without bounds checks: this is the inner loop of every product's epilogue.
///
/// # Safety
/// All operands have a whole vector at `i`.
#[inline(always)]
unsafe fn apply_vector<S: Simd, T: Element>(
    s: S,
    sums: &[f32],
    operands: &RowOperands<'_, T>,
    i: usize,
) -> S::V {
    // SAFETY: upheld by the caller.
    unsafe {
        let mut v = s.load(sums.as_ptr().add(i));
        if let Some(bias) = operands.bias {
            v = s.add(v, s.load(bias.as_ptr().add(i)));
        }
        match (operands.gate, operands.residual) {
            (Some(gate), Some(residual)) => {
                s.fma(s.load(gate.as_ptr().add(i)), v, T::load(s, residual.as_ptr().add(i)))
            }
            (Some(gate), None) => s.mul(s.load(gate.as_ptr().add(i)), v),
            (None, Some(residual)) => s.add(T::load(s, residual.as_ptr().add(i)), v),
            (None, None) => v,
        }
    }
}

/// f32 sums times a factor, `[rows, width]`.
pub(crate) struct ScaleEpilogue<'a> {
    pub scale: f32,
    pub width: usize,
    pub data: DisjointMut<'a, f32>,
}

impl Epilogue for ScaleEpilogue<'_> {
    #[inline(always)]
    fn apply<S: Simd>(&self, s: S, block: SumBlock<'_>) {
        let scale = s.splat(self.scale);
        for row in block.rows.clone() {
            let offset = |row: usize| row * self.width + block.cols.start;
            prefetch(s, self.data.ptr(offset(row + PREFETCH_ROWS)), block.cols.len());
            // SAFETY: every column of every row is written once, by the task that has its sums.
            let out = unsafe { self.data.slice(offset(row)..offset(row) + block.cols.len()) };
            let sums = block.row(row, block.cols.clone());
            for i in (0..out.len()).step_by(S::LANES) {
                write(s, out, i, s.mul(scale, read(s, sums, i)));
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn direct_output(&self, _: Range<usize>, _: Range<usize>) -> Option<DirectOutput> {
        None
    }
}
