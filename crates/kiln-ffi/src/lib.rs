//! Kiln as a C library. `include/kiln.h` is generated from this crate; `docs/c.md` shows how it is used.
//!
//! ```text
//! kiln_model_open ──▶ kiln_model ─┐
//! kiln_request, callbacks, token ─┴─kiln_generate──▶ kiln_images ──▶ pixels, PNG, recipe
//! ```
//! The crate translates and checks; everything else is `kiln-engine` and `kiln-catalog`. `unsafe` is needed where memory
//! of the caller is read or written: structures, texts, pixels and results. Handles are numbers in a table, so that a
//! wrong one is detected and never dereferenced. No panic crosses the C boundary.
// The header says what each function needs, for all of them at once.
#![allow(clippy::missing_safety_doc)]

mod abi;
mod callbacks;
mod cancel;
mod generate;
mod handles;
mod images;
mod model;
mod request;
mod signer;
mod status;
mod verify;

use std::ffi::{CStr, c_char};

pub use callbacks::{KilnCallbacks, KilnPhase, KilnPixels, KilnProgress};
pub use cancel::{
    KilnCancelToken, kiln_cancel, kiln_cancel_token_free, kiln_cancel_token_new, kiln_cancel_token_reset,
};
pub use generate::{kiln_generate, kiln_generate_json};
pub use images::{
    KilnBuffer, KilnFileOptions, KilnImage, KilnImages, kiln_buffer_free, kiln_image_png,
    kiln_image_png_with, kiln_image_save, kiln_image_save_with, kiln_images_count, kiln_images_free,
    kiln_images_get,
};
pub use model::{KilnModel, KilnModelOptions, kiln_model_free, kiln_model_load, kiln_model_open};
pub use request::{KilnInput, KilnLora, KilnRequest};
pub use signer::{KilnSigner, KilnSignerOptions, kiln_signer_free, kiln_signer_open};
pub use status::{KilnStatus, kiln_last_error, kiln_last_hint, kiln_last_status};
pub use verify::kiln_verify;

/// The version of the ABI that this header describes. It changes only if programs must be compiled again.
pub const KILN_ABI_VERSION: u32 = 1;

const VERSION: &CStr = match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
    Ok(version) => version,
    Err(_) => c"",
};

/// Returns the version of the library's ABI: KILN_ABI_VERSION of the header it was built with.
#[unsafe(no_mangle)]
pub extern "C" fn kiln_abi_version() -> u32 {
    KILN_ABI_VERSION
}

/// Returns the library's version, such as "0.1.0". Never freed.
#[unsafe(no_mangle)]
pub extern "C" fn kiln_version() -> *const c_char {
    VERSION.as_ptr()
}
