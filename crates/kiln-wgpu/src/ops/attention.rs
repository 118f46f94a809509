//! Attention without keeping scores.

use kiln_ops::{AttentionMask, AttentionSpec, Result, Tensor, shapes};

use super::movement::concat_rows;
use crate::context::{Context, Launch, Param, u};
use crate::kernels::{ACTIVATIONS, Kernel, Number};
use crate::tensor::WgpuTensor;

pub(super) const ATTENTION: Kernel = Kernel {
    name: "attention",
    source: include_str!("../../kernels/attention.wgsl"),
    constants: &[
        ("T", ACTIVATIONS),
        ("ROWS", &[Number(1), Number(2), Number(4)]),
        ("SLICES", &[Number(1), Number(2), Number(3), Number(4), Number(8), Number(16)]),
    ],
};

/// Columns of a slice of a head.
const SLICE: usize = 32;

pub(crate) fn attention(
    cx: &Context,
    q: &[&WgpuTensor],
    k: &[&WgpuTensor],
    v: &[&WgpuTensor],
    spec: &AttentionSpec,
) -> Result<WgpuTensor> {
    let size = shapes::attention(q, k, v, spec)?;
    let slices = size.head_dim.div_ceil(SLICE);
    let slices = [1, 2, 3, 4, 8, 16].into_iter().find(|&n| slices <= n as usize);
    let Some(slices) = slices else {
        return Err(cx.failed(format!("there is no attention for heads of {} columns", size.head_dim)));
    };
    // Wide heads have fewer queries, so that the sums of an invocation fit its registers.
    let rows = match size.queries {
        0..=16 => 1,
        _ if slices > 4 => 2,
        _ => 4,
    };
    let (mask, start, end) = match &spec.mask {
        AttentionMask::None => (0, 0, 0),
        AttentionMask::Causal { valid } => (1, 0, *valid),
        AttentionMask::Isolated { rows } => (2, rows.start, rows.end),
    };
    let (k, v) = (concat_rows(cx, k)?, concat_rows(cx, v)?);
    let y = WgpuTensor::new(cx, size.result(), q[0].dtype())?;
    let width = size.heads * size.head_dim;
    let row_cost = 4 * (size.keys * width) as u64;
    let mut first = 0;
    for block in q {
        let count = block.shape().rows();
        let result = y.view(first * width, [count, width]);
        for chunk in cx.row_chunks(0..count, width * y.dtype().size(), row_cost) {
            let tiles = chunk.len().div_ceil(16 * rows as usize);
            cx.launch(&Launch {
                kernel: &ATTENTION,
                values: &[y.element(), Number(rows), Number(slices)],
                tensors: &[block.rows(&chunk, width), k.window(), v.window(), result.rows(&chunk, width)],
                params: &[
                    ("queries", u(chunk.len())),
                    ("keys", u(size.keys)),
                    ("head_dim", u(size.head_dim)),
                    ("heads", u(size.heads)),
                    ("kv_heads", u(size.kv_heads)),
                    ("first_query", u(first + chunk.start)),
                    ("scale", Param::F32(1.0 / (size.head_dim as f32).sqrt())),
                    ("mask", Param::U32(mask)),
                    ("mask_start", u(start)),
                    ("mask_end", u(end)),
                ],
                groups: tiles * size.heads,
                cost: chunk.len() as u64 * row_cost,
            })?;
        }
        first += count;
    }
    Ok(y)
}
