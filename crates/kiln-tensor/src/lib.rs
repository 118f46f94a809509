//! Tensors in host memory: [`Shape`], [`DType`], [`HostTensor`] and [`HostLinear`], a linear layer before a backend loads
//! it. The bytes are shared, so a tensor may be a view of a memory-mapped file.
//!
//! [`packed`] decodes and encodes quantized formats (GGUF, fp8, nvfp4), [`int8`], [`fp8`] and [`nvfp4`] quantize rows
//! for low-precision matmuls, [`Rotation`] spreads their outliers before, [`vector`] has the loops over floats that other crates
//! need, and [`rng`] reproduces torch's random numbers.
//!
//! ```
//! use kiln_tensor::{DType, HostTensor};
//!
//! let t = HostTensor::from_f32([2, 3], vec![0.0, 1.0, 2.0, 3.0, 4.0, 5.0]).unwrap();
//! assert_eq!(t.shape().dims(), [2, 3]);
//! assert_eq!(t.to_dtype(DType::BF16).unwrap().to_f32().unwrap()[5], 5.0);
//! ```
#![deny(unsafe_code)]

mod dtype;
mod error;
pub mod fp8;
mod host;
pub mod int8;
mod linear;
pub mod nvfp4;
pub mod packed;
pub mod rng;
mod rotation;
mod shape;
pub mod vector;

pub use dtype::DType;
pub use error::{Error, Result};
pub use half::{bf16, f16};
pub use host::HostTensor;
pub use linear::{HostLinear, LinearError, LinearWeight, LoraDelta};
pub use rotation::Rotation;
pub use shape::Shape;
