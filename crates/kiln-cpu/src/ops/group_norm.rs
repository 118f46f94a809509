//! Group normalisation. Statistics are taken per channel over chunks of pixels, then merged in f64 per group; the result is
//! an affine map per channel.

use kiln_ops::{Activation, Result, shapes};

use super::elementwise::{ColumnAffine, affine_rows};
use super::movement::image_dims;
use crate::Context;
use crate::element::{Element, read, write};
use crate::parallel::DisjointMut;
use crate::simd::{Simd, dispatch};
use crate::tensor::{CpuTensor, TensorElement, by_dtype};

/// Pixels of a chunk. Fixed, so that sums don't depend on the number of threads.
const PIXELS_PER_CHUNK: usize = 128;

/// Writes, for every channel over some pixels, the mean in two parts (the second is the rounding error of the first) and
/// the sum of squared deviations from it.
#[inline(always)]
fn statistics_kernel<S: Simd, T: Element>(s: S, x: &[T], channels: usize, out: &mut [f32]) {
    let (means, rest) = out.split_at_mut(channels);
    let (errors, squares) = rest.split_at_mut(channels);
    let count = (x.len() / channels) as f32;
    let mut c = 0;
    while c < channels {
        // Four vectors at once if there are as many, so that sums don't wait for each other.
        let wide = 4 * S::LANES <= channels - c;
        let out = [&mut means[c..], &mut errors[c..], &mut squares[c..]];
        if wide {
            channel_vectors::<S, T, 4>(s, &x[c..], channels, count, out);
        } else {
            channel_vectors::<S, T, 1>(s, &x[c..], channels, count, out);
        }
        c += if wide { 4 * S::LANES } else { S::LANES };
    }
}

/// The statistics of the first `VECTORS` vectors of channels; pixels are `channels` apart.
#[inline(always)]
fn channel_vectors<S: Simd, T: Element, const VECTORS: usize>(
    s: S,
    x: &[T],
    channels: usize,
    count: f32,
    [means, errors, squares]: [&mut [f32]; 3],
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
    // Deviations from the rough mean are small, so their sums lose few bits.
    let (mut error, mut square) = ([s.splat(0.0); VECTORS], [s.splat(0.0); VECTORS]);
    for pixel in x.chunks(channels) {
        for i in 0..VECTORS {
            let d = s.sub(read(s, pixel, i * S::LANES), rough[i]);
            error[i] = s.add(error[i], d);
            square[i] = s.fma(d, d, square[i]);
        }
    }
    for i in 0..VECTORS {
        let error = s.mul(error[i], s.splat(1.0 / count));
        let excess = s.mul(s.mul(error, error), s.splat(count));
        write(s, means, i * S::LANES, rough[i]);
        write(s, errors, i * S::LANES, error);
        write(s, squares, i * S::LANES, s.sub(square[i], excess));
    }
}

dispatch! {
    fn channel_statistics<T: Element>(x: &[T], channels: usize, out: &mut [f32]) => statistics_kernel;
}

/// Count, mean and sum of squared deviations, which can be merged with those of other values.
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
    weight: &CpuTensor,
    bias: &CpuTensor,
    eps: f32,
    f: Option<Activation>,
) -> Result<CpuTensor> {
    let shape = shapes::group_norm(x, groups, weight, bias)?;
    let [height, width, channels] = image_dims(x);
    let pixels = height * width;
    let chunks = pixels.div_ceil(PIXELS_PER_CHUNK);
    let mut statistics = cx.buffer::<f32>(chunks * 3 * channels)?;
    let out = DisjointMut::new(&mut statistics);
    by_dtype!(x, T => {
        let x = T::elements(x);
        cx.pool.for_each(chunks, |chunk| {
            let first = chunk * PIXELS_PER_CHUNK;
            let end = pixels.min(first + PIXELS_PER_CHUNK);
            // SAFETY: every task has a range of its own.
            let out = unsafe { out.slice(chunk * 3 * channels..(chunk + 1) * 3 * channels) };
            channel_statistics(cx.level, &x[first * channels..end * channels], channels, out);
        });
    });
    let (weight, bias) = (f32::elements(weight), f32::elements(bias));
    let per_group = channels / groups;
    let mut columns = [vec![0.0; channels], vec![0.0; channels], vec![0.0; channels]];
    for group in 0..groups {
        let group_channels = group * per_group..(group + 1) * per_group;
        let mut moments = Moments::default();
        for chunk in 0..chunks {
            let count = (pixels - chunk * PIXELS_PER_CHUNK).min(PIXELS_PER_CHUNK) as f64;
            let chunk = &statistics[chunk * 3 * channels..];
            for c in group_channels.clone() {
                let mean = f64::from(chunk[c]) + f64::from(chunk[channels + c]);
                moments.merge(Moments { count, mean, squares: chunk[2 * channels + c].into() });
            }
        }
        let factor = 1.0 / (moments.squares / moments.count + f64::from(eps)).sqrt();
        // The mean in two parts: an f32 to subtract first, and the rest of it in the shift.
        let mean = moments.mean as f32;
        for c in group_channels {
            let scale = factor * f64::from(weight[c]);
            columns[0][c] = mean;
            columns[1][c] = scale as f32;
            columns[2][c] = (f64::from(bias[c]) - (moments.mean - f64::from(mean)) * scale) as f32;
        }
    }
    let columns = ColumnAffine { mean: Some(&columns[0]), scale: &columns[1], shift: &columns[2], f };
    by_dtype!(x, T => affine_rows(cx, &columns, T::elements(x), shape))
}
