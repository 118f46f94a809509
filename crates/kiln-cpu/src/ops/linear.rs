use std::ops::Range;

use kiln_ops::{Error, Groups, Result, shapes};
use kiln_tensor::Shape;
#[cfg(target_arch = "x86_64")]
use kiln_tensor::{DType, bf16};

use super::output::{Output, Part, Scaled};
use crate::Context;
use crate::element::{Source, convert};
use crate::gemm::{
    FEW_ROWS, FewTerm, Int8, Packed, ROWS_AT_ONCE, Rows, Sink, Term, few_rows, product, product_of_bytes,
    widen_rows,
};
#[cfg(target_arch = "x86_64")]
use crate::gemm::{Halves, Panels, TileProduct};
#[cfg(target_arch = "x86_64")]
use crate::isa::Level;
use crate::parallel::Disjoint;
#[cfg(target_arch = "x86_64")]
use crate::simd::Amx;
use crate::simd::Simd;
use crate::tensor::{CpuTensor, Stored, by_dtype};
use crate::weight::{CpuWeight, Format, LowRank, Placed, Stack};

pub(crate) fn linear(cx: &Context, x: &CpuTensor, w: &CpuWeight) -> Result<CpuTensor> {
    let shape = shapes::linear(x, w.size())?;
    let [y] = by_dtype!(x, T => run::<T, 1>(cx, &[x], w, Extras { gate: None, residual: None }, [shape])?);
    Ok(y)
}

pub(crate) fn linear_split<const N: usize>(
    cx: &Context,
    x: &CpuTensor,
    w: &CpuWeight,
    widths: [usize; N],
) -> Result<[CpuTensor; N]> {
    let shapes = shapes::linear_split(x, w.size(), &widths)?;
    by_dtype!(x, T => run::<T, N>(cx, &[x], w, Extras { gate: None, residual: None }, shapes))
}

pub(crate) fn linear_gated_add(
    cx: &Context,
    xs: &[&CpuTensor],
    w: &CpuWeight,
    gate: Option<(&CpuTensor, &Groups)>,
    residual: &CpuTensor,
) -> Result<CpuTensor> {
    let shape = shapes::linear_gated_add(xs, w.size(), gate, residual)?;
    let gate = gate.map(|(gate, groups)| (f32::of(gate), groups));
    let [y] = by_dtype!(residual, T => {
        run::<T, 1>(cx, xs, w, Extras { gate, residual: Some(T::of(residual)) }, [shape])?
    });
    Ok(y)
}

/// What [`linear_gated_add`] adds to a plain product.
struct Extras<'a, T> {
    gate: Option<(&'a [f32], &'a Groups)>,
    residual: Option<&'a [T]>,
}

/// The product of `xs` side by side, its columns cut into tensors of these shapes.
fn run<T: Stored, const N: usize>(
    cx: &Context,
    xs: &[&CpuTensor],
    w: &CpuWeight,
    extras: Extras<'_, T>,
    shapes: [Shape; N],
) -> Result<[CpuTensor; N]> {
    let mut buffers = shapes.iter().map(|s| cx.buffer::<T>(s.numel())).collect::<Result<Vec<_>>>()?;
    let mut start = 0;
    let mut parts = Vec::with_capacity(N);
    for (buffer, shape) in buffers.iter_mut().zip(&shapes) {
        parts.push(Part { start, width: shape.last(), data: Disjoint::new(buffer) });
        start += shape.last();
    }
    let x = Columns::<T>::new(xs);
    let [width, _] = w.size();
    let Extras { gate, residual } = extras;
    let stream = w.in_tiles() && x.rows * width * size_of::<T>() >= STREAMED;
    let output = Output { bias: w.bias.as_deref(), gate, residual, width, parts, stream };
    match x.rows {
        0 => {}
        _ if w.stack.format == Format::I8 => bytes(cx, &x, w, &output, PACKED_AT_ONCE)?,
        1..=FEW_ROWS => few(cx, &x, w, &output)?,
        _ => many(cx, &x, w, &output, PACKED_AT_ONCE)?,
    }
    drop(output);
    let tensors: Vec<_> = buffers.into_iter().zip(shapes).map(|(b, s)| T::wrap(b, s)).collect();
    tensors
        .try_into()
        .map_err(|_| Error::Arguments { op: "linear_split", what: "no tensor for one of the widths".into() })
}

/// Bytes from which on a result is written past the caches: whoever reads it finds little of it there anyway.
const STREAMED: usize = 8 << 20;

/// Packed activations kept at a time, in elements; more rows than fit are worked on in bands.
const PACKED_AT_ONCE: usize = 1 << 26;

