//! Finds and opens models by name: the built-in one, those in the models folders, and those in the Hugging Face cache.
//!
//! ```text
//! name or path ──ModelFolders::resolve──▶ ModelLocation ──open──▶ kiln_engine::Model
//! ```
//! The command line, the server and the bindings for other languages all resolve names here, so that a name means the
//! same everywhere. [`export`] converts and quantizes models, [`info`] describes them.
//!
//! ```no_run
//! use std::path::Path;
//! use kiln_catalog::ModelFolders;
//!
//! let location = ModelFolders::from_env().resolve(Some(Path::new("klein-4b")))?;
//! let model = location.open()?;
//! println!("{}", model.variant);
//! # Ok::<(), kiln_catalog::Error>(())
//! ```
#![forbid(unsafe_code)]

pub mod cache;
mod credentials;
pub mod ember;
mod error;
pub mod export;
mod folders;
pub mod info;
mod location;
mod open;
mod origin;
pub mod properties;
mod pull;
pub mod user_cache;
pub mod values;

pub use credentials::{own_trust, trust_with};
pub use error::{Error, Result};
pub use folders::ModelFolders;
pub use location::ModelLocation;
pub use open::{not_a_model, open_with};
pub use origin::{FileOrigin, MarkOrigin, WatermarkOrigin};
pub use pull::{cache_settings, download_settings, known, pull, require_no_terms, terms};
