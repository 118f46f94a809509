//! The scales (and minima) of GGUF's blocks of 256 values that give the least squared error.
//!
//! Eight groups of a block are searched side by side, one in each lane of a vector: a candidate then takes additions and
//! multiplications of whole vectors, without branches and without sums across lanes. Values are rounded by adding a large
//! number, and a candidate's error follows from the sums of its codes, without another look at the values.
//!
//! The best candidate of each group is refined: values are rounded with its scale, and the scale is fitted to their codes.
//! When the scales of the groups have been rounded to their few bits, the scale of the block is fitted in the same way.

use std::array::from_fn;

use kiln_tensor::f16;

pub(super) const VALUES: usize = 256;
/// A block has 8 or 16 groups.
const MAX_GROUPS: usize = 16;
/// Groups that are searched side by side: whole vectors on every machine, and few enough for the registers of the smallest.
const LANES: usize = 8;
type Lanes = [f32; LANES];

/// How far the candidates stretch the range of the values, in codes.
const STRETCHES: [f32; 7] = [-0.8, -0.5, -0.25, 0.0, 0.25, 0.5, 0.8];
/// How often the best candidate is refined.
const REFINEMENTS: usize = 2;

/// Values `d · scale · q - dmin · minimum`, with q from 0 to a largest code.
pub(super) struct AsymmetricBlock {
    pub d: f16,
    pub dmin: f16,
    pub scales: [u8; MAX_GROUPS],
    pub minima: [u8; MAX_GROUPS],
    pub codes: [u8; VALUES],
}

impl AsymmetricBlock {
    /// Encodes `PARTS` times eight groups of `N` values, with scales and minima up to `max_scale`.
    pub fn new<const N: usize, const PARTS: usize>(
        x: &[f32; VALUES],
        max_code: u8,
        max_scale: u8,
    ) -> AsymmetricBlock {
        let (max_code, max_scale) = (f32::from(max_code), f32::from(max_scale));
        let columns: [[Lanes; N]; PARTS] = columns(x);
        let fits = columns.each_ref().map(|x| fit_asymmetric(x, max_code));
        let [d, dmin] = [largest(&fits, |f| &f.scale), largest(&fits, |f| &f.minimum)]
            .map(|largest| round_to_f16(largest / max_scale));
        let groups = fits.each_ref().map(|fit| fit.round([d, dmin], max_scale));
        let [d, dmin] = fit_asymmetric_block(&columns, &groups, [d, dmin], max_code);

        let mut block = AsymmetricBlock {
            d: f16::from_f32(d),
            dmin: f16::from_f32(dmin),
            scales: [0; MAX_GROUPS],
            minima: [0; MAX_GROUPS],
            codes: [0; VALUES],
        };
        let per_group = groups.iter().flat_map(|g| g.scale.iter().zip(&g.minimum)).enumerate();
        let values = x.as_chunks::<N>().0.iter().zip(block.codes.as_chunks_mut::<N>().0);
        for ((g, (&scale, &minimum)), (x, codes)) in per_group.zip(values) {
            (block.scales[g], block.minima[g]) = (scale as u8, minimum as u8);
            encode(x, -dmin * minimum, inverse(d * scale), [0.0, max_code], codes);
        }
        block
    }
}

/// Values `d · scale · q`, with q from `-half` to `half - 1`.
pub(super) struct SymmetricBlock {
    pub d: f16,
    pub scales: [i8; MAX_GROUPS],
    /// The codes plus `half`.
    pub codes: [u8; VALUES],
}

