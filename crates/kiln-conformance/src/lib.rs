//! The test cases of every operation, written once and run on every backend.
//!
//! A case draws its inputs from a generator seeded by its name, runs them through the backend under test and through
//! [`Reference`](kiln_ops::Reference), and compares the results within the [`Tolerance`] of the operation. A backend's
//! whole test is a `tests/conformance.rs` with `harness = false`:
//!
//! ```no_run
//! use std::process::ExitCode;
//! use std::sync::Arc;
//!
//! use kiln_conformance::{Skip, libtest_mimic, trials};
//! use kiln_ops::Reference;
//!
//! fn main() -> ExitCode {
//!     let backend = Arc::new(Reference::new());
//!     let skips = [Skip { cases: "attention/head_dim_512", reason: "no kernel for heads wider than 256" }];
//!     let trials = trials("plain_loops", &backend, &skips);
//!     libtest_mimic::run(&libtest_mimic::Arguments::from_args(), trials).exit_code()
//! }
//! ```
//!
//! Each case is one trial, named like `rms_norm/odd_tails/bf16::cpu_avx2`.
//!
//! Sizes are odd, so that every vector width has a tail; each expensive operation also has one case at full size.
#![forbid(unsafe_code)]

mod case;
mod case_run;
mod cases;
mod compare;
pub mod imports;
mod random;
mod trials;

pub use case::Case;
pub use cases::cases;
pub use compare::Tolerance;
pub use libtest_mimic;
pub use trials::{Skip, bit_identical, trials, trials_of_both};
