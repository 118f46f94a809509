//! PNG's pixels in strips of rows that are filtered and packed at the same time.

use std::ops::Range;

use rayon::prelude::*;

use crate::Picture;
use crate::deflate::{self, Adler};

/// Bytes of pixels in a strip, roughly: enough for codes of their own to pay, few enough to give every core some.
const STRIP: usize = 128 << 10;
/// Rows that share a filter.
const ALIKE: usize = 8;
/// Bytes of a pixel.
const RGB: usize = 3;

/// The contents of a PNG's `IDAT` chunks: one zlib stream, cut anywhere. The same for any number of threads.
pub(crate) fn chunks(picture: &Picture) -> Vec<Vec<u8>> {
    let row = RGB * picture.width() as usize;
    let rows = (STRIP / row).max(1);
    let pixels = picture.pixels();
    let number = (picture.height() as usize).div_ceil(rows);
    let strips = (0..number).into_par_iter().map(|strip| {
        let filtered =
            filtered(pixels, row, strip * rows..((strip + 1) * rows).min(picture.height() as usize));
        (deflate::piece(&filtered, strip + 1 == number), Adler::new(&filtered))
    });
    let mut strips: Vec<(Vec<u8>, Adler)> = strips.collect();
    let mut sum = Adler::new(&[]);
    strips.iter().for_each(|(_, next)| sum.add(next));
    if let Some((last, _)) = strips.last_mut() {
        last.extend(sum.checksum());
    }
    // Deflate with a window of 32 KiB, made quickly.
    let head = vec![0x78, 0x01];
    std::iter::once(head).chain(strips.into_iter().map(|(bytes, _)| bytes)).collect()
}

/// Rows behind the number of their filter. Neighbours want the same: one row in a few is tried with all of them.
fn filtered(pixels: &[u8], row: usize, rows: Range<usize>) -> Vec<u8> {
    let blank = vec![0; row];
    let mut out = vec![0; (row + 1) * rows.len()];
    let mut best = FILTERS[0];
    for (i, (number, out)) in rows.zip(out.chunks_exact_mut(row + 1)).enumerate() {
        let here = &pixels[number * row..][..row];
        let above = if number == 0 { &blank[..] } else { &pixels[(number - 1) * row..][..row] };
        let (kind, out) = out.split_at_mut(1);
        if i % ALIKE == 0 {
            best = smallest(here, above, out);
        }
        let (filter, apply) = best;
        apply(here, above, out);
        kind[0] = filter;
    }
    out
}

/// The filter whose differences are smallest. `out` is where they are tried.
fn smallest(here: &[u8], above: &[u8], out: &mut [u8]) -> (u8, Filter) {
    let mut best = (u64::MAX, FILTERS[0]);
    for filter in FILTERS {
        filter.1(here, above, out);
        let size = size(out);
        if size < best.0 {
            best = (size, filter);
        }
    }
    best.1
}

/// A row, the one above, and where the differences go.
type Filter = fn(&[u8], &[u8], &mut [u8]);

/// By their numbers in PNG. Rows without a filter are left out: pictures have none that gain from it.
const FILTERS: [(u8, Filter); 4] = [(2, up), (1, sub), (3, average), (4, paeth)];

/// How far the differences are from zero, all together.
fn size(differences: &[u8]) -> u64 {
    let part = |part: &[u8]| part.iter().map(|&d| u32::from((d as i8).unsigned_abs())).sum::<u32>();
    differences.chunks(4096).map(|chunk| u64::from(part(chunk))).sum()
}

fn up(here: &[u8], above: &[u8], out: &mut [u8]) {
    for ((out, here), above) in out.iter_mut().zip(here).zip(above) {
        *out = here.wrapping_sub(*above);
    }
}

fn sub(here: &[u8], _: &[u8], out: &mut [u8]) {
    let first = RGB.min(here.len());
    out[..first].copy_from_slice(&here[..first]);
    for ((out, here), left) in out[first..].iter_mut().zip(&here[first..]).zip(here) {
        *out = here.wrapping_sub(*left);
    }
}

fn average(here: &[u8], above: &[u8], out: &mut [u8]) {
    let first = RGB.min(here.len());
    for i in 0..first {
        out[i] = here[i].wrapping_sub(above[i] / 2);
    }
    let sides = here[first..].iter().zip(here).zip(&above[first..]);
    for (out, ((here, left), above)) in out[first..].iter_mut().zip(sides) {
        *out = here.wrapping_sub(((u16::from(*left) + u16::from(*above)) / 2) as u8);
    }
}

fn paeth(here: &[u8], above: &[u8], out: &mut [u8]) {
    let first = RGB.min(here.len());
    for i in 0..first {
        out[i] = here[i].wrapping_sub(above[i]);
    }
    let sides = here[first..].iter().zip(here).zip(above[first..].iter().zip(above));
    for (out, ((here, left), (above, corner))) in out[first..].iter_mut().zip(sides) {
        *out = here.wrapping_sub(nearest(*left, *above, *corner));
    }
}

/// Of three neighbours the one nearest to `left + above - corner`, as PNG breaks ties.
fn nearest(left: u8, above: u8, corner: u8) -> u8 {
    let (a, b, c) = (i16::from(left), i16::from(above), i16::from(corner));
    let (to_left, to_above) = ((b - c).abs(), (a - c).abs());
    let to_corner = (a + b - 2 * c).abs();
    let other = if to_above <= to_corner { above } else { corner };
    if to_left <= to_above && to_left <= to_corner { left } else { other }
}
