//! f32 pictures that are doubled before a kernel, as four convolutions of the small one.

use kiln_ops::Result;
use kiln_tensor::DType;

use crate::context::Context;
use crate::gemm::own;
use crate::kernels::{Conv, FOLD_TAPS_F32, FoldTapsF32};
use crate::sys::driver::DevicePtr;
use crate::weight::CudaConv;

/// Whether the four convolutions are this one. None of its sizes is 0.
pub(super) fn takes(call: &Conv, dtype: DType) -> bool {
    own::takes_f32_tiles(call, dtype) && own::folds(call)
}

pub(super) fn run(cx: &Context, call: &Conv, conv: &CudaConv) -> Result<()> {
    let [height, width, channels] = call.input;
    let folded = Conv {
        w: weights(cx, call, conv)?,
        ldw: 4 * i64::from(channels),
        output: [height, width, call.output[2]],
        kernel: [2, 2],
        upsample: own::FOLDED,
        ..*call
    };
    own::run(cx, &folded, DType::F32, DType::F32)
}

/// Where the weights of the four convolutions lie; made when they are first needed.
fn weights(cx: &Context, call: &Conv, conv: &CudaConv) -> Result<DevicePtr> {
    if let Some(block) = conv.folded_f32.get() {
        return Ok(block.at(cx));
    }
    // Kept, so it is not to be what only a recording writes.
    cx.done(cx.device("cuLaunchKernel"))?;
    let (n, channels) = (call.output[2], call.input[2]);
    let elements = 16 * n as usize * channels as usize;
    let block = cx.block(4 * elements)?;
    let grid = [elements.div_ceil(256), 1];
    cx.launch(FOLD_TAPS_F32, grid, 256, 0, &FoldTapsF32 { w: call.w, out: block.at(cx), n, channels })?;
    // Of two threads that come here at once one is second, and its copy is as good.
    Ok(conv.folded_f32.get_or_init(|| block).at(cx))
}
