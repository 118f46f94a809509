use kiln_ops::Result;
use kiln_tensor::DType;

use crate::Context;
use crate::device::{Argument, launch};
use crate::gemm::ConvCall;
use crate::sources::CONV_HOPPER;
use crate::sys::driver::{DevicePtr, TensorMap};

/// Pixels along a side of a block; the numbers are those in `conv_hopper.cu`.
const SIDE: usize = 16;
const THREADS: usize = 384;
const STAGES: usize = 2;

/// What the kernels take; `struct HopperConv` there.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct HopperConv {
    x: TensorMap,
    w: TensorMap,
    bias: DevicePtr,
    add: DevicePtr,
    out: DevicePtr,
    channels: i32,
    height: i32,
    width: i32,
    n: i32,
    top: i32,
    left: i32,
    tiles_x: i32,
    tiles_n: i32,
}

// SAFETY: the fields of `struct HopperConv`, in its order.
unsafe impl Argument for HopperConv {}

const _: () = assert!(size_of::<HopperConv>() == 2 * 128 + 64);

/// Whether this GPU and convolution are the kernels'. `call` is one of whole vectors of bf16.
pub(crate) fn takes(cx: &Context, call: &ConvCall, out: DType) -> bool {
    let packed = call.ldx == i64::from(call.input[2]) && call.ldo == i64::from(call.output[2]);
    let square = matches!(call.kernel, [3, 3] | [1, 1]);
    let plain = call.stride == 1 && call.upsample == 0 && call.alpha == 1.0;
    let aligned = [call.out, call.add, call.bias].iter().all(|at| at % 16 == 0);
    let whole = call.output[2] % 8 == 0 || call.output[2] < 8;
    cx.device.gpu.capability == (9, 0) && out == DType::BF16 && packed && square && plain && aligned && whole
}

pub(crate) fn run(cx: &Context, call: &ConvCall) -> Result<()> {
    let [height, width, channels] = call.input.map(|n| n as usize);
    let [out_height, out_width, n] = call.output.map(|n| n as usize);
    let kernel = call.kernel[0] as usize;
    // The narrow kernel is for pictures themselves.
    let (columns, name) = match (kernel, n <= 8) {
        (3, true) => (8, "conv_hopper_3_8"),
        (3, false) => (128, "conv_hopper_3_128"),
        _ => (128, "conv_hopper_1_128"),
    };
    let (taps, rows) = (kernel * kernel, SIDE + kernel - 1);
    let x =
        cx.device.tensor_map(call.x, [channels, width, height], [channels, width * channels], [SIDE, rows]);
    let w = cx.device.tensor_map(call.w, [channels, taps, n], [channels, call.ldw as usize], [1, columns]);
    let (tiles_x, tiles_y) = (out_width.div_ceil(SIDE), out_height.div_ceil(SIDE));
    let tiles_n = n.div_ceil(columns);
    let arguments = HopperConv {
        x: cx.done(x)?,
        w: cx.done(w)?,
        bias: call.bias,
        add: call.add,
        out: call.out,
        channels: call.input[2],
        height: call.output[0],
        width: call.output[1],
        n: call.output[2],
        top: call.padding[0],
        left: call.padding[1],
        tiles_x: tiles_x as i32,
        tiles_n: tiles_n as i32,
    };
    let shared = STAGES * 128 * (rows * SIDE + kernel * columns) + 16 * STAGES + 1024;
    let grid = [tiles_x * tiles_y * tiles_n, 1];
    cx.done(launch!(cx.device, CONV_HOPPER, name, grid, THREADS, shared; arguments))
}
