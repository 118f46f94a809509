//! The values of 8-bit optimizer state: Dettmers' dynamic data type, as in bitsandbytes.
//!
//! A magnitude is `10^-e` times one of some evenly spaced fractions between 0.1 and 1: the larger the magnitude, the more
//! fractions. Blocks are scaled so that their largest magnitude is 1.

use std::sync::LazyLock;

/// Elements that share a scale.
pub const BLOCK: usize = 256;

/// 8-bit optimizer state in host memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantized8 {
    /// One code per element.
    pub codes: Vec<u8>,
    /// The largest magnitude of each block of codes.
    pub scales: Vec<f32>,
}

impl Quantized8 {
    /// State of zeros for `count` elements, under a book whose code of 0.0 is `zero`.
    pub fn zeros(count: usize, zero: u8) -> Self {
        Quantized8 { codes: vec![zero; count], scales: vec![0.0; count.div_ceil(BLOCK)] }
    }
}

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

    /// The values of stored blocks.
    pub fn dequantize(&self, state: &Quantized8) -> Vec<f32> {
        let value = |(i, &code): (usize, &u8)| self.value(code) * state.scales[i / BLOCK];
        state.codes.iter().enumerate().map(value).collect()
    }

    /// Stores values in blocks: codes, and the largest magnitude of each block.
    ///
    /// A second moment that is not 0 never becomes 0: the next step would divide by almost nothing. bitsandbytes rounds
    /// it to 0, and such a step is up to a thousand times too large.
    pub fn quantize(&self, values: &[f32], codes: &mut [u8], scales: &mut [f32]) {
        // In the book without signs, code 0 is the value 0.
        let smallest = |value: f32| u8::from(self.values[0] == 0.0 && value > 0.0);
        for ((values, codes), scale) in values.chunks(BLOCK).zip(codes.chunks_mut(BLOCK)).zip(scales) {
            *scale = values.iter().fold(0f32, |m, v| m.max(v.abs()));
            // Not the inverse of the scale, which may be infinite.
            let divisor = if *scale > 0.0 { *scale } else { 1.0 };
            for (code, value) in codes.iter_mut().zip(values) {
                *code = self.code(value / divisor).max(smallest(*value));
            }
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
    fn zero_stays_zero_and_no_second_moment_becomes_zero() {
        for (book, largest) in
            [(CodeBook::signed(), 1.0), (CodeBook::unsigned(), 1e-3), (CodeBook::signed(), 1e-42)]
        {
            let values = [largest, 0.0, largest * 1e-8, f32::from_bits(1)];
            let (mut codes, mut scales) = ([0; 4], [0.0]);
            book.quantize(&values, &mut codes, &mut scales);
            assert_eq!((book.value(codes[0]), book.value(codes[1])), (1.0, 0.0), "{largest}");
            let is_zero = |code: u8| book.value(code) == 0.0;
            assert!(book.values[0] < 0.0 || !is_zero(codes[2]) && !is_zero(codes[3]), "{codes:?}");
        }
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
