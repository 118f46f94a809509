//! Pillow's convolution resampling of 8-bit images, byte-exact.
//!
//! Two passes with bytes in between, so their order matters: columns and then rows, unless the height loses more
//! than twice as many pixels as the width (Pillow 13; older versions always start with the columns). Each output
//! position has a window of source positions whose weights are computed in f64, normalized, and rounded to 22-bit
//! fixed point. A pass over a side that keeps its length is skipped.

use std::ops::Range;

use rayon::prelude::*;

use crate::{Raster, counters};

/// Fraction bits of a weight: 32, minus 8 for the pixel and 2 for weights that sum to more than 1.
const PRECISION: u32 = 22;

/// A resampling filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filter {
    /// Windowed sinc over 3 pixels each side: what the FLUX.2 pipelines resize with.
    Lanczos,
    /// Cubic with a = -0.5, over 2 pixels each side.
    Bicubic,
    /// Triangle, over 1 pixel each side.
    Bilinear,
}

impl Filter {
    /// Radius of the filter, in pixels of the smaller of the two scales.
    fn support(self) -> f64 {
        match self {
            Filter::Lanczos => 3.0,
            Filter::Bicubic => 2.0,
            Filter::Bilinear => 1.0,
        }
    }

    fn weight(self, x: f64) -> f64 {
        match self {
            Filter::Lanczos if (-3.0..3.0).contains(&x) => sinc(x) * sinc(x / 3.0),
            Filter::Lanczos => 0.0,
            Filter::Bicubic => {
                const A: f64 = -0.5;
                let x = x.abs();
                if x < 1.0 {
                    ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
                } else if x < 2.0 {
                    (((x - 5.0) * x + 8.0) * x - 4.0) * A
                } else {
                    0.0
                }
            }
            Filter::Bilinear => (1.0 - x.abs()).max(0.0),
        }
    }
}

fn sinc(x: f64) -> f64 {
    if x == 0.0 {
        return 1.0;
    }
    let x = x * std::f64::consts::PI;
    x.sin() / x
}

/// Resizes an image, byte-exact with Pillow's `Image.resize`. Sides of 0 count as 1.
pub fn resize<const C: usize>(image: &Raster<C>, width: u32, height: u32, filter: Filter) -> Raster<C> {
    let columns = Axis { size: width.max(1), span: 0..image.width() };
    let rows = Axis { size: height.max(1), span: 0..image.height() };
    resize_spans(image, columns, rows, filter)
}

/// The resampling of one axis.
pub(crate) struct Axis {
    /// Output size in pixels.
    pub size: u32,
    /// The source pixels it shows. May be empty: then the filter is centred on that edge for every output position,
    /// which is how Pillow extends an edge over a border.
    pub span: Range<u32>,
}

impl Axis {
    fn changes(&self, source: u32) -> bool {
        self.size != source || self.span != (0..source)
    }
}

/// Resizes a rectangle of an image; sizes must not be 0.
pub(crate) fn resize_spans<const C: usize>(
    image: &Raster<C>,
    columns: Axis,
    rows: Axis,
    filter: Filter,
) -> Raster<C> {
    if columns.changes(image.width()) || rows.changes(image.height()) {
        counters::count_resampled();
    }
    let lost = |from: u32, to: u32| i64::from(from) - i64::from(to);
    let (lost_columns, lost_rows) = (lost(image.width(), columns.size), lost(image.height(), rows.size));
    let across = |image: &Raster<C>| resize_columns(image, &columns, filter);
    let down = |image: &Raster<C>| resize_rows(image, &rows, filter);
    if lost_rows > 0 && lost_rows > 2 * lost_columns { across(&down(image)) } else { down(&across(image)) }
}

/// The filter windows: for each output position, where it starts in the source and the weights inside it.
struct FilterWindows {
    /// Start and length of each window.
    bounds: Vec<(usize, usize)>,
    weights: Vec<i32>,
    /// Capacity for weights per output position.
    stride: usize,
}

