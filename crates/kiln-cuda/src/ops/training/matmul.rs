//! Products through frozen weights and with adapters.
//!
//! Adapters are f32 and multiplied in the activations' dtype. A low-rank update is computed first, and the large product
//! adds it, which costs one pass less over the outputs.

use kiln_ops::training::{AdaptedOutput, LowRank, LowRankGradient, shapes};
use kiln_ops::{Error, Result, Tensor as _};
use kiln_tensor::DType;

use super::adapter::{DEQUANTIZE_FP8, DequantizeFp8, ROW_NORMS, RowNorms};
use super::low_rank::{Thin, WideProducts};
use crate::context::{Context, int};
use crate::gemm::product::{Operand, Product};
use crate::ops::elementwise;
use crate::ops::fp8::Fp8Operand;
use crate::ops::grid::{THREADS, row_grid};
use crate::ops::int8::dequantize_int8;
use crate::ops::linear::linear_onto;
use crate::ops::movement::cast;
use crate::queue::DeviceBuffer;
use crate::sys::driver::DevicePtr;
use crate::tensor::CudaTensor;
use crate::weight::{CudaWeight, LoadedWeight, QuantizedMatrix, WeightMatrix};

fn rows_of(at: DevicePtr) -> Operand {
    Operand { at, by_columns: false }
}

fn columns_of(at: DevicePtr) -> Operand {
    Operand { at, by_columns: true }
}

/// The values of a weight, `[out, in]`, in f32 or bf16.
struct DenseWeight<'a> {
    at: DevicePtr,
    _loaded: LoadedWeight<'a>,
    _dequantized: Option<DeviceBuffer>,
}

