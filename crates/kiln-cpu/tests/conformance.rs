//! Every operation against the reference, once per instruction set this machine has, and one thread against several.

use std::process::ExitCode;
use std::sync::Arc;

use kiln_conformance::libtest_mimic::{self, Arguments};
use kiln_conformance::{Skip, bit_identical, trials};
use kiln_cpu::{CpuBackend, Isa, Options};

/// What the processor has no instructions for; 8-bit integers are of that size, and faster.
const SKIPS: [Skip; 1] = [Skip { cases: "_fp8/", reason: "8-bit floats are for GPUs" }];

fn main() -> ExitCode {
    let backend = |isa, threads| match CpuBackend::new(Options { isa: Some(isa), threads: Some(threads) }) {
        Ok(backend) => Arc::new(backend),
        Err(e) => panic!("{e}"),
    };
    let mut all = Vec::new();
    for isa in Isa::available() {
        let (one, three) = (backend(isa, 1), backend(isa, 3));
        let name = format!("cpu_{isa}");
        all.extend(trials(&name, &three, &SKIPS));
        all.extend(bit_identical(&name, &one, &three, &SKIPS));
    }
    libtest_mimic::run(&Arguments::from_args(), all).exit_code()
}
