//! How a pipeline is loaded, and how many images it makes at once.

use std::sync::Arc;

use kiln_tensor::DType;
use kiln_weights::LinearForm;

use crate::model::VaeFile;
use crate::placement::Placement;
use crate::plan::PlannedLora;
use crate::text_cache::TextCache;

/// How a model is loaded.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// What activations are computed in: f32 or bf16.
    pub dtype: DType,
    /// The form of the transformer's linear layers: as stored, or in 8 bits. The text encoder's stay as they are.
    pub form: LinearForm,
    /// An autoencoder to load instead of the model's; a plan may still name another.
    pub vae: Option<Arc<VaeFile>>,
    /// LoRAs for the transformer.
    pub loras: Vec<PlannedLora>,
    /// Whether LoRAs may have modules that match nothing in the transformer.
    pub lora_partial: bool,
    /// Which weights stay on the device; all when absent.
    pub placement: Option<Placement>,
    /// Where encoded texts are kept and looked for. With it, the text encoder is loaded only when it is needed.
    pub text_cache: Option<TextCache>,
}

impl Default for LoadOptions {
    fn default() -> Self {
        LoadOptions {
            dtype: DType::F32,
            form: LinearForm::Float,
            vae: None,
            loras: Vec::new(),
            lora_partial: false,
            placement: None,
            text_cache: None,
        }
    }
}

/// How many images may be made at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchLimit {
    /// Images at most; 1 is one after the other.
    pub images: usize,
    /// Rows of all images at most; what the backend is known to gain from
    /// ([`Backend::rows_at_once`](kiln_ops::Backend::rows_at_once)) when absent.
    pub rows: Option<usize>,
    /// Bytes that their activations may take.
    pub memory: Option<u64>,
}

impl BatchLimit {
    /// One after the other.
    pub const ONE: BatchLimit = BatchLimit { images: 1, rows: None, memory: None };
}
