//! Encodes GGUF's blocks of 32 values. The bytes equal those that the `gguf` Python package writes.

use half::f16;

use crate::vector;

/// Appends 32 values in 4 bits, with a scale.
pub(super) fn q4_0(x: &[f32; 32], out: &mut Vec<u8>) {
    let (d, inverse) = symmetric_scale(x, -8.0);
    out.extend(d);
    let q = |x: f32| (x * inverse + 8.5).clamp(0.0, 15.0) as u8;
    out.extend((0..16).map(|i| q(x[i]) | q(x[i + 16]) << 4));
}

/// Appends 32 values in 4 bits, with a scale and a minimum.
pub(super) fn q4_1(x: &[f32; 32], out: &mut Vec<u8>) {
    let (d, min, inverse) = min_and_scale(x, 15.0);
    out.extend(d.into_iter().chain(f16_bytes(min)));
    let q = |x: f32| ((x - min) * inverse + 0.5).clamp(0.0, 15.0) as u8;
    out.extend((0..16).map(|i| q(x[i]) | q(x[i + 16]) << 4));
}

/// Appends 32 values in 5 bits, with a scale.
pub(super) fn q5_0(x: &[f32; 32], out: &mut Vec<u8>) {
    let (d, inverse) = symmetric_scale(x, -16.0);
    out.extend(d);
    pack_5_bits(x, out, |x| (x * inverse + 16.5).clamp(0.0, 31.0) as u8);
}

/// Appends 32 values in 5 bits, with a scale and a minimum.
pub(super) fn q5_1(x: &[f32; 32], out: &mut Vec<u8>) {
    let (d, min, inverse) = min_and_scale(x, 31.0);
    out.extend(d.into_iter().chain(f16_bytes(min)));
    pack_5_bits(x, out, |x| ((x - min) * inverse + 0.5).clamp(0.0, 31.0) as u8);
}

/// Appends 32 values in 8 bits, with a scale.
pub(super) fn q8_0(x: &[f32; 32], out: &mut Vec<u8>) {
    let d = vector::max_abs(x) / 127.0;
    let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
    out.extend(f16_bytes(d));
    let mut codes = [0u8; 32];
    for (code, x) in codes.iter_mut().zip(x) {
        *code = round_away_from_zero(x * inverse) as u8;
    }
    out.extend(codes);
}

/// Rounds to the nearest integer, ties away from zero, like [`f32::round`]; with additions, which vectorize everywhere.
fn round_away_from_zero(x: f32) -> i8 {
    // 1.5 · 2²³: the sum has no fraction bits. It is rounded, ties to even, and ends in the integer's bits.
    const MAGIC: f32 = 12_582_912.0;
    let sum = x + MAGIC;
    let rest = x - (sum - MAGIC);
    let up = (rest == 0.5) & (x > 0.0);
    let down = (rest == -0.5) & (x < 0.0);
    (sum.to_bits() as i8).wrapping_add(i8::from(up)).wrapping_sub(i8::from(down))
}

fn pack_5_bits(x: &[f32; 32], out: &mut Vec<u8>, q: impl Fn(f32) -> u8) {
    let high = x.iter().enumerate().fold(0u32, |bits, (i, x)| bits | u32::from(q(*x) >> 4) << i);
    out.extend(high.to_le_bytes());
    out.extend((0..16).map(|i| q(x[i]) & 15 | (q(x[i + 16]) & 15) << 4));
}

/// The scale that maps the value farthest from zero to the lowest code, as f16 bytes, and its inverse.
fn symmetric_scale(x: &[f32], lowest: f32) -> ([u8; 2], f32) {
    let largest = x.iter().fold(0f32, |best, &x| if x.abs() > best.abs() { x } else { best });
    let d = largest / lowest;
    (f16_bytes(d), if d == 0.0 { 0.0 } else { 1.0 / d })
}

/// The scale that spreads the values over `steps` steps, as f16 bytes, the smallest value, and the
/// inverse of the scale.
fn min_and_scale(x: &[f32], steps: f32) -> ([u8; 2], f32, f32) {
    let (min, max) = x.iter().fold((f32::MAX, f32::MIN), |(min, max), &x| (min.min(x), max.max(x)));
    let d = (max - min) / steps;
    (f16_bytes(d), min, if d == 0.0 { 0.0 } else { 1.0 / d })
}

fn f16_bytes(x: f32) -> [u8; 2] {
    f16::from_f32(x).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_go_away_from_zero() {
        for i in -1270..=1270 {
            for ulps in [-1, 0, 1] {
                let x = f32::from_bits((i as f32 / 10.0).to_bits().wrapping_add_signed(ulps));
                if x.abs() <= 127.0 {
                    // Exact in f64. `round` may become that of mingw-w64 for f32, which gives -1 for -0.49999997.
                    let exact = f64::from(x) + 0.5f64.copysign(x.into());
                    assert_eq!(round_away_from_zero(x), exact.trunc() as i8, "{x}");
                }
            }
        }
    }
}
