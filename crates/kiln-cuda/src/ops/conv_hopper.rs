//! Convolutions on Hopper, with TMA and wgmma.

use kiln_ops::Result;
use kiln_tensor::DType;

use crate::context::{Context, int};
use crate::gemm::implicit_gemm;
use crate::kernels::{ConvArgs, HopperConvArgs, kernels};
use crate::sys::driver::DevicePtr;
use crate::tensor_map::MapElement;
use crate::weight::CudaConv;

kernels! {
    "conv_hopper" {
        FoldTaps(w: DevicePtr, out: DevicePtr, n: i32, channels: i32):
            FOLD_TAPS = "fold_taps";
        ConvHopper(args: HopperConvArgs):
            CONV_HOPPER_3_128 = "conv_hopper_3_128", CONV_HOPPER_3_8 = "conv_hopper_3_8",
            CONV_HOPPER_2_128 = "conv_hopper_2_128", CONV_HOPPER_1_128 = "conv_hopper_1_128";
    }
}

/// Side of a tile in pixels, and threads per block, as in `conv_hopper.cu`.
const TILE_SIDE: usize = 16;
const THREADS: usize = 384;
/// Bytes per row of a box.
const BOX_ROW_BYTES: usize = 128;

/// Whether the convolution is run with folded taps.
fn is_foldable(args: &ConvArgs) -> bool {
    implicit_gemm::is_foldable(args) && args.output[2] > 8
}

/// Whether the kernels take these arguments, which are aligned bf16, on this GPU.
pub(crate) fn supports(cx: &Context, args: &ConvArgs, out: DType) -> bool {
    let packed = args.ldx == i64::from(args.input[2]) && args.ldo == i64::from(args.output[2]);
    let square = matches!(args.kernel, [3, 3] | [1, 1]);
    let plain = args.stride == 1 && (args.upsample == 0 || is_foldable(args)) && args.alpha == 1.0;
    let aligned = [args.out, args.add, args.bias].iter().all(|at| at % 16 == 0);
    let whole = args.output[2] % 8 == 0 || args.output[2] < 8;
    cx.gpu().capability == (9, 0) && out == DType::BF16 && packed && square && plain && aligned && whole
}

pub(crate) fn run(cx: &Context, args: &ConvArgs, conv: &CudaConv) -> Result<()> {
    let [height, width, channels] = args.input.map(|n| n as usize);
    let n = args.output[2] as usize;
    let (phases, side) = if args.upsample == 1 { (4, 2) } else { (1, args.kernel[0] as usize) };
    let (out_height, out_width) = match phases {
        1 => (args.output[0] as usize, args.output[1] as usize),
        _ => (height, width),
    };
    let (weights, step) = match phases {
        1 => (args.w, args.ldw as usize),
        _ => (folded_weights(cx, args, conv)?, 4 * channels),
    };
    // The narrow kernel is for RGB output.
    let (columns, stages, kernel) = match (side, n <= 8) {
        (3, true) => (8, 3, CONV_HOPPER_3_8),
        (3, false) => (128, 2, CONV_HOPPER_3_128),
        (2, _) => (128, 3, CONV_HOPPER_2_128),
        _ => (128, 3, CONV_HOPPER_1_128),
    };
    let (taps, rows) = (side * side, TILE_SIDE + side - 1);
    let x = cx.driver().encode_tensor_map(
        MapElement::Bf16,
        args.x,
        [channels, width, height],
        [channels, width * channels],
        [TILE_SIDE, rows],
    );
    let w = cx.driver().encode_tensor_map(
        MapElement::Bf16,
        weights,
        [channels, taps, phases * n],
        [channels, step],
        [1, columns],
    );
    let (tiles_x, tiles_y) = (out_width.div_ceil(TILE_SIDE), out_height.div_ceil(TILE_SIDE));
    let tiles_n = n.div_ceil(columns);
    let tiles = tiles_x * tiles_y * tiles_n * phases;
    let args = HopperConvArgs {
        x: cx.check(x)?,
        w: cx.check(w)?,
        bias: args.bias,
        add: args.add,
        out: args.out,
        channels: args.input[2],
        height: out_height as i32,
        width: out_width as i32,
        n: args.output[2],
        top: args.padding[0],
        left: args.padding[1],
        tiles_x: tiles_x as i32,
        tiles_n: tiles_n as i32,
        tiles: int("conv2d", tiles)?,
        phases: phases as i32,
    };
    let shared = stages * BOX_ROW_BYTES * (rows * TILE_SIDE + side * columns) + 16 * stages + 1024;
    let grid = [tiles.min(cx.gpu().multiprocessors.max(1) as usize), 1];
    cx.launch(kernel, grid, THREADS, shared, &ConvHopper { args })
}

/// Returns the address of the folded weights, computed on first use.
fn folded_weights(cx: &Context, args: &ConvArgs, conv: &CudaConv) -> Result<DevicePtr> {
    conv.folded(cx, DType::BF16, |out, elements| {
        let parameters = FoldTaps { w: args.w, out, n: args.output[2], channels: args.input[2] };
        cx.launch(FOLD_TAPS, [elements.div_ceil(256), 1], 256, 0, &parameters)
    })
}
