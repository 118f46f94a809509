//! Products and convolutions with Kiln's own kernels: on tensor cores, in f32 on CUDA cores, or with plain arithmetic.

use kiln_ops::Result;
use kiln_tensor::DType;

use crate::context::Context;
use crate::kernels::{
    CONV_F32_32, CONV_F32_64, CONV_F32_128, CONV_PLAIN_BF16_BF16, CONV_PLAIN_BF16_F32, CONV_PLAIN_F32_F32,
    CONV_TILES_BF16_32, CONV_TILES_BF16_128, CONV_TILES_F32_32, CONV_TILES_F32_128, Conv, ConvF32, ConvPlain,
    ConvTiles,
};

/// Pixels, depth and stages of a block of the tensor-core kernel, and elements between its rows.
const TILE_M: usize = 128;
const TILE_STAGES: usize = 3;
const TILE_PITCH: usize = 40;
/// Elements between the rows of the kernel for f32 that a block has of its operands, and stages of them.
const F32_PITCH: usize = 20;
const F32_STAGES: usize = 2;
/// Pixels and channels of a block of the plain kernel.
const PLAIN: usize = 64;

/// Whether 16 bytes are always of one tap and aligned.
pub(crate) fn takes_tiles(conv: &Conv, dtype: DType) -> bool {
    let vectors = [i64::from(conv.input[2]), conv.ldx, conv.ldw].iter().all(|n| n % 8 == 0);
    dtype == DType::BF16 && vectors && conv.x.is_multiple_of(16) && conv.w.is_multiple_of(16)
}

/// [`takes_tiles`] for f32.
pub(crate) fn takes_f32_tiles(conv: &Conv, dtype: DType) -> bool {
    let vectors = [i64::from(conv.input[2]), conv.ldx, conv.ldw].iter().all(|n| n % 4 == 0);
    dtype == DType::F32 && vectors && conv.x.is_multiple_of(16) && conv.w.is_multiple_of(16)
}

/// `upsample` where the output is one kind of four, by the parity of their place, and the weights are those of all four.
pub(crate) const FOLDED: i32 = 2;

/// Whether the picture is doubled before a kernel whose results are four convolutions of the small one.
pub(crate) fn folds(conv: &Conv) -> bool {
    let doubled = |side: usize| conv.output[side] == 2 * conv.input[side];
    conv.upsample == 1
        && conv.kernel == [3, 3]
        && conv.padding == [1, 1]
        && conv.stride == 1
        && doubled(0)
        && doubled(1)
}

/// Puts the kernel that fits on the stream.
pub(crate) fn run(cx: &Context, conv: &Conv, dtype: DType, out: DType) -> Result<()> {
    let pixels = conv.output[0] as usize * conv.output[1] as usize;
    let n = conv.output[2] as usize;
    if takes_tiles(conv, dtype) {
        // A block of 128 channels would be mostly empty for a picture's three.
        let (width, kernel) = match (n <= 32, out) {
            (true, DType::BF16) => (32, CONV_TILES_BF16_32),
            (true, _) => (32, CONV_TILES_F32_32),
            (false, DType::BF16) => (128, CONV_TILES_BF16_128),
            (false, _) => (128, CONV_TILES_F32_128),
        };
        let shared = TILE_STAGES * (TILE_M + width) * TILE_PITCH * 2;
        let grid = [pixels.div_ceil(TILE_M), n.div_ceil(width)];
        return cx.launch(kernel, grid, 256, shared, &ConvTiles { t: *conv });
    }
    if takes_f32_tiles(conv, dtype) {
        // Smaller blocks where larger ones would leave processors without work.
        let kinds = if conv.upsample == FOLDED { 4 } else { 1 };
        let blocks = kinds * pixels.div_ceil(128) * n.div_ceil(128);
        let fills = blocks >= cx.gpu().processors.max(1) as usize;
        let (height, width, kernel) = match n {
            ..=32 => (256, 32, CONV_F32_32),
            65.. if fills => (128, 128, CONV_F32_128),
            _ => (128, 64, CONV_F32_64),
        };
        let shared = F32_STAGES * (height + width) * F32_PITCH * 4;
        let grid = [kinds * pixels.div_ceil(height), n.div_ceil(width)];
        return cx.launch(kernel, grid, 128, shared, &ConvF32 { t: *conv });
    }
    let kernel = match (dtype, out) {
        (DType::BF16, DType::BF16) => CONV_PLAIN_BF16_BF16,
        (DType::BF16, _) => CONV_PLAIN_BF16_F32,
        _ => CONV_PLAIN_F32_F32,
    };
    let grid = [pixels.div_ceil(PLAIN), n.div_ceil(PLAIN)];
    cx.launch(kernel, grid, 256, 0, &ConvPlain { t: *conv })
}