/// Blocked product; each low-rank update is one more product into the same sums.
fn many<T: Stored>(
    cx: &Context,
    x: &Columns<'_, T>,
    w: &CpuWeight,
    output: &impl Sink,
    packed_at_once: usize,
) -> Result<()> {
    #[cfg(target_arch = "x86_64")]
    if let (Level::Amx(amx), Format::BF16 | Format::Packed, Some(x)) = (cx.level, w.stack.format, x.halves())
    {
        return tiled(cx, amx, &x, w, output, packed_at_once);
    }
    let [out, cols] = w.size();
    // Whole strips, over which a weight is packed once.
    let band = (packed_at_once / cols / ROWS_AT_ONCE).max(1) * ROWS_AT_ONCE;
    for start in (0..x.rows).step_by(band) {
        let rows = start..x.rows.min(start + band);
        let left = Packed::new(cx, x, rows.clone(), cols)?;
        let inner = inner(cx, w, rows.clone(), |down, sink| {
            product(cx, &[term(&left, down, 0)], rows.clone(), down.rows, sink)
        })?;
        let mut terms = vec![term(&left, &w.stack, 0)];
        terms.extend(updates(w, &inner));
        product(cx, &terms, rows, out, output)?;
    }
    Ok(())
}

/// [`many`], and [`few`], for weights of integers. Updates take the activations as they are.
fn bytes<T: Stored>(
    cx: &Context,
    x: &Columns<'_, T>,
    w: &CpuWeight,
    output: &impl Sink,
    packed_at_once: usize,
) -> Result<()> {
    let [_, cols] = w.size();
    let weight = Int8 { stack: &w.stack, scales: &w.scales };
    let band = (packed_at_once / cols / ROWS_AT_ONCE).max(1) * ROWS_AT_ONCE;
    for start in (0..x.rows).step_by(band) {
        let rows = start..x.rows.min(start + band);
        let mut wide = None;
        let inner = inner(cx, w, rows.clone(), |down, sink| {
            let left = packed(&mut wide, cx, x, rows.clone(), cols)?;
            product(cx, &[term(left, down, 0)], rows.clone(), down.rows, sink)
        })?;
        drop(wide);
        product_of_bytes(cx, x, rows, weight, &updates(w, &inner), output)?;
    }
    Ok(())
}

/// [`many`] for bf16 weights and activations on AMX. What an update makes of the activations stays f32.
#[cfg(target_arch = "x86_64")]
fn tiled(
    cx: &Context,
    amx: Amx,
    x: &Columns<'_, bf16>,
    w: &CpuWeight,
    output: &impl Sink,
    packed_at_once: usize,
) -> Result<()> {
    let [_, cols] = w.size();
    let band = (packed_at_once / cols / ROWS_AT_ONCE).max(1) * ROWS_AT_ONCE;
    for start in (0..x.rows).step_by(band) {
        let rows = start..x.rows.min(start + band);
        let left = &Panels::of_halves(cx, amx, x, rows.clone(), cols)?;
        let mut wide = None;
        let inner = inner(cx, w, rows.clone(), |down, sink| {
            if down.format == Format::BF16 {
                let none: &[Term<'_, Placed<'_>>] = &[];
                return TileProduct { cx, amx, left, weight: down, updates: none }.run(sink);
            }
            let left = packed(&mut wide, cx, x, rows.clone(), cols)?;
            product(cx, &[term(left, down, 0)], rows.clone(), down.rows, sink)
        })?;
        drop(wide);
        let updates = &updates(w, &inner)[..];
        TileProduct { cx, amx, left, weight: &w.stack, updates }.run(output)?;
    }
    Ok(())
}

/// What the updates make of `rows` of the activations, f32, each packed for its second product; `down` is the first one.
fn inner(
    cx: &Context,
    w: &CpuWeight,
    rows: Range<usize>,
    mut down: impl FnMut(&Stack, &Scaled<'_>) -> Result<()>,
) -> Result<Vec<Packed>> {
    let one = |delta: &LowRank| {
        let rank = delta.down.rows;
        let mut h = cx.buffer(rows.end * rank)?;
        down(&delta.down, &Scaled { scale: delta.scale, width: rank, data: Disjoint::new(&mut h) })?;
        let h = Columns { parts: vec![(rank, &h[..])], rows: rows.end };
        Packed::new(cx, &h, rows.clone(), rank)
    };
    w.deltas.iter().map(one).collect()
}

/// The activations in f32, packed when first asked for.
fn packed<'a, T: Stored>(
    wide: &'a mut Option<Packed>,
    cx: &Context,
    x: &Columns<'_, T>,
    rows: Range<usize>,
    cols: usize,
) -> Result<&'a Packed> {
    match wide {
        Some(wide) => Ok(wide),
        None => Ok(wide.insert(Packed::new(cx, x, rows, cols)?)),
    }
}

/// The second products of the updates.
fn updates<'a>(w: &'a CpuWeight, inner: &'a [Packed]) -> Vec<Term<'a, Placed<'a>>> {
    let both = w.deltas.iter().zip(inner);
    both.map(|(delta, inner)| term(inner, &delta.up, delta.row)).collect()
}

fn term<'a>(left: &'a Packed, stack: &'a Stack, at: usize) -> Term<'a, Placed<'a>> {
    Term { left, right: Placed { stack, at }, cols: at..at + stack.rows }
}

