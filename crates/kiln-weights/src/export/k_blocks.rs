//! Rows of floats to GGUF's blocks of 256.
//!
//! A group's scale (and minimum) is the best of several tries, each improved by least squares for the codes it gives; then
//! the scales of a block are rounded to their few bits, and every value is coded anew with what is left of its scale.

use kiln_tensor::f16;
use kiln_tensor::packed::small_floats::nearest;

use super::blocks::half;

const VALUES: usize = 256;

/// Groups of 16 with 2 bits a value, 4 a scale and a minimum.
pub(super) fn q2_k(x: &[f32], out: &mut Vec<u8>) {
    let block = Offset::new(x, 16, 3, 15);
    out.extend((0..16).map(|g| block.scales[g] | block.minima[g] << 4));
    let mut quants = [0u8; 64];
    for (i, &q) in block.codes.iter().enumerate() {
        let group = i / 16;
        quants[group / 8 * 32 + group % 2 * 16 + i % 16] |= q << (group % 8 / 2 * 2);
    }
    out.extend(quants);
    out.extend(block.halves());
}

/// Groups of 16 with 3 bits a value and 6 a scale.
pub(super) fn q3_k(x: &[f32], out: &mut Vec<u8>) {
    let block = Centred::new(x, 4, 31);
    let (mut high, mut quants, mut scales) = ([0u8; 32], [0u8; 64], [0u8; 12]);
    for (i, &q) in block.codes.iter().enumerate() {
        let (group, q) = (i / 16, (q + 4) as u8);
        quants[group / 8 * 32 + group % 2 * 16 + i % 16] |= (q & 3) << (group % 8 / 2 * 2);
        high[group % 2 * 16 + i % 16] |= (q >> 2) << (group / 2);
    }
    for (g, &scale) in block.scales.iter().enumerate() {
        let scale = (scale + 32) as u8;
        scales[g % 8] |= (scale & 15) << (g / 8 * 4);
        scales[8 + g % 4] |= (scale >> 4) << (2 * (g / 4));
    }
    out.extend(high);
    out.extend(quants);
    out.extend(scales);
    out.extend(half(block.d));
}

/// Groups of 32 with 4 bits a value, 6 a scale and a minimum.
pub(super) fn q4_k(x: &[f32], out: &mut Vec<u8>) {
    let block = Offset::new(x, 32, 15, 63);
    out.extend(block.halves());
    out.extend(six_bits(&block));
    out.extend(nibbles(&block.codes));
}

/// Groups of 32 with 5 bits a value, 6 a scale and a minimum.
pub(super) fn q5_k(x: &[f32], out: &mut Vec<u8>) {
    let block = Offset::new(x, 32, 31, 63);
    out.extend(block.halves());
    out.extend(six_bits(&block));
    let mut high = [0u8; 32];
    for (i, &q) in block.codes.iter().enumerate() {
        high[i % 32] |= (q >> 4) << (i / 32);
    }
    out.extend(high);
    out.extend(nibbles(&block.codes.map(|q| q & 15)));
}

/// Groups of 16 with 6 bits a value and 8 a scale.
pub(super) fn q6_k(x: &[f32], out: &mut Vec<u8>) {
    let block = Centred::new(x, 32, 127);
    let (mut low, mut high) = ([0u8; 128], [0u8; 64]);
    for (i, &q) in block.codes.iter().enumerate() {
        let (group, q) = (i / 16, (q + 32) as u8);
        let (side, turn, at) = (group / 8, group % 8 / 2, group % 2 * 16 + i % 16);
        low[side * 64 + turn % 2 * 32 + at] |= (q & 15) << (turn / 2 * 4);
        high[side * 32 + at] |= (q >> 4) << (2 * turn);
    }
    out.extend(low);
    out.extend(high);
    out.extend(block.scales.map(|s| s as i8 as u8));
    out.extend(half(block.d));
}

/// Two groups of 32 share 32 bytes.
fn nibbles(codes: &[u8; VALUES]) -> impl Iterator<Item = u8> {
    (0..128).map(|i| {
        let first = i / 32 * 64 + i % 32;
        codes[first] | codes[first + 32] << 4
    })
}

/// Eight scales and eight minima of 6 bits in 12 bytes.
fn six_bits(block: &Offset) -> [u8; 12] {
    let (s, m) = (&block.scales, &block.minima);
    std::array::from_fn(|i| match i {
        0..4 => s[i] | s[i + 4] >> 4 << 6,
        4..8 => m[i - 4] | m[i] >> 4 << 6,
        _ => s[i - 4] & 15 | (m[i - 4] & 15) << 4,
    })
}

/// `d · scale · q - dmin · minimum`.
struct Offset {
    d: f32,
    dmin: f32,
    scales: [u8; 16],
    minima: [u8; 16],
    codes: [u8; VALUES],
}

