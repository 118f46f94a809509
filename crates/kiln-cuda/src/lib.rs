//! The operations of [`kiln_ops::Backend`] on NVIDIA GPUs.
//!
//! Nothing of CUDA is needed to build this crate or to start a program that uses it: the driver, the compiler of kernels
//! (NVRTC) and cuBLASLt are looked for at run time, and [`probe`] says what was found. The kernels are part of the
//! program as source text; they are compiled for the GPU at hand when it is first used, and kept on disk.
//!
//! ```no_run
//! use kiln_cuda::{CudaBackend, Options};
//! use kiln_ops::{Backend, Residency};
//! use kiln_tensor::{DType, HostTensor, LinearParts};
//!
//! let b = CudaBackend::new(&Options::default())?;
//! let weight = HostTensor::from_f32([1, 2], vec![2.0, 3.0])?;
//! let w = b.weight(LinearParts::dense(vec![weight])?, Residency::Device)?;
//! let x = b.upload(&HostTensor::from_f32([1, 2], vec![10.0, 1.0])?, DType::F32)?;
//! assert_eq!(b.download(&b.linear(&x, &w)?)?.to_f32()?[0], 23.0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! All work of one backend goes to one stream, in the order of the calls; only [`kiln_ops::Backend::download`] waits, and
//! whoever calls what [`kiln_ops::Backend::download_later`] gave.

// Layers, each of which uses those above it only.
// The libraries and what they say:
mod error;
mod find;
mod options;
mod probe;
mod sys;

// What is compiled, and what is kept on disk:
mod cache;
mod compile;
mod sources;

// One GPU's context, stream, memory and modules; where work on it goes; its kernels:
mod device;
mod kernels;
mod map;
mod queue;

// Operations:
mod backend;
mod context;
mod flags;
mod gemm;
mod ops;
mod replay;
mod streamer;
mod tensor;
mod weight;

pub use backend::CudaBackend;
pub use compile::Compiler;
pub use error::{Error, Result};
pub use find::Wanted;
pub use options::{Graphs, Options};
pub use probe::{Found, Gpu, Library, Probe, probe};
pub use replay::CudaReplays;
pub use sources::{SOURCES, Source, Target};
pub use tensor::CudaTensor;
pub use weight::{CudaConv, CudaWeight};
