//! The functions of CUDA's libraries, looked up when a library is first used.
//!
//! Written here rather than taken from a binding crate, because those panic when a library or a function is missing and
//! choose the file themselves; Kiln has to say which file it uses, and to go on without one.

pub(crate) mod cublaslt;
pub(crate) mod driver;
pub(crate) mod nvrtc;

use std::path::{Path, PathBuf};

use libloading::Library;

use crate::error::{Error, Result};

/// Declares a table of functions and how to fill it from a library.
macro_rules! functions {
    ($(#[$doc:meta])* $Table:ident { $(fn $name:ident = $symbol:literal ($($arg:ty),*) $(-> $ret:ty)?;)* }) => {
        $(#[$doc])*
        pub(crate) struct $Table {
            $(pub $name: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)*
            pub path: std::path::PathBuf,
            /// Keeps the functions where they are.
            _library: libloading::Library,
        }

        impl $Table {
            /// Fills the table; fails when the library lacks a function.
            pub fn new(loaded: crate::find::Loaded) -> crate::error::Result<Self> {
                let crate::find::Loaded { library, path } = loaded;
                Ok($Table {
                    // SAFETY: the types are those of the library's headers.
                    $($name: unsafe { crate::sys::symbol(&library, &path, $symbol)? },)*
                    path,
                    _library: library,
                })
            }
        }
    };
}
pub(crate) use functions;

/// A function of a library.
///
/// # Safety
///
/// `F` has to be the function's type.
unsafe fn symbol<F: Copy>(library: &Library, path: &Path, name: &str) -> Result<F> {
    // SAFETY: as the caller promises.
    match unsafe { library.get::<F>(name.as_bytes()) } {
        Ok(symbol) => Ok(*symbol),
        Err(_) => Err(Error::Unusable {
            path: PathBuf::from(path),
            what: format!("it has no function `{name}`: it is too old"),
        }),
    }
}
