//! Every operation against the reference, once per instruction set this machine has, and one thread against several.

use std::process::ExitCode;
use std::sync::Arc;

use kiln_conformance::libtest_mimic::{self, Arguments};
use kiln_conformance::{bit_identical, trials};
use kiln_cpu::{CpuBackend, Isa, Options};

fn main() -> ExitCode {
    let backend = |isa, threads| match CpuBackend::new(Options { isa: Some(isa), threads: Some(threads) }) {
        Ok(backend) => Arc::new(backend),
        Err(e) => panic!("{e}"),
    };
    let mut all = Vec::new();
    for isa in Isa::available() {
        let (one, three) = (backend(isa, 1), backend(isa, 3));
        let name = format!("cpu_{isa}");
        all.extend(trials(&name, &three, &[]));
        all.extend(bit_identical(&name, &one, &three, &[]));
    }
    libtest_mimic::run(&Arguments::from_args(), all).exit_code()
}
