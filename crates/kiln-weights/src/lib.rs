//! Model weights for Kiln. A [`WeightSource`] has the named tensors of safetensors files, GGUF files and diffusers folders,
//! whatever their naming and quantization; [`LoraUpdates`] applies LoRAs to them; [`export`] writes such files.
//! Files are memory-mapped: opening one reads only its header, and a tensor is a view of it.
//!
//! A model loads its layers through [`Vars`], a cursor that checks every shape:
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
//! Invalid files give an [`enum@Error`] with the file, the tensor, what was expected and what was found; no input makes this
//! crate panic.
#![deny(unsafe_code)]

mod delta;
mod dtypes;
mod encoding;
mod error;
pub mod export;
mod file;
mod fingerprint;
mod folder;
mod gguf;
mod gguf_types;
mod header;
mod index;
mod int8;
mod known;
mod layout;
mod lora;
mod malformed;
mod map;
mod pages;
pub mod quantize;
pub mod save;
mod similar;
mod source;
mod source_tensor;
mod synthetic;
mod threads;
mod vars;

pub use error::{Error, Result};
pub use gguf::MetadataArray;
pub use int8::LinearPrecision;
pub use known::KnownTensors;
pub use layout::Component;
pub use lora::{
    DoraRule, LayerShape, Lora, LoraBase, LoraContents, LoraLayout, LoraNaming, LoraOptions, LoraProblem,
    LoraReport, LoraUpdates, SettingsPlace, TrainedModule, lora_contents,
};
pub use malformed::MalformedFile;
pub use pages::PageRanges;
pub use similar::similar_names;
pub use source::WeightSource;
pub use vars::Vars;
