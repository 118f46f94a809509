//! Every operation against the reference on the GPU, with and without cuBLASLt; skipped without a GPU.

use std::process::ExitCode;
use std::sync::Arc;

use kiln_conformance::libtest_mimic::{self, Arguments};
use kiln_conformance::{bit_identical, trials};
use kiln_cuda::{CudaBackend, Options};

fn main() -> ExitCode {
    let args = Arguments::from_args();
    let backend = |disable_cublaslt| {
        let options = Options { disable_cublaslt, ..Options::default() };
        CudaBackend::new(&options).map(Arc::new)
    };
    let (default, without) = match (backend(false), backend(true)) {
        (Ok(default), Ok(without)) => (default, without),
        (Err(e), _) | (_, Err(e)) if std::env::var_os("KILN_CUDA_KERNELS").is_some() => {
            println!("the kernels that KILN_CUDA_KERNELS names can't be tested: {e}");
            return ExitCode::FAILURE;
        }
        (Err(e), _) | (_, Err(e)) => {
            println!("skipped: no GPU to test on: {e}");
            return libtest_mimic::run(&args, Vec::new()).exit_code();
        }
    };
    if let Some(e) = default.cublaslt_error() {
        println!("without cuBLASLt: {e}");
    }
    let mut all = trials("cuda", &default, &[]);
    let products = ["linear", "training/products", "training/linear", "training/row_norms"];
    all.extend(
        trials("cuda_without_cublaslt", &without, &[])
            .into_iter()
            .filter(|t| products.iter().any(|kind| t.name().starts_with(kind))),
    );
    all.extend(bit_identical("cuda", &default, &default, &[]));
    if !default.gpu().has_fp8() {
        println!("skipped: the cases of fp8, which {} does not have", default.gpu().name);
        all.retain(|t| !t.name().contains("fp8"));
    }
    if !default.has_nvfp4() {
        println!("skipped: products of nvfp4, which {} does not have", default.gpu().name);
        all.retain(|t| !t.name().contains("_nvfp4/"));
    }
    libtest_mimic::run(&args, all).exit_code()
}
