//! Calls of Windows that the standard library has no functions for: the console, processes with their children, disks, the
//! identity of files, versions of libraries, the browser. Empty on other systems.
//!
//! ```
//! # #[cfg(windows)]
//! assert!(kiln_windows::free_space(&kiln_windows::system_folder().unwrap()).is_ok());
//! ```

#![cfg(windows)]

pub mod console;
mod disk;
mod file_id;
mod library;
mod process_tree;
mod shell;

pub use disk::free_space;
pub use file_id::FileId;
pub use library::{file_version, own_file, system_folder};
pub use process_tree::ProcessTree;
pub use shell::open_url;

use std::ffi::OsStr;
use std::io;
use std::os::windows::ffi::OsStrExt;

/// A text as Windows takes it, with a zero at its end.
fn wide(text: &OsStr) -> Vec<u16> {
    text.encode_wide().chain([0]).collect()
}

/// The error of a function that has returned 0 for failure.
fn check(result: i32) -> io::Result<()> {
    if result == 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
