//! Linear layers: chooses the product that suits the weight's format, the number of rows and the instruction set.
//!
//! A low-rank update (LoRA) is two more products: `h = scale · x · downᵀ` in f32, then `h · upᵀ`, which is added to the
//! sums of the layer.

use std::ops::Range;

use kiln_ops::{Error, Result, RowGroups, shapes};
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use kiln_tensor::DType;
use kiln_tensor::Shape;
#[cfg(target_arch = "x86_64")]
use kiln_tensor::bf16;

use super::epilogue::{FusedEpilogue, OutputColumns, ScaleEpilogue};
use crate::Context;
use crate::element::{Scalar, convert};
#[cfg(target_arch = "x86_64")]
use crate::gemm::{AmxBf16Gemm, Bf16Rows, TiledOperand};
use crate::gemm::{
    Epilogue, GEMV_MAX_ROWS, GemvTerm, MC, Orientation, PackedFormat, PackedGemm, PackedLeft, RowSource,
    Term, gemm_int8, gemv, widen_rows,
};
#[cfg(target_arch = "x86_64")]
use crate::isa::{Amx, Level};
use crate::matrix::{Format, Int8Weight, StackedMatrix, ZeroPadded};
use crate::parallel::DisjointMut;
use crate::simd::Simd;
use crate::tensor::{CpuTensor, TensorElement, by_dtype};
use crate::weight::{CpuWeight, LowRankUpdate};

pub(crate) fn linear(cx: &Context, x: &CpuTensor, w: &CpuWeight) -> Result<CpuTensor> {
    let shape = shapes::linear(x, w.size())?;
    single(by_dtype!(x, T => run::<T>(cx, &[x], w, GatedAdd::NONE, &[shape])?))
}

pub(crate) fn linear_split<const N: usize>(
    cx: &Context,
    x: &CpuTensor,
    w: &CpuWeight,
    widths: [usize; N],
) -> Result<[CpuTensor; N]> {
    let shapes = shapes::linear_split(x, w.size(), &widths)?;
    split(cx, x, w, &shapes)?.try_into().map_err(|_| missing_output())
}

/// Not generic over the number of outputs: callers of [`linear_split`] would compile all kernels again, once per number and
/// with their own optimization level.
fn split(cx: &Context, x: &CpuTensor, w: &CpuWeight, shapes: &[Shape]) -> Result<Vec<CpuTensor>> {
    by_dtype!(x, T => run::<T>(cx, &[x], w, GatedAdd::NONE, shapes))
}

pub(crate) fn linear_gated_add(
    cx: &Context,
    xs: &[&CpuTensor],
    w: &CpuWeight,
    gate: Option<(&CpuTensor, &RowGroups)>,
    residual: &CpuTensor,
) -> Result<CpuTensor> {
    let shape = shapes::linear_gated_add(xs, w.size(), gate, residual)?;
    let gate = gate.map(|(gate, groups)| (f32::elements(gate), groups));
    single(by_dtype!(residual, T => {
        run::<T>(cx, xs, w, GatedAdd { gate, residual: Some(T::elements(residual)) }, &[shape])?
    }))
}

fn single(mut outputs: Vec<CpuTensor>) -> Result<CpuTensor> {
    outputs.pop().ok_or_else(missing_output)
}

fn missing_output() -> Error {
    Error::Arguments { op: "linear_split", what: "no tensor for one of the widths".into() }
}

/// The fused operands of [`linear_gated_add`].
struct GatedAdd<'a, T> {
    gate: Option<(&'a [f32], &'a RowGroups)>,
    residual: Option<&'a [T]>,
}

impl<T> GatedAdd<'_, T> {
    const NONE: Self = GatedAdd { gate: None, residual: None };
}

