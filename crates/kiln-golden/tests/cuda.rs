//! The golden set on the CUDA backend; skipped without a GPU.

use kiln_cuda::{CudaBackend, Graphs, Options};
use kiln_golden::{Tolerance, trials};

fn main() {
    let args = libtest_mimic::Arguments::from_args();
    let replaying = Options { graphs: Graphs::Always, ..Options::default() };
    let (backend, replaying) =
        match CudaBackend::new(&Options::default()).and_then(|b| Ok((b, CudaBackend::new(&replaying)?))) {
            Ok(backends) => backends,
            Err(e) => {
                println!("skipped: no GPU to test on: {e}");
                libtest_mimic::run(&args, Vec::new()).exit();
            }
        };
    let second = backend.clone();
    let mut all = trials("cuda_f32", move || backend.clone(), Tolerance::F32);
    all.extend(trials("cuda_bf16", move || second.clone(), Tolerance::BF16));
    let outside = Tolerance { transformer_tensors: false, ..Tolerance::F32 };
    all.extend(trials("cuda_replayed", move || replaying.clone(), outside));
    libtest_mimic::run(&args, all).exit();
}
