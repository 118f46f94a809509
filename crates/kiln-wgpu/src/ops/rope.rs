//! RMS norm of heads and the rotary embedding.

use kiln_ops::{Result, RopeLayout, RopeTable, Tensor, shapes};

use super::elementwise::ELEMENT_COST;
use crate::context::{Context, Launch, Param, u};
use crate::kernels::{ACTIVATIONS, Kernel, Word};
use crate::tensor::WgpuTensor;

pub(super) const ROPE: Kernel = Kernel {
    name: "rope",
    source: include_str!("../../kernels/rope.wgsl"),
    constants: &[
        ("T", ACTIVATIONS),
        ("NORMED", &[Word("yes"), Word("no")]),
        ("PAIRS", &[Word("interleaved"), Word("half_split")]),
    ],
};

/// Heads that a workgroup takes.
const HEADS: usize = 8;

pub(crate) fn norm_rope(
    cx: &Context,
    x: &WgpuTensor,
    weight: Option<&WgpuTensor>,
    rope: &RopeTable<WgpuTensor>,
    eps: f32,
) -> Result<WgpuTensor> {
    let [tokens, heads, head_dim] = shapes::norm_rope(x, weight, rope)?;
    let y = WgpuTensor::new(cx, x.shape(), x.dtype())?;
    let width = heads * head_dim;
    let pairs = match rope.pairs {
        RopeLayout::Interleaved => "interleaved",
        RopeLayout::HalfSplit => "half_split",
    };
    let normed = if weight.is_some() { "yes" } else { "no" };
    let cost = width as u64 * ELEMENT_COST;
    for chunk in cx.row_chunks(0..tokens, width * x.dtype().size(), cost) {
        let mut tensors = vec![x.rows(&chunk, width)];
        tensors.extend(weight.map(WgpuTensor::window));
        tensors.extend([&rope.cos, &rope.sin].map(|table| table.rows(&chunk, head_dim / 2)));
        tensors.push(y.rows(&chunk, width));
        let count = chunk.len() * heads;
        cx.launch(&Launch {
            kernel: &ROPE,
            values: &[x.element(), Word(normed), Word(pairs)],
            tensors: &tensors,
            params: &[
                ("count", u(count)),
                ("heads", u(heads)),
                ("head_dim", u(head_dim)),
                ("eps", Param::F32(eps)),
            ],
            groups: count.div_ceil(HEADS),
            cost: chunk.len() as u64 * cost,
        })?;
    }
    Ok(y)
}
