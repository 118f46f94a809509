//! Helpers shared by Kiln's crates: atomic file writes, the user's folders, hex, locks.
//!
//! ```
//! # fn main() -> std::io::Result<()> {
//! let folder = tempfile::tempdir()?;
//! let path = folder.path().join("recipe.json");
//! kiln_base::write_atomic(&path, b"{}")?;
//! assert_eq!(std::fs::read(&path)?, b"{}");
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod atomic;
pub mod folders;
mod hex;
mod sync;

pub use atomic::{AtomicFile, write_atomic};
pub use hex::hex;
pub use sync::{lock, wait};
