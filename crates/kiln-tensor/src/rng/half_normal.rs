//! The Box–Muller transform of 16-bit draws in torch up to 2.11, which rounds every operation to the 16-bit type.
//!
//! A uniform value has only as many bits as the type's significand, so there are 256 radii and angles in bf16 and 2048 in
//! f16. They are computed once; a draw looks them up and multiplies.

use std::sync::OnceLock;

use half::{bf16, f16};

/// Values per group of torch's vectorized draw. Shorter draws use a scalar algorithm.
pub(super) const GROUP: usize = 16;

/// A 16-bit type for draws of torch up to 2.11.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HalfDType {
    /// `torch.bfloat16`.
    Bf16,
    /// `torch.float16`.
    F16,
}

impl HalfDType {
    /// `x` rounded to this type, to nearest even.
    pub(super) fn round(self, x: f32) -> f32 {
        match self {
            HalfDType::Bf16 => bf16::from_f32(x).to_f32(),
            HalfDType::F16 => f16::from_f32(x).to_f32(),
        }
    }

    /// Bits of the significand, including the implicit one.
    fn bits(self) -> u32 {
        match self {
            HalfDType::Bf16 => bf16::MANTISSA_DIGITS,
            HalfDType::F16 => f16::MANTISSA_DIGITS,
        }
    }

    /// The uniform value of a word, in units of 2^-[`bits`](Self::bits).
    pub(super) fn uniform(self, word: u32) -> f32 {
        (word & ((1 << self.bits()) - 1)) as f32
    }

    /// Transforms uniform values to normal ones, group by group.
    pub(super) fn make_normal(self, groups: &mut [[f32; GROUP]]) {
        static TABLES: [OnceLock<Table>; 2] = [const { OnceLock::new() }; 2];
        let table = TABLES[self as usize].get_or_init(|| Table::new(self));
        for group in groups {
            for j in 0..GROUP / 2 {
                let radius = table.radius[group[j] as usize];
                let (sin, cos) = table.sin_cos[group[j + GROUP / 2] as usize];
                // torch finally adds a mean of 0, which turns -0 into 0.
                group[j] = self.round(radius * cos) + 0.0;
                group[j + GROUP / 2] = self.round(radius * sin) + 0.0;
            }
        }
    }
}

/// The radius and the angle's sine and cosine for every uniform value.
struct Table {
    radius: Vec<f32>,
    sin_cos: Vec<(f32, f32)>,
}

impl Table {
    /// torch uses single-precision functions. f64 results rounded to f32 give the same 16-bit values: none is closer than
    /// 0.86 f32 ulps to a rounding boundary.
    fn new(half: HalfDType) -> Table {
        let round = |x: f64| half.round(x as f32);
        let count = 1u32 << half.bits();
        let unit = 1.0 / f64::from(count);
        let radius = |k: u32| {
            let ln = round((1.0 - f64::from(k) * unit).ln());
            round(f64::from(-2.0 * ln).sqrt())
        };
        let sin_cos = |k: u32| {
            let angle = round(std::f64::consts::TAU * (f64::from(k) * unit));
            let (sin, cos) = f64::from(angle).sin_cos();
            (round(sin), round(cos))
        };
        Table { radius: (0..count).map(radius).collect(), sin_cos: (0..count).map(sin_cos).collect() }
    }
}