impl<'a> DenseWeight<'a> {
    fn new(cx: &Context, w: &'a CudaWeight, dtype: DType) -> Result<DenseWeight<'a>> {
        DenseWeight::of(cx, w.load(cx, dtype)?, dtype)
    }

    fn of(cx: &Context, loaded: LoadedWeight<'a>, dtype: DType) -> Result<DenseWeight<'a>> {
        let kept = |buffer: DeviceBuffer| (buffer.ptr(cx), Some(buffer));
        let (at, dequantized) = match &*loaded {
            WeightMatrix::Dense(matrix) => (matrix.ptr(cx, dtype, 0, 0)?, None),
            WeightMatrix::Int8(matrix) => kept(dequantize_int8(cx, matrix, dtype)?),
            WeightMatrix::Fp8(matrix) => kept(dequantize_fp8(cx, matrix, dtype)?),
            WeightMatrix::Nvfp4(matrix) => kept(matrix.dequantize(cx, dtype)?),
        };
        Ok(DenseWeight { at, _loaded: loaded, _dequantized: dequantized })
    }
}

fn dequantize_fp8(cx: &Context, w: &QuantizedMatrix, dtype: DType) -> Result<DeviceBuffer> {
    let buffer = cx.allocate(w.rows * w.cols * dtype.size())?;
    let [x, scales] = w.ptr(cx, 0);
    let parameters = DequantizeFp8 {
        x,
        scales,
        out: buffer.ptr(cx),
        rows: w.rows as i64,
        cols: int("linear_backward", w.cols)?,
        depth: int("linear_backward", w.depth)?,
    };
    let kernel = DEQUANTIZE_FP8.of(dtype);
    cx.launch(kernel, row_grid(w.rows, w.cols), THREADS, 0, &parameters)?;
    Ok(buffer)
}

pub(crate) fn linear_backward(
    cx: &Context,
    dys: &[&CudaTensor],
    w: &CudaWeight,
    add: Option<&CudaTensor>,
) -> Result<CudaTensor> {
    let size @ [_, cols] = w.size();
    let shape = shapes::linear_backward(dys, size, w.deltas.len(), add)?;
    let dtype = dys[0].dtype();
    let out = CudaTensor::new(cx, &shape, dtype)?;
    let loaded = w.load(cx, dtype)?;
    if let WeightMatrix::Fp8(matrix) = &*loaded {
        return fp8_backward(cx, dys, matrix, add, out);
    }
    let dense = DenseWeight::of(cx, loaded, dtype)?;
    let (mut first, mut add) = (0, add.map(|add| add.ptr(cx)));
    for dy in dys {
        let k = dy.shape().last();
        let w = columns_of(dense.at + (first * cols * dtype.size()) as u64);
        let size = [shape.rows(), cols, k];
        let product = Product::new(rows_of(dy.ptr(cx)), w, size, dtype, out.ptr(cx));
        Product { add, ..product }.run(cx)?;
        add = Some(out.ptr(cx));
        first += k;
    }
    Ok(out)
}

/// The gradient of an fp8 matmul: one fp8 product for all gradients.
fn fp8_backward(
    cx: &Context,
    dys: &[&CudaTensor],
    w: &QuantizedMatrix,
    add: Option<&CudaTensor>,
    out: CudaTensor,
) -> Result<CudaTensor> {
    let transposed = w.transposed_fp8(cx)?;
    let operand = Fp8Operand::from_gradients(cx, dys, w, &transposed)?;
    let (all, dtype) = (0..transposed.rows, out.dtype());
    if let Some(add) = add
        && let Some(launched) = operand.gemm_onto(cx, &transposed, &all, [add.ptr(cx), out.ptr(cx)], dtype)
    {
        return launched.map(|()| out);
    }
    operand.gemm(cx, &transposed, &all, out.ptr(cx), dtype)?;
    match add {
        Some(add) => elementwise::add(cx, &out, add),
        None => Ok(out),
    }
}

pub(crate) fn matmul_nt(
    cx: &Context,
    x: &CudaTensor,
    w: &CudaTensor,
    scale: f32,
    add: Option<&CudaTensor>,
) -> Result<CudaTensor> {
    let shape = shapes::matmul_nt(x, w, add)?;
    if add.is_none()
        && let Some(products) = WideProducts::new(&[x], w.shape().rows())
    {
        return products.multiply(cx, Thin { x: w, by_rank: true }, scale);
    }
    let out = CudaTensor::new(cx, shape, x.dtype())?;
    let add = add.map(|add| add.ptr(cx));
    matmul_nt_into(cx, x, &cast(cx, w, x.dtype())?, scale, add, &out)?;
    Ok(out)
}

/// `add + scale · x · wᵀ`, all of one dtype.
fn matmul_nt_into(
    cx: &Context,
    x: &CudaTensor,
    w: &CudaTensor,
    scale: f32,
    add: Option<DevicePtr>,
    out: &CudaTensor,
) -> Result<()> {
    let size = [x.shape().rows(), w.shape().rows(), x.shape().last()];
    let product = Product::new(rows_of(x.ptr(cx)), rows_of(w.ptr(cx)), size, x.dtype(), out.ptr(cx));
    Product { alpha: scale, add, ..product }.run(cx)
}

pub(crate) fn matmul_nn(
    cx: &Context,
    dy: &CudaTensor,
    w: &CudaTensor,
    scale: f32,
    add: Option<&CudaTensor>,
) -> Result<CudaTensor> {
    let shape = shapes::matmul_nn(dy, w, add)?;
    let out = CudaTensor::new(cx, &shape, dy.dtype())?;
    let w = cast(cx, w, dy.dtype())?;
    let size = [shape.rows(), shape.last(), dy.shape().last()];
    let product = Product::new(rows_of(dy.ptr(cx)), columns_of(w.ptr(cx)), size, dy.dtype(), out.ptr(cx));
    Product { alpha: scale, add: add.map(|add| add.ptr(cx)), ..product }.run(cx)?;
    Ok(out)
}

pub(crate) fn matmul_tn(
    cx: &Context,
    dy: &CudaTensor,
    x: &CudaTensor,
    scale: f32,
    add: Option<&CudaTensor>,
) -> Result<CudaTensor> {
    let shape = shapes::matmul_tn(dy, x, add)?;
    if let Some(products) = WideProducts::new(&[x], dy.shape().last()) {
        return products.multiply_transposed(cx, dy, scale, add);
    }
    let out = CudaTensor::new(cx, &shape, DType::F32)?;
    let size = [shape.rows(), shape.last(), dy.shape().rows()];
    let product = Product::new(columns_of(dy.ptr(cx)), columns_of(x.ptr(cx)), size, dy.dtype(), out.ptr(cx));
    let add = add.map(|add| add.ptr(cx));
    Product { alpha: scale, add, out_dtype: DType::F32, ..product }.run(cx)?;
    Ok(out)
}

pub(crate) fn linear_low_rank(
    cx: &Context,
    x: &CudaTensor,
    w: &CudaWeight,
    updates: &[LowRank<'_, CudaTensor>],
    widths: &[usize],
) -> Result<AdaptedOutput<CudaTensor>> {
    let [out, _] = w.size();
    kiln_ops::shapes::linear(x, w.size())?;
    shapes::low_rank(x, updates, out)?;
    if widths.iter().sum::<usize>() != out {
        let what = format!("the widths {widths:?} don't add up to {out}");
        return Err(Error::Arguments { op: "linear_low_rank", what });
    }
    let mut inner = Vec::with_capacity(updates.len());
    for update in updates {
        inner.push(matmul_nt(cx, update.input.unwrap_or(x), update.down, 1.0, None)?);
    }
    let mut first = 0;
    let mut changes = Vec::with_capacity(widths.len());
    for &width in widths {
        let mut change: Option<CudaTensor> = None;
        for (update, inner) in updates.iter().zip(&inner) {
            let Some(rows) = update.rows_within(first, width)? else { continue };
            let up =
                update.up.view(rows.start * inner.shape().last(), [rows.len(), inner.shape().last()].into());
            let up = cast(cx, &up, x.dtype())?;
            match &change {
                Some(change) => {
                    matmul_nt_into(cx, inner, &up, update.scale, Some(change.ptr(cx)), change)?;
                }
                None => {
                    let new = CudaTensor::new(cx, [x.shape().rows(), width], x.dtype())?;
                    matmul_nt_into(cx, inner, &up, update.scale, None, &new)?;
                    change = Some(new);
                }
            }
        }
        changes.push(change);
        first += width;
    }
    Ok(AdaptedOutput { ys: linear_onto(cx, x, w, widths, changes)?, inner })
}

/// The gradients of low-rank updates, or `None` if there is no kernel for one of them.
pub(crate) fn fused_low_rank_backward(
    cx: &Context,
    dys: &[&CudaTensor],
    x: &CudaTensor,
    updates: &[LowRank<'_, CudaTensor>],
    inner: &[CudaTensor],
    add: &[Option<[&CudaTensor; 2]>],
) -> Result<Option<Vec<LowRankGradient<CudaTensor>>>> {
    shapes::low_rank(x, updates, dys.iter().map(|dy| dy.shape().last()).sum())?;
    let mut gradients = Vec::with_capacity(updates.len());
    for ((update, inner), add) in updates.iter().zip(inner).zip(add) {
        let (mut first, mut own) = (0, Vec::new());
        for &dy in dys {
            let width = dy.shape().last();
            if update.rows_within(first, width)?.is_some() {
                own.push(dy);
            }
            first += width;
        }
        let Some(products) = WideProducts::new(&own, inner.shape().last()) else { return Ok(None) };
        let [d_inner, up] =
            products.multiply_both(cx, update.up, inner, update.scale, add.map(|[_, up]| up))?;
        let down = matmul_tn(cx, &d_inner, update.input.unwrap_or(x), 1.0, add.map(|[down, _]| down))?;
        gradients.push(LowRankGradient { down, up, inner: d_inner });
    }
    Ok(Some(gradients))
}

pub(crate) fn row_norms(
    cx: &Context,
    w: &CudaWeight,
    updates: &[LowRank<'_, CudaTensor>],
) -> Result<CudaTensor> {
    let size @ [out, cols] = w.size();
    let norms = CudaTensor::new(cx, shapes::row_norms(size, updates)?, DType::F32)?;
    let dense = DenseWeight::new(cx, w, DType::F32)?;
    let mut at = dense.at;
    let sum;
    if !updates.is_empty() {
        sum = cx.allocate(out * cols * 4)?;
        cx.check(cx.copy(dense.at, sum.ptr(cx), out * cols * 4))?;
        at = sum.ptr(cx);
    }
    for update in updates {
        let rows = at + (4 * update.first * cols) as u64;
        let (up, down) = (rows_of(update.up.ptr(cx)), columns_of(update.down.ptr(cx)));
        let size = [update.up.shape().rows(), cols, update.down.shape().rows()];
        let product = Product::new(up, down, size, DType::F32, rows);
        Product { alpha: update.scale, add: Some(rows), ..product }.run(cx)?;
    }
    let parameters = RowNorms { x: at, out: norms.ptr(cx), dim: int("row_norms", cols)? };
    cx.launch(ROW_NORMS, [out, 1], THREADS, 0, &parameters)?;
    Ok(norms)
}
