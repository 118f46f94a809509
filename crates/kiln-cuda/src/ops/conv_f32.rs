//! 3x3 convolutions of 2x upsampled f32 images, as four 2x2 convolutions of the small image (see `conv_f32.cu`).

use kiln_ops::Result;
use kiln_tensor::DType;

use crate::context::Context;
use crate::gemm::implicit_gemm::{self, FOLD_TAPS_F32, FoldTapsF32};
use crate::kernels::ConvArgs;
use crate::sys::driver::DevicePtr;
use crate::weight::CudaConv;

/// Whether the convolution can be folded. None of its sizes is 0.
pub(super) fn supports(args: &ConvArgs, dtype: DType) -> bool {
    implicit_gemm::supports_f32_tiles(args, dtype) && implicit_gemm::is_foldable(args)
}

pub(super) fn run(cx: &Context, args: &ConvArgs, conv: &CudaConv) -> Result<()> {
    let [height, width, channels] = args.input;
    let folded = ConvArgs {
        w: folded_weights(cx, args, conv)?,
        ldw: 4 * i64::from(channels),
        output: [height, width, args.output[2]],
        kernel: [2, 2],
        upsample: implicit_gemm::UPSAMPLE_FOLDED,
        ..*args
    };
    implicit_gemm::run(cx, &folded, DType::F32, DType::F32)
}

/// Returns the address of the folded weights, computed on first use.
fn folded_weights(cx: &Context, args: &ConvArgs, conv: &CudaConv) -> Result<DevicePtr> {
    conv.folded(cx, DType::F32, |out, elements| {
        let parameters = FoldTapsF32 { w: args.w, out, n: args.output[2], channels: args.input[2] };
        cx.launch(FOLD_TAPS_F32, [elements.div_ceil(256), 1], 256, 0, &parameters)
    })
}
