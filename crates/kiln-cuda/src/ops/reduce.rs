//! Reductions of whole tensors to one number, in two launches: sums of ranges, and their sum.

use kiln_ops::{Result, Tensor as _, shapes};
use kiln_tensor::DType;

use super::grid::THREADS;
use crate::context::{Context, int};
use crate::kernels::kernels;
use crate::sys::driver::DevicePtr;
use crate::tensor::CudaTensor;

kernels! {
    "reduce" {
        L1Partial(x: DevicePtr, y: DevicePtr, partials: DevicePtr, n: i64, per_block: i64):
            L1_PARTIAL = "l1_partial" by dtype;
        RelativeL1(partials: DevicePtr, out: DevicePtr, count: i32):
            RELATIVE_L1 = "relative_l1";
    }
}

/// Blocks of the first launch, at most.
const MAX_BLOCKS: usize = 1024;

pub(crate) fn relative_l1(cx: &Context, x: &CudaTensor, y: &CudaTensor) -> Result<CudaTensor> {
    let out = CudaTensor::new(cx, shapes::relative_l1(x, y)?, DType::F32)?;
    let n = x.shape().numel();
    let blocks = n.div_ceil(8 * THREADS).clamp(1, MAX_BLOCKS);
    let per_block = n.div_ceil(blocks).next_multiple_of(8);
    let partials = cx.allocate(blocks * 2 * 4)?;
    let parameters = L1Partial {
        x: x.ptr(cx),
        y: y.ptr(cx),
        partials: partials.ptr(cx),
        n: n as i64,
        per_block: per_block as i64,
    };
    cx.launch(L1_PARTIAL.of(x.dtype()), [blocks, 1], THREADS, 0, &parameters)?;
    let parameters =
        RelativeL1 { partials: partials.ptr(cx), out: out.ptr(cx), count: int("relative_l1", blocks)? };
    cx.launch(RELATIVE_L1, [1, 1], THREADS, 0, &parameters)?;
    Ok(out)
}
