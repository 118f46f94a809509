//! The normal random numbers torch draws, so that a seed means the same picture here as in diffusers.
//!
//! torch has two unrelated generators. [`TorchCpu`] is what `torch.Generator("cpu")` draws, and what diffusers
//! uses by default whatever device the model runs on; it equals torch bit for bit. [`TorchCuda`] is what
//! `torch.Generator("cuda")` draws; there the device's own sine and cosine are rough, so it equals torch to
//! about 1e-6.
//!
//! A pipeline that computes in bf16 or f16 draws its noise in that type. On a CPU generator that is the f32 draw rounded
//! since torch 2.13, and up to 2.11 another sequence, [`TorchCpu::randn_half`]. On a CUDA generator it is the f32 draw
//! rounded in all of them.
//!
//! ```
//! use kiln_tensor::rng::Generator;
//!
//! let mut noise = Generator::cpu(42);
//! assert_eq!(noise.randn(3), [0.33669037, 0.1288094, 0.23446237]);
//! ```
//!
//! A draw depends on its length, not only on the numbers before it: ten draws of one value are not one draw of
//! ten. Draw the latents of a whole batch in one call when one generator serves the batch.

mod cpu;
mod cuda;
mod half_normal;
mod mt19937;
mod philox;
mod vector_math;

pub use cpu::TorchCpu;
pub use cuda::{CudaLayout, TorchCuda};
pub use half_normal::Half;

/// One of torch's generators, and the type it draws in.
#[derive(Clone, Debug, PartialEq)]
pub enum Generator {
    /// `torch.Generator("cpu")`, in f32.
    Cpu(TorchCpu),
    /// `torch.Generator("cpu")` of torch up to 2.11, in a 16-bit type.
    CpuHalf(TorchCpu, Half),
    /// `torch.Generator("cuda")`, in f32.
    Cuda(TorchCuda),
}

impl Generator {
    /// `torch.Generator("cpu").manual_seed(seed)`.
    #[must_use]
    pub fn cpu(seed: u64) -> Self {
        Self::Cpu(TorchCpu::new(seed))
    }

    /// `torch.Generator("cpu").manual_seed(seed)` of torch up to 2.11, for draws in a 16-bit type.
    #[must_use]
    pub fn cpu_half(seed: u64, half: Half) -> Self {
        Self::CpuHalf(TorchCpu::new(seed), half)
    }

    /// `torch.Generator("cuda").manual_seed(seed)`, on a device of [`CudaLayout::default`].
    #[must_use]
    pub fn cuda(seed: u64) -> Self {
        Self::Cuda(TorchCuda::new(seed))
    }

    /// `n` values as `torch.randn(n, generator=…)` draws them.
    pub fn randn(&mut self, n: usize) -> Vec<f32> {
        match self {
            Self::Cpu(g) => g.randn(n),
            Self::CpuHalf(g, half) => g.randn_half(n, *half),
            Self::Cuda(g) => g.randn(n),
        }
    }
}

impl From<TorchCpu> for Generator {
    fn from(g: TorchCpu) -> Self {
        Self::Cpu(g)
    }
}

impl From<TorchCuda> for Generator {
    fn from(g: TorchCuda) -> Self {
        Self::Cuda(g)
    }
}
