//! Models from the Hugging Face hub, in the cache that all programs of that family share.
//!
//! [`Name`] is what a user types, [`Settings`] where things are (with the usual variables: `HF_HOME`, `HF_HUB_CACHE`,
//! `HF_ENDPOINT`, `HF_TOKEN`), [`pull`] fetches, [`Cache`] knows what is there. Downloads go on where they stopped, also in
//! a later run, and count only when their checksum is right.
//!
//! ```
//! use kiln_hub::{Cache, Name, Settings};
//!
//! let name = Name::parse("unsloth/FLUX.2-klein-4B-GGUF:Q4_K_M")?;
//! assert_eq!((name.repo.as_str(), name.pattern.as_deref()), ("unsloth/FLUX.2-klein-4B-GGUF", Some("Q4_K_M")));
//! assert_eq!(Name::parse("klein-4b")?.repo, "black-forest-labs/FLUX.2-klein-4B");
//!
//! let settings = Settings { cache: std::env::temp_dir().join("no-models"), ..Settings::default() };
//! assert!(Cache::new(&settings.cache).find(&name)?.is_none());
//! # Ok::<(), kiln_hub::Error>(())
//! ```
#![forbid(unsafe_code)]

mod cache;
mod client;
mod download;
mod error;
mod name;
mod pull;
mod select;
mod settings;

pub use cache::{Cache, Installed};
pub use client::RemoteFile;
pub use error::{Error, Result};
pub use name::{ALIASES, Name};
pub use pull::{Progress, Pulled, pull};
pub use settings::Settings;
