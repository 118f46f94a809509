//! Columns, dropout, products with small matrices from the left, and sums over rows.

use kiln_ops::training::shapes;
use kiln_ops::{Result, Tensor as _};
use kiln_tensor::{DType, Shape};

use crate::context::{Context, int};
use crate::kernels::kernels;
use crate::ops::grid::THREADS;
use crate::ops::movement::unit;
use crate::sys::driver::DevicePtr;
use crate::tensor::CudaTensor;

kernels! {
    "adapter" {
        Transpose(x: DevicePtr, out: DevicePtr, rows: i32, cols: i32):
            TRANSPOSE_2 = "transpose_2", TRANSPOSE_4 = "transpose_4";
        FillZeros(x: DevicePtr, n: i64):
            FILL_ZEROS = "fill_zeros";
        TakeColumns(x: DevicePtr, out: DevicePtr, rows: i64, width: i32, column: i32, x_width: i32):
            TAKE_COLUMNS_2 = "take_columns_2", TAKE_COLUMNS_4 = "take_columns_4",
            TAKE_COLUMNS_16 = "take_columns_16";
        Dropout(x: DevicePtr, out: DevicePtr, n: i64, rate: f32, factor: f32, seed: i64):
            DROPOUT = "dropout" by dtype;
        MixRows(x: DevicePtr, a: DevicePtr, out: DevicePtr, n: i64, from: i32, to: i32, dim: i32,
            row_stride: i32, column_stride: i32):
            MIX_ROWS = "mix_rows" by dtype;
        MixRowsGradient(dy: DevicePtr, x: DevicePtr, add: DevicePtr, out: DevicePtr, blocks: i64,
            rows: i32, cols: i32, dim: i32, scale: f32):
            MIX_ROWS_GRADIENT = "mix_rows_gradient" by dtype;
        ColumnDot(x: DevicePtr, y: DevicePtr, partials: DevicePtr, rows: i32, dim: i32,
            rows_per_block: i32):
            COLUMN_DOT = "column_dot" by dtype;
        SumRows(partials: DevicePtr, add: DevicePtr, out: DevicePtr, count: i32, dim: i32):
            SUM_ROWS = "sum_rows";
        RowNorms(x: DevicePtr, out: DevicePtr, dim: i32):
            ROW_NORMS = "row_norms";
        DequantizeFp8(x: DevicePtr, scales: DevicePtr, out: DevicePtr, rows: i64, cols: i32,
            depth: i32):
            DEQUANTIZE_FP8 = "dequantize_fp8" by dtype;
    }
}

/// Blocks along the rows of a sum by columns, at most.
const MAX_ROW_BLOCKS: usize = 64;

pub(crate) fn zeros(cx: &Context, shape: Shape, dtype: DType) -> Result<CudaTensor> {
    let out = CudaTensor::new(cx, shape, dtype)?;
    // Memory is allocated in larger units than words.
    let words = (out.shape().numel() * dtype.size()).div_ceil(4);
    let parameters = FillZeros { x: out.ptr(cx), n: words as i64 };
    cx.launch(FILL_ZEROS, [words.div_ceil(THREADS), 1], THREADS, 0, &parameters)?;
    Ok(out)
}

pub(crate) fn split_columns(cx: &Context, x: &CudaTensor, widths: &[usize]) -> Result<Vec<CudaTensor>> {
    let (rows, all, size) = (x.shape().rows(), x.shape().last(), x.dtype().size());
    let mut column = 0;
    let mut parts = Vec::with_capacity(widths.len());
    for shape in shapes::split_columns(x, widths)? {
        let width = shape.last();
        let out = CudaTensor::new(cx, shape, x.dtype())?;
        let unit = unit(size, [width, column, all], x.ptr(cx));
        let kernel = match unit {
            2 => TAKE_COLUMNS_2,
            4 => TAKE_COLUMNS_4,
            _ => TAKE_COLUMNS_16,
        };
        let units = |elements: usize| int("split_columns", elements * size / unit);
        let parameters = TakeColumns {
            x: x.ptr(cx),
            out: out.ptr(cx),
            rows: rows as i64,
            width: units(width)?,
            column: units(column)?,
            x_width: units(all)?,
        };
        let grid = [(rows * (width * size / unit)).div_ceil(THREADS), 1];
        cx.launch(kernel, grid, THREADS, 0, &parameters)?;
        parts.push(out);
        column += width;
    }
    Ok(parts)
}

