//! Elementwise operations and SwiGLU.

use kiln_ops::{Activation, Result, Tensor, shapes};
use kiln_tensor::Shape;

use crate::context::{Context, Launch, Param, u};
use crate::kernels::{ACTIVATIONS, Kernel, Value, Word};
use crate::tensor::WgpuTensor;

pub(super) const ELEMENTWISE: Kernel = Kernel {
    name: "elementwise",
    source: include_str!("../../kernels/elementwise.wgsl"),
    constants: &[
        ("T", ACTIVATIONS),
        (
            "OP",
            &[
                Word("activation"),
                Word("add_scaled"),
                Word("lerp"),
                Word("guide"),
                Word("blend_rows"),
                Word("affine"),
            ],
        ),
    ],
};

pub(super) const SWIGLU: Kernel = Kernel {
    name: "swiglu",
    source: include_str!("../../kernels/swiglu.wgsl"),
    constants: &[("T", ACTIVATIONS)],
};

/// Operations that a few accesses of memory count as, for the budget.
pub(super) const ELEMENT_COST: u64 = 40;

/// What stands beside `x`.
enum Others<'a> {
    None,
    /// A tensor of the same shape.
    Same(&'a WgpuTensor),
    /// That, and a value for each row.
    Rows(&'a WgpuTensor, &'a WgpuTensor),
    /// Two values for each column.
    Columns(&'a WgpuTensor, &'a WgpuTensor),
}

/// The number of an activation function in `activation.wgsl`.
pub(super) fn activation_number(f: Option<Activation>) -> Param {
    Param::U32(match f {
        None => 0,
        Some(Activation::Silu) => 1,
        Some(Activation::Relu) => 2,
        Some(Activation::SoftClamp) => 3,
        Some(Activation::Gelu) => 4,
    })
}

fn elementwise(
    cx: &Context,
    op: &'static str,
    x: &WgpuTensor,
    others: &Others<'_>,
    s: f32,
    f: Option<Activation>,
) -> Result<WgpuTensor> {
    let y = WgpuTensor::new(cx, x.shape(), x.dtype())?;
    let (rows, columns) = (x.shape().rows(), x.shape().last());
    let row_bytes = columns * x.dtype().size();
    for chunk in cx.row_chunks(0..rows, row_bytes, columns as u64 * ELEMENT_COST) {
        let count = chunk.len() * columns;
        let mut tensors = vec![x.rows(&chunk, columns)];
        match others {
            Others::None => {}
            Others::Same(other) => tensors.push(other.rows(&chunk, columns)),
            Others::Rows(other, mask) => tensors.extend([other.rows(&chunk, columns), mask.rows(&chunk, 1)]),
            Others::Columns(scale, shift) => tensors.extend([scale.window(), shift.window()]),
        }
        tensors.push(y.rows(&chunk, columns));
        cx.launch(&Launch {
            kernel: &ELEMENTWISE,
            values: &[x.element(), Word(op)],
            tensors: &tensors,
            params: &[
                ("count", u(count)),
                ("columns", u(columns)),
                ("s", Param::F32(s)),
                ("f", activation_number(f)),
            ],
            groups: Context::groups_for(count, 2),
            cost: count as u64 * ELEMENT_COST,
        })?;
    }
    Ok(y)
}

pub(crate) fn activation(cx: &Context, x: &WgpuTensor, f: Activation) -> Result<WgpuTensor> {
    shapes::activation(x)?;
    elementwise(cx, "activation", x, &Others::None, 0.0, Some(f))
}

pub(crate) fn add(cx: &Context, x: &WgpuTensor, y: &WgpuTensor) -> Result<WgpuTensor> {
    shapes::add(x, y)?;
    elementwise(cx, "add_scaled", x, &Others::Same(y), 1.0, None)
}

pub(crate) fn add_scaled(cx: &Context, x: &WgpuTensor, y: &WgpuTensor, s: f32) -> Result<WgpuTensor> {
    shapes::add_scaled(x, y)?;
    elementwise(cx, "add_scaled", x, &Others::Same(y), s, None)
}

pub(crate) fn lerp(cx: &Context, x: &WgpuTensor, y: &WgpuTensor, t: f32) -> Result<WgpuTensor> {
    shapes::lerp(x, y)?;
    elementwise(cx, "lerp", x, &Others::Same(y), t, None)
}

pub(crate) fn guide(cx: &Context, c: &WgpuTensor, u: &WgpuTensor, g: f32) -> Result<WgpuTensor> {
    shapes::guide(c, u)?;
    elementwise(cx, "guide", c, &Others::Same(u), g, None)
}

pub(crate) fn blend_rows(
    cx: &Context,
    x: &WgpuTensor,
    y: &WgpuTensor,
    mask: &WgpuTensor,
) -> Result<WgpuTensor> {
    shapes::blend_rows(x, y, mask)?;
    elementwise(cx, "blend_rows", x, &Others::Rows(y, mask), 0.0, None)
}

pub(crate) fn affine(
    cx: &Context,
    x: &WgpuTensor,
    scale: &WgpuTensor,
    shift: &WgpuTensor,
) -> Result<WgpuTensor> {
    shapes::affine(x, scale, shift)?;
    elementwise(cx, "affine", x, &Others::Columns(scale, shift), 0.0, None)
}

pub(crate) fn swiglu(cx: &Context, x: &WgpuTensor) -> Result<WgpuTensor> {
    let shape: Shape = shapes::swiglu(x)?;
    let (rows, columns) = (shape.rows(), shape.last());
    let y = WgpuTensor::new(cx, shape, x.dtype())?;
    let row_bytes = 2 * columns * x.dtype().size();
    for chunk in cx.row_chunks(0..rows, row_bytes, columns as u64 * ELEMENT_COST) {
        let count = chunk.len() * columns;
        let values: [Value; 1] = [x.element()];
        cx.launch(&Launch {
            kernel: &SWIGLU,
            values: &values,
            tensors: &[x.rows(&chunk, 2 * columns), y.rows(&chunk, columns)],
            params: &[("count", u(count)), ("columns", u(columns))],
            groups: Context::groups_for(count, 2),
            cost: count as u64 * ELEMENT_COST,
        })?;
    }
    Ok(y)
}
