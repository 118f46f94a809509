//! Every kernel compiles for every GPU generation; needs NVRTC, but no GPU.

use kiln_cuda::{Compiler, kernel_sources};

#[test]
fn every_kernel_compiles_for_every_generation() {
    let compiler = match Compiler::find() {
        Ok(compiler) => compiler,
        Err(e) => return println!("skipped: no kernel compiler: {e}"),
    };
    let (major, minor) = compiler.version();
    for (generation, (a, b)) in [
        ("Ampere", (8, 0)),
        ("Ada", (8, 9)),
        ("Hopper", (9, 0)),
        ("Blackwell", (10, 0)),
        ("Blackwell", (12, 0)),
    ] {
        if !compiler.supports(10 * a + b).unwrap() {
            println!("NVRTC {major}.{minor} does not support {generation} ({a}.{b})");
            continue;
        }
        let target = compiler.target(a, b).unwrap();
        for source in kernel_sources() {
            let image = compiler.compile(&source, &target).unwrap_or_else(|e| panic!("{e}"));
            assert!(!image.is_empty(), "{}", source.name);
        }
        println!(
            "NVRTC {major}.{minor}: {} kernel files for {generation} ({})",
            kernel_sources().count(),
            target.arch
        );
    }
}