impl SymmetricBlock {
    /// Encodes 16 groups of 16 values, with scales from `-max_scale` to `max_scale - 1`.
    pub fn new(x: &[f32; VALUES], half: u8, max_scale: u8) -> SymmetricBlock {
        let (range, max_scale) = ([-f32::from(half), f32::from(half) - 1.0], f32::from(max_scale));
        let columns: [[Lanes; 16]; 2] = columns(x);
        let fits = columns.each_ref().map(|x| fit_symmetric(x, range));
        // The farthest scale gets the lowest code.
        let d = round_to_f16(fits.iter().flatten().fold(0f32, |far, &s| farther(far, s)) / -max_scale);
        let groups = fits.map(|scale| round_all(&scale, d, [-max_scale, max_scale - 1.0]));
        let d = fit_symmetric_block(&columns, &groups, d, range);

        let mut block = SymmetricBlock { d: f16::from_f32(d), scales: [0; MAX_GROUPS], codes: [0; VALUES] };
        let values = x.as_chunks::<16>().0.iter().zip(block.codes.as_chunks_mut::<16>().0);
        for ((g, &scale), (x, codes)) in groups.iter().flatten().enumerate().zip(values) {
            block.scales[g] = scale as i8;
            encode(x, 0.0, inverse(d * scale), range, codes);
            codes.iter_mut().for_each(|code| *code = code.wrapping_add(half));
        }
        block
    }
}

/// The values of eight groups: first those that come first in their group.
fn columns<const N: usize, const PARTS: usize>(x: &[f32; VALUES]) -> [[Lanes; N]; PARTS] {
    from_fn(|part| from_fn(|i| from_fn(|lane| x[(part * LANES + lane) * N + i])))
}

/// The nearest integer, ties to even, inside a range of integers.
#[inline(always)]
fn round(x: f32, [low, high]: [f32; 2]) -> f32 {
    let sum = x + ROUNDER;
    let sum = if sum < ROUNDER + low { ROUNDER + low } else { sum };
    let sum = if sum > ROUNDER + high { ROUNDER + high } else { sum };
    sum - ROUNDER
}

/// 1.5 · 2²³: a sum with it has no fraction bits, and ends in the integer's bits.
const ROUNDER: f32 = 12_582_912.0;

/// The codes `(x - zero) · inverse`, as the lowest eight bits of integers.
#[inline(always)]
fn encode<const N: usize>(x: &[f32; N], zero: f32, inverse: f32, range: [f32; 2], codes: &mut [u8; N]) {
    for (code, x) in codes.iter_mut().zip(x) {
        *code = (round((x - zero) * inverse, range) + ROUNDER).to_bits() as u8;
    }
}

/// `1 / x`; 0 if that is not finite.
fn inverse(x: f32) -> f32 {
    let inverse = 1.0 / x;
    if inverse.is_finite() { inverse } else { 0.0 }
}

/// `x / by`, rounded and limited to `range`; 0 if `by` is 0.
fn round_all(x: &Lanes, by: f32, range: [f32; 2]) -> Lanes {
    let inverse = inverse(by);
    x.map(|x| round(x * inverse, range))
}

/// Rounds to f16; large values to the largest finite one.
fn round_to_f16(x: f32) -> f32 {
    f16::from_f32(x.clamp(-65504.0, 65504.0)).to_f32()
}

fn farther(a: f32, b: f32) -> f32 {
    if b.abs() > a.abs() { b } else { a }
}

/// Sums over the codes of the values of each group.
struct Sums {
    q: Lanes,
    qq: Lanes,
    qx: Lanes,
}

impl Sums {
    /// Of the codes `(x - zero) · inverse`.
    #[inline(always)]
    fn new<const N: usize>(x: &[Lanes; N], zero: &Lanes, inverse: &Lanes, range: [f32; 2]) -> Sums {
        let mut sums = Sums { q: [0.0; LANES], qq: [0.0; LANES], qx: [0.0; LANES] };
        for x in x {
            for lane in 0..LANES {
                let q = round((x[lane] - zero[lane]) * inverse[lane], range);
                sums.q[lane] += q;
                sums.qq[lane] += q * q;
                sums.qx[lane] += q * x[lane];
            }
        }
        sums
    }
}

/// The best scales and minima of eight groups so far, for values `scale · q - minimum`.
struct AsymmetricFit {
    scale: Lanes,
    minimum: Lanes,
    error: Lanes,
    sums: Sums,
}