/// The product of `xs` side by side, its columns split into tensors of these shapes.
fn run<T: TensorElement>(
    cx: &Context,
    xs: &[&CpuTensor],
    w: &CpuWeight,
    gated: GatedAdd<'_, T>,
    shapes: &[Shape],
) -> Result<Vec<CpuTensor>> {
    let mut buffers = shapes.iter().map(|s| cx.buffer::<T>(s.numel())).collect::<Result<Vec<_>>>()?;
    let mut start = 0;
    let mut outputs = Vec::with_capacity(shapes.len());
    for (buffer, shape) in buffers.iter_mut().zip(shapes) {
        outputs.push(OutputColumns { start, width: shape.last(), data: DisjointMut::new(buffer) });
        start += shape.last();
    }
    let x = ColumnConcat::<T>::new(xs);
    let [width, _] = w.size();
    let GatedAdd { gate, residual } = gated;
    let stream = w.is_amx_packed() && x.rows * width * size_of::<T>() >= STREAM_BYTES;
    let epilogue = FusedEpilogue { bias: w.bias.as_deref(), gate, residual, width, outputs, stream };
    match x.rows {
        0 => {}
        _ if w.matrix.format == Format::I8 => linear_int8(cx, &x, w, &epilogue, MAX_PACKED_ELEMENTS)?,
        1..=GEMV_MAX_ROWS => linear_gemv(cx, &x, w, &epilogue)?,
        _ => linear_blocked(cx, &x, w, &epilogue, MAX_PACKED_ELEMENTS)?,
    }
    drop(epilogue);
    Ok(buffers.into_iter().zip(shapes).map(|(buffer, shape)| T::into_tensor(buffer, shape.clone())).collect())
}

/// Results of at least this many bytes are written by non-temporal stores: little of them would stay in the caches.
const STREAM_BYTES: usize = 8 << 20;

/// Maximum packed activations kept at a time, in elements; more rows are processed in bands.
const MAX_PACKED_ELEMENTS: usize = 1 << 26;

/// Bands of rows whose packed activations have at most `max_packed` elements: whole row blocks, so that a weight is
/// packed no more often than for one band.
fn row_bands(rows: usize, cols: usize, max_packed: usize) -> impl Iterator<Item = Range<usize>> {
    let band = (max_packed / cols / MC).max(1) * MC;
    (0..rows).step_by(band).map(move |start| start..rows.min(start + band))
}

/// The blocked product; each low-rank update is one more product into the same sums.
fn linear_blocked<T: TensorElement>(
    cx: &Context,
    x: &ColumnConcat<'_, T>,
    w: &CpuWeight,
    epilogue: &impl Epilogue,
    max_packed: usize,
) -> Result<()> {
    #[cfg(target_arch = "x86_64")]
    if let (Level::Amx(amx), Format::BF16 | Format::Packed, Some(x)) =
        (cx.level, w.matrix.format, x.as_bf16())
    {
        return linear_amx_bf16(cx, amx, &x, w, epilogue, max_packed);
    }
    #[cfg(target_arch = "aarch64")]
    if let (Some(bf16), Format::BF16 | Format::Packed, DType::BF16) =
        (cx.level.bf16(), w.matrix.format, T::DTYPE)
    {
        return linear_packed(cx, bf16, x, w, epilogue, max_packed);
    }
    linear_packed(cx, cx.level, x, w, epilogue, max_packed)
}

/// [`linear_blocked`] with operands packed in this format. The hidden activations of updates stay f32.
fn linear_packed<T: TensorElement, P: PackedFormat>(
    cx: &Context,
    format: P,
    x: &ColumnConcat<'_, T>,
    w: &CpuWeight,
    epilogue: &impl Epilogue,
    max_packed: usize,
) -> Result<()> {
    let [_, cols] = w.size();
    for rows in row_bands(x.rows, cols, max_packed) {
        let left = &PackedLeft::new(cx, format, x, rows.clone(), cols)?;
        let mut packed = None;
        let hidden = update_hidden(cx, w, rows.clone(), |down, epilogue| {
            if P::ROUNDS && down.format != Format::BF16 {
                let left = pack_once(&mut packed, cx, x, rows.clone(), cols)?;
                return gemm(cx, cx.level, left, down, &[], epilogue);
            }
            gemm(cx, format, left, down, &[], epilogue)
        })?;
        drop(packed);
        gemm(cx, format, left, &w.matrix, &update_terms(w, &hidden), epilogue)?;
    }
    Ok(())
}

/// `left · matrixᵀ` and the updates, for all rows of `left`.
fn gemm<'a, P: PackedFormat>(
    cx: &Context,
    format: P,
    left: &'a PackedLeft<P>,
    matrix: &'a StackedMatrix,
    updates: &[Term<'a, ZeroPadded<'a>>],
    epilogue: &impl Epilogue,
) -> Result<()> {
    let (term, orientation) = (term(left, matrix, 0), Orientation::ColsByDepth);
    PackedGemm { cx, format, term, orientation, updates }.run(left.rows.clone(), epilogue)
}

