//! Every operation against the reference on the adapter found; skipped without one.

use std::process::ExitCode;
use std::sync::Arc;

use kiln_conformance::libtest_mimic::{self, Arguments};
use kiln_conformance::trials;
use kiln_wgpu::{Options, WgpuBackend};

fn main() -> ExitCode {
    let args = Arguments::from_args();
    let backend = match WgpuBackend::new(&Options::default()) {
        Ok(backend) => Arc::new(backend),
        Err(e) => {
            println!("skipped: no GPU to test on: {e}");
            return libtest_mimic::run(&args, Vec::new()).exit_code();
        }
    };
    let mut all = trials("wgpu", &backend, &[]);
    // Training is for CUDA and CPUs.
    all.retain(|trial| !trial.name().starts_with("training/"));
    libtest_mimic::run(&args, all).exit_code()
}