/// The scales and minima of eight groups as integers.
struct AsymmetricGroups {
    scale: Lanes,
    minimum: Lanes,
}

/// The largest of a value of all groups, or 0.
fn largest(fits: &[AsymmetricFit], value: fn(&AsymmetricFit) -> &Lanes) -> f32 {
    fits.iter().flat_map(value).fold(0f32, |max, &v| max.max(v))
}

/// The scales and the negated minima (which are at most 0) with the least squared error for codes from 0 to `max_code`.
fn fit_asymmetric<const N: usize>(x: &[Lanes; N], max_code: f32) -> AsymmetricFit {
    let (mut min, mut max, mut sum, mut squares) =
        ([0f32; LANES], [f32::MIN; LANES], [0f32; LANES], [0f32; LANES]);
    for x in x {
        for lane in 0..LANES {
            let x = x[lane];
            min[lane] = if x < min[lane] { x } else { min[lane] };
            max[lane] = if x > max[lane] { x } else { max[lane] };
            sum[lane] += x;
            squares[lane] += x * x;
        }
    }
    let range: Lanes = from_fn(|lane| (max[lane] - min[lane]).max(0.0));
    let mut best = AsymmetricFit {
        scale: range.map(|range| range / max_code),
        minimum: min.map(|min| -min),
        error: [f32::INFINITY; LANES],
        sums: Sums { q: [0.0; LANES], qq: [0.0; LANES], qx: [0.0; LANES] },
    };
    for stretch in STRETCHES {
        let inverse = range.map(|range| inverse(range / (max_code + stretch)));
        best.improve(Sums::new(x, &min, &inverse, [0.0, max_code]), N as f32, &sum, &squares);
    }
    for _ in 0..REFINEMENTS {
        let (zero, inverse) = (best.minimum.map(|m| -m), best.scale.map(inverse));
        best.improve(Sums::new(x, &zero, &inverse, [0.0, max_code]), N as f32, &sum, &squares);
    }
    best
}

impl AsymmetricFit {
    /// Fits scales and minima to codes, by least squares, and keeps those with a smaller error. `n` is the number of values
    /// in a group, `x` their sum and `xx` that of their squares.
    #[inline(always)]
    fn improve(&mut self, sums: Sums, n: f32, x: &Lanes, xx: &Lanes) {
        for lane in 0..LANES {
            let (q, qq, qx, x, xx) = (sums.q[lane], sums.qq[lane], sums.qx[lane], x[lane], xx[lane]);
            let by_determinant = 1.0 / (n * qq - q * q);
            let (scale, minimum) = ((n * qx - q * x) * by_determinant, (q * qx - qq * x) * by_determinant);
            // The format has no minima above 0.
            let (scale, minimum) = if minimum < 0.0 { (qx / qq, 0.0) } else { (scale, minimum) };
            let error =
                xx + scale * (scale * qq - 2.0 * (qx + minimum * q)) + minimum * (n * minimum + 2.0 * x);
            // Not if all codes are equal: then nothing above is a number.
            let better = (error < self.error[lane]) & (scale > 0.0);
            let choose = |best: &mut f32, new: f32| *best = if better { new } else { *best };
            choose(&mut self.error[lane], error);
            choose(&mut self.scale[lane], scale);
            choose(&mut self.minimum[lane], minimum);
            choose(&mut self.sums.q[lane], q);
            choose(&mut self.sums.qq[lane], qq);
            choose(&mut self.sums.qx[lane], qx);
        }
    }

    /// Rounds to multiples of `d` and `dmin`: first the minima, then the scales that suit the rounded minima.
    fn round(&self, [d, dmin]: [f32; 2], max_scale: f32) -> AsymmetricGroups {
        let minimum = round_all(&self.minimum, dmin, [0.0, max_scale]);
        let scale = from_fn(|lane| {
            let Sums { q, qq, qx } = &self.sums;
            let scale = (qx[lane] + dmin * minimum[lane] * q[lane]) / qq[lane];
            if scale.is_finite() { scale } else { self.scale[lane] }
        });
        AsymmetricGroups { scale: round_all(&scale, d, [0.0, max_scale]), minimum }
    }
}