/// The product of an int8 weight, whatever the number of rows. Updates use the activations before quantization.
fn linear_int8<T: TensorElement>(
    cx: &Context,
    x: &ColumnConcat<'_, T>,
    w: &CpuWeight,
    epilogue: &impl Epilogue,
    max_packed: usize,
) -> Result<()> {
    let [_, cols] = w.size();
    let weight = Int8Weight { matrix: &w.matrix, scales: &w.scales, rotation: w.rotation };
    for rows in row_bands(x.rows, cols, max_packed) {
        let mut packed = None;
        let hidden = update_hidden(cx, w, rows.clone(), |down, epilogue| {
            let left = pack_once(&mut packed, cx, x, rows.clone(), cols)?;
            gemm(cx, cx.level, left, down, &[], epilogue)
        })?;
        drop(packed);
        gemm_int8(cx, x, rows, weight, &update_terms(w, &hidden), epilogue)?;
    }
    Ok(())
}

/// [`linear_blocked`] for bf16 activations on AMX. The hidden activations of updates stay f32.
#[cfg(target_arch = "x86_64")]
fn linear_amx_bf16(
    cx: &Context,
    amx: Amx,
    x: &ColumnConcat<'_, bf16>,
    w: &CpuWeight,
    epilogue: &impl Epilogue,
    max_packed: usize,
) -> Result<()> {
    let [_, cols] = w.size();
    for rows in row_bands(x.rows, cols, max_packed) {
        let left = &TiledOperand::pack_bf16(cx, amx, x, rows.clone(), cols)?;
        let mut packed = None;
        let hidden = update_hidden(cx, w, rows.clone(), |down, epilogue| {
            if down.format == Format::BF16 {
                let updates: &[Term<'_, ZeroPadded<'_>>] = &[];
                return AmxBf16Gemm { cx, amx, left, weight: down, updates }.run(epilogue);
            }
            let left = pack_once(&mut packed, cx, x, rows.clone(), cols)?;
            gemm(cx, cx.level, left, down, &[], epilogue)
        })?;
        drop(packed);
        let updates = &update_terms(w, &hidden)[..];
        AmxBf16Gemm { cx, amx, left, weight: &w.matrix, updates }.run(epilogue)?;
    }
    Ok(())
}

/// The hidden activations `scale · x · downᵀ` of every update for `rows` of `x`, packed for the second product. `gemm`
/// computes the first one.
fn update_hidden(
    cx: &Context,
    w: &CpuWeight,
    rows: Range<usize>,
    mut gemm: impl FnMut(&StackedMatrix, &ScaleEpilogue<'_>) -> Result<()>,
) -> Result<Vec<PackedLeft>> {
    let hidden = |update: &LowRankUpdate| {
        let rank = update.down.rows;
        let mut h = cx.buffer(rows.end * rank)?;
        let data = DisjointMut::new(&mut h);
        gemm(&update.down, &ScaleEpilogue { scale: update.scale, width: rank, data })?;
        let h = ColumnConcat { parts: vec![(rank, &h[..])], rows: rows.end };
        PackedLeft::new(cx, cx.level, &h, rows.clone(), rank)
    };
    w.updates.iter().map(hidden).collect()
}

/// The activations in f32, packed at the first call.
fn pack_once<'a, T: TensorElement>(
    packed: &'a mut Option<PackedLeft>,
    cx: &Context,
    x: &ColumnConcat<'_, T>,
    rows: Range<usize>,
    cols: usize,
) -> Result<&'a PackedLeft> {
    match packed {
        Some(packed) => Ok(packed),
        None => Ok(packed.insert(PackedLeft::new(cx, cx.level, x, rows, cols)?)),
    }
}

/// The second products of the updates.
fn update_terms<'a>(w: &'a CpuWeight, hidden: &'a [PackedLeft]) -> Vec<Term<'a, ZeroPadded<'a>>> {
    let updates = w.updates.iter().zip(hidden);
    updates.map(|(update, hidden)| term(hidden, &update.up, update.first_col)).collect()
}

/// The product with a matrix whose first row computes column `first_col`.
fn term<'a, P: PackedFormat>(
    left: &'a PackedLeft<P>,
    matrix: &'a StackedMatrix,
    first_col: usize,
) -> Term<'a, ZeroPadded<'a>, P> {
    let right = ZeroPadded { matrix, first_row: first_col };
    Term { left, right, cols: first_col..first_col + matrix.rows }
}

