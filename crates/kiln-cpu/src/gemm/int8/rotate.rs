//! [`Rotation::rotate`] in vectors: the same additions in the same order, so the same bits.
//!
//! 256 columns are a square of 16 rows. A step at a digit of the row adds whole vectors; for the digits of the position in a
//! row, the square is transposed and back.

use kiln_tensor::Rotation;

use crate::simd::Simd;

/// Rows and columns of a square.
const SIDE: usize = 16;

type Square = [f32; SIDE * SIDE];

/// Rotates a row of whole groups.
#[inline(always)]
pub(super) fn rotate<S: Simd>(s: S, rotation: Rotation, x: &mut [f32]) {
    let row_digits = match rotation {
        Rotation::None => return,
        Rotation::By16 => 0,
        Rotation::By64 => 1,
        Rotation::By256 => 2,
    };
    let (squares, rest) = x.as_chunks_mut::<{ SIDE * SIDE }>();
    let factor = 1.0 / (rotation.group() as f32).sqrt();
    for square in squares {
        let mut turned: Square = [0.0; SIDE * SIDE];
        transpose(s, square, &mut turned);
        step::<S, 1>(s, &mut turned, 1.0);
        step::<S, 4>(s, &mut turned, if row_digits == 0 { factor } else { 1.0 });
        transpose(s, &turned, square);
        if row_digits > 0 {
            step::<S, 1>(s, square, if row_digits == 1 { factor } else { 1.0 });
        }
        if row_digits > 1 {
            step::<S, 4>(s, square, factor);
        }
    }
    rotation.rotate(rest);
}

/// Multiplies by the matrix of four at one base-4 digit of the rows, and by a power of two.
#[inline(always)]
fn step<S: Simd, const STRIDE: usize>(s: S, square: &mut Square, factor: f32) {
    let (factor, apart) = (s.splat(factor), STRIDE * SIDE);
    for group in 0..4 {
        let first = if STRIDE == 1 { 4 * group } else { group };
        for column in (0..SIDE).step_by(S::LANES) {
            // SAFETY: the last of the four rows is `first + 3 * STRIDE`, at most 15, and LANES divides a row.
            unsafe {
                let p = square.as_mut_ptr().add(first * SIDE + column);
                let (a, b) = (s.load(p), s.load(p.add(apart)));
                let (c, d) = (s.load(p.add(2 * apart)), s.load(p.add(3 * apart)));
                let (sum, other_sum) = (s.add(a, b), s.add(c, d));
                let (difference, other_difference) = (s.sub(a, b), s.sub(c, d));
                s.store(p, s.mul(s.add(sum, other_difference), factor));
                s.store(p.add(apart), s.mul(s.sub(sum, other_difference), factor));
                s.store(p.add(2 * apart), s.mul(s.add(other_sum, difference), factor));
                s.store(p.add(3 * apart), s.mul(s.sub(other_sum, difference), factor));
            }
        }
    }
}

#[inline(always)]
fn transpose<S: Simd>(s: S, from: &Square, to: &mut Square) {
    for row in (0..SIDE).step_by(S::LANES) {
        for column in (0..SIDE).step_by(S::LANES) {
            // SAFETY: LANES divides the side, so every block lies inside.
            unsafe {
                let block = from.as_ptr().add(row * SIDE + column);
                s.transpose(block, SIDE, to.as_mut_ptr().add(column * SIDE + row), SIDE);
            }
        }
    }
}
