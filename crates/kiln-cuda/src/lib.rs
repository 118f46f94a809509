//! The operations of [`kiln_ops::Backend`] on NVIDIA GPUs.
//!
//! Neither building this crate nor starting a program that uses it requires CUDA: the driver, the kernel compiler (NVRTC)
//! and cuBLASLt are loaded at run time, and [`probe`] reports what was found. The kernels are embedded as machine code if
//! `tools/cuda/kernels.sh` has compiled them, and as source text, which NVRTC compiles otherwise.
//!
//! ```no_run
//! use kiln_cuda::{CudaBackend, Options};
//! use kiln_ops::{Backend, Residency};
//! use kiln_tensor::{DType, HostTensor, HostLinear};
//!
//! let b = CudaBackend::new(&Options::default())?;
//! let weight = HostTensor::from_f32([1, 2], vec![2.0, 3.0])?;
//! let w = b.load_weight(HostLinear::dense(vec![weight])?, Residency::Device)?;
//! let x = b.upload(&HostTensor::from_f32([1, 2], vec![10.0, 1.0])?, DType::F32)?;
//! assert_eq!(b.download(&b.linear(&x, &w)?)?.to_f32()?[0], 23.0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! All work of one backend goes to one stream, in call order. Only [`kiln_ops::Backend::download`] and the result of
//! [`kiln_ops::Backend::download_async`] wait for it.
//!
//! `tools/cuda/emulator` runs kernels and launchers on a CPU, so that conformance and golden tests need no GPU;
//! measuring speed and finding races do. The modules are layers: a test fails if two files import each other.

// Layers; each uses only those above it.
// Loading CUDA's libraries:
mod error;
mod find;
mod options;
mod probe;
mod sys;

// Kernel sources, their machine code and the disk cache:
mod built_in;
mod cache;
mod compile;
mod images;
mod release;
mod sources;
mod target;

// One GPU's context, stream, memory and modules; the queue of work; kernel signatures:
mod device;
mod kernels;
mod later;
mod queue;
mod tensor_map;

// Operations:
mod backend;
mod context;
mod flags;
mod gemm;
mod ops;
mod replay;
mod slow;
mod streamer;
mod tensor;
mod weight;

pub use backend::CudaBackend;
pub use built_in::BuiltInKernels;
pub use compile::Compiler;
pub use error::{Error, Result};
pub use find::CudaLibrary;
pub use ops::CudaQuantized;
pub use options::{Graphs, Options};
pub use probe::{Gpu, LibraryInfo, LibraryStatus, Probe, probe};
pub use release::compile_for_release;
pub use replay::CudaGraphCache;
pub use sources::{KernelSource, kernel_sources};
pub use target::CompileTarget;
pub use tensor::CudaTensor;
pub use weight::{CudaConv, CudaWeight};
