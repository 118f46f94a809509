//! Model weights for Kiln: safetensors and GGUF files and diffusers folders as one [`WeightSource`] of named tensors,
//! whatever their names and packing; LoRAs for them ([`LoraUpdates`]); and such files written ([`export`]). Files are mapped, so that opening one reads its header only, and a tensor is a window into it.
//!
//! A model takes its layers through [`Vars`], a cursor that checks every shape:
//!
//! ```
//! use kiln_tensor::HostTensor;
//! use kiln_weights::{WeightSource, save};
//!
//! let dir = tempfile::tempdir()?;
//! let weights = [
//!     ("blocks.0.attn.to_q.weight", HostTensor::zeros([6, 4])),
//!     ("blocks.0.attn.to_k.weight", HostTensor::zeros([2, 4])),
//! ];
//! save::save(dir.path().join("model.safetensors"), &weights, &Default::default())?;
//!
//! let source = WeightSource::open(dir.path())?;
//! let attn = source.root().at("blocks").at(0).at("attn");
//! let qk = attn.linear_stack(&[("to_q", 6), ("to_k", 2)], 4)?;
//! assert_eq!((qk.rows(), qk.cols()), (8, 4));
//!
//! let error = attn.linear("to_v", 2, 4).unwrap_err().to_string();
//! assert!(error.contains("no tensor `blocks.0.attn.to_v.weight`"), "{error}");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Anything wrong with a file is an [`enum@Error`] that names the file and the tensor, what was expected and what was
//! found; no input makes this crate panic.
#![deny(unsafe_code)]

mod coding;
mod dtypes;
mod error;
pub mod export;
mod file;
mod fingerprint;
mod folder;
mod gguf;
mod header;
mod index;
mod int8;
mod layout;
mod lora;
mod malformed;
mod map;
mod near;
mod pages;
mod placed;
pub mod quantise;
pub mod save;
mod source;
mod synthetic;
mod vars;

pub use error::{Error, Result};
pub use int8::LinearForm;
pub use layout::Component;
pub use lora::{LayerShape, Lora, LoraBase, LoraLayout, LoraOptions, LoraProblem, LoraReport, LoraUpdates};
pub use malformed::Malformed;
pub use near::nearest;
pub use pages::Pages;
pub use source::WeightSource;
pub use vars::Vars;
