//! What can be wrong with a LoRA file.

use kiln_tensor::{DType, Shape};

use super::LoraBase;
use crate::error::quoted;

/// What is wrong with a LoRA file. [`crate::Error::Lora`] adds its name.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum LoraProblem {
    /// No tensors.
    #[error("there is no tensor in it")]
    Empty,
    /// A kind of adapter that is not supported.
    #[error("it is a {kind} adapter (`{key}`), which is not supported")]
    UnsupportedKind {
        /// The kind.
        kind: &'static str,
        /// A key that tells the kind.
        key: String,
    },
    /// Keys for the text encoder.
    #[error("it changes the text encoder (`{key}`); only LoRAs of the transformer are supported")]
    TextEncoder {
        /// One of the keys.
        key: String,
    },
    /// Keys for something else than the matrices of the transformer.
    #[error("it {what} (`{key}`); only updates of the transformer's linear layers are supported")]
    OtherPart {
        /// What it does, as in "changes the VAE".
        what: &'static str,
        /// One of the keys.
        key: String,
    },
    /// Two adapters in one file.
    #[error("it holds two adapters, `{first}` and `{second}`; expected one")]
    Adapters {
        /// The name of an adapter.
        first: String,
        /// The name of another.
        second: String,
    },
    /// Keys that are not LoRA keys.
    #[error("{} of its keys are not LoRA keys: {}", keys.len(), quoted(keys))]
    UnknownKeys {
        /// The keys.
        keys: Vec<String>,
    },
    /// A tensor without another that it needs.
    #[error("`{key}` has no `{missing}` beside it")]
    Incomplete {
        /// A key of the module.
        key: String,
        /// The missing key.
        missing: String,
    },
    /// Two updates of the same module.
    #[error("both `{first}` and `{second}` are for one module")]
    Duplicate {
        /// A key.
        first: String,
        /// Another key for the same module.
        second: String,
    },
    /// A tensor of the wrong shape.
    #[error("`{key}` has shape {found}, expected {expected}")]
    UnexpectedShape {
        /// The key.
        key: String,
        /// Its shape.
        found: Shape,
        /// What it should be.
        expected: &'static str,
    },
    /// A tensor that is not of a float type.
    #[error("`{key}` is {dtype}, expected f32, bf16, f16, f64 or fp8")]
    DType {
        /// The key.
        key: String,
        /// Its type.
        dtype: DType,
    },
    /// Two matrices that differ in their common dimension.
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
    /// Numbers that are not finite.
    #[error("`{key}` is {dtype} and not finite everywhere: values out of its range were cast to it")]
    NotFinite {
        /// The key.
        key: String,
        /// Its type.
        dtype: DType,
    },
    /// An alpha that gives no scale.
    #[error("`{key}` is {found}, expected a finite number other than 0")]
    Alpha {
        /// The key.
        key: String,
        /// The value.
        found: f32,
    },
    /// An invalid `lora_adapter_metadata` in the header.
    #[error("its lora_adapter_metadata is not usable: {reason}")]
    Metadata {
        /// Why.
        reason: String,
    },
    /// A rank in the header that differs from the matrices'.
    #[error("its lora_adapter_metadata gives `{module}` rank {expected}, but `{key}` has {found}")]
    MetadataRank {
        /// The module.
        module: String,
        /// The rank in the metadata.
        expected: f64,
        /// The key of its first matrix.
        key: String,
        /// That matrix's rows.
        found: usize,
    },
    /// A config for another kind of adapter than the tensors'.
    #[error("its settings are those of a {expected}, but `{key}` is of a {found}")]
    MetadataKind {
        /// The kinds that fit the settings.
        expected: String,
        /// A key.
        key: String,
        /// The kind that its name tells.
        found: &'static str,
    },
    /// A setting that PEFT heeds and Kiln does not support.
    #[error("its settings have {setting} ({value}), which is not supported")]
    Setting {
        /// The setting.
        setting: &'static str,
        /// Its value.
        value: String,
    },
    /// A config with `use_dora`, without the magnitudes of some modules.
    #[error("its settings say use_dora, but there is no lora_magnitude_vector in it for every module")]
    DoraWithoutMagnitude,
    /// Magnitudes, with a config without `use_dora`.
    #[error("its settings say that use_dora is false, but there are magnitudes in it")]
    MagnitudeWithoutDora,
    /// A LoRA made for another model.
    #[error("it was made for {made_for}, and this model is {model}")]
    WrongBase {
        /// The model it was made for.
        made_for: LoraBase,
        /// The model it is applied to.
        model: LoraBase,
    },
    /// Matrices that don't fit the layer of the model.
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
