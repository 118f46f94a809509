//! Every kernel compiles for every GPU generation, and for releases; needs NVRTC, but no GPU. `KILN_TEST_CAPABILITIES=8.9,9.0`
//! compiles for these generations alone.

use kiln_cuda::{BuiltInKernels, CompileTarget, Compiler, KernelSource, compile_for_release, kernel_sources};

fn compiler() -> Option<Compiler> {
    Compiler::find().map_err(|e| println!("skipped: no kernel compiler: {e}")).ok()
}

#[test]
fn every_kernel_compiles_for_every_generation() {
    let Some(compiler) = compiler() else { return };
    let (major, minor) = compiler.version();
    let wanted = std::env::var("KILN_TEST_CAPABILITIES").ok();
    let is_wanted = |(major, minor): (i32, i32)| {
        let name = format!("{major}.{minor}");
        wanted.as_ref().is_none_or(|wanted| wanted.split(',').any(|capability| capability == name))
    };
    for (generation, capability) in [
        ("Ampere", (8, 0)),
        ("Ada", (8, 9)),
        ("Hopper", (9, 0)),
        ("Blackwell", (10, 0)),
        ("Blackwell", (12, 0)),
    ]
    .into_iter()
    .filter(|(_, capability)| is_wanted(*capability))
    {
        if !compiler.supports(capability).unwrap() {
            println!("NVRTC {major}.{minor} does not support {generation} {capability:?}");
            continue;
        }
        let target = compiler.target(capability).unwrap();
        for source in kernel_sources().filter(|source| target.takes(source)) {
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

/// Whatever `KILN_TEST_CAPABILITIES` says: no other generation compiles them.
#[test]
fn nvfp4_products_compile_where_they_run() {
    let Some(compiler) = compiler() else { return };
    if compiler.version() < (12, 9) {
        return println!("skipped: NVRTC {:?} does not know their instruction", compiler.version());
    }
    let target = CompileTarget::built_in_for((12, 0)).unwrap();
    for name in ["gemm_mma_nvfp4", "nvfp4"] {
        let source = KernelSource { name };
        assert!(target.takes(&source));
        assert!(!compiler.compile(&source, &target).unwrap_or_else(|e| panic!("{e}")).is_empty());
    }
}

#[test]
fn kernels_of_a_release_are_what_the_compiler_made() {
    let Some(compiler) = compiler() else { return };
    if compiler.version() < (12, 9) {
        return println!("skipped: NVRTC {:?} does not know all targets of a release", compiler.version());
    }
    // The second one is for 12.0 alone.
    let sources = ["epilogue", "nvfp4"].map(|name| KernelSource { name });
    let targets: Vec<CompileTarget> = CompileTarget::built_in().collect();
    let release = |sources: &[KernelSource], previous: &[u8]| {
        let compiled = std::sync::Mutex::new(0);
        let report = |_: &KernelSource, _: &CompileTarget, _| *compiled.lock().unwrap() += 1;
        let previous = BuiltInKernels::new(previous);
        let file = compile_for_release(&compiler, sources, &targets, &previous, report).unwrap();
        (file, compiled.into_inner().unwrap())
    };
    let (first, compiled) = release(&sources[..1], &[]);
    assert_eq!(compiled, targets.len());
    let (file, compiled) = release(&sources, &first);
    assert_eq!(compiled, 1, "an unchanged source was compiled again, or one for a GPU that can't run it");
    let kernels = BuiltInKernels::new(&file);
    for target in &targets {
        for source in sources.iter().filter(|source| target.takes(source)) {
            let image = compiler.compile(source, target).unwrap();
            assert_eq!(kernels.image(source, target), Some(image), "{} for {}", source.name, target.arch);
        }
        assert!(!kernels.contains(&KernelSource { name: "norm" }, target));
    }
}