impl Offset {
    fn new(x: &[f32], group: usize, most: u8, largest: u8) -> Offset {
        let fitted: Vec<(f32, f32)> = x.chunks_exact(group).map(|x| fit_offset(x, most)).collect();
        let top = |value: fn(&(f32, f32)) -> f32| fitted.iter().map(value).fold(0f32, f32::max);
        // What a reader will have: halves.
        let [d, dmin] = [top(|f| f.0), top(|f| f.1)].map(|v| rounded(v / f32::from(largest)));
        let (mut scales, mut minima, mut codes) = ([0; 16], [0; 16], [0; VALUES]);
        for (g, (&(scale, minimum), x)) in fitted.iter().zip(x.chunks_exact(group)).enumerate() {
            scales[g] = ratio(scale, d).clamp(0.0, f32::from(largest)) as u8;
            minima[g] = ratio(minimum, dmin).clamp(0.0, f32::from(largest)) as u8;
            let (step, below) = (d * f32::from(scales[g]), dmin * f32::from(minima[g]));
            for (code, x) in codes[g * group..].iter_mut().zip(x) {
                *code = ratio(x + below, step).clamp(0.0, f32::from(most)) as u8;
            }
        }
        Offset { d, dmin, scales, minima, codes }
    }

    fn halves(&self) -> impl Iterator<Item = u8> {
        half(self.d).into_iter().chain(half(self.dmin))
    }
}

/// `d · scale · q`, with q from `-half` to `half - 1`.
struct Centred {
    d: f32,
    scales: [i32; 16],
    codes: [i32; VALUES],
}

impl Centred {
    fn new(x: &[f32], half: i32, largest: i32) -> Centred {
        let fitted: Vec<f32> = x.chunks_exact(16).map(|x| fit_centred(x, half)).collect();
        let top = fitted.iter().fold(0f32, |m, s| m.max(s.abs()));
        let d = rounded(top / largest as f32);
        let (mut scales, mut codes) = ([0; 16], [0; VALUES]);
        for (g, (scale, x)) in fitted.iter().zip(x.chunks_exact(16)).enumerate() {
            scales[g] = ratio(*scale, d).clamp(-largest as f32, largest as f32) as i32;
            let step = d * scales[g] as f32;
            for (code, x) in codes[g * 16..].iter_mut().zip(x) {
                *code = ratio(*x, step).clamp(-half as f32, (half - 1) as f32) as i32;
            }
        }
        Centred { d, scales, codes }
    }
}

/// As a half holds it; never so large that it is infinite.
fn rounded(x: f32) -> f32 {
    f16::from_f32(x.min(65504.0)).to_f32()
}

/// The nearest integer to `x / by`; 0 when there is nothing to divide by.
fn ratio(x: f32, by: f32) -> f32 {
    if by == 0.0 { 0.0 } else { nearest(x / by) }
}

/// How far the range is stretched in the tries, in parts of a code.
const TRIES: [f32; 7] = [-0.8, -0.5, -0.25, 0.0, 0.25, 0.5, 0.8];

/// The scale and the minimum (counted downwards, never above zero) with the least squared error for codes `0..=most`.
fn fit_offset(x: &[f32], most: u8) -> (f32, f32) {
    let (least, top) = x.iter().fold((0f32, f32::MIN), |(l, m), &x| (l.min(x), m.max(x)));
    if top <= least {
        return (0.0, -least);
    }
    let n = x.len() as f32;
    let sum_x: f32 = x.iter().sum();
    let mut best = ((top - least) / f32::from(most), -least, f32::INFINITY);
    for stretch in TRIES {
        let inverse = (f32::from(most) + stretch) / (top - least);
        let code = |x: f32| nearest((x - least) * inverse).clamp(0.0, f32::from(most));
        let (mut q_sum, mut qq, mut qx) = (0f32, 0f32, 0f32);
        for &x in x {
            let q = code(x);
            (q_sum, qq, qx) = (q_sum + q, qq + q * q, qx + q * x);
        }
        let determinant = n * qq - q_sum * q_sum;
        let (mut scale, mut minimum) = match determinant > 0.0 {
            true => ((n * qx - q_sum * sum_x) / determinant, (q_sum * qx - qq * sum_x) / determinant),
            false => (1.0 / inverse, -least),
        };
        if minimum < 0.0 {
            // Nothing lies below zero there.
            (scale, minimum) = (if qq > 0.0 { qx / qq } else { 0.0 }, 0.0);
        }
        let error: f32 = x.iter().map(|&x| (scale * code(x) - minimum - x).powi(2)).sum();
        if scale >= 0.0 && error < best.2 {
            best = (scale, minimum, error);
        }
    }
    (best.0, best.1)
}

/// The scale with the least squared error for codes `-half..half`; the value farthest from zero gets the lowest code.
fn fit_centred(x: &[f32], half: i32) -> f32 {
    let far = x.iter().fold(0f32, |best, &x| if x.abs() > best.abs() { x } else { best });
    if far == 0.0 {
        return 0.0;
    }
    let mut best = (-far / half as f32, f32::INFINITY);
    for stretch in TRIES {
        let inverse = -(half as f32 + stretch) / far;
        let code = |x: f32| nearest(x * inverse).clamp(-half as f32, (half - 1) as f32);
        let (qq, qx) = x.iter().fold((0f32, 0f32), |(qq, qx), &x| (qq + code(x).powi(2), qx + code(x) * x));
        let scale = if qq > 0.0 { qx / qq } else { 0.0 };
        let error: f32 = x.iter().map(|&x| (scale * code(x) - x).powi(2)).sum();
        if error < best.1 {
            best = (scale, error);
        }
    }
    best.0
}
