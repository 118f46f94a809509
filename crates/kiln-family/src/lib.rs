//! Model families: all that Kiln knows of a family beforehand, as plain data. The other crates hold networks, formats and
//! programs, and ask here.
//!
//! A family is a folder of this crate and a line of [`FAMILIES`]. Its members are [`Variant`]s, which share the networks
//! and the latents and differ in how they are sampled. What is in a model's own files (sizes of layers, tensors, a
//! tokenizer) is read from them and not repeated here.
//!
//! ```
//! let variant: kiln_family::Variant = "base".parse()?;
//! assert_eq!((variant.family.name, variant.steps), ("FLUX.2", 50));
//! assert_eq!(variant.family.latent.pixels_per_token(), 16);
//! # Ok::<(), String>(())
//! ```
#![forbid(unsafe_code)]

mod family;
pub mod flux2;
mod models;
#[cfg(feature = "pebble")]
pub mod pebble;
mod tensor_names;
mod text_encoder;
mod variant;
mod variant_info;

pub use family::{Family, Latent, Pipeline, Shift};
pub use models::{Alias, Companion, Licence, aliases};
pub use tensor_names::{BlockPrefix, Layout, ModuleLayout, ModuleNames, TransformerNames};
pub use text_encoder::{BuiltInTokenizer, ChatArguments, Side, Template, TextEncoder};
pub use variant::Variant;
pub use variant_info::{Guidance, VariantInfo};

/// All families, that of [`default_family`] first.
pub static FAMILIES: &[&Family] = &[
    &flux2::FLUX2,
    #[cfg(feature = "pebble")]
    &pebble::PEBBLE,
];

/// Returns the family that a model of no known family is taken for.
pub fn default_family() -> &'static Family {
    FAMILIES[0]
}

/// Returns the families that have published models: those that users are told of.
pub fn published() -> impl Iterator<Item = &'static Family> {
    FAMILIES.iter().copied().filter(|family| !family.models.is_empty())
}

/// Returns the names of [`published`] families for a message: `FLUX.2`.
pub fn published_names() -> String {
    published().map(|family| family.name).collect::<Vec<_>>().join(" or ")
}

/// Returns the variants of all families.
pub fn variants() -> impl Iterator<Item = Variant> {
    FAMILIES.iter().flat_map(|family| family.variants())
}

/// Returns the text encoders of all families.
pub fn text_encoders() -> impl Iterator<Item = &'static TextEncoder> {
    FAMILIES.iter().flat_map(|family| family.text_encoders())
}
