//! The scales (and minima) of GGUF's blocks of 256 values that give the least squared error.
//!
//! Eight groups of a block are searched side by side, one in each lane of a vector: a candidate then takes additions
//! and multiplications of whole vectors, without branches and without sums across lanes. A candidate's error follows
//! from the sums of its codes, without another look at the values.
//!
//! The best candidate of each group is refined: values are rounded with its scale, and the scale is fitted to their
//! codes. When the scales of the groups have been rounded to their few bits, the scale of the block is fitted in the
//! same way.
//!
//! The compiler vectorizes loops over the lanes of arrays, but neither `array::map` nor operators on a type of eight
//! floats.

use half::f16;

pub(super) const VALUES: usize = 256;
/// A block has 8 or 16 groups.
const MAX_GROUPS: usize = 16;
/// Groups that are searched side by side: whole vectors on every machine, and few enough for the registers of the
/// smallest.
const LANES: usize = 8;
type Lanes = [f32; LANES];
/// The values of eight groups, a group in each lane.
type Columns<const N: usize> = [Lanes; N];

/// How far the candidates stretch the range of the values, in codes.
const STRETCHES: [f32; 7] = [-1.6, -1.2, -0.8, -0.4, 0.0, 0.4, 0.8];
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
        let (codes, max_scale) = ([0.0, f32::from(max_code)], f32::from(max_scale));
        let columns: [Columns<N>; PARTS] = columns(x);
        let fits = columns.each_ref().map(|x| AsymmetricFit::new(x, codes));
        let largest = |value: fn(&AsymmetricFit) -> &Lanes| {
            fits.iter().flat_map(value).fold(0f32, |max, &v| if v > max { v } else { max })
        };
        let d = round_to_f16(largest(|fit| &fit.scale) / max_scale);
        let dmin = round_to_f16(largest(|fit| &fit.minimum) / max_scale);
        let mut groups = [AsymmetricGroups { scale: [0.0; LANES], minimum: [0.0; LANES] }; PARTS];
        for ((groups, fit), x) in groups.iter_mut().zip(&fits).zip(&columns) {
            *groups = fit.round(x, [d, dmin], codes, max_scale);
        }
        let [d, dmin] = fit_asymmetric_block(&columns, &fits, &groups, [d, dmin], codes);

        let mut block = AsymmetricBlock {
            d: f16::from_f32(d),
            dmin: f16::from_f32(dmin),
            scales: [0; MAX_GROUPS],
            minima: [0; MAX_GROUPS],
            codes: [0; VALUES],
        };
        let per_group = groups.iter().flat_map(|g| g.scale.iter().zip(&g.minimum)).enumerate();
        let values = x.as_chunks::<N>().0.iter().zip(block.codes.as_chunks_mut::<N>().0);
        for ((g, (&scale, &minimum)), (x, out)) in per_group.zip(values) {
            (block.scales[g], block.minima[g]) = (scale as u8, minimum as u8);
            encode(x, -dmin * minimum, inverse(d * scale), codes, out);
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
        let (codes, max_scale) = ([-f32::from(half), f32::from(half) - 1.0], f32::from(max_scale));
        let columns: [Columns<16>; 2] = columns(x);
        let fits = columns.each_ref().map(|x| fit_symmetric(x, codes));
        // The farthest scale gets the lowest code.
        let d =
            round_to_f16(fits.iter().flatten().fold(0f32, |far, &scale| farther(far, scale)) / -max_scale);
        let by_d = inverse(d);
        let groups = fits.map(|scale| lanes(|i| round(by_d * scale[i], [-max_scale, max_scale - 1.0])));
        let d = fit_symmetric_block(&columns, &groups, d, codes);

        let mut block = SymmetricBlock { d: f16::from_f32(d), scales: [0; MAX_GROUPS], codes: [0; VALUES] };
        let values = x.as_chunks::<16>().0.iter().zip(block.codes.as_chunks_mut::<16>().0);
        for ((g, &scale), (x, out)) in groups.iter().flatten().enumerate().zip(values) {
            block.scales[g] = scale as i8;
            encode(x, 0.0, inverse(d * scale), codes, out);
            out.iter_mut().for_each(|code| *code = code.wrapping_add(half));
        }
        block
    }
}

