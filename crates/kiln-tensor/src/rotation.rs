//! Hadamard rotation of rows before they are quantized to int8, as ConvRot defines it.
//!
//! The largest element of a row decides its scale, so a few large ones cost all others their precision. A rotation spreads
//! them over their group: with `H` orthogonal, `x · Wᵀ = (x · H) · (W · H)ᵀ`, and both factors are quantized rotated. `H` is
//! the Kronecker power of the regular matrix with rows (1, 1, 1, −1), (1, 1, −1, 1), (1, −1, 1, 1), (−1, 1, 1, 1), divided
//! by the square root of its size; it is symmetric, so that it undoes itself. Unlike those of Sylvester's matrix, its rows
//! all have the same sum: a row's mean does not end up in one element.
//!
//! ```
//! use kiln_tensor::Rotation;
//!
//! let mut x = [0f32; 16];
//! x[5] = 8.0;
//! Rotation::for_width(16).rotate(&mut x);
//! assert!(x.iter().all(|x| x.abs() == 2.0));
//! ```

use std::ops::{Add, Mul, Sub};

/// How the columns of an int8 weight, and of its input, are rotated: in groups of consecutive ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rotation {
    /// Not at all.
    #[default]
    None,
    /// In groups of 16.
    By16,
    /// In groups of 64.
    By64,
    /// In groups of 256.
    By256,
}

impl Rotation {
    /// Every rotation.
    pub const ALL: [Rotation; 4] = [Rotation::None, Rotation::By16, Rotation::By64, Rotation::By256];

    /// Columns of the largest group.
    pub const MAX_GROUP: usize = Rotation::By256.group();

    /// The widest rotation of rows with `cols` columns: groups are powers of four that divide the width.
    pub fn for_width(cols: usize) -> Rotation {
        let widest = Rotation::ALL.into_iter().rev().find(|rotation| rotation.fits(cols));
        widest.unwrap_or_default()
    }

    /// Whether rows of `cols` columns consist of whole groups.
    pub fn fits(self, cols: usize) -> bool {
        cols.is_multiple_of(self.group())
    }

    /// Columns of a group.
    pub const fn group(self) -> usize {
        match self {
            Rotation::None => 1,
            Rotation::By16 => 16,
            Rotation::By64 => 64,
            Rotation::By256 => 256,
        }
    }

    /// Rotates a row of whole groups. The order of additions is part of the definition: backends give the same bits.
    #[inline(always)]
    pub fn rotate<T>(self, x: &mut [T])
    where
        T: Copy + Add<Output = T> + Sub<Output = T> + Mul<Output = T> + From<f32>,
    {
        match self {
            Rotation::None => {}
            Rotation::By16 => x.as_chunks_mut::<16>().0.iter_mut().for_each(|x| {
                step::<T, 1, 16>(x, 1.0);
                step::<T, 4, 16>(x, 0.25);
            }),
            Rotation::By64 => x.as_chunks_mut::<64>().0.iter_mut().for_each(|x| {
                step::<T, 1, 64>(x, 1.0);
                step::<T, 4, 64>(x, 1.0);
                step::<T, 16, 64>(x, 0.125);
            }),
            Rotation::By256 => x.as_chunks_mut::<256>().0.iter_mut().for_each(|x| {
                step::<T, 1, 256>(x, 1.0);
                step::<T, 4, 256>(x, 1.0);
                step::<T, 16, 256>(x, 1.0);
                step::<T, 64, 256>(x, 0.0625);
            }),
        }
    }
}

/// Multiplies by the matrix of four at one place of the indices' base-4 digits, and by a power of two.
#[inline(always)]
fn step<T, const STRIDE: usize, const GROUP: usize>(x: &mut [T; GROUP], factor: f32)
where
    T: Copy + Add<Output = T> + Sub<Output = T> + Mul<Output = T> + From<f32>,
{
    let factor = T::from(factor);
    for first in (0..GROUP).step_by(4 * STRIDE) {
        for i in first..first + STRIDE {
            let [a, b, c, d] = [x[i], x[i + STRIDE], x[i + 2 * STRIDE], x[i + 3 * STRIDE]];
            let (sum, difference) = ([a + b, c + d], [a - b, c - d]);
            x[i] = (sum[0] + difference[1]) * factor;
            x[i + STRIDE] = (sum[0] - difference[1]) * factor;
            x[i + 2 * STRIDE] = (sum[1] + difference[0]) * factor;
            x[i + 3 * STRIDE] = (sum[1] - difference[0]) * factor;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sign is (−1) to the number of base-4 places where the digits of `i` and `j` add up to 3.
    fn element(rotation: Rotation, i: usize, j: usize) -> f32 {
        let digits = rotation.group().ilog2() / 2;
        let negative =
            (0..digits).filter(|&place| (i >> (2 * place) & 3) + (j >> (2 * place) & 3) == 3).count();
        (if negative % 2 == 0 { 1.0 } else { -1.0 }) / (rotation.group() as f32).sqrt()
    }

    #[test]
    fn rotating_is_a_product_with_the_regular_hadamard_matrix() {
        for rotation in Rotation::ALL {
            let group = rotation.group();
            // The second group shows that groups are rotated alone.
            for j in [0, 1, 7, 100, 255].map(|j| j % group + group) {
                let mut x = vec![0f32; 2 * group];
                x[j] = 1.0;
                rotation.rotate(&mut x);
                let expected = (0..2 * group)
                    .map(|i| if i < group { 0.0 } else { element(rotation, i - group, j - group) });
                assert!(x.iter().copied().eq(expected), "{rotation:?}, column {j}");
            }
        }
    }

    #[test]
    fn a_rotation_undoes_itself() {
        for rotation in Rotation::ALL {
            let x: Vec<f64> = (0..512).map(|i| f64::from(i * 7919 % 1001 - 500)).collect();
            let mut rotated = x.clone();
            rotation.rotate(&mut rotated);
            assert_eq!(rotated == x, rotation == Rotation::None);
            rotation.rotate(&mut rotated);
            assert_eq!(rotated, x, "{rotation:?}");
        }
    }

    #[test]
    fn groups_divide_the_width() {
        for (cols, rotation) in [
            (3072, Rotation::By256),
            (384, Rotation::By64),
            (80, Rotation::By16),
            (100, Rotation::None),
            (8, Rotation::None),
        ] {
            assert_eq!(Rotation::for_width(cols), rotation, "{cols}");
        }
    }
}
