//! The command line inside the package: one library holds both, so that a wheel has the built-in models once.

use std::ffi::OsString;

use pyo3::prelude::*;

/// Runs the command line with these arguments, the first of which is the program's name. Returns the exit code.
#[pyfunction]
pub(crate) fn command_line(py: Python<'_>, args: Vec<OsString>) -> u8 {
    py.detach(|| kiln_cli::main_with(args))
}
