//! Operations that move values or change their type.

use std::ops::Range;

use kiln_ops::{Result, Tensor, shapes};
use kiln_tensor::{DType, Shape};

use super::elementwise::ELEMENT_COST;
use crate::context::{Context, Launch, u};
use crate::kernels::{ACTIVATIONS, Kernel, Word};
use crate::tensor::WgpuTensor;

const SOURCE: &str = include_str!("../../kernels/movement.wgsl");

pub(super) const COPY: Kernel = Kernel {
    name: "movement",
    source: SOURCE,
    constants: &[
        ("X", ACTIVATIONS),
        ("Y", ACTIVATIONS),
        ("OP", &[Word("copy_columns"), Word("space_to_depth"), Word("depth_to_space")]),
    ],
};

pub(super) const CAST: Kernel = Kernel {
    name: "cast",
    source: SOURCE,
    constants: &[("X", ACTIVATIONS), ("Y", ACTIVATIONS), ("OP", &[Word("cast")])],
};

/// A rectangle of values: `columns` of each row of `stride`, from element `at` on.
#[derive(Clone, Copy)]
struct Place<'a> {
    tensor: &'a WgpuTensor,
    at: usize,
    stride: usize,
}

/// Copies `rows` rows of `columns` values.
fn copy(cx: &Context, from: Place<'_>, to: Place<'_>, rows: usize, columns: usize) -> Result<()> {
    let size = from.tensor.dtype().size();
    let row_bytes = from.stride.max(to.stride) * size;
    for chunk in cx.row_chunks(0..rows, row_bytes, columns as u64 * ELEMENT_COST) {
        let part = |place: Place<'_>| {
            let start = place.at + chunk.start * place.stride;
            start..start + (chunk.len() - 1) * place.stride + columns
        };
        let count = chunk.len() * columns;
        cx.launch(&Launch {
            kernel: &COPY,
            values: &[from.tensor.element(), to.tensor.element(), Word("copy_columns")],
            tensors: &[from.tensor.elements(part(from)), to.tensor.elements(part(to))],
            params: &[
                ("count", u(count)),
                ("columns", u(columns)),
                ("from_stride", u(from.stride)),
                ("to_stride", u(to.stride)),
            ],
            groups: Context::groups_for(count, 2),
            cost: count as u64 * ELEMENT_COST,
        })?;
    }
    Ok(())
}

pub(crate) fn reshape(_: &Context, x: &WgpuTensor, shape: Shape) -> Result<WgpuTensor> {
    Ok(x.view(0, shapes::reshape(x, &shape)?))
}

pub(crate) fn cast(cx: &Context, x: &WgpuTensor, dtype: DType) -> Result<WgpuTensor> {
    let shape = shapes::cast(x, dtype)?;
    if dtype == x.dtype() {
        return Ok(x.clone());
    }
    let count = shape.numel();
    let y = WgpuTensor::new(cx, shape, dtype)?;
    for chunk in cx.row_chunks(0..count, 4, ELEMENT_COST) {
        cx.launch(&Launch {
            kernel: &CAST,
            values: &[x.element(), y.element(), Word("cast")],
            tensors: &[x.elements(chunk.clone()), y.elements(chunk.clone())],
            params: &[("count", u(chunk.len()))],
            groups: Context::groups_for(chunk.len(), 2),
            cost: chunk.len() as u64 * ELEMENT_COST,
        })?;
    }
    Ok(y)
}

pub(crate) fn slice_rows(_: &Context, x: &WgpuTensor, range: Range<usize>) -> Result<WgpuTensor> {
    let shape = shapes::slice_rows(x, &range)?;
    let row = x.shape().dims()[1..].iter().product::<usize>();
    Ok(x.view(range.start * row, shape))
}

pub(crate) fn concat_rows(cx: &Context, parts: &[&WgpuTensor]) -> Result<WgpuTensor> {
    let shape = shapes::concat_rows(parts)?;
    if let [part] = parts {
        return Ok((*part).clone());
    }
    let y = WgpuTensor::new(cx, shape, parts[0].dtype())?;
    let mut at = 0;
    for part in parts {
        let count = part.shape().numel();
        copy_elements(cx, part, &y, at, count)?;
        at += count;
    }
    Ok(y)
}

