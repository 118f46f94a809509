//! Every operation against the reference, once per instruction set that this machine has, and one thread against three.

use std::process::ExitCode;
use std::sync::Arc;

use kiln_conformance::libtest_mimic::{self, Arguments};
use kiln_conformance::{Skip, trials_of_both};
use kiln_cpu::{CpuBackend, CpuOptions, Isa};

/// CPUs have no fp8 instructions; int8 has the same size and is faster.
const FP8: Skip = Skip { cases: "_fp8/", reason: "fp8 products are for GPUs" };

/// CPUs dequantize nvfp4.
const NVFP4: Skip = Skip { cases: "_nvfp4/", reason: "nvfp4 products are for GPUs" };

fn main() -> ExitCode {
    let backend = |isa, threads| match CpuBackend::new(CpuOptions { isa: Some(isa), threads: Some(threads) })
    {
        Ok(backend) => Arc::new(backend),
        Err(e) => panic!("{e}"),
    };
    let mut all = Vec::new();
    for isa in Isa::available() {
        let (one, three) = (backend(isa, 1), backend(isa, 3));
        let name = format!("cpu_{isa}");
        all.extend(trials_of_both(&name, &three, &one, &[FP8, NVFP4]));
    }
    libtest_mimic::run(&Arguments::from_args(), all).exit_code()
}
