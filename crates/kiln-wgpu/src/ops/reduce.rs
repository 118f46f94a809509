//! Sums over whole tensors.

use kiln_ops::{Result, Tensor, shapes};
use kiln_tensor::DType;

use super::elementwise::ELEMENT_COST;
use crate::context::{Context, Launch, Param, u};
use crate::kernels::{ACTIVATIONS, Kernel, Word};
use crate::tensor::WgpuTensor;

const SOURCE: &str = include_str!("../../kernels/reduce.wgsl");

pub(super) const SHARES: Kernel =
    Kernel { name: "reduce", source: SOURCE, constants: &[("T", ACTIVATIONS), ("STEP", &[Word("share")])] };

pub(super) const TOTAL: Kernel =
    Kernel { name: "reduce_total", source: SOURCE, constants: &[("STEP", &[Word("total")])] };

/// Elements that a workgroup adds up.
const SHARE: usize = 8192;

pub(crate) fn relative_l1(cx: &Context, x: &WgpuTensor, y: &WgpuTensor) -> Result<WgpuTensor> {
    let shape = shapes::relative_l1(x, y)?;
    let count = x.shape().numel();
    let shares = count.div_ceil(SHARE);
    let sums = WgpuTensor::new(cx, [shares, 3], DType::F32)?;
    for chunk in cx.row_chunks(0..shares, 4 * SHARE, SHARE as u64 * ELEMENT_COST) {
        let elements = chunk.start * SHARE..count.min(chunk.end * SHARE);
        cx.launch(&Launch {
            kernel: &SHARES,
            values: &[x.element(), Word("share")],
            tensors: &[x.elements(elements.clone()), y.elements(elements.clone()), sums.rows(&chunk, 3)],
            params: &[("count", u(elements.len())), ("share", u(SHARE))],
            groups: chunk.len(),
            cost: elements.len() as u64 * ELEMENT_COST,
        })?;
    }
    let result = WgpuTensor::new(cx, shape, DType::F32)?;
    cx.launch(&Launch {
        kernel: &TOTAL,
        values: &[Word("total")],
        tensors: &[sums.window(), result.window()],
        params: &[("shares", u(shares)), ("nan", Param::U32(f32::NAN.to_bits()))],
        groups: 1,
        cost: shares as u64 * ELEMENT_COST,
    })?;
    Ok(result)
}
