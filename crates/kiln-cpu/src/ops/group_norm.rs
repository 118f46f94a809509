use kiln_ops::{Activation, Result, shapes};

use super::elementwise::{Affine, affine_rows};
use super::movement::image;
use crate::Context;
use crate::element::{Element, read, write};
use crate::parallel::Disjoint;
use crate::simd::{Simd, dispatch};
use crate::tensor::{CpuTensor, Stored, by_dtype};

/// Pixels whose statistics are taken at once. Fixed, so that sums do not depend on the number of threads.
const PIXELS_AT_ONCE: usize = 128;

/// For every channel, over some pixels: the mean in two parts (the second is what the first lost to rounding) and
/// the sum of squared distances from it.
#[inline(always)]
fn statistics_kernel<S: Simd, T: Element>(s: S, x: &[T], channels: usize, out: &mut [f32]) {
    let (means, rest) = out.split_at_mut(channels);
    let (offs, squares) = rest.split_at_mut(channels);
    let count = (x.len() / channels) as f32;
    let mut c = 0;
    while c < channels {
        // Four vectors at once where there are as many, so that one sum does not wait for the other.
        let wide = 4 * S::LANES <= channels - c;
        let [mean, off, square] = [&mut means[c..], &mut offs[c..], &mut squares[c..]];
        if wide {
            columns::<S, T, 4>(s, &x[c..], channels, count, [mean, off, square]);
        } else {
            columns::<S, T, 1>(s, &x[c..], channels, count, [mean, off, square]);
        }
        c += if wide { 4 * S::LANES } else { S::LANES };
    }
}

/// The statistics of `VECTORS` vectors of channels: those at the start of `x` and every `channels` further on.
#[inline(always)]
fn columns<S: Simd, T: Element, const VECTORS: usize>(
    s: S,
    x: &[T],
    channels: usize,
    count: f32,
    [means, offs, squares]: [&mut [f32]; 3],
) {
    let mut rough = [s.splat(0.0); VECTORS];
    for pixel in x.chunks(channels) {
        for (i, sum) in rough.iter_mut().enumerate() {
            *sum = s.add(*sum, read(s, pixel, i * S::LANES));
        }
    }
    for sum in &mut rough {
        *sum = s.mul(*sum, s.splat(1.0 / count));
    }
    // Around the rough mean all numbers are small.
    let (mut off, mut square) = ([s.splat(0.0); VECTORS], [s.splat(0.0); VECTORS]);
    for pixel in x.chunks(channels) {
        for i in 0..VECTORS {
            let d = s.sub(read(s, pixel, i * S::LANES), rough[i]);
            off[i] = s.add(off[i], d);
            square[i] = s.fma(d, d, square[i]);
        }
    }
    for i in 0..VECTORS {
        let off = s.mul(off[i], s.splat(1.0 / count));
        let excess = s.mul(s.mul(off, off), s.splat(count));
        write(s, means, i * S::LANES, rough[i]);
        write(s, offs, i * S::LANES, off);
        write(s, squares, i * S::LANES, s.sub(square[i], excess));
    }
}

dispatch! {
    fn statistics_on<T: Element>(x: &[T], channels: usize, out: &mut [f32]) => statistics_kernel;
}

/// Count, mean and sum of squared distances, which can be merged with those of other numbers.
#[derive(Clone, Copy, Default)]
struct Moments {
    count: f64,
    mean: f64,
    squares: f64,
}

impl Moments {
    fn merge(&mut self, other: Moments) {
        let count = self.count + other.count;
        let step = other.mean - self.mean;
        self.squares += other.squares + step * step * self.count * other.count / count;
        self.mean += step * other.count / count;
        self.count = count;
    }
}

pub(crate) fn group_norm(
    cx: &Context,
    x: &CpuTensor,
    groups: usize,
    [weight, bias]: [&CpuTensor; 2],
    eps: f32,
    f: Option<Activation>,
) -> Result<CpuTensor> {
    let shape = shapes::group_norm(x, groups, weight, bias)?;
    let [height, width, channels] = image(x);
    let pixels = height * width;
    let chunks = pixels.div_ceil(PIXELS_AT_ONCE);
    let mut parts = cx.buffer::<f32>(chunks * 3 * channels)?;
    let out = Disjoint::new(&mut parts);
    by_dtype!(x, T => {
        let x = T::of(x);
        cx.pool.each(chunks, |chunk| {
            let first = chunk * PIXELS_AT_ONCE;
            let end = pixels.min(first + PIXELS_AT_ONCE);
            // SAFETY: every task has a place of its own.
            let out = unsafe { out.slice(chunk * 3 * channels..(chunk + 1) * 3 * channels) };
            statistics_on(cx.level, &x[first * channels..end * channels], channels, out);
        });
    });
    let (weight, bias) = (f32::of(weight), f32::of(bias));
    let per_group = channels / groups;
    let mut columns = [vec![0.0; channels], vec![0.0; channels], vec![0.0; channels]];
    for group in 0..groups {
        let of_group = group * per_group..(group + 1) * per_group;
        let mut all = Moments::default();
        for chunk in 0..chunks {
            let count = (pixels - chunk * PIXELS_AT_ONCE).min(PIXELS_AT_ONCE) as f64;
            let part = &parts[chunk * 3 * channels..];
            for c in of_group.clone() {
                let mean = f64::from(part[c]) + f64::from(part[channels + c]);
                all.merge(Moments { count, mean, squares: part[2 * channels + c].into() });
            }
        }
        let factor = 1.0 / (all.squares / all.count + f64::from(eps)).sqrt();
        // The mean in two parts: an f32 to subtract first, and the rest of it in the shift.
        let mean = all.mean as f32;
        for c in of_group {
            let scale = factor * f64::from(weight[c]);
            columns[0][c] = mean;
            columns[1][c] = scale as f32;
            columns[2][c] = (f64::from(bias[c]) - (all.mean - f64::from(mean)) * scale) as f32;
        }
    }
    let columns = Affine { mean: Some(&columns[0]), scale: &columns[1], shift: &columns[2], f };
    by_dtype!(x, T => affine_rows(cx, &columns, T::of(x), shape))
}