fn columns<const N: usize, const PARTS: usize>(x: &[f32; VALUES]) -> [Columns<N>; PARTS] {
    let mut columns = [[[0.0; LANES]; N]; PARTS];
    for (part, columns) in columns.iter_mut().enumerate() {
        for (i, column) in columns.iter_mut().enumerate() {
            *column = lanes(|lane| x[(part * LANES + lane) * N + i]);
        }
    }
    columns
}

/// A value for every lane.
#[inline(always)]
fn lanes(value: impl Fn(usize) -> f32) -> Lanes {
    let mut lanes = [0.0; LANES];
    for (i, lane) in lanes.iter_mut().enumerate() {
        *lane = value(i);
    }
    lanes
}

/// 1.5 · 2²³: a sum with it has no fraction bits, and ends in the integer's bits.
const ROUNDER: f32 = 12_582_912.0;

/// The nearest integer, ties to even, inside a range of integers; plus [`ROUNDER`].
#[inline(always)]
fn round_with_rounder(x: f32, [low, high]: [f32; 2]) -> f32 {
    let sum = x + ROUNDER;
    let sum = if sum > ROUNDER + low { sum } else { ROUNDER + low };
    if sum < ROUNDER + high { sum } else { ROUNDER + high }
}

/// The nearest integer, ties to even, inside a range of integers.
#[inline(always)]
fn round(x: f32, range: [f32; 2]) -> f32 {
    round_with_rounder(x, range) - ROUNDER
}

/// The codes `(x - zero) · inverse`, as the lowest eight bits of integers.
#[inline(always)]
fn encode<const N: usize>(x: &[f32; N], zero: f32, inverse: f32, range: [f32; 2], codes: &mut [u8; N]) {
    for (code, x) in codes.iter_mut().zip(x) {
        *code = round_with_rounder((x - zero) * inverse, range).to_bits() as u8;
    }
}

/// `1 / x`; 0 if that is not finite.
#[inline(always)]
fn inverse(x: f32) -> f32 {
    let inverse = 1.0 / x;
    select(inverse.abs() < f32::INFINITY, inverse, 0.0)
}

/// `if condition { yes } else { no }` without a branch, also where several values depend on the condition.
#[inline(always)]
fn select(condition: bool, yes: f32, no: f32) -> f32 {
    let mask = u32::from(condition).wrapping_neg();
    f32::from_bits(yes.to_bits() & mask | no.to_bits() & !mask)
}

#[inline(always)]
fn farther(a: f32, b: f32) -> f32 {
    select(b.abs() > a.abs(), b, a)
}

