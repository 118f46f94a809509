//! The `kiln` program. Everything is in the library, which the compiler can work on while it finishes those below.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    kiln_cli::main()
}
