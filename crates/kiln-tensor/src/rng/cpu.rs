use super::mt19937::Mt19937;
use super::vector_math;

/// How many values torch's vectorised draw makes at once. Shorter draws take another way.
const GROUP: usize = 16;

/// What `torch.Generator("cpu").manual_seed(seed)` draws, bit for bit (as torch's AVX2 and AVX-512 builds do).
///
/// torch seeds its Mersenne Twister with the low 32 bits only, so seeds 2³² apart are the same seed.
///
/// A draw in bf16 or f16 is this draw rounded to nearest, as long as its length is a multiple of 16, which
/// latents always are.
#[derive(Clone, Debug, PartialEq)]
pub struct TorchCpu {
    mt: Mt19937,
    /// The second sample of a scalar pair. It waits here, also across long draws, for the next short one.
    cached: Option<f64>,
}

impl TorchCpu {
    /// A generator at the start of the stream of `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self { mt: Mt19937::new(seed as u32), cached: None }
    }

    /// `n` values as `torch.randn(n, generator=…)` draws them in f32.
    pub fn randn(&mut self, n: usize) -> Vec<f32> {
        if n < GROUP {
            return (0..n).map(|_| self.sample() as f32).collect();
        }
        let mut values: Vec<f32> = (0..n).map(|_| self.uniform_f32()).collect();
        values.as_chunks_mut::<GROUP>().0.iter_mut().for_each(box_muller);
        if !n.is_multiple_of(GROUP) {
            // The ragged end is not transformed: torch draws a fresh group over the last 16 values.
            let mut group = std::array::from_fn(|_| self.uniform_f32());
            box_muller(&mut group);
            values[n - GROUP..].copy_from_slice(&group);
        }
        values
    }

    /// One value the way short draws make it: in f64, two at a time.
    fn sample(&mut self) -> f64 {
        if let Some(second) = self.cached.take() {
            return second;
        }
        let turn = self.uniform_f64();
        let radius = (-2.0 * (-self.uniform_f64()).ln_1p()).sqrt();
        let (sin, cos) = (std::f64::consts::TAU * turn).sin_cos();
        self.cached = Some(radius * sin);
        radius * cos
    }

    /// In `[0, 1)`, 24 bits.
    fn uniform_f32(&mut self) -> f32 {
        const SCALE: f32 = 1.0 / (1u32 << 24) as f32;
        (self.mt.next_u32() & 0x00ff_ffff) as f32 * SCALE
    }

    /// In `[0, 1)`, 53 bits.
    fn uniform_f64(&mut self) -> f64 {
        const SCALE: f64 = 1.0 / (1u64 << 53) as f64;
        (self.mt.next_u64() & ((1 << 53) - 1)) as f64 * SCALE
    }
}

/// Turns 16 uniform values into 16 normal ones: value `j` gives the radius and value `j + 8` the angle of a pair.
fn box_muller(group: &mut [f32; GROUP]) {
    let (radii, angles) = group.split_at_mut(GROUP / 2);
    for (a, b) in radii.iter_mut().zip(angles) {
        let radius = (-2.0 * vector_math::ln(1.0 - *a)).sqrt();
        let (sin, cos) = vector_math::sin_cos(std::f32::consts::TAU * *b);
        (*a, *b) = (radius * cos, radius * sin);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_draw_takes_nothing_from_the_stream() {
        let (mut a, mut b) = (TorchCpu::new(9), TorchCpu::new(9));
        assert!(a.randn(0).is_empty());
        assert_eq!(a.randn(20), b.randn(20));
    }

    #[test]
    fn seeds_that_share_their_low_32_bits_are_the_same_seed() {
        assert_eq!(TorchCpu::new(5).randn(40), TorchCpu::new((1 << 32) + 5).randn(40));
    }
}