/// Product of a few rows: every weight row is read once and multiplied with all of them.
fn few<T: Stored>(cx: &Context, x: &Columns<'_, T>, w: &CpuWeight, output: &impl Sink) -> Result<()> {
    let [out, cols] = w.size();
    let rows = x.rows;
    let mut wide = cx.buffer(rows * cols)?;
    widen_rows(cx.level, x, cols, cols, &mut wide);
    let mut inner = Vec::with_capacity(w.deltas.len());
    for delta in &w.deltas {
        let rank = delta.down.rows;
        let mut h = cx.buffer(rows * rank)?;
        let sink = Scaled { scale: delta.scale, width: rank, data: Disjoint::new(&mut h) };
        few_rows(cx, &[FewTerm { x: &wide, weight: &delta.down, at: 0 }], [rows, rank], &sink);
        inner.push(h);
    }
    let mut terms = vec![FewTerm { x: &wide, weight: &w.stack, at: 0 }];
    let deltas = w.deltas.iter().zip(&inner);
    terms.extend(deltas.map(|(delta, h)| FewTerm { x: h, weight: &delta.up, at: delta.row }));
    few_rows(cx, &terms, [rows, out], output);
    Ok(())
}

/// Matrices side by side, read as one.
struct Columns<'a, T> {
    /// Each one's width and elements.
    parts: Vec<(usize, &'a [T])>,
    rows: usize,
}

impl<'a, T: Stored> Columns<'a, T> {
    fn new(xs: &[&'a CpuTensor]) -> Self {
        use kiln_ops::Tensor;
        let parts = xs.iter().map(|x| (x.shape().last(), T::of(x))).collect();
        Columns { parts, rows: xs[0].shape().rows() }
    }

    /// The same matrices where they are bf16.
    #[cfg(target_arch = "x86_64")]
    fn halves(&self) -> Option<Columns<'a, bf16>> {
        let cast = || self.parts.iter().map(|&(width, x)| (width, bytemuck::cast_slice(x))).collect();
        (T::DTYPE == DType::BF16).then(|| Columns { parts: cast(), rows: self.rows })
    }
}

#[cfg(target_arch = "x86_64")]
impl Halves for Columns<'_, bf16> {
    fn copy(&self, row: usize, from: usize, out: &mut [bf16]) {
        let end = from + out.len();
        let mut start = 0;
        for &(width, x) in &self.parts {
            let (a, b) = (from.max(start), end.min(start + width));
            if a < b {
                out[a - from..b - from].copy_from_slice(&x[row * width..][a - start..b - start]);
            }
            start += width;
        }
    }
}

impl<T: Source> Rows for Columns<'_, T> {
    #[inline(always)]
    fn fill<S: Simd>(&self, s: S, row: usize, from: usize, out: &mut [f32]) {
        let end = from + out.len();
        let mut start = 0;
        for &(width, x) in &self.parts {
            let (a, b) = (from.max(start), end.min(start + width));
            if a < b {
                let x = &x[row * width..][a - start..b - start];
                convert(s, x, &mut out[a - from..b - from]);
            }
            start += width;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use kiln_tensor::{DType, Delta, HostTensor, LinearParts};

    use super::*;
    use crate::isa::{Isa, Level};
    use crate::parallel::Pool;

    /// What one band and many bands make of `rows` rows.
    fn bands<T: Stored>(stored: DType, x: impl Fn(&HostTensor) -> Vec<T>) -> [Vec<f32>; 2] {
        let level = Level::detect(Isa::best()).unwrap();
        let pool = Arc::new(Pool::new(Some(2)).unwrap());
        let cx = Context { level, pool, memory: Arc::default() };
        let host = |rows: usize, cols: usize| {
            let values = (0..rows * cols).map(|i| (i * 7919 % 1001) as f32 - 500.0).collect();
            HostTensor::from_f32([rows, cols], values).unwrap().to_dtype(stored).unwrap()
        };
        let delta = Delta { row: 3, down: host(4, 20), up: host(30, 4), scale: 0.25 };
        let parts = LinearParts::dense(vec![host(40, 20)]).unwrap().with_deltas(vec![delta]).unwrap();
        let w = CpuWeight::new(&cx, parts).unwrap();
        let rows = 2 * ROWS_AT_ONCE + 100;
        let x = x(&host(rows, 20));
        let x = Columns { parts: vec![(20, &x[..])], rows };
        let run = |packed_at_once| {
            let mut out = vec![0.0; rows * 40];
            let sink = Scaled { scale: 1.0, width: 40, data: Disjoint::new(&mut out) };
            many(&cx, &x, &w, &sink, packed_at_once).unwrap();
            out
        };
        [run(1), run(PACKED_AT_ONCE)]
    }

    #[test]
    fn bands_of_rows_give_the_same_product() {
        let [many, one] = bands(DType::F32, |x| x.to_f32().unwrap().into_owned());
        assert!(many == one);
        let [many, one] = bands(DType::BF16, |x| x.to_bf16().unwrap().into_owned());
        assert!(many == one);
    }
}
