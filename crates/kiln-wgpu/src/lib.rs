//! The operations of [`kiln_ops::Backend`] on any GPU through wgpu: Vulkan, Metal and DirectX 12.
//!
//! The kernels are WGSL (`kernels/`), one source for all element types and weight formats; wgpu translates them for the driver when
//! they are first used. Neither building this crate nor starting a program that uses it requires a GPU or a library:
//! [`adapters`] lists what was found.
//!
//! ```
//! use kiln_ops::{Backend, Residency};
//! use kiln_tensor::{DType, HostLinear, HostTensor};
//! use kiln_wgpu::{Options, WgpuBackend};
//!
//! let Ok(b) = WgpuBackend::new(&Options::default()) else { return Ok(()) };
//! let weight = HostTensor::from_f32([1, 2], vec![2.0, 3.0])?;
//! let w = b.load_weight(HostLinear::dense(vec![weight])?, Residency::Device)?;
//! let x = b.upload(&HostTensor::from_f32([1, 2], vec![10.0, 1.0])?, DType::F32)?;
//! assert_eq!(b.download(&b.linear(&x, &w)?)?.to_f32()?[0], 23.0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! All work of one backend goes to one queue, in call order; only downloads and [`kiln_ops::Backend::fence`] wait for it. Kernels
//! need no more than WebGPU guarantees: 16 KiB of workgroup memory, 256 invocations, bindings of 128 MiB, no subgroups and no f16.
#![forbid(unsafe_code)]

mod api;
mod backend;
mod context;
mod device;
mod error;
mod kernels;
mod ops;
mod options;
mod queue;
mod tensor;
mod weight;

pub use api::Api;
pub use backend::WgpuBackend;
pub use device::{Adapter, AdapterKind, adapters};
pub use error::{Error, Result};
pub use options::Options;
pub use tensor::WgpuTensor;
pub use weight::{WgpuConv, WgpuWeight};
