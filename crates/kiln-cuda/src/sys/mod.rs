//! Function tables of CUDA's libraries, filled when a library is loaded.
//!
//! Not from a binding crate: those panic if a library or function is missing and choose the file themselves. Kiln reports
//! which file it uses and continues without one.

pub(crate) mod cublaslt;
pub(crate) mod driver;
pub(crate) mod nvrtc;

use std::path::{Path, PathBuf};

use libloading::Library;

use crate::error::{Error, Result};

/// Declares a function table and its loader.
macro_rules! functions {
    ($(#[$doc:meta])* $Table:ident { $(fn $name:ident = $symbol:literal ($($arg:ty),*) $(-> $ret:ty)?;)* }) => {
        $(#[$doc])*
        pub(crate) struct $Table {
            $(pub $name: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)*
            pub path: std::path::PathBuf,
            /// Keeps the functions loaded.
            _library: libloading::Library,
        }

        impl $Table {
            /// Fills the table; fails if the library lacks a function.
            pub fn new(loaded: crate::find::LoadedLibrary) -> crate::error::Result<Self> {
                let crate::find::LoadedLibrary { library, path } = loaded;
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

/// Looks up a function of a library.
///
/// # Safety
///
/// `F` is the function's type.
unsafe fn symbol<F: Copy>(library: &Library, path: &Path, name: &str) -> Result<F> {
    // SAFETY: as the caller promises.
    match unsafe { library.get::<F>(name.as_bytes()) } {
        Ok(symbol) => Ok(*symbol),
        Err(_) => Err(Error::Unusable {
            path: PathBuf::from(path),
            what: format!("it lacks the function `{name}`; install a newer version"),
        }),
    }
}
