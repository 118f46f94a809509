//! Products through frozen weights, and those of adapters with their gradients.
//!
//! `dy · W` needs no transposed copy of the weight: the right operand of a product is packed from rows of `W` as they are stored.
//! Of a gradient `dyᵀ · x`, the narrower operand is the one that is read by columns.

#[cfg(target_arch = "x86_64")]
use std::ops::Range;

use kiln_ops::training::{LowRank, shapes};
use kiln_ops::{Result, Tensor as _};

use crate::Context;
use crate::element::{Element, Scalar, convert, read, write};
#[cfg(target_arch = "x86_64")]
use crate::gemm::DirectOutput;
use crate::gemm::{Epilogue, Orientation, PackedGemm, PackedLeft, RowSource, SumBlock, Term};
use crate::matrix::DequantizedRows;
use crate::ops::linear::ColumnConcat;
use crate::parallel::DisjointMut;
use crate::simd::Simd;
use crate::tensor::{CpuTensor, TensorElement, by_dtype};
use crate::weight::CpuWeight;

/// `add + scale · sums`, rounded to `T`: `[rows, width]`.
pub(super) struct ScaledAdd<'a, T> {
    pub scale: f32,
    pub add: Option<&'a [T]>,
    pub width: usize,
    pub data: DisjointMut<'a, T>,
}

impl<T: Element> Epilogue for ScaledAdd<'_, T> {
    #[inline(always)]
    fn apply<S: Simd>(&self, s: S, block: SumBlock<'_>) {
        let scale = s.splat(self.scale);
        for row in block.rows.clone() {
            let start = row * self.width + block.cols.start;
            // SAFETY: every column of every row is written once, by the task that has its sums.
            let out = unsafe { self.data.slice(start..start + block.cols.len()) };
            let sums = block.row(row, block.cols.clone());
            let add = self.add.map(|add| &add[start..start + sums.len()]);
            for i in (0..out.len()).step_by(S::LANES) {
                let sum = read(s, sums, i);
                let v = match add {
                    Some(add) => s.fma(scale, sum, read(s, add, i)),
                    None => s.mul(scale, sum),
                };
                write(s, out, i, v);
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn direct_output(&self, _: Range<usize>, _: Range<usize>) -> Option<DirectOutput> {
        None
    }
}

/// Rows of a matrix in memory, `stride` apart, `width` elements from `start` on.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a, T> {
    pub data: &'a [T],
    pub start: usize,
    pub stride: usize,
}

impl<T: Scalar> RowSource for Rows<'_, T> {
    #[inline(always)]
    fn read_row<S: Simd>(&self, s: S, row: usize, from: usize, out: &mut [f32]) {
        // Panels may have rows past the end, whose sums nobody reads.
        let first = self.start + row * self.stride + from;
        let end = self.data.len().min(first + out.len());
        let inside = end.saturating_sub(first);
        let (known, rest) = out.split_at_mut(inside);
        convert(s, &self.data[first.min(end)..end], known);
        rest.fill(0.0);
    }
}

/// The columns of a matrix in memory as rows.
#[derive(Clone, Copy)]
pub(super) struct Columns<'a, T> {
    pub data: &'a [T],
    pub start: usize,
    pub stride: usize,
}

impl<T: Scalar> RowSource for Columns<'_, T> {
    #[inline(always)]
    fn read_row<S: Simd>(&self, _: S, row: usize, from: usize, out: &mut [f32]) {
        let column = self.data[self.start + from * self.stride + row..].iter().step_by(self.stride);
        out.iter_mut().zip(column).for_each(|(out, v)| *out = v.widen());
    }
}

/// `left · rightᵀ` or `left · right`, by `orientation` of the right operand, into `epilogue`: `[rows, cols]` from sums of
/// `depth`.
pub(super) fn product<L: RowSource, R: RowSource + Send>(
    cx: &Context,
    left: &L,
    right: R,
    orientation: Orientation,
    [rows, cols, depth]: [usize; 3],
    epilogue: &impl Epilogue,
) -> Result<()> {
    if rows == 0 || cols == 0 {
        return Ok(());
    }
    let left = PackedLeft::new(cx, cx.level, left, 0..rows, depth)?;
    let term = Term { left: &left, right, cols: 0..cols };
    PackedGemm { cx, format: cx.level, term, orientation, updates: &[] }.run(0..rows, epilogue)
}

pub(crate) fn split_columns(cx: &Context, x: &CpuTensor, widths: &[usize]) -> Result<Vec<CpuTensor>> {
    let shapes = shapes::split_columns(x, widths)?;
    let width: usize = widths.iter().sum();
    by_dtype!(x, T => {
        let x = T::elements(x);
        let mut first = 0;
        let mut parts = Vec::with_capacity(widths.len());
        for shape in shapes {
            let columns = first..first + shape.last();
            let mut out = cx.buffer::<T>(shape.numel())?;
            cx.for_each_row(&mut out, shape.last(), |row, out| {
                out.copy_from_slice(&x[row * width..][columns.clone()]);
            });
            first = columns.end;
            parts.push(T::into_tensor(out, shape));
        }
        Ok(parts)
    })
}

pub(crate) fn linear_backward(
    cx: &Context,
    dys: &[&CpuTensor],
    w: &CpuWeight,
    add: Option<&CpuTensor>,
) -> Result<CpuTensor> {
    let [out, cols] = w.size();
    let shape = shapes::linear_backward(dys, [out, cols], w.updates.len(), add)?;
    let rows = shape.rows();
    let weight = dequantized(w);
    by_dtype!(dys[0], T => {
        let mut dx = cx.buffer::<T>(shape.numel())?;
        let add = add.map(T::elements);
        let epilogue = ScaledAdd { scale: 1.0, add, width: cols, data: DisjointMut::new(&mut dx) };
        let left = ColumnConcat::<T>::new(dys);
        product(cx, &left, weight, Orientation::DepthByCols, [rows, cols, out], &epilogue)?;
        Ok(T::into_tensor(dx, shape))
    })
}

