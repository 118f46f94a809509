use kiln_ops::Result;
use kiln_tensor::DType;

use crate::context::{Context, int};
use crate::gemm::own;
use crate::kernels::{
    CONV_HOPPER_1_128, CONV_HOPPER_2_128, CONV_HOPPER_3_8, CONV_HOPPER_3_128, Conv, ConvHopper, FOLD_TAPS,
    FoldTaps, HopperConv,
};
use crate::sys::driver::DevicePtr;
use crate::weight::CudaConv;

/// Pixels along a side of a block; the numbers are those in `conv_hopper.cu`.
const SIDE: usize = 16;
const THREADS: usize = 384;
/// Bytes of a row of a box.
const ROW: usize = 128;

/// Whether the picture is doubled before a kernel whose results are four convolutions of the small one.
fn folds(call: &Conv) -> bool {
    own::folds(call) && call.output[2] > 8
}

/// Whether this GPU and convolution are the kernels'. `call` is one of whole vectors of bf16.
pub(crate) fn takes(cx: &Context, call: &Conv, out: DType) -> bool {
    let packed = call.ldx == i64::from(call.input[2]) && call.ldo == i64::from(call.output[2]);
    let square = matches!(call.kernel, [3, 3] | [1, 1]);
    let plain = call.stride == 1 && (call.upsample == 0 || folds(call)) && call.alpha == 1.0;
    let aligned = [call.out, call.add, call.bias].iter().all(|at| at % 16 == 0);
    let whole = call.output[2] % 8 == 0 || call.output[2] < 8;
    cx.gpu().capability == (9, 0) && out == DType::BF16 && packed && square && plain && aligned && whole
}

pub(crate) fn run(cx: &Context, call: &Conv, conv: &CudaConv) -> Result<()> {
    let [height, width, channels] = call.input.map(|n| n as usize);
    let n = call.output[2] as usize;
    let (kinds, side) = if call.upsample == 1 { (4, 2) } else { (1, call.kernel[0] as usize) };
    let (out_height, out_width) = match kinds {
        1 => (call.output[0] as usize, call.output[1] as usize),
        _ => (height, width),
    };
    let (weights, step) = match kinds {
        1 => (call.w, call.ldw as usize),
        _ => (folded(cx, call, conv)?, 4 * channels),
    };
    // The narrow kernel is for pictures themselves.
    let (columns, stages, kernel) = match (side, n <= 8) {
        (3, true) => (8, 3, CONV_HOPPER_3_8),
        (3, false) => (128, 2, CONV_HOPPER_3_128),
        (2, _) => (128, 3, CONV_HOPPER_2_128),
        _ => (128, 3, CONV_HOPPER_1_128),
    };
    let (taps, rows) = (side * side, SIDE + side - 1);
    let x =
        cx.driver().map_tensor(call.x, [channels, width, height], [channels, width * channels], [SIDE, rows]);
    let w = cx.driver().map_tensor(weights, [channels, taps, kinds * n], [channels, step], [1, columns]);
    let (tiles_x, tiles_y) = (out_width.div_ceil(SIDE), out_height.div_ceil(SIDE));
    let tiles_n = n.div_ceil(columns);
    let tiles = tiles_x * tiles_y * tiles_n * kinds;
    let arguments = HopperConv {
        x: cx.done(x)?,
        w: cx.done(w)?,
        bias: call.bias,
        add: call.add,
        out: call.out,
        channels: call.input[2],
        height: out_height as i32,
        width: out_width as i32,
        n: call.output[2],
        top: call.padding[0],
        left: call.padding[1],
        tiles_x: tiles_x as i32,
        tiles_n: tiles_n as i32,
        tiles: int("conv2d", tiles)?,
        kinds: kinds as i32,
    };
    let shared = stages * ROW * (rows * SIDE + side * columns) + 16 * stages + 1024;
    let grid = [tiles.min(cx.gpu().processors.max(1) as usize), 1];
    cx.launch(kernel, grid, THREADS, shared, &ConvHopper { t: arguments })
}

/// Where the weights of the four convolutions lie; made when they are first needed.
fn folded(cx: &Context, call: &Conv, conv: &CudaConv) -> Result<DevicePtr> {
    if let Some(block) = conv.folded.get() {
        return Ok(block.at(cx));
    }
    let (n, channels) = (call.output[2], call.input[2]);
    let elements = 16 * n as usize * channels as usize;
    // Kept, so it is not to be what only a recording writes.
    cx.done(cx.device("cuLaunchKernel"))?;
    let block = cx.block(2 * elements)?;
    let grid = [elements.div_ceil(256), 1];
    cx.launch(FOLD_TAPS, grid, 256, 0, &FoldTaps { w: call.w, out: block.at(cx), n, channels })?;
    // Of two threads that come here at once one is second, and its copy is as good.
    Ok(conv.folded.get_or_init(|| block).at(cx))
}
