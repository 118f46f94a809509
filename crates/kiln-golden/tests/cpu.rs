//! The golden set on the CPU backend.

use kiln_cpu::CpuBackend;
use kiln_golden::{Tolerance, trials};

fn main() {
    let args = libtest_mimic::Arguments::from_args();
    let backend = || CpuBackend::new(Default::default()).expect("the CPU backend is always available");
    let mut all = trials("cpu_f32", backend, Tolerance::F32);
    all.extend(trials("cpu_bf16", backend, Tolerance::BF16));
    libtest_mimic::run(&args, all).exit();
}
