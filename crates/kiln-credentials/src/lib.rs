//! C2PA credentials: a signed statement inside an image file that says how it was made, and by whom.
//!
//! A store is added to the finished file, and its hash covers everything else in it. What strangers have signed is checked by
//! a validator, with the feature `verify`; without it, [`verify`] says only whether a file has credentials.
//!
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # use kiln_base::Utc;
//! use kiln_credentials::{NewCredentials, Signer, Statement, sign};
//! use kiln_image::{AiSource, Format, RgbImage, encode, read_manifest_store};
//!
//! let folder = tempfile::tempdir()?;
//! let files = NewCredentials::in_folder(folder.path());
//! files.create("Ada's studio")?;
//! let signer = Signer::open(&files.key, &files.certificate)?;
//!
//! let statement = Statement {
//!     generator: ("Kiln".into(), "1.0.0".into()),
//!     model: "FLUX.2 klein 4B".into(),
//!     producer: None,
//!     ingredients: vec![],
//!     source: AiSource::Generated.address(),
//!     watermarked: false,
//!     when: Utc::now(),
//! };
//! let file = encode(&RgbImage::black(8, 8), Format::Png, None)?;
//! let signed = sign(&file, Format::Png, &statement, &signer)?;
//! assert!(kiln_credentials::is_store(&read_manifest_store(&signed)?.unwrap()));
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod algorithm;
mod carried;
mod cbor;
mod certificate;
mod command;
mod create;
mod der;
mod error;
mod jumbf;
mod key;
mod manifest;
mod report;
mod sign;
mod signer;
mod time_stamp;
mod trust;
#[cfg_attr(not(feature = "verify"), path = "no_verify.rs")]
mod verify;

pub use algorithm::Algorithm;
pub use carried::Carried;
pub use create::NewCredentials;
pub use error::{Error, Result};
pub use manifest::{Ingredient, Role, Statement, is_store};
pub use report::{Action, FoundIngredient, Problem, Report, State};
pub use sign::sign;
pub use signer::Signer;
pub use trust::Trust;
pub use verify::{CAN_VERIFY, carry, verify};
