//! GGUF blocks of 32 values: `d · q` or `d · q + m`, with q of 4, 5 or 8 bits, or of a table.
//!
//! Low nibbles are values 0 to 15, high nibbles 16 to 31; the fifth bits are stored in a separate word.

use super::small_floats::half;

#[inline(always)]
pub(super) fn q4_0(b: &[u8; 18], out: &mut [f32; 32]) {
    let d = half([b[0], b[1]]);
    nibbles(&b[2..], out, |q, _| f32::from(q as i8 - 8) * d);
}

#[inline(always)]
pub(super) fn q4_1(b: &[u8; 20], out: &mut [f32; 32]) {
    let (d, m) = (half([b[0], b[1]]), half([b[2], b[3]]));
    nibbles(&b[4..], out, |q, _| f32::from(q) * d + m);
}

#[inline(always)]
pub(super) fn q5_0(b: &[u8; 22], out: &mut [f32; 32]) {
    let (d, high) = (half([b[0], b[1]]), u32::from_le_bytes([b[2], b[3], b[4], b[5]]));
    nibbles(&b[6..], out, |q, i| f32::from((q | fifth_bit(high, i)) as i8 - 16) * d);
}

#[inline(always)]
pub(super) fn q5_1(b: &[u8; 24], out: &mut [f32; 32]) {
    let (d, m) = (half([b[0], b[1]]), half([b[2], b[3]]));
    let high = u32::from_le_bytes([b[4], b[5], b[6], b[7]]);
    nibbles(&b[8..], out, |q, i| f32::from(q | fifth_bit(high, i)) * d + m);
}

#[inline(always)]
pub(super) fn q8_0(b: &[u8; 34], out: &mut [f32; 32]) {
    let d = half([b[0], b[1]]);
    for (out, &q) in out.iter_mut().zip(&b[2..]) {
        *out = f32::from(q as i8) * d;
    }
}

/// The values of IQ4's codes: closer together near zero, where most weights are.
const IQ4_VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

#[inline(always)]
pub(super) fn iq4_nl(b: &[u8; 18], out: &mut [f32; 32]) {
    iq4_values(&b[2..], half([b[0], b[1]]), out);
}

/// `d · IQ4_VALUES[code]`.
#[inline(always)]
pub(super) fn iq4_values(codes: &[u8], d: f32, out: &mut [f32; 32]) {
    nibbles(codes, out, |q, _| d * f32::from(IQ4_VALUES[usize::from(q & 15)]));
}

#[inline(always)]
fn fifth_bit(high: u32, i: usize) -> u8 {
    ((high >> i & 1) << 4) as u8
}

#[inline(always)]
fn nibbles(packed: &[u8], out: &mut [f32; 32], value: impl Fn(u8, usize) -> f32) {
    let (low, high) = out.split_at_mut(16);
    for (i, ((&q, low), high)) in packed.iter().zip(low).zip(high).enumerate() {
        *low = value(q & 15, i);
        *high = value(q >> 4, 16 + i);
    }
}
