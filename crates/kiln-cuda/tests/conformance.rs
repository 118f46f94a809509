//! Every operation against the reference on the GPU, with cuBLASLt and without; nothing where there is no GPU.

use std::process::ExitCode;
use std::sync::Arc;

use kiln_conformance::libtest_mimic::{self, Arguments};
use kiln_conformance::{bit_identical, trials};
use kiln_cuda::{CudaBackend, Options};

fn main() -> ExitCode {
    let args = Arguments::from_args();
    let backend = |own_products| {
        let options = Options { own_products, ..Options::default() };
        CudaBackend::new(&options).map(Arc::new)
    };
    let (usual, own) = match (backend(false), backend(true)) {
        (Ok(usual), Ok(own)) => (usual, own),
        (Err(e), _) | (_, Err(e)) => {
            println!("skipped: no GPU to test on: {e}");
            return libtest_mimic::run(&args, Vec::new()).exit_code();
        }
    };
    if let Some(e) = usual.without_cublaslt() {
        println!("without cuBLASLt: {e}");
    }
    let mut all = trials("cuda", &usual, &[]);
    all.extend(trials("cuda_own_products", &own, &[]).into_iter().filter(|t| t.name().starts_with("linear")));
    all.extend(bit_identical("cuda", &usual, &usual, &[]));
    libtest_mimic::run(&args, all).exit_code()
}
