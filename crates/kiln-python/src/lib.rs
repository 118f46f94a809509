//! `kiln._kiln`, the Rust part of the Python package `kiln`: opens models and runs requests.
//!
//! ```text
//! kiln (Python: arguments, PIL, numpy) ──JSON of a Request, bytes of images and arrays──▶ Model.start ──▶ Job
//! Job.next ◀──progress, previews, latents of a step, images, the end── a thread that runs the session
//! ```
//! Only the thread that waits in `Job.next` runs Python code; it releases the GIL while it waits, and checks for
//! signals several times a second. Threads of the engine never touch Python.

mod array;
mod command_line;
mod errors;
mod files;
mod inputs;
mod job;
mod model;
mod output;
mod settings;
mod shutdown;
mod signer;
mod sink;
mod train;
mod wait;

use pyo3::prelude::*;

/// The module that the package `kiln` is built on; use `kiln` instead.
#[pymodule]
mod _kiln {
    #[pymodule_export]
    use crate::array::Array;
    #[pymodule_export]
    use crate::command_line::command_line;
    #[pymodule_export]
    use crate::errors::exceptions;
    #[pymodule_export]
    use crate::files::{convert, info, pull, quantize, verify};
    #[pymodule_export]
    use crate::job::Job;
    #[pymodule_export]
    use crate::model::{Model, request_fields};
    #[pymodule_export]
    use crate::output::Image;
    #[pymodule_export]
    use crate::shutdown::{after_fork, shutdown};
    #[pymodule_export]
    use crate::signer::Signer;
    #[pymodule_export]
    use crate::train::{train, train_fields};

    use super::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        crate::errors::add(module)
    }
}