/// Rounds to f16; large values to the largest finite one.
fn round_to_f16(x: f32) -> f32 {
    f16::from_f32(x.clamp(-65504.0, 65504.0)).to_f32()
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
    fn new<const N: usize>(x: &Columns<N>, zero: &Lanes, inverse: &Lanes, codes: [f32; 2]) -> Sums {
        let mut sums = Sums { q: [0.0; LANES], qq: [0.0; LANES], qx: [0.0; LANES] };
        for x in x {
            for i in 0..LANES {
                let q = round((x[i] - zero[i]) * inverse[i], codes);
                sums.q[i] += q;
                sums.qq[i] += q * q;
                sums.qx[i] += q * x[i];
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
    /// Sums of the values and of their squares.
    x: Lanes,
    xx: Lanes,
}

/// The scales and minima of eight groups as integers.
#[derive(Clone, Copy)]
struct AsymmetricGroups {
    scale: Lanes,
    minimum: Lanes,
}

impl AsymmetricFit {
    /// The scales and the negated minima (which are at most 0) with the least squared error.
    fn new<const N: usize>(values: &Columns<N>, codes: [f32; 2]) -> AsymmetricFit {
        let (mut min, mut max, mut x, mut xx) =
            ([0f32; LANES], [f32::MIN; LANES], [0f32; LANES], [0f32; LANES]);
        for value in values {
            for i in 0..LANES {
                min[i] = if value[i] < min[i] { value[i] } else { min[i] };
                max[i] = if value[i] > max[i] { value[i] } else { max[i] };
                x[i] += value[i];
                xx[i] += value[i] * value[i];
            }
        }
        let (step, minimum) = (lanes(|i| (max[i] - min[i]) / codes[1]), lanes(|i| -min[i]));
        let scale = lanes(|i| if step[i] > 0.0 { step[i] } else { 0.0 });
        let mut best = AsymmetricFit { scale, minimum, error: [f32::INFINITY; LANES], x, xx };
        for stretch in STRETCHES {
            let shrink = codes[1] / (codes[1] + stretch);
            let inverse = lanes(|i| inverse(scale[i] * shrink));
            best.improve::<N>(&Sums::new(values, &min, &inverse, codes));
        }
        for _ in 0..REFINEMENTS {
            let (zero, inverse) = (lanes(|i| -best.minimum[i]), lanes(|i| inverse(best.scale[i])));
            best.improve::<N>(&Sums::new(values, &zero, &inverse, codes));
        }
        best
    }

    /// Fits scales and minima to codes, by least squares, and keeps those with a smaller error.
    #[inline(always)]
    fn improve<const N: usize>(&mut self, sums: &Sums) {
        let n = N as f32;
        for i in 0..LANES {
            let (q, qq, qx, x, xx) = (sums.q[i], sums.qq[i], sums.qx[i], self.x[i], self.xx[i]);
            let determinant = n * qq - q * q;
            let minimum = (q * qx - qq * x) / determinant;
            // The format has no minima above 0.
            let is_above = minimum < 0.0;
            let scale = select(is_above, qx, n * qx - q * x) / select(is_above, qq, determinant);
            let minimum = select(is_above, 0.0, minimum);
            let error =
                xx + scale * (scale * qq - 2.0 * (qx + minimum * q)) + minimum * (n * minimum + 2.0 * x);
            // Where all codes are equal, none of this is a number, and nothing is better.
            let is_better = (error < self.error[i]) & (scale > 0.0);
            self.error[i] = select(is_better, error, self.error[i]);
            self.scale[i] = select(is_better, scale, self.scale[i]);
            self.minimum[i] = select(is_better, minimum, self.minimum[i]);
        }
    }

    /// Rounds to multiples of `d` and `dmin`: first the minima, then the scales that suit the rounded minima.
    fn round<const N: usize>(
        &self,
        values: &Columns<N>,
        [d, dmin]: [f32; 2],
        codes: [f32; 2],
        max_scale: f32,
    ) -> AsymmetricGroups {
        let [by_d, by_dmin] = [inverse(d), inverse(dmin)];
        let minimum = lanes(|i| round(by_dmin * self.minimum[i], [0.0, max_scale]));
        let zero = lanes(|i| -dmin * minimum[i]);
        let inverse = lanes(|i| inverse(self.scale[i]));
        let Sums { q, qq, qx } = Sums::new(values, &zero, &inverse, codes);
        // Not a number, and then rounded to 0, where all codes are 0.
        let scale = lanes(|i| round(by_d * (qx[i] - zero[i] * q[i]) / qq[i], [0.0, max_scale]));
        AsymmetricGroups { scale, minimum }
    }
}

/// The `d` and `dmin` that suit the rounded scales and minima, by least squares over the whole block.
fn fit_asymmetric_block<const N: usize, const PARTS: usize>(
    columns: &[Columns<N>; PARTS],
    fits: &[AsymmetricFit; PARTS],
    groups: &[AsymmetricGroups; PARTS],
    [d, dmin]: [f32; 2],
    codes: [f32; 2],
) -> [f32; 2] {
    // Of the normal equations `a·d - b·dmin = p` and `b·d - c·dmin = r`.
    let [mut a, mut b, mut c, mut p, mut r] = [[0f32; LANES]; 5];
    for ((values, fit), AsymmetricGroups { scale, minimum }) in columns.iter().zip(fits).zip(groups) {
        let (zero, inverse) = (lanes(|i| -dmin * minimum[i]), lanes(|i| inverse(d * scale[i])));
        let Sums { q, qq, qx } = Sums::new(values, &zero, &inverse, codes);
        for i in 0..LANES {
            a[i] += scale[i] * scale[i] * qq[i];
            b[i] += scale[i] * minimum[i] * q[i];
            c[i] += minimum[i] * minimum[i] * N as f32;
            p[i] += scale[i] * qx[i];
            r[i] += minimum[i] * fit.x[i];
        }
    }
    let [a, b, c, p, r] = [a, b, c, p, r].map(|lanes| lanes.iter().sum::<f32>());
    let determinant = a * c - b * b;
    let fitted =
        if c == 0.0 { [p / a, 0.0] } else { [(p * c - b * r) / determinant, (b * p - a * r) / determinant] };
    let is_usable = fitted[0] > 0.0 && fitted[1] >= 0.0 && fitted.iter().all(|v| v.is_finite());
    if is_usable { fitted.map(round_to_f16) } else { [d, dmin] }
}

/// The scales with the least squared error; the value farthest from zero gets about the lowest code.
fn fit_symmetric<const N: usize>(values: &Columns<N>, codes: [f32; 2]) -> Lanes {
    let mut farthest = [0f32; LANES];
    for x in values {
        farthest = lanes(|i| farther(farthest[i], x[i]));
    }
    let first = lanes(|i| farthest[i] / codes[0]);
    // With the sums of the squares of the values less those of the errors.
    let mut best = (first, [0f32; LANES]);
    for stretch in STRETCHES {
        let shrink = codes[0] / (codes[0] - stretch);
        improve_symmetric(values, codes, &lanes(|i| inverse(first[i] * shrink)), &mut best);
    }
    for _ in 0..REFINEMENTS {
        let inverse = lanes(|i| inverse(best.0[i]));
        improve_symmetric(values, codes, &inverse, &mut best);
    }
    best.0
}

/// Fits scales to the codes that an inverse scale gives, and keeps those with a smaller error.
#[inline(always)]
fn improve_symmetric<const N: usize>(
    values: &Columns<N>,
    codes: [f32; 2],
    inverse: &Lanes,
    (best, explained): &mut (Lanes, Lanes),
) {
    let Sums { qq, qx, .. } = Sums::new(values, &[0.0; LANES], inverse, codes);
    for i in 0..LANES {
        let scale = qx[i] / qq[i];
        let is_better = scale * qx[i] > explained[i];
        explained[i] = select(is_better, scale * qx[i], explained[i]);
        best[i] = select(is_better, scale, best[i]);
    }
}

/// The `d` that suits the rounded scales, by least squares over the whole block.
fn fit_symmetric_block(columns: &[Columns<16>; 2], groups: &[Lanes; 2], d: f32, codes: [f32; 2]) -> f32 {
    let [mut a, mut p] = [[0f32; LANES]; 2];
    for (values, scale) in columns.iter().zip(groups) {
        let inverse = lanes(|i| inverse(d * scale[i]));
        let Sums { qq, qx, .. } = Sums::new(values, &[0.0; LANES], &inverse, codes);
        for i in 0..LANES {
            a[i] += scale[i] * scale[i] * qq[i];
            p[i] += scale[i] * qx[i];
        }
    }
    let fitted = p.iter().sum::<f32>() / a.iter().sum::<f32>();
    if fitted.is_finite() { round_to_f16(fitted) } else { d }
}
