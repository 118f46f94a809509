//! torch's normal random numbers, so that a seed gives the same image as in diffusers.
//!
//! torch has two unrelated generators. [`TorchCpu`] is `torch.Generator("cpu")`, which diffusers uses by default
//! whatever the device; it equals torch bit for bit. [`TorchCuda`] is `torch.Generator("cuda")`; it equals torch to about
//! 1e-6, because the device's fast sine and cosine are approximate.
//!
//! A bf16 or f16 pipeline draws its noise in that type. With a CPU generator that is the rounded f32 draw since torch
//! 2.13, and a different sequence, [`TorchCpu::randn_half`], up to 2.11. With a CUDA generator it is always the rounded
//! f32 draw.
//!
//! ```
//! use kiln_tensor::rng::Generator;
//!
//! let mut noise = Generator::cpu(42);
//! assert_eq!(noise.randn(3), [0.33669037, 0.1288094, 0.23446237]);
//! ```
//!
//! A draw depends on its length: ten draws of one value differ from one draw of ten. If one generator serves a batch,
//! draw the latents of the whole batch in one call.

mod cpu;
mod cuda;
mod half_normal;
mod mt19937;
mod mul_add;
mod philox;
mod vector_math;

pub use cpu::TorchCpu;
pub use cuda::{CudaLayout, TorchCuda};
pub use half_normal::HalfDType;

/// A torch generator and the type it draws in.
#[derive(Clone, Debug, PartialEq)]
pub enum Generator {
    /// `torch.Generator("cpu")`, in f32.
    Cpu(TorchCpu),
    /// `torch.Generator("cpu")` of torch up to 2.11, in a 16-bit type.
    CpuHalf(TorchCpu, HalfDType),
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
    pub fn cpu_half(seed: u64, half: HalfDType) -> Self {
        Self::CpuHalf(TorchCpu::new(seed), half)
    }

    /// `torch.Generator("cuda").manual_seed(seed)`, on a device of [`CudaLayout::default`].
    #[must_use]
    pub fn cuda(seed: u64) -> Self {
        Self::Cuda(TorchCuda::new(seed))
    }

    /// Draws `n` values as `torch.randn(n, generator=…)` does.
    pub fn randn(&mut self, n: usize) -> Vec<f32> {
        match self {
            Self::Cpu(g) => g.randn(n),
            Self::CpuHalf(g, half) => g.randn_half(n, *half),
            Self::Cuda(g) => g.randn(n),
        }
    }
}