impl FilterWindows {
    fn new(source: u32, Axis { size, span }: &Axis, filter: Filter) -> Self {
        let size = *size;
        let scale = (f64::from(span.end) - f64::from(span.start)) / f64::from(size);
        let filter_scale = scale.max(1.0);
        let support = filter.support() * filter_scale;
        let stride = support.ceil() as usize * 2 + 1;
        let mut windows = FilterWindows {
            bounds: Vec::with_capacity(size as usize),
            weights: vec![0; size as usize * stride],
            stride,
        };
        let mut exact = vec![0.0; stride];
        for (position, weights) in windows.weights.chunks_exact_mut(stride).enumerate() {
            let centre = f64::from(span.start) + (position as f64 + 0.5) * scale;
            // The cast truncates, and turns negative values into 0, as the bounds require.
            let start = (centre - support + 0.5) as usize;
            let end = ((centre + support + 0.5) as usize).min(source as usize);
            let exact = &mut exact[..end - start];
            let mut sum = 0.0;
            for (i, weight) in exact.iter_mut().enumerate() {
                *weight = filter.weight(((i + start) as f64 - centre + 0.5) * (1.0 / filter_scale));
                sum += *weight;
            }
            for (weight, &mut exact) in weights.iter_mut().zip(exact) {
                let exact = if sum != 0.0 { exact / sum } else { exact };
                let scaled = exact * f64::from(1 << PRECISION);
                *weight = (if exact < 0.0 { scaled - 0.5 } else { scaled + 0.5 }) as i32;
            }
            windows.bounds.push((start, end - start));
        }
        windows
    }

    fn len(&self) -> usize {
        self.bounds.len()
    }

    /// Returns the first source position of a window, and its weights.
    fn window(&self, position: usize) -> (usize, &[i32]) {
        let (start, length) = self.bounds[position];
        (start, &self.weights[position * self.stride..][..length])
    }
}

const HALF: i32 = 1 << (PRECISION - 1);

fn to_byte(sum: i32) -> u8 {
    (sum >> PRECISION).clamp(0, 255) as u8
}

fn resize_columns<const C: usize>(image: &Raster<C>, columns: &Axis, filter: Filter) -> Raster<C> {
    if !columns.changes(image.width()) {
        return image.clone();
    }
    let windows = FilterWindows::new(image.width(), columns, filter);
    let mut out = vec![0u8; windows.len() * C * image.height() as usize];
    out.par_chunks_exact_mut(windows.len() * C).enumerate().for_each(|(y, out)| {
        let source = image.row(y as u32).as_chunks::<C>().0;
        for (x, out) in out.as_chunks_mut::<C>().0.iter_mut().enumerate() {
            let (start, weights) = windows.window(x);
            let mut sums = [HALF; C];
            for (pixel, &weight) in source[start..].iter().zip(weights) {
                for (sum, &value) in sums.iter_mut().zip(pixel) {
                    *sum += i32::from(value) * weight;
                }
            }
            *out = sums.map(to_byte);
        }
    });
    Raster::from_parts(windows.len() as u32, image.height(), out)
}

fn resize_rows<const C: usize>(image: &Raster<C>, rows: &Axis, filter: Filter) -> Raster<C> {
    if !rows.changes(image.height()) {
        return image.clone();
    }
    let windows = FilterWindows::new(image.height(), rows, filter);
    let length = image.width() as usize * C;
    let mut out = vec![0u8; length * windows.len()];
    out.par_chunks_exact_mut(length).enumerate().for_each_init(
        || vec![0i32; length],
        |sums, (y, out)| {
            let (start, weights) = windows.window(y);
            sums.fill(HALF);
            for (i, &weight) in weights.iter().enumerate() {
                for (sum, &value) in sums.iter_mut().zip(image.row((start + i) as u32)) {
                    *sum += i32::from(value) * weight;
                }
            }
            for (out, &sum) in out.iter_mut().zip(sums.iter()) {
                *out = to_byte(sum);
            }
        },
    );
    Raster::from_parts(image.width(), windows.len() as u32, out)
}
