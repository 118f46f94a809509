//! Convolutions on Hopper, with TMA and wgmma.

use kiln_ops::Result;
use kiln_tensor::DType;

use crate::context::{Context, int};
use crate::gemm::implicit_gemm;
use crate::kernels::{ConvArgs, HopperConvArgs, kernels};
use crate::sys::driver::DevicePtr;
use crate::tensor::Moments;
use crate::tensor_map::MapElement;
use crate::weight::CudaConv;

kernels! {
    "conv_hopper" {
        FoldTaps(w: DevicePtr, out: DevicePtr, n: i32, channels: i32):
            FOLD_TAPS = "fold_taps";
        ConvHopper(args: HopperConvArgs):
            CONV_HOPPER_3_128 = "conv_hopper_3_128", CONV_HOPPER_3_128_LONG = "conv_hopper_3_128_long",
            CONV_HOPPER_3_8 = "conv_hopper_3_8",
            CONV_HOPPER_2_128 = "conv_hopper_2_128", CONV_HOPPER_1_128 = "conv_hopper_1_128";
    }
}

/// Pixels in a row of a tile, rows of a warpgroup, threads of a block, its consumer warps, and the most bytes and number of
/// stages, as in `conv_hopper.cu`.
const TILE_WIDTH: usize = 16;
const GROUP_ROWS: usize = 8;
const THREADS: usize = 384;
const CONSUMER_WARPS: usize = 8;
const STAGE_BYTES: usize = 208 << 10;
const MAX_STAGES: usize = 6;
/// Channels for whose moments there is room in shared memory.
const MAX_MOMENT_CHANNELS: usize = 512;
/// Channels from which a sum is long.
const LONG_CHANNELS: usize = 512;
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
    let whole = args.output[2] % 8 == 0 || args.output[2] < 8 && args.add == 0;
    cx.gpu().capability == (9, 0) && out == DType::BF16 && packed && square && plain && aligned && whole
}

/// Runs the convolution; returns the moments of the result.
pub(crate) fn run(cx: &Context, args: &ConvArgs, conv: &CudaConv) -> Result<Option<Moments>> {
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
    let blocks = cx.gpu().multiprocessors.max(1) as usize;
    let tiles_x = out_width.div_ceil(TILE_WIDTH);
    let tiles_of =
        |rows: usize, columns: usize| tiles_x * out_height.div_ceil(rows) * n.div_ceil(columns) * phases;
    // The narrow kernel is for RGB output. Tiles of both warpgroups are large, and need a large image.
    let long = channels >= LONG_CHANNELS && tiles_of(2 * GROUP_ROWS, 128) >= blocks;
    let (columns, block_rows, kernel) = match (side, n <= 8) {
        (3, true) => (8, 2 * GROUP_ROWS, CONV_HOPPER_3_8),
        (3, false) if long => (128, 2 * GROUP_ROWS, CONV_HOPPER_3_128_LONG),
        (3, false) => (128, GROUP_ROWS, CONV_HOPPER_3_128),
        (2, _) => (128, GROUP_ROWS, CONV_HOPPER_2_128),
        _ => (128, 2 * GROUP_ROWS, CONV_HOPPER_1_128),
    };
    let tiles = tiles_of(block_rows, columns);
    let blocks = blocks.min(tiles);
    let (taps, rows) = (side * side, block_rows + side - 1);
    let x = cx.driver().encode_tensor_map(
        MapElement::Bf16,
        args.x,
        [channels, width, height],
        [channels, width * channels],
        [TILE_WIDTH, rows],
    );
    let w = cx.driver().encode_tensor_map(
        MapElement::Bf16,
        weights,
        [channels, taps, phases * n],
        [channels, step],
        [1, columns],
    );
    // Nothing is known to need those of a 1x1 convolution.
    let moments = (n.is_multiple_of(8) && n <= MAX_MOMENT_CHANNELS && side > 1)
        .then(|| Moments::new(cx, blocks, n))
        .transpose()?;
    let args = HopperConvArgs {
        x: cx.check(x)?,
        w: cx.check(w)?,
        bias: args.bias,
        add: args.add,
        out: args.out,
        moments: moments.as_ref().map_or(0, |moments| moments.buffer.ptr(cx)),
        channels: args.input[2],
        height: out_height as i32,
        width: out_width as i32,
        n: args.output[2],
        top: args.padding[0],
        left: args.padding[1],
        tiles_x: tiles_x as i32,
        tiles_n: n.div_ceil(columns) as i32,
        tiles: int("conv2d", tiles)?,
        phases: phases as i32,
    };
    let stage = BOX_ROW_BYTES * (rows * TILE_WIDTH + side * columns);
    let stages = MAX_STAGES.min(STAGE_BYTES / stage);
    let moment_bytes = if moments.is_some() { CONSUMER_WARPS * n / Moments::CHANNELS * 3 * 4 } else { 0 };
    let shared = stages * (stage + 16) + moment_bytes + 1024;
    cx.launch(kernel, [blocks, 1], THREADS, shared, &ConvHopper { args })?;
    Ok(moments)
}

/// Returns the address of the folded weights, computed on first use.
fn folded_weights(cx: &Context, args: &ConvArgs, conv: &CudaConv) -> Result<DevicePtr> {
    conv.folded(cx, DType::BF16, |out, elements| {
        let parameters = FoldTaps { w: args.w, out, n: args.output[2], channels: args.input[2] };
        cx.launch(FOLD_TAPS, [elements.div_ceil(256), 1], 256, 0, &parameters)
    })
}
