//! The golden set on the adapter that wgpu finds; skipped without one.

use kiln_golden::{Tolerance, trials};
use kiln_wgpu::{AdapterKind, Options, WgpuBackend};

/// The cases for a driver on the CPU, which takes several seconds for each: text to image, several images of odd sizes, references.
const ON_CPU: &[&str] = &["t2i_80x112::wgpu_f32", "t2i_64x64::wgpu_bf16", "edit_1ref::wgpu_f32"];

fn main() {
    let args = libtest_mimic::Arguments::from_args();
    let backend = match WgpuBackend::new(&Options::default()) {
        Ok(backend) => backend,
        Err(e) => {
            println!("skipped: no GPU to test on: {e}");
            libtest_mimic::run(&args, Vec::new()).exit();
        }
    };
    let on_cpu = backend.adapter().kind == AdapterKind::Cpu;
    let second = backend.clone();
    let mut all = trials("wgpu_f32", move || backend.clone(), Tolerance::F32);
    all.extend(trials("wgpu_bf16", move || second.clone(), Tolerance::BF16));
    if on_cpu && !args.include_ignored {
        println!("a driver on the CPU runs {} cases; --include-ignored runs all", ON_CPU.len());
        all.retain(|trial| ON_CPU.contains(&trial.name()));
    }
    libtest_mimic::run(&args, all).exit();
}
