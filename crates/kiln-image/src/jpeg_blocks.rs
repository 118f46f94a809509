//! Blocks of a JPEG image: colours, cosine transform, quantization.
//!
//! Loops run over the eight lanes of a row in 16-bit numbers, so that the compiler makes vectors of them.
#![expect(clippy::needless_range_loop, reason = "a lane is an index into every row")]

use crate::RgbImage;

/// Position in a block of the n-th coefficient in the file.
pub(crate) const ZIGZAG: [u8; 64] = [
    0, 1, 8, 16, 9, 2, 3, 10, 17, 24, 32, 25, 18, 11, 4, 5, 12, 19, 26, 33, 40, 48, 41, 34, 27, 20, 13, 6, 7,
    14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39,
    46, 53, 60, 61, 54, 47, 55, 62, 63,
];

/// Eight rows of eight numbers.
type Block = [[i16; 8]; 8];

/// A row of blocks: the samples of each component, block by block, each block column by column.
pub(crate) struct BlockRow {
    width: usize,
    components: [Vec<Block>; 3],
}

impl BlockRow {
    pub(crate) fn new(width: usize) -> BlockRow {
        let blocks = || vec![[[0; 8]; 8]; width.div_ceil(8)];
        BlockRow { width, components: [blocks(), blocks(), blocks()] }
    }

    pub(crate) fn blocks(&self) -> usize {
        self.components[0].len()
    }

    /// Reads the blocks whose first row is `top`. Beyond the image its last pixels are repeated.
    pub(crate) fn load(&mut self, image: &RgbImage, top: usize) {
        let stride = 3 * self.width;
        for y in 0..8 {
            let row = (top + y).min(image.height() as usize - 1);
            let row = &image.pixels()[row * stride..][..stride];
            for (x, pixels) in row.chunks(24).enumerate() {
                let colors = match pixels.first_chunk::<24>() {
                    Some(eight) => convert(eight),
                    None => convert(&std::array::from_fn(|at| pixels[at.min(pixels.len() - 3 + at % 3)])),
                };
                for (blocks, samples) in self.components.iter_mut().zip(&colors) {
                    for (column, sample) in blocks[x].iter_mut().zip(samples) {
                        column[y] = *sample;
                    }
                }
            }
        }
    }

    /// The cosine transform of a block, 8 times too large.
    pub(crate) fn transform(&self, component: usize, block: usize) -> Block {
        columns(&transpose(&rows(&self.components[component][block])))
    }
}

/// Converts eight pixels to luma and chroma of BT.601 in full range, around 0.
fn convert(pixels: &[u8; 24]) -> [[i16; 8]; 3] {
    const HALF: i32 = (1 << 15) - 1;
    let mut out = [[0; 8]; 3];
    for i in 0..8 {
        let (r, g, b) =
            (i32::from(pixels[3 * i]), i32::from(pixels[3 * i + 1]), i32::from(pixels[3 * i + 2]));
        out[0][i] = (((19595 * r + 38469 * g + 7471 * b + HALF) >> 16) - 128) as i16;
        out[1][i] = ((-11059 * r - 21709 * g + 32768 * b + HALF) >> 16) as i16;
        out[2][i] = ((32768 * r - 27439 * g - 5329 * b + HALF) >> 16) as i16;
    }
    out
}

fn transpose(block: &Block) -> Block {
    let mut out = [[0; 8]; 8];
    for i in 0..8 {
        for j in 0..8 {
            out[i][j] = block[j][i];
        }
    }
    out
}

/// Bits behind the point of [`Factors`].
const FACTOR_BITS: u32 = 13;
/// Bits that the first pass keeps beyond the point.
const KEPT_BITS: u32 = 2;

/// One coefficient of eight samples from its even or odd part.
struct Sums {
    even: [i16; 4],
    odd: [i16; 4],
}

/// Sums and differences of mirrored samples of lane `i`. No sum of a block's samples exceeds 16 bits.
#[inline(always)]
fn fold(block: &Block, i: usize) -> Sums {
    let sum = |k: usize| block[k][i].wrapping_add(block[7 - k][i]);
    let difference = |k: usize| block[k][i].wrapping_sub(block[7 - k][i]);
    let (a, b, c, d) = (sum(0), sum(1), sum(2), sum(3));
    let odd = [difference(0), difference(1), difference(2), difference(3)];
    let even = [a.wrapping_add(d), b.wrapping_add(c), a.wrapping_sub(d), b.wrapping_sub(c)];
    Sums { even, odd }
}

#[inline(always)]
fn times(value: i16, factor: i16) -> i32 {
    i32::from(value) * i32::from(factor)
}

/// Coefficients 2 and 6, with `half` added.
#[inline(always)]
fn even_part([_, _, a, b]: [i16; 4], half: i32) -> [i32; 2] {
    let sum = times(a.wrapping_add(b), 4433) + half;
    [sum + times(a, 6270), sum - times(b, 15137)]
}

