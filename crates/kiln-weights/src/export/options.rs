//! How weights are written.

use kiln_family::Family;
use kiln_tensor::DType;
use kiln_tensor::packed::Format;

use super::presets::{Preset, TextEncoderInfo};
use crate::Component;

/// The naming scheme of the written tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorNames {
    /// That of diffusers and transformers.
    Diffusers,
    /// That of Black Forest Labs for the transformer, with q, k and v fused; of llama.cpp for the text encoder, with its
    /// order of rows; of latent diffusion for the autoencoder.
    Original,
}

/// How values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    /// Unchanged, if the container supports it; else bf16. ([`Report::changed`](super::Report::changed) says which changed.)
    Keep,
    /// All floats in this dtype.
    Dense(DType),
    /// The linear layers inside the blocks in this format; the rest unchanged.
    Quantized(Format),
    /// The same with a mix of formats.
    Preset(Preset),
}

impl Storage {
    /// The format of a layer that is quantized; `None` if none are.
    pub(super) fn format(
        self,
        component: Component,
        family: &Family,
        name: &str,
        info: TextEncoderInfo,
    ) -> Option<Format> {
        match self {
            Storage::Keep | Storage::Dense(_) => None,
            Storage::Quantized(format) => Some(format),
            Storage::Preset(preset) => Some(preset.format(component, family, name, info)),
        }
    }

    pub(super) fn quantizes(self) -> bool {
        matches!(self, Storage::Quantized(_) | Storage::Preset(_))
    }
}

/// The file format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Container {
    /// safetensors.
    Safetensors,
    /// GGUF, version 3.
    Gguf,
}

/// How to write weights.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The component to write.
    pub component: Component,
    /// The file format.
    pub container: Container,
    /// The naming scheme.
    pub names: TensorNames,
    /// How values are stored.
    pub storage: Storage,
    /// Number of threads that encode; 0 counts as 1.
    pub threads: usize,
}
