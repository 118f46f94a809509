//! RMS norm and adaptive layer norm of rows.

use kiln_ops::{Result, RowGroups, Tensor, shapes};

use super::elementwise::ELEMENT_COST;
use crate::context::{Context, Launch, Param, Window, u};
use crate::kernels::{ACTIVATIONS, Kernel, Word};
use crate::tensor::WgpuTensor;

pub(super) const NORM: Kernel = Kernel {
    name: "norm",
    source: include_str!("../../kernels/norm.wgsl"),
    constants: &[("T", ACTIVATIONS), ("OP", &[Word("rms_norm"), Word("ada_layer_norm")])],
};

pub(crate) fn rms_norm(cx: &Context, x: &WgpuTensor, weight: &WgpuTensor, eps: f32) -> Result<WgpuTensor> {
    let shape = shapes::rms_norm(x, weight)?;
    let rows = shape.rows();
    let y = WgpuTensor::new(cx, shape, x.dtype())?;
    norm(cx, "rms_norm", x, &y, 0..rows, &[weight.window()], eps)?;
    Ok(y)
}

pub(crate) fn ada_layer_norm(
    cx: &Context,
    x: &WgpuTensor,
    scale: &WgpuTensor,
    shift: &WgpuTensor,
    groups: &RowGroups,
    eps: f32,
) -> Result<WgpuTensor> {
    let shape = shapes::ada_layer_norm(x, scale, shift, groups)?;
    let dim = shape.last();
    let y = WgpuTensor::new(cx, shape, x.dtype())?;
    for (group, rows) in groups.ranges().enumerate() {
        let of_group = [scale, shift].map(|tensor| tensor.rows(&(group..group + 1), dim));
        norm(cx, "ada_layer_norm", x, &y, rows, &of_group, eps)?;
    }
    Ok(y)
}

/// Norms some rows with the same parameters.
fn norm(
    cx: &Context,
    op: &'static str,
    x: &WgpuTensor,
    y: &WgpuTensor,
    rows: std::ops::Range<usize>,
    parameters: &[Window<'_>],
    eps: f32,
) -> Result<()> {
    let columns = x.shape().last();
    let cost = columns as u64 * 2 * ELEMENT_COST;
    for chunk in cx.row_chunks(rows, columns * x.dtype().size(), cost) {
        let mut tensors = vec![x.rows(&chunk, columns)];
        tensors.extend_from_slice(parameters);
        tensors.push(y.rows(&chunk, columns));
        cx.launch(&Launch {
            kernel: &NORM,
            values: &[x.element(), Word(op)],
            tensors: &tensors,
            params: &[("rows", u(chunk.len())), ("columns", u(columns)), ("eps", Param::F32(eps))],
            groups: chunk.len(),
            cost: chunk.len() as u64 * cost,
        })?;
    }
    Ok(())
}