/// The product of very few rows, without packing.
fn linear_gemv<T: TensorElement>(
    cx: &Context,
    x: &ColumnConcat<'_, T>,
    w: &CpuWeight,
    epilogue: &impl Epilogue,
) -> Result<()> {
    let [out, cols] = w.size();
    let rows = x.rows;
    let mut wide = cx.buffer(rows * cols)?;
    widen_rows(cx.level, x, cols, cols, &mut wide);
    let mut hidden = Vec::with_capacity(w.updates.len());
    for update in &w.updates {
        let rank = update.down.rows;
        let mut h = cx.buffer(rows * rank)?;
        let scaled = ScaleEpilogue { scale: update.scale, width: rank, data: DisjointMut::new(&mut h) };
        let down = GemvTerm { x: &wide, weight: &update.down, first_col: 0 };
        gemv(cx, &[down], [rows, rank], &scaled)?;
        hidden.push(h);
    }
    let mut terms = vec![GemvTerm { x: &wide, weight: &w.matrix, first_col: 0 }];
    let updates = w.updates.iter().zip(&hidden);
    terms.extend(updates.map(|(u, h)| GemvTerm { x: h, weight: &u.up, first_col: u.first_col }));
    gemv(cx, &terms, [rows, out], epilogue)
}

/// Matrices side by side, read as one.
pub(crate) struct ColumnConcat<'a, T> {
    /// The width and elements of each.
    parts: Vec<(usize, &'a [T])>,
    rows: usize,
}

impl<'a, T: TensorElement> ColumnConcat<'a, T> {
    pub(crate) fn new(xs: &[&'a CpuTensor]) -> Self {
        use kiln_ops::Tensor;
        let parts = xs.iter().map(|x| (x.shape().last(), T::elements(x))).collect();
        ColumnConcat { parts, rows: xs[0].shape().rows() }
    }

    /// The same matrices, if they are bf16.
    #[cfg(target_arch = "x86_64")]
    fn as_bf16(&self) -> Option<ColumnConcat<'a, bf16>> {
        let cast = || self.parts.iter().map(|&(width, x)| (width, bytemuck::cast_slice(x))).collect();
        (T::DTYPE == DType::BF16).then(|| ColumnConcat { parts: cast(), rows: self.rows })
    }
}

#[cfg(target_arch = "x86_64")]
impl Bf16Rows for ColumnConcat<'_, bf16> {
    fn copy_row(&self, row: usize, from: usize, out: &mut [bf16]) {
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

impl<T: Scalar> RowSource for ColumnConcat<'_, T> {
    #[inline(always)]
    fn read_row<S: Simd>(&self, s: S, row: usize, from: usize, out: &mut [f32]) {
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

    use kiln_ops::Residency;
    use kiln_tensor::{DType, HostLinear, HostTensor, LoraDelta};

    use super::*;
    use crate::isa::{Isa, Level};
    use crate::ops::load_weight;
    use crate::parallel::Pool;

    /// The product of the same rows in many bands and in one.
    fn bands<T: TensorElement>(stored: DType, x: impl Fn(&HostTensor) -> Vec<T>) -> [Vec<f32>; 2] {
        let level = Level::detect(Isa::best()).unwrap();
        let pool = Arc::new(Pool::new(Some(2)).unwrap());
        let cx = Context { level, pool, buffers: Arc::default() };
        let host = |rows: usize, cols: usize| {
            let values = (0..rows * cols).map(|i| (i * 7919 % 1001) as f32 - 500.0).collect();
            HostTensor::from_f32([rows, cols], values).unwrap().to_dtype(stored).unwrap()
        };
        let delta = LoraDelta { row: 3, down: host(4, 20), up: host(30, 4), scale: 0.25 };
        let linear = HostLinear::dense(vec![host(40, 20)]).unwrap().with_deltas(vec![delta]).unwrap();
        let w = load_weight(&cx, linear, Residency::Device).unwrap();
        let rows = 2 * MC + 100;
        let x = x(&host(rows, 20));
        let x = ColumnConcat { parts: vec![(20, &x[..])], rows };
        let run = |max_packed| {
            let mut out = vec![0.0; rows * 40];
            let epilogue = ScaleEpilogue { scale: 1.0, width: 40, data: DisjointMut::new(&mut out) };
            linear_blocked(&cx, &x, &w, &epilogue, max_packed).unwrap();
            out
        };
        [run(1), run(MAX_PACKED_ELEMENTS)]
    }

    #[test]
    fn bands_of_rows_give_the_same_product() {
        let [many, one] = bands(DType::F32, |x| x.to_f32().unwrap().into_owned());
        assert!(many == one);
        let [many, one] = bands(DType::BF16, |x| x.to_bf16().unwrap().into_owned());
        assert!(many == one);
    }
}
