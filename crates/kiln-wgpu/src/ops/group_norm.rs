//! Group norm of images: moments of shares of the pixels, of the groups, and the result.

use kiln_ops::{Activation, Result, Tensor, shapes};
use kiln_tensor::DType;

use super::elementwise::{ELEMENT_COST, activation_number};
use crate::context::{Context, Launch, Param, u};
use crate::kernels::{ACTIVATIONS, Kernel, Word};
use crate::tensor::WgpuTensor;

const SOURCE: &str = include_str!("../../kernels/group_norm.wgsl");

pub(super) const SHARE: Kernel = Kernel {
    name: "group_norm_share",
    source: SOURCE,
    constants: &[("T", ACTIVATIONS), ("STEP", &[Word("share")])],
};

pub(super) const COMBINE: Kernel =
    Kernel { name: "group_norm_combine", source: SOURCE, constants: &[("STEP", &[Word("combine")])] };

pub(super) const APPLY: Kernel = Kernel {
    name: "group_norm_apply",
    source: SOURCE,
    constants: &[("T", ACTIVATIONS), ("STEP", &[Word("apply")])],
};

/// Values of a group that a workgroup adds up.
const SHARE_VALUES: usize = 8192;

pub(crate) fn group_norm(
    cx: &Context,
    x: &WgpuTensor,
    groups: usize,
    weight: &WgpuTensor,
    bias: &WgpuTensor,
    eps: f32,
    f: Option<Activation>,
) -> Result<WgpuTensor> {
    let shape = shapes::group_norm(x, groups, weight, bias)?;
    let (pixels, channels) = (shape.rows(), shape.last());
    let y = WgpuTensor::new(cx, shape, x.dtype())?;
    if pixels * channels == 0 {
        return Ok(y);
    }
    let moments = moments(cx, x, [pixels, channels], groups, eps)?;
    let cost = channels as u64 * 2 * ELEMENT_COST;
    for chunk in cx.row_chunks(0..pixels, channels * x.dtype().size(), cost) {
        let count = chunk.len() * channels;
        cx.launch(&Launch {
            kernel: &APPLY,
            values: &[x.element(), Word("apply")],
            tensors: &[
                x.rows(&chunk, channels),
                moments.window(),
                weight.window(),
                bias.window(),
                y.rows(&chunk, channels),
            ],
            params: &[
                ("count", u(count)),
                ("channels", u(channels)),
                ("width", u(channels / groups)),
                ("f", activation_number(f)),
            ],
            groups: Context::groups_for(count, 2),
            cost: chunk.len() as u64 * cost,
        })?;
    }
    Ok(y)
}

/// Mean and inverse standard deviation of each group: `[groups, 2]`.
fn moments(
    cx: &Context,
    x: &WgpuTensor,
    [pixels, channels]: [usize; 2],
    groups: usize,
    eps: f32,
) -> Result<WgpuTensor> {
    let width = channels / groups;
    let share = (SHARE_VALUES / width).max(1);
    let shares = pixels.div_ceil(share);
    let share_moments = WgpuTensor::new(cx, [shares, groups, 3], DType::F32)?;
    let share_bytes = share * channels * x.dtype().size();
    let cost = (share * channels) as u64 * ELEMENT_COST;
    for chunk in cx.row_chunks(0..shares, share_bytes, cost) {
        let of_chunk = chunk.start * share..pixels.min(chunk.end * share);
        cx.launch(&Launch {
            kernel: &SHARE,
            values: &[x.element(), Word("share")],
            tensors: &[x.rows(&of_chunk, channels), share_moments.window()],
            params: &[
                ("pixels", u(of_chunk.len())),
                ("share", u(share)),
                ("channels", u(channels)),
                ("width", u(width)),
                ("number", u(chunk.start)),
            ],
            groups: chunk.len() * groups,
            cost: chunk.len() as u64 * cost,
        })?;
    }
    let moments = WgpuTensor::new(cx, [groups, 2], DType::F32)?;
    cx.launch(&Launch {
        kernel: &COMBINE,
        values: &[Word("combine")],
        tensors: &[share_moments.window(), moments.window()],
        params: &[
            ("shares", u(shares)),
            ("groups", u(groups)),
            ("size", Param::F32((pixels * width) as f32)),
            ("eps", Param::F32(eps)),
        ],
        groups,
        cost: (shares * groups) as u64 * ELEMENT_COST,
    })?;
    Ok(moments)
}
