use kiln_tensor::{DType, Shape};

use super::LoraBase;
use crate::error::quoted;

/// What is wrong with a LoRA file. [`crate::Error::Lora`] adds its name.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum LoraProblem {
    /// No tensors.
    #[error("there is no tensor in it")]
    Empty,
    /// A kind of adapter that can't be applied.
    #[error("it is a {kind} adapter (`{key}`), which is not supported")]
    Kind {
        /// The kind.
        kind: &'static str,
        /// The key that gives it away.
        key: String,
    },
    /// Keys for the text encoder.
    #[error("it changes the text encoder (`{key}`); only LoRAs of the transformer are supported")]
    TextEncoder {
        /// One of the keys.
        key: String,
    },
    /// Keys that are no LoRA keys at all.
    #[error("{} of its keys are not LoRA keys: {}", keys.len(), quoted(keys))]
    UnknownKeys {
        /// The keys.
        keys: Vec<String>,
    },
    /// A matrix without its partner.
    #[error("`{key}` has no `{missing}` beside it")]
    Incomplete {
        /// The key that is there.
        key: String,
        /// The key that is not.
        missing: String,
    },
    /// The same module under two names.
    #[error("both `{first}` and `{second}` are for one module")]
    Twice {
        /// A key.
        first: String,
        /// Another key for the same matrix.
        second: String,
    },
    /// A matrix that is none.
    #[error("`{key}` has shape {found}, expected {expected}")]
    NotThatShape {
        /// The key.
        key: String,
        /// Its shape.
        found: Shape,
        /// What it should be, in words.
        expected: &'static str,
    },
    /// Values that are no real numbers.
    #[error("`{key}` is {dtype}, expected f32, bf16, f16 or f64")]
    DType {
        /// The key.
        key: String,
        /// Its type.
        dtype: DType,
    },
    /// The two matrices disagree on their common dimension.
    #[error("`{down}` has rank {rank} (shape {down_shape}), but `{up}` has shape {up_shape}")]
    Rank {
        /// The key of the first matrix.
        down: String,
        /// Its rows.
        rank: usize,
        /// Its shape.
        down_shape: Shape,
        /// The key of the second matrix.
        up: String,
        /// Its shape.
        up_shape: Shape,
    },
    /// An alpha that is no number.
    #[error("`{key}` is {found}, expected a finite number")]
    Alpha {
        /// The key.
        key: String,
        /// The value.
        found: f32,
    },
    /// The header's `lora_adapter_metadata` can't be used.
    #[error("its lora_adapter_metadata is not usable: {reason}")]
    Metadata {
        /// Why.
        reason: String,
    },
    /// The header's rank is not that of the matrices.
    #[error("its lora_adapter_metadata gives `{module}` rank {expected}, but `{key}` has {found}")]
    MetadataRank {
        /// The module.
        module: String,
        /// The rank that the metadata give.
        expected: f64,
        /// The key of its first matrix.
        key: String,
        /// That matrix's rows.
        found: usize,
    },
    /// Settings that speak of a DoRA, without its tensors.
    #[error("its settings say use_dora, but there is no lora_magnitude_vector in it")]
    DoraWithoutLengths,
    /// Made for another model.
    #[error("it was made for {made_for}, and this model is {model}")]
    Base {
        /// The model it was made for.
        made_for: LoraBase,
        /// The model it was laid over.
        model: LoraBase,
    },
    /// The matrices don't fit the layer of the model.
    #[error(
        "`{key}` has shape {found}, but for `{module}` of {rows} by {cols} it must be {expected}; \
             it was made for a model of another size"
    )]
    Shape {
        /// The key; for updates of several factors, the module.
        key: String,
        /// Its shape.
        found: Shape,
        /// The shape that fits.
        expected: Shape,
        /// The layer of the model.
        module: String,
        /// The layer's rows.
        rows: usize,
        /// The layer's columns.
        cols: usize,
    },
}
