//! The values of 8-bit optimizer state: Dettmers' dynamic data type.
//!
//! A magnitude is `10^-e` times one of some evenly spaced fractions between 0.1 and 1: the larger the magnitude, the more
//! fractions. Blocks are scaled so that their largest magnitude is 1.

use std::sync::LazyLock;

/// Elements that share a scale.
pub const BLOCK: usize = 256;

/// The 256 values of a code, in ascending order.
#[derive(Debug)]
pub struct CodeBook {
    values: [f32; 256],
}

impl CodeBook {
    /// For first moments: -0.99… to 1.
    pub fn signed() -> &'static CodeBook {
        static BOOK: LazyLock<CodeBook> = LazyLock::new(|| CodeBook::new(true));
        &BOOK
    }

    /// For second moments: 0 to 1.
    pub fn unsigned() -> &'static CodeBook {
        static BOOK: LazyLock<CodeBook> = LazyLock::new(|| CodeBook::new(false));
        &BOOK
    }

    /// Seven decades, `10^-6` to 1. Decade `i` has `2^i` fractions of each sign, or `2^(i + 1)` without signs: the midpoints
    /// of as many equal parts of 0.1 to 1. 0 and 1 complete the list.
    fn new(signed: bool) -> CodeBook {
        let mut values = vec![0f32, 1.0];
        for i in 0..7 {
            let parts = 1 << if signed { i } else { i + 1 };
            let decade = 10f64.powi(i - 6);
            for part in 0..parts {
                let fraction = 0.1 + 0.9 * (f64::from(part) + 0.5) / f64::from(parts);
                let value = (decade * fraction) as f32;
                values.push(value);
                values.extend(signed.then_some(-value));
            }
        }
        values.sort_by(f32::total_cmp);
        let mut book = CodeBook { values: [0.0; 256] };
        book.values.copy_from_slice(&values);
        book
    }

    /// The value of a code.
    pub fn value(&self, code: u8) -> f32 {
        self.values[usize::from(code)]
    }

    /// All values by code.
    pub fn values(&self) -> &[f32; 256] {
        &self.values
    }

    /// The code of the nearest value; of two equally near ones, the smaller.
    pub fn code(&self, value: f32) -> u8 {
        let above = self.values.partition_point(|&v| v < value).min(255);
        let below = above.saturating_sub(1);
        if value - self.values[below] <= self.values[above] - value { below as u8 } else { above as u8 }
    }

    /// Stores values in blocks: codes, and the largest magnitude of each block.
    pub fn quantize(&self, values: &[f32], codes: &mut [u8], scales: &mut [f32]) {
        for ((values, codes), scale) in values.chunks(BLOCK).zip(codes.chunks_mut(BLOCK)).zip(scales) {
            *scale = values.iter().fold(0f32, |m, v| m.max(v.abs()));
            let inverse = if *scale > 0.0 { 1.0 / *scale } else { 0.0 };
            codes.iter_mut().zip(values).for_each(|(code, value)| *code = self.code(value * inverse));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_is_its_own_nearest() {
        for book in [CodeBook::signed(), CodeBook::unsigned()] {
            for code in 0..=255u8 {
                assert_eq!(book.code(book.value(code)), code);
            }
            assert_eq!(book.value(book.code(0.0)), 0.0);
            assert_eq!(book.value(255), 1.0);
        }
        assert!(CodeBook::signed().value(0) < -0.99 && CodeBook::unsigned().value(0) == 0.0);
    }

    #[test]
    fn values_come_back_within_half_a_step() {
        let values: Vec<f32> = (0..300).map(|i| ((i * 37 % 101) as f32 / 50.0 - 1.0) * 3.0).collect();
        let (mut codes, mut scales) = (vec![0; 300], vec![0.0; 2]);
        CodeBook::signed().quantize(&values, &mut codes, &mut scales);
        for (i, value) in values.iter().enumerate() {
            let back = CodeBook::signed().value(codes[i]) * scales[i / BLOCK];
            assert!((back - value).abs() < 0.03, "{value}: {back}");
        }
    }
}
