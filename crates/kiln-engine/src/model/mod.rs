//! Models: what lies at a path, its parts, and what is known of them.

mod assemble;
mod beside;
mod diffusers;
mod locate;
mod opened;
mod part;
mod parts;
mod set;
mod vae_file;
mod variant;

pub use opened::{Model, OwnDefaults};
pub use part::Part;
pub use parts::Parts;
pub use vae_file::VaeFile;
pub use variant::Variant;
