//! GGUF K-quants: blocks of 256 values in groups of 16 or 32. Each group has a small integer scale (and minimum), relative
//! to the block's f16 `d` (and `dmin`).

use super::blocks::iq4_values;
use super::small_floats::half;

/// Groups of 16, `d · scale · q - dmin · minimum`: 2-bit values, 4-bit scales and minimums.
#[inline(always)]
pub(super) fn q2_k(b: &[u8; 84], out: &mut [f32; 256]) {
    let (scales, quants) = (&b[..16], &b[16..80]);
    let (d, dmin) = (half([b[80], b[81]]), half([b[82], b[83]]));
    for (group, out) in out.chunks_exact_mut(16).enumerate() {
        let scale = scales[group];
        let (d, m) = (d * f32::from(scale & 15), dmin * f32::from(scale >> 4));
        let (from, shift) = two_bit_position(group);
        for (out, q) in out.iter_mut().zip(&quants[from..from + 16]) {
            *out = d * f32::from(q >> shift & 3) - m;
        }
    }
}

/// Groups of 16, `d · (scale - 32) · (q - 4)`: 3-bit values with the high bit stored separately, 6-bit scales.
#[inline(always)]
pub(super) fn q3_k(b: &[u8; 110], out: &mut [f32; 256]) {
    let (high, quants, scales) = (&b[..32], &b[32..96], &b[96..108]);
    let d = half([b[108], b[109]]);
    for (group, out) in out.chunks_exact_mut(16).enumerate() {
        let low = if group < 8 { scales[group] & 15 } else { scales[group - 8] >> 4 };
        let upper = scales[8 + group % 4] >> (2 * (group / 4)) & 3;
        let d = d * f32::from((low | upper << 4) as i8 - 32);
        let ((from, shift), bit) = (two_bit_position(group), group / 2);
        let high = &high[group % 2 * 16..][..16];
        for ((out, q), h) in out.iter_mut().zip(&quants[from..from + 16]).zip(high) {
            *out = d * f32::from((q >> shift & 3 | (h >> bit & 1) << 2) as i8 - 4);
        }
    }
}

/// Byte offset and shift of the 2-bit values of a group of 16: 128 values share 32 bytes.
#[inline(always)]
fn two_bit_position(group: usize) -> (usize, usize) {
    (group / 8 * 32 + group % 2 * 16, group % 8 / 2 * 2)
}

/// Groups of 32, `d · scale · q - dmin · minimum`: 4-bit values, 6-bit scales and minimums.
#[inline(always)]
pub(super) fn q4_k(b: &[u8; 144], out: &mut [f32; 256]) {
    let (d, dmin) = (half([b[0], b[1]]), half([b[2], b[3]]));
    let (scales, quants) = (&b[4..16], &b[16..]);
    for (group, out) in out.chunks_exact_mut(32).enumerate() {
        let (d, m) = six_bit_scale(scales, group, d, dmin);
        let (quants, shift) = (&quants[group / 2 * 32..][..32], group % 2 * 4);
        for (out, q) in out.iter_mut().zip(quants) {
            *out = d * f32::from(q >> shift & 15) - m;
        }
    }
}

/// As [`q4_k`], with the fifth bit of each value stored separately.
#[inline(always)]
pub(super) fn q5_k(b: &[u8; 176], out: &mut [f32; 256]) {
    let (d, dmin) = (half([b[0], b[1]]), half([b[2], b[3]]));
    let (scales, high, quants) = (&b[4..16], &b[16..48], &b[48..]);
    for (group, out) in out.chunks_exact_mut(32).enumerate() {
        let (d, m) = six_bit_scale(scales, group, d, dmin);
        let (quants, shift) = (&quants[group / 2 * 32..][..32], group % 2 * 4);
        for ((out, q), h) in out.iter_mut().zip(quants).zip(high) {
            *out = d * f32::from(q >> shift & 15 | (h >> group & 1) << 4) - m;
        }
    }
}

/// Scale and minimum of a group, six bits each. The upper two bits of the last four groups are stored in the upper bits of
/// the first four.
#[inline(always)]
fn six_bit_scale(s: &[u8], group: usize, d: f32, dmin: f32) -> (f32, f32) {
    let (scale, minimum) = match group {
        0..4 => (s[group] & 63, s[group + 4] & 63),
        _ => (s[group + 4] & 15 | s[group - 4] >> 6 << 4, s[group + 4] >> 4 | s[group] >> 6 << 4),
    };
    (d * f32::from(scale), dmin * f32::from(minimum))
}

/// Groups of 16, `d · scale · (q - 32)`: 6-bit values with the upper two bits stored separately, signed 8-bit scales.
#[inline(always)]
pub(super) fn q6_k(b: &[u8; 210], out: &mut [f32; 256]) {
    let (low, high, scales) = (&b[..128], &b[128..192], &b[192..208]);
    let d = half([b[208], b[209]]);
    for (group, out) in out.chunks_exact_mut(16).enumerate() {
        let d = d * f32::from(scales[group] as i8);
        // 128 values share 64 bytes of low bits (two values a byte) and 32 bytes of high bits (four values a byte).
        let (half, quarter) = (group / 8, group % 8 / 2);
        let low = &low[half * 64 + quarter % 2 * 32 + group % 2 * 16..][..16];
        let high = &high[half * 32 + group % 2 * 16..][..16];
        for ((out, l), h) in out.iter_mut().zip(low).zip(high) {
            *out = d * f32::from((l >> (quarter / 2 * 4) & 15 | (h >> (2 * quarter) & 3) << 4) as i8 - 32);
        }
    }
}

/// Groups of 32, `d · (scale - 32) · value`: 4-bit codes of a table's values, 6-bit scales with the upper two bits stored
/// separately.
#[inline(always)]
pub(super) fn iq4_xs(b: &[u8; 136], out: &mut [f32; 256]) {
    let (d, upper) = (half([b[0], b[1]]), u16::from_le_bytes([b[2], b[3]]));
    let (lower, quants) = (&b[4..8], &b[8..]);
    let (groups, _) = out.as_chunks_mut::<32>();
    for (group, out) in groups.iter_mut().enumerate() {
        let low = lower[group / 2] >> (group % 2 * 4) & 15;
        let high = (upper >> (2 * group) & 3) as u8;
        let d = d * f32::from((low | high << 4) as i8 - 32);
        iq4_values(&quants[group * 16..][..16], d, out);
    }
}
