//! torch's CPU generator: a Mersenne Twister and Box–Muller, vectorized in groups of 16 values.

use super::half_normal::{GROUP, HalfDType};
use super::mt19937::Mt19937;
use super::mul_add::{Hardware, MulAdd, Software};
use super::vector_math;

/// `torch.Generator("cpu").manual_seed(seed)`, bit for bit (as torch's AVX2 and AVX-512 builds draw).
///
/// torch seeds its Mersenne Twister with the low 32 bits only, so seeds 2³² apart are equal.
///
/// A draw in bf16 or f16 depends on the torch release. Since 2.13 it is the f32 draw rounded to nearest if the length is
/// a multiple of 16, which it always is for latents; 2.12 differs in a few values. Up to 2.11 it is a different sequence,
/// [`randn_half`](Self::randn_half).
#[derive(Clone, Debug, PartialEq)]
pub struct TorchCpu {
    mt: Mt19937,
    /// The second sample of a scalar pair, kept for the next short draw, also across long draws.
    cached: Option<f64>,
}

impl TorchCpu {
    /// Creates a generator at the start of the stream of `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self { mt: Mt19937::new(seed as u32), cached: None }
    }

    /// Draws `n` values as `torch.randn(n, generator=…)` does in f32.
    // Not inlined: in a crate compiled for size it would take eight times as long.
    #[inline(never)]
    pub fn randn(&mut self, n: usize) -> Vec<f32> {
        if n < GROUP {
            return (0..n).map(|_| self.draw_scalar() as f32).collect();
        }
        self.draw_groups(n, uniform_f32, make_normal)
    }

    /// Draws `n` values as `torch.randn(n, dtype=…, generator=…)` does in torch up to 2.11, where every operation rounds
    /// to the 16-bit type.
    #[inline(never)]
    pub fn randn_half(&mut self, n: usize, half: HalfDType) -> Vec<f32> {
        if n < GROUP {
            return (0..n).map(|_| half.round(self.draw_scalar() as f32)).collect();
        }
        self.draw_groups(n, |word| half.uniform(word), |groups| half.make_normal(groups))
    }

    /// Draws `n` values, at least 16: uniform values, transformed in groups.
    fn draw_groups(
        &mut self,
        n: usize,
        uniform: impl Fn(u32) -> f32,
        make_normal: impl Fn(&mut [[f32; GROUP]]),
    ) -> Vec<f32> {
        let mut values = vec![0.0; n];
        self.mt.fill(&mut values, &uniform);
        make_normal(values.as_chunks_mut().0);
        if !n.is_multiple_of(GROUP) {
            // torch does not transform the partial group at the end: it draws a fresh group over the last 16 values.
            let mut group = [[0.0; GROUP]];
            self.mt.fill(&mut group[0], &uniform);
            make_normal(&mut group);
            values[n - GROUP..].copy_from_slice(&group[0]);
        }
        values
    }

    /// Draws one value as short draws do: in f64, two at a time.
    fn draw_scalar(&mut self) -> f64 {
        if let Some(second) = self.cached.take() {
            return second;
        }
        let turns = self.uniform_f64();
        let radius = (-2.0 * (-self.uniform_f64()).ln_1p()).sqrt();
        let (sin, cos) = (std::f64::consts::TAU * turns).sin_cos();
        self.cached = Some(radius * sin);
        radius * cos
    }

    /// Draws a uniform value in `[0, 1)` with 53 bits, as `torch.rand(1, dtype=torch.float64, generator=…)` does.
    pub fn uniform_f64(&mut self) -> f64 {
        const SCALE: f64 = 1.0 / (1u64 << 53) as f64;
        (self.mt.next_u64() & ((1 << 53) - 1)) as f64 * SCALE
    }
}

/// A uniform value in `[0, 1)` with 24 bits.
fn uniform_f32(word: u32) -> f32 {
    const SCALE: f32 = 1.0 / (1u32 << 24) as f32;
    (word & 0x00ff_ffff) as i32 as f32 * SCALE
}

/// Transforms uniform values to normal ones, group by group.
fn make_normal(groups: &mut [[f32; GROUP]]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        // SAFETY: AVX2 and FMA were detected.
        #[allow(unsafe_code)]
        return unsafe { make_normal_fma(groups) };
    }
    if cfg!(target_arch = "x86_64") {
        return groups.iter_mut().for_each(box_muller::<Software>);
    }
    groups.iter_mut().for_each(box_muller::<Hardware>);
}

/// [`make_normal`] with hardware FMA: the same bits, many times as fast.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn make_normal_fma(groups: &mut [[f32; GROUP]]) {
    for group in groups {
        box_muller::<Hardware>(group);
    }
}

/// Transforms a group: value `j` gives the radius and value `j + 8` the angle of a pair.
#[inline(always)]
fn box_muller<M: MulAdd>(group: &mut [f32; GROUP]) {
    for j in 0..GROUP / 2 {
        let radius = (-2.0 * vector_math::ln::<M>(1.0 - group[j])).sqrt();
        let (sin, cos) = vector_math::sin_cos::<M>(std::f32::consts::TAU * group[j + GROUP / 2]);
        (group[j], group[j + GROUP / 2]) = (radius * cos, radius * sin);
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
    fn fma_instructions_change_no_bit() {
        let mut mt = Mt19937::new(3);
        let mut groups = vec![[0.0; GROUP]; 4096];
        groups.iter_mut().for_each(|group| mt.fill(group, uniform_f32));
        let mut plain = groups.clone();
        plain.iter_mut().for_each(box_muller::<Software>);
        make_normal(&mut groups);
        let bits =
            |groups: &[[f32; GROUP]]| groups.as_flattened().iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&groups), bits(&plain));
    }

    #[test]
    fn seeds_that_share_their_low_32_bits_are_the_same_seed() {
        assert_eq!(TorchCpu::new(5).randn(40), TorchCpu::new((1 << 32) + 5).randn(40));
    }
}
