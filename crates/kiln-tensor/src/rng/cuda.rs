//! torch's CUDA generator: one Philox stream per thread of the kernel that draws.

use super::mul_add::{MulAdd, Software};
use super::philox::philox4x32_10;

/// Threads in a block of torch's random kernels.
const BLOCK: u64 = 256;
/// Values that a thread draws from one Philox block.
const UNROLL: u64 = 4;

/// The size of the GPU that torch would draw on.
///
/// torch launches at most as many threads as fit on the GPU at once, so a long draw depends on the GPU model. A draw of up
/// to `multiprocessors · threads_per_multiprocessor` values (rounded down to whole blocks of 256 per multiprocessor) has a
/// thread per value and is the same on every GPU: with the default layout 270,336 values, enough for an image of 512 × 512
/// or 720 × 720, but not of 1024 × 1024.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CudaLayout {
    /// `torch.cuda.get_device_properties(0).multi_processor_count`
    pub multiprocessors: u32,
    /// `torch.cuda.get_device_properties(0).max_threads_per_multi_processor`
    pub threads_per_multiprocessor: u32,
}

impl Default for CudaLayout {
    /// An H100 SXM or H200.
    fn default() -> Self {
        Self { multiprocessors: 132, threads_per_multiprocessor: 2048 }
    }
}

impl CudaLayout {
    /// Threads torch launches for a draw of `n` values.
    fn threads(self, n: u64) -> u64 {
        let resident = u64::from(self.multiprocessors) * (u64::from(self.threads_per_multiprocessor) / BLOCK);
        // A layout of zero threads is no GPU; one block keeps the draw defined.
        n.div_ceil(BLOCK).min(resident).max(1) * BLOCK
    }
}

/// `torch.Generator("cuda").manual_seed(seed)`, to about 1e-6 (the error of the device's sine and cosine).
///
/// A draw in bf16 or f16 is this draw rounded to nearest. All 64 bits of the seed count. Every thread has its own Philox
/// stream; each draw advances all of them.
#[derive(Clone, Debug, PartialEq)]
pub struct TorchCuda {
    seed: u64,
    /// 32-bit words consumed from every stream; a multiple of four.
    offset: u64,
    layout: CudaLayout,
}

impl TorchCuda {
    /// Creates a generator at the start of the streams of `seed`, for a GPU of [`CudaLayout::default`].
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self::with_layout(seed, CudaLayout::default())
    }

    /// Creates a generator for another GPU.
    #[must_use]
    pub fn with_layout(seed: u64, layout: CudaLayout) -> Self {
        Self { seed, offset: 0, layout }
    }

    /// The position in the streams, as `torch.Generator.get_offset` returns it.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Draws `n` values as `torch.randn(n, device="cuda", generator=…)` does in f32.
    pub fn randn(&mut self, n: usize) -> Vec<f32> {
        if n == 0 {
            return Vec::new();
        }
        let threads = self.layout.threads(n as u64);
        let rounds = (n as u64).div_ceil(threads * UNROLL);
        let mut values = vec![0.0; n];
        for round in 0..rounds {
            for thread in 0..threads {
                let normals = self.normal4(thread, round);
                for (i, value) in normals.into_iter().enumerate() {
                    let index = thread + threads * (round * UNROLL + i as u64);
                    match usize::try_from(index).ok().and_then(|index| values.get_mut(index)) {
                        Some(slot) => *slot = value,
                        None => break,
                    }
                }
            }
        }
        self.offset += rounds * UNROLL;
        values
    }

    /// The four values of one Philox block of one thread's stream.
    fn normal4(&self, thread: u64, round: u64) -> [f32; 4] {
        let block = self.offset / UNROLL + round;
        let counter = [block as u32, (block >> 32) as u32, thread as u32, (thread >> 32) as u32];
        let [a, b, c, d] = philox4x32_10(counter, [self.seed as u32, (self.seed >> 32) as u32]);
        let ([a, b], [c, d]) = (box_muller(a, b), box_muller(c, d));
        [a, b, c, d]
    }
}

/// cuRAND's Box–Muller transform of one word for the radius and one for the angle; the sine comes first.
fn box_muller(radius: u32, angle: u32) -> [f32; 2] {
    const UNIT: f32 = 1.0 / (1u64 << 32) as f32;
    const STEP: f32 = UNIT * std::f32::consts::TAU;
    let u = radius as f32 * UNIT + UNIT / 2.0;
    let v = Software::mul_add(angle as f32, STEP, STEP / 2.0);
    let radius = (-2.0 * f64::from(u).ln() as f32).sqrt();
    // The device divides by 2π again, rounding towards zero, before its table lookup of sine and cosine.
    let turns = truncate(f64::from(v) * f64::from(1.0 / std::f32::consts::TAU));
    let (sin, cos) = (std::f64::consts::TAU * turns).sin_cos();
    [sin as f32 * radius, cos as f32 * radius]
}

/// `x` truncated to the 24-bit precision of an f32.
fn truncate(x: f64) -> f64 {
    f64::from_bits(x.to_bits() & !((1 << 29) - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_draw_that_fits_the_device_does_not_depend_on_its_size() {
        let small = CudaLayout { multiprocessors: 10, threads_per_multiprocessor: 1536 };
        let limit = 10 * 1536;
        assert_eq!(TorchCuda::with_layout(3, small).randn(limit), TorchCuda::new(3).randn(limit));
        assert_ne!(TorchCuda::with_layout(3, small).randn(limit + 1), TorchCuda::new(3).randn(limit + 1));
    }

    #[test]
    fn an_empty_draw_advances_nothing() {
        let mut g = TorchCuda::new(1);
        assert!(g.randn(0).is_empty());
        assert_eq!(g, TorchCuda::new(1));
    }

    #[test]
    fn all_bits_of_the_seed_count() {
        assert_ne!(TorchCuda::new(5).randn(4), TorchCuda::new((1 << 32) + 5).randn(4));
    }
}
