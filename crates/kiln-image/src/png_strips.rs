//! Parallel PNG encoding: strips of rows are filtered and compressed independently.
//!
//! The strips form one zlib stream, the same for any number of threads. This is as fast as the fastest common encoders, with
//! smaller files; `Encoding::small` also tries the `png` crate's compression.

use std::ops::Range;

use rayon::prelude::*;

use crate::RgbImage;
use crate::deflate::{self, Adler32};

/// Approximate pixel bytes per strip: large enough for its own Huffman codes to pay off, small enough to occupy every core.
const STRIP_BYTES: usize = 128 << 10;
/// Consecutive rows that share a filter.
const ROWS_PER_FILTER: usize = 8;
const BYTES_PER_PIXEL: usize = 3;

/// Returns the contents of a PNG's `IDAT` chunks: one zlib stream in several parts.
///
/// The bytes do not depend on the number of threads.
pub(crate) fn idat_chunks(image: &RgbImage) -> Vec<Vec<u8>> {
    let (stride, height) = (BYTES_PER_PIXEL * image.width() as usize, image.height() as usize);
    let rows = (STRIP_BYTES / stride).max(1);
    let count = height.div_ceil(rows);
    let strips = (0..count).into_par_iter().map(|strip| {
        let filtered = filter_rows(image.pixels(), stride, strip * rows..((strip + 1) * rows).min(height));
        (deflate::compress(&filtered, strip + 1 == count), Adler32::new(&filtered))
    });
    let mut strips: Vec<(Vec<u8>, Adler32)> = strips.collect();
    let mut checksum = Adler32::new(&[]);
    strips.iter().for_each(|(_, next)| checksum.append(next));
    if let Some((last, _)) = strips.last_mut() {
        last.extend(checksum.to_bytes());
    }
    // Deflate, 32 KiB window, fastest compression level.
    let zlib_header = vec![0x78, 0x01];
    std::iter::once(zlib_header).chain(strips.into_iter().map(|(bytes, _)| bytes)).collect()
}

/// Filters rows, each behind the number of its filter. Neighbouring rows suit the same filter, so only the first of
/// every [`ROWS_PER_FILTER`] is tried with all of them.
fn filter_rows(pixels: &[u8], stride: usize, rows: Range<usize>) -> Vec<u8> {
    let black = vec![0; stride];
    let mut out = vec![0; (stride + 1) * rows.len()];
    let mut best = FILTERS[0];
    for (i, (y, out)) in rows.zip(out.chunks_exact_mut(stride + 1)).enumerate() {
        let row = &pixels[y * stride..][..stride];
        let above = if y == 0 { &black[..] } else { &pixels[(y - 1) * stride..][..stride] };
        let (number, out) = out.split_at_mut(1);
        if i % ROWS_PER_FILTER == 0 {
            best = choose_filter(row, above, out);
        }
        let (filter, apply) = best;
        apply(row, above, out);
        number[0] = filter;
    }
    out
}

/// Returns the filter with the smallest differences. `out` is scratch space.
fn choose_filter(row: &[u8], above: &[u8], out: &mut [u8]) -> (u8, Filter) {
    let mut best = (u64::MAX, FILTERS[0]);
    for filter in FILTERS {
        filter.1(row, above, out);
        let sum = sum_of_magnitudes(out);
        if sum < best.0 {
            best = (sum, filter);
        }
    }
    best.1
}

/// A PNG filter: takes a row and the one above it, and writes the differences.
type Filter = fn(&[u8], &[u8], &mut [u8]);

/// Filters with their PNG numbers. "None" (0) is left out: generated images do not gain from it.
const FILTERS: [(u8, Filter); 4] = [(2, up), (1, sub), (3, average), (4, paeth)];

fn sum_of_magnitudes(differences: &[u8]) -> u64 {
    let sum = |chunk: &[u8]| chunk.iter().map(|&d| u32::from((d as i8).unsigned_abs())).sum::<u32>();
    differences.chunks(4096).map(|chunk| u64::from(sum(chunk))).sum()
}

fn up(row: &[u8], above: &[u8], out: &mut [u8]) {
    for ((out, value), above) in out.iter_mut().zip(row).zip(above) {
        *out = value.wrapping_sub(*above);
    }
}

fn sub(row: &[u8], _: &[u8], out: &mut [u8]) {
    let first = BYTES_PER_PIXEL.min(row.len());
    out[..first].copy_from_slice(&row[..first]);
    for ((out, value), left) in out[first..].iter_mut().zip(&row[first..]).zip(row) {
        *out = value.wrapping_sub(*left);
    }
}

fn average(row: &[u8], above: &[u8], out: &mut [u8]) {
    let first = BYTES_PER_PIXEL.min(row.len());
    for i in 0..first {
        out[i] = row[i].wrapping_sub(above[i] / 2);
    }
    let neighbours = row[first..].iter().zip(row).zip(&above[first..]);
    for (out, ((value, left), above)) in out[first..].iter_mut().zip(neighbours) {
        *out = value.wrapping_sub(((u16::from(*left) + u16::from(*above)) / 2) as u8);
    }
}

fn paeth(row: &[u8], above: &[u8], out: &mut [u8]) {
    let first = BYTES_PER_PIXEL.min(row.len());
    for i in 0..first {
        out[i] = row[i].wrapping_sub(above[i]);
    }
    let neighbours = row[first..].iter().zip(row).zip(above[first..].iter().zip(above));
    for (out, ((value, left), (above, corner))) in out[first..].iter_mut().zip(neighbours) {
        *out = value.wrapping_sub(paeth_predictor(*left, *above, *corner));
    }
}

/// Returns the neighbour nearest to `left + above - corner`; ties in PNG's order.
fn paeth_predictor(left: u8, above: u8, corner: u8) -> u8 {
    let (a, b, c) = (i16::from(left), i16::from(above), i16::from(corner));
    let (to_left, to_above) = ((b - c).abs(), (a - c).abs());
    let to_corner = (a + b - 2 * c).abs();
    let other = if to_above <= to_corner { above } else { corner };
    if to_left <= to_above && to_left <= to_corner { left } else { other }
}