/// The rows of a weight as f32.
fn dequantized(w: &CpuWeight) -> DequantizedRows<'_> {
    DequantizedRows { matrix: &w.matrix, scales: &w.scales, rotation: w.rotation }
}

fn rows_of<T: TensorElement>(x: &CpuTensor) -> Rows<'_, T> {
    Rows { data: T::elements(x), start: 0, stride: x.shape().last() }
}

fn columns_of<T: TensorElement>(x: &CpuTensor) -> Columns<'_, T> {
    Columns { data: T::elements(x), start: 0, stride: x.shape().last() }
}

pub(crate) fn matmul_nt(
    cx: &Context,
    x: &CpuTensor,
    w: &CpuTensor,
    scale: f32,
    add: Option<&CpuTensor>,
) -> Result<CpuTensor> {
    let shape = shapes::matmul_nt(x, w, add)?;
    let (rows, out, depth) = (shape.rows(), shape.last(), x.shape().last());
    by_dtype!(x, T => {
        let mut y = cx.buffer::<T>(shape.numel())?;
        let epilogue =
            ScaledAdd { scale, add: add.map(T::elements), width: out, data: DisjointMut::new(&mut y) };
        let size = [rows, out, depth];
        product(cx, &rows_of::<T>(x), rows_of::<f32>(w), Orientation::ColsByDepth, size, &epilogue)?;
        Ok(T::into_tensor(y, shape))
    })
}

pub(crate) fn matmul_nn(
    cx: &Context,
    dy: &CpuTensor,
    w: &CpuTensor,
    scale: f32,
    add: Option<&CpuTensor>,
) -> Result<CpuTensor> {
    let shape = shapes::matmul_nn(dy, w, add)?;
    let (rows, cols, depth) = (shape.rows(), shape.last(), dy.shape().last());
    by_dtype!(dy, T => {
        let mut dx = cx.buffer::<T>(shape.numel())?;
        let epilogue =
            ScaledAdd { scale, add: add.map(T::elements), width: cols, data: DisjointMut::new(&mut dx) };
        let size = [rows, cols, depth];
        product(cx, &rows_of::<T>(dy), rows_of::<f32>(w), Orientation::DepthByCols, size, &epilogue)?;
        Ok(T::into_tensor(dx, shape))
    })
}

pub(crate) fn matmul_tn(
    cx: &Context,
    dy: &CpuTensor,
    x: &CpuTensor,
    scale: f32,
    add: Option<&CpuTensor>,
) -> Result<CpuTensor> {
    let shape = shapes::matmul_tn(dy, x, add)?;
    let (out, cols, rows) = (dy.shape().last(), x.shape().last(), dy.shape().rows());
    let add = add.map(f32::elements);
    let mut dw = cx.buffer::<f32>(shape.numel())?;
    if rows == 0 {
        dw.fill(0.0);
        dw.iter_mut().zip(add.into_iter().flatten()).for_each(|(dw, add)| *dw += add);
        return Ok(f32::into_tensor(dw, shape));
    }
    by_dtype!(dy, T => {
        if out <= cols {
            let epilogue = ScaledAdd { scale, add, width: cols, data: DisjointMut::new(&mut dw) };
            let size = [out, cols, rows];
            product(cx, &columns_of::<T>(dy), rows_of::<T>(x), Orientation::DepthByCols, size, &epilogue)?;
        } else {
            let mut turned = cx.buffer::<f32>(shape.numel())?;
            let data = DisjointMut::new(&mut turned);
            let epilogue = ScaledAdd { scale, add: None, width: out, data };
            let size = [cols, out, rows];
            product(cx, &columns_of::<T>(x), rows_of::<T>(dy), Orientation::DepthByCols, size, &epilogue)?;
            cx.for_each_row(&mut dw, cols, |row, dw| {
                for (col, dw) in dw.iter_mut().enumerate() {
                    *dw = turned[col * out + row] + add.map_or(0.0, |add| add[row * cols + col]);
                }
            });
        }
    });
    Ok(f32::into_tensor(dw, shape))
}

pub(crate) fn row_norms(
    cx: &Context,
    w: &CpuWeight,
    updates: &[LowRank<'_, CpuTensor>],
) -> Result<CpuTensor> {
    let [out, cols] = w.size();
    let shape = shapes::row_norms([out, cols], updates)?;
    let weight = dequantized(w);
    let mut norms = cx.buffer::<f32>(out)?;
    cx.pool.for_each_chunk_with(
        &mut norms,
        16,
        || cx.buffer::<f32>(cols),
        |chunk, norms, row| {
            for (i, norm) in norms.iter_mut().enumerate() {
                let index = chunk * 16 + i;
                crate::gemm::read_row(cx.level, &weight, index, row);
                for update in updates {
                    let (rank, n) = (update.down.shape().rows(), update.up.shape().rows());
                    if !(update.first..update.first + n).contains(&index) {
                        continue;
                    }
                    let up = &f32::elements(update.up)[(index - update.first) * rank..][..rank];
                    for (up, down) in up.iter().zip(f32::elements(update.down).chunks_exact(cols.max(1))) {
                        let factor = update.scale * up;
                        row.iter_mut().zip(down).for_each(|(row, down)| *row += factor * down);
                    }
                }
                *norm = row.iter().map(|v| f64::from(*v) * f64::from(*v)).sum::<f64>().sqrt() as f32;
            }
        },
    )?;
    Ok(f32::into_tensor(norms, shape))
}
