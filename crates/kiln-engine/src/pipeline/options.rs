//! How a pipeline is loaded, and how many images it generates at once.

use std::sync::Arc;

use kiln_tensor::DType;
use kiln_weights::LinearPrecision;

use crate::model::VaeFile;
use crate::plan::PlannedLora;
use crate::residency::WeightResidency;
use crate::shared_device::SharedDevice;
use crate::text_cache::TextCache;

/// How a model is loaded.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// The dtype of activations: f32 or bf16.
    pub dtype: DType,
    /// The precision of the transformer's linear layers. The text encoder's weights are used as stored.
    pub linear_precision: LinearPrecision,
    /// A VAE to load in place of the model's; a plan may still name another.
    pub vae: Option<Arc<VaeFile>>,
    /// LoRAs for the transformer.
    pub loras: Vec<PlannedLora>,
    /// Whether modules of a LoRA that match no layer are skipped instead of refused.
    pub lora_partial: bool,
    /// Which weights stay on the device; all if absent.
    pub residency: Option<WeightResidency>,
    /// Cache of encoded texts. With it, the text encoder is loaded only when a text is not cached.
    pub text_cache: Option<TextCache>,
    /// A device that has the transformer already, perhaps: then it is used, not loaded.
    pub shared: Option<SharedDevice>,
}

impl Default for LoadOptions {
    fn default() -> Self {
        LoadOptions {
            dtype: DType::F32,
            linear_precision: LinearPrecision::Float,
            vae: None,
            loras: Vec::new(),
            lora_partial: false,
            residency: None,
            text_cache: None,
            shared: None,
        }
    }
}

/// How many images may run in one batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchLimit {
    /// Maximum number of images; 1 generates them one after the other.
    pub images: usize,
    /// Maximum token rows of all images together; if absent, the largest batch that pays off on the backend
    /// ([`Backend::max_batch_rows`](kiln_ops::Backend::max_batch_rows)).
    pub rows: Option<usize>,
    /// Bytes available for activations.
    pub memory: Option<u64>,
}

impl BatchLimit {
    /// One image after the other.
    pub const ONE: BatchLimit = BatchLimit { images: 1, rows: None, memory: None };
}