pub(crate) fn dropout(cx: &Context, x: &CudaTensor, rate: f32, seed: u64) -> Result<CudaTensor> {
    let out = CudaTensor::new(cx, shapes::dropout(x, rate)?, x.dtype())?;
    let n = x.shape().numel();
    let parameters = Dropout {
        x: x.ptr(cx),
        out: out.ptr(cx),
        n: n as i64,
        rate,
        factor: (1.0 / (1.0 - f64::from(rate))) as f32,
        seed: seed.cast_signed(),
    };
    let kernel = DROPOUT.of(x.dtype());
    cx.launch(kernel, [n.div_ceil(THREADS), 1], THREADS, 0, &parameters)?;
    Ok(out)
}

pub(crate) fn mix_rows(cx: &Context, x: &CudaTensor, a: &CudaTensor, transposed: bool) -> Result<CudaTensor> {
    let (shape, [from, to]) = shapes::mix_rows(x, a, transposed)?;
    let out = CudaTensor::new(cx, &shape, x.dtype())?;
    let size = |n: usize| int("mix_rows", n);
    let columns = size(a.shape().last())?;
    let [row_stride, column_stride] = if transposed { [1, columns] } else { [columns, 1] };
    let n = shape.numel();
    let parameters = MixRows {
        x: x.ptr(cx),
        a: a.ptr(cx),
        out: out.ptr(cx),
        n: n as i64,
        from: size(from)?,
        to: size(to)?,
        dim: size(shape.last())?,
        row_stride,
        column_stride,
    };
    let kernel = MIX_ROWS.of(x.dtype());
    cx.launch(kernel, [n.div_ceil(THREADS), 1], THREADS, 0, &parameters)?;
    Ok(out)
}

pub(crate) fn mix_rows_gradient(
    cx: &Context,
    dy: &CudaTensor,
    x: &CudaTensor,
    size: [usize; 2],
    scale: f32,
    add: Option<&CudaTensor>,
) -> Result<CudaTensor> {
    let out = CudaTensor::new(cx, shapes::mix_rows_gradient(dy, x, size, add)?, DType::F32)?;
    let [rows, cols] = size;
    let number = |n: usize| int("mix_rows_gradient", n);
    let parameters = MixRowsGradient {
        dy: dy.ptr(cx),
        x: x.ptr(cx),
        add: add.map_or(0, |add| add.ptr(cx)),
        out: out.ptr(cx),
        blocks: (dy.shape().rows() / rows) as i64,
        rows: number(rows)?,
        cols: number(cols)?,
        dim: number(dy.shape().last())?,
        scale,
    };
    let kernel = MIX_ROWS_GRADIENT.of(dy.dtype());
    cx.launch(kernel, [cols, rows], THREADS, 0, &parameters)?;
    Ok(out)
}

pub(crate) fn column_dot(
    cx: &Context,
    x: &CudaTensor,
    y: &CudaTensor,
    add: Option<&CudaTensor>,
) -> Result<CudaTensor> {
    let out = CudaTensor::new(cx, shapes::column_dot(x, y, add)?, DType::F32)?;
    let (rows, dim) = (x.shape().rows(), x.shape().last());
    let blocks = rows.div_ceil(32).clamp(1, MAX_ROW_BLOCKS);
    let partials = cx.allocate(blocks * dim * 4)?;
    let size = |n: usize| int("column_dot", n);
    let parameters = ColumnDot {
        x: x.ptr(cx),
        y: y.ptr(cx),
        partials: partials.ptr(cx),
        rows: size(rows)?,
        dim: size(dim)?,
        rows_per_block: size(rows.div_ceil(blocks))?,
    };
    let kernel = COLUMN_DOT.of(x.dtype());
    cx.launch(kernel, [dim.div_ceil(THREADS), blocks], THREADS, 0, &parameters)?;
    let parameters = SumRows {
        partials: partials.ptr(cx),
        add: add.map_or(0, |add| add.ptr(cx)),
        out: out.ptr(cx),
        count: size(blocks)?,
        dim: size(dim)?,
    };
    cx.launch(SUM_ROWS, [dim.div_ceil(THREADS), 1], THREADS, 0, &parameters)?;
    Ok(out)
}
