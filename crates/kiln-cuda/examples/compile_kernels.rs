//! Compiles the kernels that a release has inside: `tools/cuda/kernels.sh` runs this with its NVRTC.
//!
//! `compile_kernels FILE [TARGET]...` writes FILE for all targets of a release, or for the named ones, such as `sm_90a`.

use std::error::Error;
use std::time::Instant;

use kiln_cuda::{BuiltInKernels, CompileTarget, Compiler, KernelSource, compile_for_release, kernel_sources};

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let file = args.next().ok_or("usage: compile_kernels FILE [TARGET]...")?;
    let mut targets: Vec<CompileTarget> = args.map(CompileTarget::new).collect();
    if targets.is_empty() {
        targets.extend(CompileTarget::built_in());
    }
    let compiler = Compiler::find()?;
    let (major, minor) = compiler.version();
    println!("NVRTC {major}.{minor}");
    let start = Instant::now();
    let report = |source: &KernelSource, target: &CompileTarget, bytes: usize| {
        println!(
            "{:6.1} s  {:12} {:26} {bytes:9} bytes",
            start.elapsed().as_secs_f32(),
            target.arch,
            source.name
        );
    };
    let previous = std::fs::read(&file).unwrap_or_default();
    let sources: Vec<KernelSource> = kernel_sources().collect();
    let packed = compile_for_release(&compiler, &sources, &targets, &BuiltInKernels::new(&previous), report)?;
    std::fs::write(&file, &packed)?;

    println!("\n{:12} {:>12} {:>12} {:>12}", "target", "bytes", "packed", "unpacking");
    let kernels = BuiltInKernels::new(&packed);
    for target in &targets {
        let start = Instant::now();
        let bytes: usize =
            sources.iter().filter_map(|s| kernels.image(s, target)).map(|image| image.len()).sum();
        let ms = 1e3 * start.elapsed().as_secs_f64();
        let packed: usize = sources.iter().filter_map(|s| kernels.packed(s, target)).map(<[u8]>::len).sum();
        println!("{:12} {bytes:12} {packed:12} {ms:9.1} ms", target.arch);
    }
    println!("{file}: {} bytes, {:.0} s", packed.len(), start.elapsed().as_secs_f32());
    Ok(())
}
