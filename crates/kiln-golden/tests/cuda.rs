//! The golden set on the CUDA backend; nothing where there is no GPU.

use kiln_cuda::{CudaBackend, Options};
use kiln_golden::{Tolerance, trials};

fn main() {
    let args = libtest_mimic::Arguments::from_args();
    let backend = match CudaBackend::new(&Options::default()) {
        Ok(backend) => backend,
        Err(e) => {
            println!("skipped: no GPU to test on: {e}");
            libtest_mimic::run(&args, Vec::new()).exit();
        }
    };
    let second = backend.clone();
    let mut all = trials("cuda_f32", move || backend.clone(), Tolerance::F32);
    all.extend(trials("cuda_bf16", move || second.clone(), Tolerance::BF16));
    libtest_mimic::run(&args, all).exit();
}
