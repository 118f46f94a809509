//! What can be wrong with a LoRA file.

use std::fmt;
use std::path::PathBuf;

use kiln_family::published_names;
use kiln_tensor::{DType, Shape};

use super::LoraBase;
use crate::similar::quoted;

/// Where the settings of a LoRA are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SettingsPlace {
    /// In the header, under `lora_adapter_metadata`.
    Header,
    /// In the header of a GGUF file.
    Gguf,
    /// In this `adapter_config.json`.
    File(PathBuf),
}

impl fmt::Display for SettingsPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SettingsPlace::Header => f.write_str("its lora_adapter_metadata"),
            SettingsPlace::Gguf => f.write_str("its GGUF header"),
            SettingsPlace::File(file) => write!(f, "its `{}`", file.display()),
        }
    }
}

/// What is wrong with a LoRA file. [`crate::Error::Lora`] adds its name.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the fields are")]
pub enum LoraProblem {
    /// No tensors.
    #[error("there is no tensor in it")]
    Empty,
    /// A kind of adapter that is not supported.
    #[error("it is an adapter of type {kind} (`{key}`), which is not supported")]
    UnsupportedKind { kind: &'static str, key: String },
    /// A part of a model, or all of it.
    #[error("it is not a LoRA but a model: {found}")]
    WholeModel { found: String },
    /// A file with nothing that the transformer can use, and why.
    #[error("{0}")]
    NothingElse(Box<LoraProblem>),
    /// Keys for the text encoder.
    #[error("it changes the text encoder (`{key}`); only LoRAs of the transformer are supported")]
    TextEncoder { key: String },
    /// Keys for something else than the matrices of the transformer.
    #[error("it {what} (`{key}`); only updates of the transformer's linear layers are supported")]
    OtherPart {
        /// What it does, as in "changes the VAE".
        what: &'static str,
        key: String,
    },
    /// Two adapters in one file.
    #[error("it holds two adapters, `{first}` and {}; expected one", second.as_ref().map_or("one without a name".into(), |s| format!("`{s}`")))]
    Adapters {
        first: String,
        /// The name of another, if it has one.
        second: Option<String>,
    },
    /// A scale of a quantized tensor.
    #[error("`{key}` belongs to a quantized tensor; LoRAs that are quantized in this way are not supported")]
    Quantized { key: String },
    /// A key of a module that is used, of unknown meaning.
    #[error("`{key}` belongs to the module `{module}`, and what it means is not known")]
    UnknownInModule { key: String, module: String },
    /// Modules that no known model has.
    #[error("{} does not have {} of its {total} modules: {}", published_names(), keys.len(), quoted(keys))]
    UnknownModules { keys: Vec<String>, total: usize },
    /// Keys that are not LoRA keys.
    #[error("{} of its keys are not LoRA keys: {}", keys.len(), quoted(keys))]
    UnknownKeys { keys: Vec<String> },
    /// A tensor without another that it needs.
    #[error("`{key}` has no `{missing}` beside it")]
    Incomplete { key: String, missing: String },
    /// Two updates of the same module.
    #[error("both `{first}` and `{second}` are for one module")]
    Duplicate { first: String, second: String },
    /// A tensor of the wrong shape.
    #[error("`{key}` has shape {found}, expected {expected}")]
    UnexpectedShape { key: String, found: Shape, expected: &'static str },
    /// A tensor of an unsupported type.
    #[error("`{key}` is {dtype}, expected {expected}")]
    DType { key: String, dtype: DType, expected: &'static str },
    /// Two matrices that differ in their common dimension.
    #[error("`{down}` has rank {rank} (shape {down_shape}), but `{up}` has shape {up_shape}")]
    Rank { down: String, rank: usize, down_shape: Shape, up: String, up_shape: Shape },
    /// The two matrices of a LoRA, exchanged.
    #[error("`{down}` (shape {down_shape}) and `{up}` (shape {up_shape}) are swapped")]
    Swapped { down: String, down_shape: Shape, up: String, up_shape: Shape },
    /// Numbers that are not finite.
    #[error("`{key}` is {dtype} and not finite everywhere{}", not_finite(*dtype))]
    NotFinite { key: String, dtype: DType },
    /// An alpha that gives no scale.
    #[error("`{key}` is {found}, expected a finite number other than 0")]
    Alpha { key: String, found: f32 },
    /// A scale that f32 can't hold.
    #[error("the scale of `{module}` is {found}, which is out of range")]
    Scale { module: String, found: f64 },
    /// Invalid settings.
    #[error("{settings} is not usable: {reason}")]
    Metadata { settings: SettingsPlace, reason: String },
    /// A rank in the settings that differs from the matrices'.
    #[error("{settings} gives `{module}` rank {expected}, but `{key}` has {found}")]
    MetadataRank { settings: SettingsPlace, module: String, expected: f64, key: String, found: usize },
    /// A config with another alpha than the tensors'.
    #[error("`{key}` is {found}, but {settings} has an alpha of {stated}; expected one alpha")]
    MetadataAlpha { settings: SettingsPlace, key: String, found: f64, stated: f64 },
    /// A config for another kind of adapter than the tensors'.
    #[error("{settings} is that of a {expected}, but `{key}` is of a {found}")]
    MetadataKind { settings: SettingsPlace, expected: String, key: String, found: &'static str },
    /// A setting that PEFT heeds and Kiln does not support.
    #[error("{settings} has {setting} ({value}), which is not supported")]
    Setting { settings: SettingsPlace, setting: &'static str, value: String },
    /// A config with `use_dora`, without the magnitudes of some modules.
    #[error("{settings} says use_dora, but there is no lora_magnitude_vector for every module")]
    DoraWithoutMagnitude { settings: SettingsPlace },
    /// Magnitudes that PEFT does not have.
    #[error("`{key}` has magnitudes of columns, which the diffusers rule for DoRAs does not cover")]
    DoraOfColumns { key: String },
    /// Magnitudes, with a config without `use_dora`.
    #[error("{settings} says that use_dora is false, but there are magnitudes in the LoRA")]
    MagnitudeWithoutDora { settings: SettingsPlace },
    /// A LoRA made for FLUX.1.
    #[error("it was made for {}, and only {} is supported", LoraBase::Flux1, published_names())]
    Flux1,
    /// A LoRA made for another model.
    #[error("it was made for {made_for}, and this model is {model}")]
    WrongBase { made_for: LoraBase, model: LoraBase },
    /// Matrices that don't fit the layer of the model.
    #[error(
        "`{key}` has shape {found}, but for `{module}` of {rows} by {cols} it must be {expected}; \
             it was made for a model of another size"
    )]
    Shape {
        /// The key; for updates of several factors, the module.
        key: String,
        found: Shape,
        expected: Shape,
        module: String,
        rows: usize,
        cols: usize,
    },
}

impl LoraProblem {
    /// The `adapter_config.json` that it is about.
    pub fn settings_file(&self) -> Option<&PathBuf> {
        match self {
            LoraProblem::Metadata { settings: SettingsPlace::File(file), .. }
            | LoraProblem::MetadataRank { settings: SettingsPlace::File(file), .. }
            | LoraProblem::MetadataAlpha { settings: SettingsPlace::File(file), .. }
            | LoraProblem::MetadataKind { settings: SettingsPlace::File(file), .. }
            | LoraProblem::DoraWithoutMagnitude { settings: SettingsPlace::File(file) }
            | LoraProblem::MagnitudeWithoutDora { settings: SettingsPlace::File(file) } => Some(file),
            _ => None,
        }
    }
}

/// Why values of this type may be infinite or NaN.
fn not_finite(dtype: DType) -> &'static str {
    match dtype {
        DType::F8E4M3 | DType::F8E5M2 | DType::F16 => ": values out of its range were cast to it",
        DType::F64 => " in f32",
        _ => "",
    }
}
