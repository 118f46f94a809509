//! What every other crate of Kiln speaks about: [`Shape`], [`DType`], and [`HostTensor`], a tensor in this
//! machine's memory whose bytes may just as well be a window into a mapped file.
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
pub mod packed;
pub mod rng;
mod shape;

pub use dtype::DType;
pub use error::{Error, Result};
pub use half::{bf16, f16};
pub use host::HostTensor;
pub use linear::{Delta, LinearError, LinearMatrix, LinearParts};
pub use shape::Shape;
