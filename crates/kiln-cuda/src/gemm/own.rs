//! Products and convolutions with Kiln's own kernels: on tensor cores, or with plain arithmetic.

use kiln_ops::Result;
use kiln_tensor::DType;

use crate::context::Context;
use crate::kernels::{
    CONV_PLAIN_BF16_BF16, CONV_PLAIN_BF16_F32, CONV_PLAIN_F32_F32, CONV_TILES_BF16_32, CONV_TILES_BF16_128,
    CONV_TILES_F32_32, CONV_TILES_F32_128, Conv, ConvPlain, ConvTiles,
};

/// Pixels, depth and stages of a block of the tensor-core kernel, and elements between its rows.
const TILE_M: usize = 128;
const TILE_STAGES: usize = 3;
const TILE_PITCH: usize = 40;
/// Pixels and channels of a block of the plain kernel.
const PLAIN: usize = 64;

/// Whether 16 bytes are always of one tap and aligned.
pub(crate) fn takes_tiles(conv: &Conv, dtype: DType) -> bool {
    let vectors = [i64::from(conv.input[2]), conv.ldx, conv.ldw].iter().all(|n| n % 8 == 0);
    dtype == DType::BF16 && vectors && conv.x.is_multiple_of(16) && conv.w.is_multiple_of(16)
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
    let kernel = match (dtype, out) {
        (DType::BF16, DType::BF16) => CONV_PLAIN_BF16_BF16,
        (DType::BF16, _) => CONV_PLAIN_BF16_F32,
        _ => CONV_PLAIN_F32_F32,
    };
    let grid = [pixels.div_ceil(PLAIN), n.div_ceil(PLAIN)];
    cx.launch(kernel, grid, 256, 0, &ConvPlain { t: *conv })
}
