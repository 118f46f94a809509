//! Helpers shared by Kiln's crates: atomic file writes, the user's folders, names and paths, free space, the identity of files,
//! hex, sizes, locks, dates, text in files and for terminals, programs of the user's, where NVIDIA's libraries can't be.
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
mod file_lock;
pub mod folders;
mod free_space;
mod hex;
mod identity;
mod nvidia;
mod paths;
mod printable;
mod program;
mod regular;
mod rename;
mod sizes;
mod sync;
mod temporary;
mod text;
mod utc;
mod words;

pub use atomic::{AtomicFile, write_atomic};
pub use file_lock::{FileLock, lock_file};
pub use free_space::free_space;
pub use hex::hex;
pub use identity::{FileIdentity, is_same_file, program_identity};
pub use nvidia::NO_NVIDIA;
pub use paths::{canonicalize, long_path, windows_name_problem};
pub use printable::{printable, printable_line, without_folders};
pub use program::{InvalidProgram, Program, ProgramError, ProgramLimits, ProgramOutput, run_program};
pub use regular::{open_input, open_regular, read_regular, read_regular_text};
pub use rename::rename;
pub use sizes::{is_or_are, parse_bytes, plural};
pub use sync::{lock, wait};
pub use temporary::{TemporaryFolder, remove_file, remove_stale};
pub use text::decode_text;
pub use utc::{Utc, unix_seconds};
