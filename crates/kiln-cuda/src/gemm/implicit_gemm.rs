//! Implicit GEMM: convolutions and matrix products (convolutions with a 1x1 kernel) on Kiln's own kernels, in bf16 on
//! tensor cores, in f32 on CUDA cores, or for any size with plain arithmetic.

use kiln_ops::Result;
use kiln_tensor::DType;

use crate::context::Context;
use crate::kernels::{ConvArgs, kernels};
use crate::sys::driver::DevicePtr;

kernels! {
    "conv" {
        ConvPlain(args: ConvArgs):
            CONV_PLAIN_F32_F32 = "conv_plain_f32_f32", CONV_PLAIN_BF16_BF16 = "conv_plain_bf16_bf16",
            CONV_PLAIN_BF16_F32 = "conv_plain_bf16_f32";
        ConvTiles(args: ConvArgs):
            CONV_TILES_BF16_128 = "conv_tiles_bf16_128", CONV_TILES_F32_128 = "conv_tiles_f32_128",
            CONV_TILES_BF16_32 = "conv_tiles_bf16_32", CONV_TILES_F32_32 = "conv_tiles_f32_32";
    }
    "conv_f32" {
        FoldTapsF32(w: DevicePtr, out: DevicePtr, n: i32, channels: i32):
            FOLD_TAPS_F32 = "fold_taps_f32";
        ConvF32(args: ConvArgs):
            CONV_F32_128 = "conv_f32_128", CONV_F32_64 = "conv_f32_64", CONV_F32_32 = "conv_f32_32";
    }
}

/// Tile size, stages and row pitch of the tensor-core kernel, as in `conv.cu`.
const TILE_M: usize = 128;
const TILE_STAGES: usize = 3;
const TILE_PITCH: usize = 40;
/// Row pitch and stages of the f32 kernel, as in `conv_f32.cu`.
const F32_PITCH: usize = 20;
const F32_STAGES: usize = 2;
/// Tile size of the plain kernel, in pixels and in channels.
const PLAIN: usize = 64;

/// Whether the bf16 kernel takes these: every 16 bytes are aligned and belong to one tap.
pub(crate) fn supports_tensor_cores(args: &ConvArgs, dtype: DType) -> bool {
    let vectors = [i64::from(args.input[2]), args.ldx, args.ldw].iter().all(|n| n % 8 == 0);
    dtype == DType::BF16 && vectors && args.x.is_multiple_of(16) && args.w.is_multiple_of(16)
}

/// [`supports_tensor_cores`] for the f32 kernel.
pub(crate) fn supports_f32_tiles(args: &ConvArgs, dtype: DType) -> bool {
    let vectors = [i64::from(args.input[2]), args.ldx, args.ldw].iter().all(|n| n % 4 == 0);
    dtype == DType::F32 && vectors && args.x.is_multiple_of(16) && args.w.is_multiple_of(16)
}

/// Value of `upsample` for folded taps: four phases of the output, each with its own 2x2 weights (see `conv_f32.cu`).
pub(crate) const UPSAMPLE_FOLDED: i32 = 2;

/// Whether this is a 3x3 convolution after 2x upsampling, which four 2x2 convolutions of the small image can replace.
pub(crate) fn is_foldable(args: &ConvArgs) -> bool {
    let doubled = |side: usize| args.output[side] == 2 * args.input[side];
    args.upsample == 1
        && args.kernel == [3, 3]
        && args.padding == [1, 1]
        && args.stride == 1
        && doubled(0)
        && doubled(1)
}

/// Launches the kernel that fits.
pub(crate) fn run(cx: &Context, args: &ConvArgs, dtype: DType, out: DType) -> Result<()> {
    let pixels = args.output[0] as usize * args.output[1] as usize;
    let n = args.output[2] as usize;
    if supports_tensor_cores(args, dtype) {
        // A tile of 128 channels would be mostly empty for an image's three.
        let (width, kernel) = match (n <= 32, out) {
            (true, DType::BF16) => (32, CONV_TILES_BF16_32),
            (true, _) => (32, CONV_TILES_F32_32),
            (false, DType::BF16) => (128, CONV_TILES_BF16_128),
            (false, _) => (128, CONV_TILES_F32_128),
        };
        let shared = TILE_STAGES * (TILE_M + width) * TILE_PITCH * 2;
        let grid = [pixels.div_ceil(TILE_M), n.div_ceil(width)];
        return cx.launch(kernel, grid, 256, shared, &ConvTiles { args: *args });
    }
    if supports_f32_tiles(args, dtype) {
        // Smaller tiles where larger ones would leave multiprocessors idle.
        let phases = if args.upsample == UPSAMPLE_FOLDED { 4 } else { 1 };
        let blocks = phases * pixels.div_ceil(128) * n.div_ceil(128);
        let fills = blocks >= cx.gpu().multiprocessors.max(1) as usize;
        let (height, width, kernel) = match n {
            ..=32 => (256, 32, CONV_F32_32),
            65.. if fills => (128, 128, CONV_F32_128),
            _ => (128, 64, CONV_F32_64),
        };
        let shared = F32_STAGES * (height + width) * F32_PITCH * 4;
        let grid = [phases * pixels.div_ceil(height), n.div_ceil(width)];
        return cx.launch(kernel, grid, 128, shared, &ConvF32 { args: *args });
    }
    let kernel = match (dtype, out) {
        (DType::BF16, DType::BF16) => CONV_PLAIN_BF16_BF16,
        (DType::BF16, _) => CONV_PLAIN_BF16_F32,
        _ => CONV_PLAIN_F32_F32,
    };
    let grid = [pixels.div_ceil(PLAIN), n.div_ceil(PLAIN)];
    cx.launch(kernel, grid, 256, 0, &ConvPlain { args: *args })
}
