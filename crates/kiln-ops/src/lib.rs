//! The operations of FLUX.2.
//!
//! [`Backend`] defines each one: its formula, shapes and dtypes. [`Reference`] implements them as plain loops in f64,
//! never optimized: the oracle that every other backend is tested against. [`TrainingBackend`] adds gradients and optimizer
//! steps. [`TimedBackend`] measures another backend. [`backend_methods!`] writes the operations of a backend that treats
//! them alike.
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

// First, since macros are in scope only below their declaration.
#[macro_use]
mod operations;
#[macro_use]
mod backend;
#[macro_use]
pub mod training;

mod args;
mod error;
mod reference;
pub mod shapes;
mod timed;

pub use args::{
    Activation, AttentionMask, AttentionSpec, ConvGeometry, HeadBlock, RopeLayout, RopeTable, RowGroups,
};
pub use backend::{Backend, Pending, Residency, RunMode, Tensor};
pub use error::{Error, Result};
pub use kiln_tensor::{fp8, int8, nvfp4};
pub use reference::Reference;
pub use timed::{OpStats, OpTimer, TimedBackend, TimedConv, TimedWeight};
pub use training::TrainingBackend;

/// The types in the signatures of all operations, for [`backend_methods!`] and [`training_methods!`].
pub mod signatures {
    pub use std::ops::Range;

    pub use kiln_tensor::{DType, HostLinear, HostTensor, LoraDelta, Shape};

    pub use crate::training::{
        AdamWStep, AdamWTensor, AdaptedOutput, LowRank, LowRankGradient, ProdigyStep, ProdigyTensor,
        Quantized8, QuantizedAdamWTensor,
    };
    pub use crate::{
        Activation, AttentionSpec, ConvGeometry, HeadBlock, Pending, Residency, Result, RopeTable, RowGroups,
    };
}
