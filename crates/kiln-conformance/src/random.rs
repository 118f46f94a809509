//! Reproducible random inputs.

use kiln_tensor::{HostTensor, Shape};

/// The distribution of an input's elements: `offset + scale · z`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Distribution {
    scale: f32,
    offset: f32,
    heavy_tailed: bool,
}

/// Approximately standard normal.
pub(crate) const NORMAL: Distribution = Distribution { scale: 1.0, offset: 0.0, heavy_tailed: false };

/// Mostly small values with a few large outliers, like a transformer's activations.
pub(crate) const HEAVY_TAILED: Distribution = Distribution { scale: 1.0, offset: 0.0, heavy_tailed: true };

impl Distribution {
    pub fn scaled(self, factor: f32) -> Self {
        Distribution { scale: self.scale * factor, offset: self.offset * factor, ..self }
    }

    pub fn shifted(self, offset: f32) -> Self {
        Distribution { offset: self.offset + offset, ..self }
    }
}

/// SplitMix64: gives the same numbers on every machine. No library functions, whose last bit may differ between machines.
pub(crate) struct Random(u64);

impl Random {
    /// Creates a generator that is seeded by `name` (through FNV-1a).
    pub fn named(name: &str) -> Self {
        Random(
            name.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3)),
        )
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// Uniform in 0..1.
    fn uniform(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Draws the sum of four uniform numbers, 16 bits each, with variance 1: close enough to normal here.
    fn normal(&mut self) -> f64 {
        let bits = self.next();
        let sum = (bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48);
        (sum as f64 / 65536.0 - 2.0) * 3f64.sqrt()
    }

    pub fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.next() as u8).collect()
    }

    pub fn tensor(&mut self, distribution: Distribution, shape: impl Into<Shape>) -> HostTensor {
        let shape = shape.into();
        let draw = |_| {
            let mut z = self.normal();
            if distribution.heavy_tailed {
                z *= self.normal() * if self.uniform() < 0.03 { 20.0 } else { 0.5 };
            }
            (f64::from(distribution.offset) + f64::from(distribution.scale) * z) as f32
        };
        let elements = (0..shape.numel()).map(draw).collect();
        HostTensor::from_f32(shape, elements).expect("as many elements as the shape has")
    }
}