/// The `d` and `dmin` that suit the rounded scales and minima, by least squares over the whole block.
fn fit_asymmetric_block<const N: usize, const PARTS: usize>(
    columns: &[[Lanes; N]; PARTS],
    groups: &[AsymmetricGroups; PARTS],
    [d, dmin]: [f32; 2],
    max_code: f32,
) -> [f32; 2] {
    // Of the normal equations `a·d - b·dmin = p` and `b·d - c·dmin = r`.
    let (mut a, mut b, mut c, mut p, mut r) = (0f32, 0f32, 0f32, 0f32, 0f32);
    for (x, AsymmetricGroups { scale, minimum }) in columns.iter().zip(groups) {
        let (zero, inverse) = (minimum.map(|m| -dmin * m), scale.map(|s| inverse(d * s)));
        let Sums { q, qq, qx } = Sums::new(x, &zero, &inverse, [0.0, max_code]);
        for lane in 0..LANES {
            let (s, m) = (scale[lane], minimum[lane]);
            let x: f32 = x.iter().map(|x| x[lane]).sum();
            (a, b, c) = (a + s * s * qq[lane], b + s * m * q[lane], c + m * m * N as f32);
            (p, r) = (p + s * qx[lane], r + m * x);
        }
    }
    let determinant = a * c - b * b;
    let fitted =
        if c == 0.0 { [p / a, 0.0] } else { [(p * c - b * r) / determinant, (b * p - a * r) / determinant] };
    let usable = fitted[0] > 0.0 && fitted[1] >= 0.0 && fitted.iter().all(|v| v.is_finite());
    if usable { fitted.map(round_to_f16) } else { [d, dmin] }
}

/// The scales with the least squared error for codes in a range; the value farthest from zero gets about the lowest code.
fn fit_symmetric<const N: usize>(x: &[Lanes; N], range: [f32; 2]) -> Lanes {
    let mut farthest = [0f32; LANES];
    for x in x {
        for lane in 0..LANES {
            farthest[lane] = farther(farthest[lane], x[lane]);
        }
    }
    let mut best = farthest.map(|far| far / range[0]);
    let mut explained = [0f32; LANES];
    let mut improve = |best: &mut Lanes, inverse: Lanes| {
        let Sums { qq, qx, .. } = Sums::new(x, &[0.0; LANES], &inverse, range);
        for lane in 0..LANES {
            let scale = qx[lane] / qq[lane];
            // The sum of the squares less that of the errors.
            let squares = scale * qx[lane];
            let better = squares > explained[lane];
            explained[lane] = if better { squares } else { explained[lane] };
            best[lane] = if better { scale } else { best[lane] };
        }
    };
    for stretch in STRETCHES {
        improve(&mut best, farthest.map(|far| inverse(far / (range[0] - stretch))));
    }
    for _ in 0..REFINEMENTS {
        let inverse = best.map(inverse);
        improve(&mut best, inverse);
    }
    best
}

/// The `d` that suits the rounded scales, by least squares over the whole block.
fn fit_symmetric_block(columns: &[[Lanes; 16]; 2], groups: &[Lanes; 2], d: f32, range: [f32; 2]) -> f32 {
    let (mut a, mut p) = (0f32, 0f32);
    for (x, scale) in columns.iter().zip(groups) {
        let inverse = scale.map(|s| inverse(d * s));
        let Sums { qq, qx, .. } = Sums::new(x, &[0.0; LANES], &inverse, range);
        for lane in 0..LANES {
            (a, p) = (a + scale[lane] * scale[lane] * qq[lane], p + scale[lane] * qx[lane]);
        }
    }
    let fitted = p / a;
    if fitted.is_finite() { round_to_f16(fitted) } else { d }
}