/// Coefficients 1, 3, 5 and 7, with `half` added.
#[inline(always)]
fn odd_part([a, b, c, d]: [i16; 4], half: i32) -> [i32; 4] {
    let (ac, bd) = (a.wrapping_add(c), b.wrapping_add(d));
    let sum = times(ac.wrapping_add(bd), 9633) + half;
    let (ac, bd) = (sum - times(ac, 3196), sum - times(bd, 16069));
    let (ad, bc) = (times(a.wrapping_add(d), -7373), times(b.wrapping_add(c), -20995));
    [
        times(a, 12299) + ad + ac,
        times(b, 25172) + bc + bd,
        times(c, 16819) + bc + ac,
        times(d, 2446) + ad + bd,
    ]
}

/// The first pass: libjpeg's accurate integer transform of rows.
fn rows(block: &Block) -> Block {
    const SHIFT: u32 = FACTOR_BITS - KEPT_BITS;
    const HALF: i32 = 1 << (SHIFT - 1);
    let mut out = [[0; 8]; 8];
    for i in 0..8 {
        let Sums { even, odd } = fold(block, i);
        out[0][i] = even[0].wrapping_add(even[1]) << KEPT_BITS;
        out[4][i] = even[0].wrapping_sub(even[1]) << KEPT_BITS;
        let evens = even_part(even, HALF);
        let odds = odd_part(odd, HALF);
        out[1][i] = (odds[0] >> SHIFT) as i16;
        out[2][i] = (evens[0] >> SHIFT) as i16;
        out[3][i] = (odds[1] >> SHIFT) as i16;
        out[5][i] = (odds[2] >> SHIFT) as i16;
        out[6][i] = (evens[1] >> SHIFT) as i16;
        out[7][i] = (odds[3] >> SHIFT) as i16;
    }
    out
}

/// The second pass: columns.
fn columns(block: &Block) -> Block {
    const SHIFT: u32 = FACTOR_BITS + KEPT_BITS;
    const HALF: i32 = 1 << (SHIFT - 1);
    let mut out = [[0; 8]; 8];
    for i in 0..8 {
        let Sums { even, odd } = fold(block, i);
        let half = 1 << (KEPT_BITS - 1);
        out[0][i] = (even[0].wrapping_add(even[1]).wrapping_add(half)) >> KEPT_BITS;
        out[4][i] = (even[0].wrapping_sub(even[1]).wrapping_add(half)) >> KEPT_BITS;
        let evens = even_part(even, HALF);
        let odds = odd_part(odd, HALF);
        out[1][i] = (odds[0] >> SHIFT) as i16;
        out[2][i] = (evens[0] >> SHIFT) as i16;
        out[3][i] = (odds[1] >> SHIFT) as i16;
        out[5][i] = (odds[2] >> SHIFT) as i16;
        out[6][i] = (evens[1] >> SHIFT) as i16;
        out[7][i] = (odds[3] >> SHIFT) as i16;
    }
    out
}

/// Division of coefficients by a quantization table, as two multiplications.
pub(crate) struct Quantizer {
    half: [u16; 64],
    inverse: [u16; 64],
    scale: [u16; 64],
}

impl Quantizer {
    pub(crate) fn new(divisors: &[u8; 64]) -> Quantizer {
        let each = |f: fn(u32) -> u32| divisors.map(|divisor| f(divisor.into()) as u16);
        // With `2^b <= d < 2^(b + 1)`: n / d = (8 n · ceil(2^(b + 15) / d) >> 16) · 2^(14 - b) >> 16, exact up to n = 2^13.
        Quantizer {
            half: each(|d| d / 2),
            inverse: each(|d| (1u32 << (15 + d.ilog2())).div_ceil(d)),
            scale: each(|d| 1 << (14 - d.ilog2())),
        }
    }

    /// Quantizes coefficients that are 8 times too large. Returns them in the file's order.
    pub(crate) fn quantize(&self, block: &Block) -> [i16; 64] {
        let high = |a: u16, b: u16| ((u32::from(a) * u32::from(b)) >> 16) as u16;
        let mut quantized = [0; 64];
        let tables = self.half.iter().zip(&self.inverse).zip(&self.scale);
        for ((out, &value), ((half, inverse), scale)) in
            quantized.iter_mut().zip(block.as_flattened()).zip(tables)
        {
            // Dropping the eighths leaves a small dead zone around 0, which makes files 4 % smaller at the same quality.
            let rounded = (value.unsigned_abs() >> 3) + half;
            let magnitude = high(high(rounded << 3, *inverse), *scale) as i16;
            let sign = value >> 15;
            *out = (magnitude ^ sign) - sign;
        }
        let mut out = [0; 64];
        for (out, at) in out.iter_mut().zip(ZIGZAG) {
            *out = quantized[usize::from(at) % 64];
        }
        out
    }
}
