//! Every operation against the reference on the adapter found, and on one that is kept to what every adapter has; skipped without one.

use std::process::ExitCode;
use std::sync::Arc;

use kiln_conformance::libtest_mimic::{self, Arguments, Trial};
use kiln_conformance::{Skip, trials};
use kiln_wgpu::{AdapterKind, Options, WgpuBackend};

/// Cases that a driver on the CPU takes a second or more for, and that test no other code than smaller ones.
const SLOW_ON_CPU: &[&str] = &[
    "attention/full_size",
    "attention/uneven_shares",
    "conv2d/full_size",
    "group_norm/full_size",
    "linear/full_size",
    "linear_fp8/full_size",
    "linear_gated_add/full_size",
    "linear_gated_add_fp8/wider_than_shared_memory",
    "linear_nvfp4/full_size",
    "linear_swiglu/full_size",
];

/// Cases that WebGPU's default limits make a difference to: large weights and inputs, workgroup memory, every kind of product.
const MINIMAL: &[&str] = &[
    "attention/grouped_heads",
    "attention/head_dim_512",
    "conv2d/same_bf16",
    "group_norm/odd_sizes",
    "linear/slabs_f16",
    "linear_int8/slabs_and_bias",
    "linear_nvfp4/tails",
    "linear_packed/q4_k",
    "norm_rope/adjacent/",
];

fn main() -> ExitCode {
    let args = Arguments::from_args();
    let open = |minimal| WgpuBackend::new(&Options { minimal, ..Options::default() }).map(Arc::new);
    let (backend, minimal) = match (open(false), open(true)) {
        (Ok(backend), Ok(minimal)) => (backend, minimal),
        (Err(e), _) | (_, Err(e)) => {
            println!("skipped: no GPU to test on: {e}");
            return libtest_mimic::run(&args, Vec::new()).exit_code();
        }
    };
    let slow = if backend.adapter().kind == AdapterKind::Cpu { SLOW_ON_CPU } else { &[] };
    let skip = |cases: &&'static str| Skip { cases, reason: "slow on a CPU" };
    let mut all = trials("wgpu", &backend, &slow.iter().map(skip).collect::<Vec<_>>());
    let is_minimal = |trial: &Trial| MINIMAL.iter().any(|case| trial.name().starts_with(case));
    all.extend(trials("wgpu_minimal", &minimal, &[]).into_iter().filter(is_minimal));
    // Training is for CUDA and CPUs.
    all.retain(|trial| !trial.name().starts_with("training/"));
    libtest_mimic::run(&args, all).exit_code()
}