/// Copies the first `count` elements of `from` to element `at` of `to`.
fn copy_elements(cx: &Context, from: &WgpuTensor, to: &WgpuTensor, at: usize, count: usize) -> Result<()> {
    let size = from.dtype().size();
    let [start, end, bytes] = [from.start_bytes(), to.start_bytes() + at * size, count * size];
    let whole_words = [start, end, bytes].iter().all(|n| n % 4 == 0);
    if whole_words && bytes > 0 && !std::ptr::eq(from.buffer().raw(), to.buffer().raw()) {
        cx.queue().copy([from.buffer().raw(), to.buffer().raw()], [start, end], bytes);
        return cx.check();
    }
    // Rows of a few thousand values, so that they can be cut.
    let columns = count.clamp(1, 4096);
    let rows = count / columns;
    let place = |tensor, at| Place { tensor, at, stride: columns };
    copy(cx, place(from, 0), place(to, at), rows, columns)?;
    let done = rows * columns;
    copy(cx, place(from, done), place(to, at + done), usize::from(done < count), count - done)
}

pub(crate) fn write_rows(cx: &Context, x: &mut WgpuTensor, first: usize, rows: &WgpuTensor) -> Result<()> {
    shapes::write_rows(x, first, rows)?;
    let count = rows.shape().numel();
    if count == 0 {
        return Ok(());
    }
    if !x.is_unique() {
        let y = WgpuTensor::new(cx, x.shape(), x.dtype())?;
        copy_elements(cx, x, &y, 0, x.shape().numel())?;
        *x = y;
    }
    copy_elements(cx, rows, x, first * x.shape().last(), count)
}

pub(crate) fn concat_columns(cx: &Context, parts: &[&WgpuTensor]) -> Result<WgpuTensor> {
    let shape = shapes::concat_columns(parts)?;
    if let [part] = parts {
        return Ok((*part).clone());
    }
    let (rows, stride) = (shape.rows(), shape.last());
    let y = WgpuTensor::new(cx, shape, parts[0].dtype())?;
    let mut column = 0;
    for part in parts {
        let width = part.shape().last();
        if width > 0 {
            let (from, to) =
                (Place { tensor: part, at: 0, stride: width }, Place { tensor: &y, at: column, stride });
            copy(cx, from, to, rows, width)?;
        }
        column += width;
    }
    Ok(y)
}

pub(crate) fn space_to_depth(cx: &Context, x: &WgpuTensor) -> Result<WgpuTensor> {
    patches(cx, "space_to_depth", x, shapes::space_to_depth(x)?)
}

pub(crate) fn depth_to_space(cx: &Context, x: &WgpuTensor) -> Result<WgpuTensor> {
    patches(cx, "depth_to_space", x, shapes::depth_to_space(x)?)
}

/// Two rows of the result at a time may be one of the input: work is cut at pairs of rows.
fn patches(cx: &Context, op: &'static str, x: &WgpuTensor, shape: Shape) -> Result<WgpuTensor> {
    let [height, width, channels] = [shape.dims()[0], shape.dims()[1], shape.dims()[2]];
    let y = WgpuTensor::new(cx, shape, x.dtype())?;
    // Units of equal elements: one row of the deeper image, two of the wider one.
    let (units, unit) = match op {
        "space_to_depth" => (height, width * channels),
        _ => (height / 2, 2 * width * channels),
    };
    for chunk in cx.row_chunks(0..units, unit * x.dtype().size(), unit as u64 * ELEMENT_COST) {
        let count = chunk.len() * unit;
        cx.launch(&Launch {
            kernel: &COPY,
            values: &[x.element(), y.element(), Word(op)],
            tensors: &[x.rows(&chunk, unit), y.rows(&chunk, unit)],
            params: &[("count", u(count)), ("width", u(width)), ("channels", u(channels))],
            groups: Context::groups_for(count, 2),
            cost: count as u64 * ELEMENT_COST,
        })?;
    }
    Ok(y)
}
