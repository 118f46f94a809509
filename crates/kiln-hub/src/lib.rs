//! Downloads models from the Hugging Face hub into the cache that all Hugging Face programs share.
//!
//! [`ModelName`] parses what a user types, [`HubSettings`] reads the usual variables (`HF_HOME`, `HF_HUB_CACHE`,
//! `HF_ENDPOINT`, `HF_TOKEN`), [`pull`] downloads, and [`Cache`] lists what is installed. Downloads resume where they
//! stopped, also in a later run, and are used only if their checksum is right.
//!
//! ```
//! use kiln_hub::{Cache, ModelName, HubSettings};
//!
//! let name = ModelName::parse("unsloth/FLUX.2-klein-4B-GGUF:Q4_K_M")?;
//! assert_eq!((name.repo.as_str(), name.pattern.as_deref()), ("unsloth/FLUX.2-klein-4B-GGUF", Some("Q4_K_M")));
//! assert_eq!(ModelName::parse("klein-4b")?.repo, "black-forest-labs/FLUX.2-klein-4B");
//!
//! let settings = HubSettings { cache: std::env::temp_dir().join("no-models"), ..HubSettings::default() };
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
mod remote_file;
mod select;
mod settings;

pub use cache::{Cache, InstalledModel, NamedModel};
pub use error::{Error, Result};
pub use name::ModelName;
pub use pull::{ModelPlan, PullPlan, PullProgress, PullSummary, Terms, plan, plan_model, pull};
pub use remote_file::RemoteFile;
pub use settings::HubSettings;
