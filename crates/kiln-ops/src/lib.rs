//! The operations FLUX.2 is made of.
//!
//! [`Backend`] defines each one: its formula, its shapes, its dtypes. [`Reference`] is the loop a reader would write
//! from that formula, summed in f64 and never optimised; every other backend is a candidate that has to agree with it.
//!
//! ```
//! use kiln_ops::{Backend, Reference};
//! use kiln_tensor::{DType, HostTensor};
//!
//! let b = Reference::new();
//! let x = b.upload(&HostTensor::from_f32([1, 2], vec![3.0, 4.0])?, DType::F32)?;
//! let w = b.upload(&HostTensor::from_f32([2], vec![1.0, 1.0])?, DType::F32)?;
//! let y = b.download(&b.rms_norm(&x, &w, 0.0)?)?;
//! assert!((y.to_f32()?[0] - 3.0 / 12.5f32.sqrt()).abs() < 1e-6);
//! # Ok::<(), kiln_ops::Error>(())
//! ```
#![forbid(unsafe_code)]

mod args;
mod backend;
mod error;
mod reference;
pub mod shapes;
mod timed;

pub use args::{Activation, AttentionSpec, ConvGeometry, Groups, Mask, RopePairs, RopeTable};
pub use backend::{Backend, Later, Residency, Run, Tensor};
pub use error::{Error, Result};
pub use kiln_tensor::{fp8, int8};
pub use reference::Reference;
pub use timed::{OpCount, Timed, TimedConv, TimedWeight};
