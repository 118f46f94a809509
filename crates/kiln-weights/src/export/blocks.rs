//! Rows of floats to GGUF's blocks of 32. The bytes are those that the `gguf` Python package writes.

use kiln_tensor::f16;

use super::lanes;

/// Appends the block of 32 values, packed in 4 bits without an offset.
pub(super) fn q4_0(x: &[f32], out: &mut Vec<u8>) {
    let (d, inverse) = toward_largest(x, -8.0);
    out.extend(d);
    let q = |x: f32| (x * inverse + 8.5).clamp(0.0, 15.0) as u8;
    out.extend((0..16).map(|i| q(x[i]) | q(x[i + 16]) << 4));
}

/// In 4 bits above the smallest.
pub(super) fn q4_1(x: &[f32], out: &mut Vec<u8>) {
    let (d, least, inverse) = above_least(x, 15.0);
    out.extend(d.into_iter().chain(half(least)));
    let q = |x: f32| ((x - least) * inverse + 0.5).clamp(0.0, 15.0) as u8;
    out.extend((0..16).map(|i| q(x[i]) | q(x[i + 16]) << 4));
}

/// In 5 bits without an offset.
pub(super) fn q5_0(x: &[f32], out: &mut Vec<u8>) {
    let (d, inverse) = toward_largest(x, -16.0);
    out.extend(d);
    fives(x, out, |x| (x * inverse + 16.5).clamp(0.0, 31.0) as u8);
}

/// In 5 bits above the smallest.
pub(super) fn q5_1(x: &[f32], out: &mut Vec<u8>) {
    let (d, least, inverse) = above_least(x, 31.0);
    out.extend(d.into_iter().chain(half(least)));
    fives(x, out, |x| ((x - least) * inverse + 0.5).clamp(0.0, 31.0) as u8);
}

/// In 8 bits.
pub(super) fn q8_0(x: &[f32], out: &mut Vec<u8>) {
    let d = lanes::largest(x) / 127.0;
    let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
    out.extend(half(d));
    let mut codes = [0u8; 32];
    for (code, x) in codes.iter_mut().zip(x) {
        *code = away_from_zero(x * inverse) as u8;
    }
    out.extend(codes);
}

/// The nearest integer, ties away from zero, as [`f32::round`] has it, of a number that fits; by additions, which every
/// machine does many at a time.
fn away_from_zero(x: f32) -> i8 {
    // Beyond this a float has no fraction left: the sum is rounded, ties to even, and ends in the integer's bits.
    const WHOLE: f32 = 12_582_912.0;
    let sum = x + WHOLE;
    let rest = x - (sum - WHOLE);
    let up = (rest == 0.5) & (x > 0.0);
    let down = (rest == -0.5) & (x < 0.0);
    (sum.to_bits() as i8).wrapping_add(i8::from(up)).wrapping_sub(i8::from(down))
}

fn fives(x: &[f32], out: &mut Vec<u8>, q: impl Fn(f32) -> u8) {
    let high = x.iter().enumerate().fold(0u32, |bits, (i, x)| bits | u32::from(q(*x) >> 4) << i);
    out.extend(high.to_le_bytes());
    out.extend((0..16).map(|i| q(x[i]) & 15 | (q(x[i + 16]) & 15) << 4));
}

/// A step with which the value farthest from zero becomes the lowest code, and what to multiply with.
fn toward_largest(x: &[f32], lowest: f32) -> ([u8; 2], f32) {
    let largest = x.iter().fold(0f32, |best, &x| if x.abs() > best.abs() { x } else { best });
    let d = largest / lowest;
    (half(d), if d == 0.0 { 0.0 } else { 1.0 / d })
}

fn above_least(x: &[f32], steps: f32) -> ([u8; 2], f32, f32) {
    let (least, most) = x.iter().fold((f32::MAX, f32::MIN), |(l, m), &x| (l.min(x), m.max(x)));
    let d = (most - least) / steps;
    (half(d), least, if d == 0.0 { 0.0 } else { 1.0 / d })
}

pub(super) fn half(x: f32) -> [u8; 2] {
    f16::from_f32(x).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_go_away_from_zero_as_in_the_standard_library() {
        for i in -1270..=1270 {
            for near in [-1, 0, 1] {
                let x = f32::from_bits((i as f32 / 10.0).to_bits().wrapping_add_signed(near));
                if x.abs() <= 127.0 {
                    assert_eq!(away_from_zero(x), x.round() as i8, "{x}");
                }
            }
        }
    }
}
