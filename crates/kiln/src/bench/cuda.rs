//! The same on a GPU, held against what its own products and copies reach.

use crate::args::BenchArgs;
use crate::failure::Failure;

#[cfg(not(feature = "cuda"))]
pub fn run(args: &BenchArgs, number: usize) -> Result<(), Failure> {
    crate::backend::cuda(number, args.machine.vram_limit, args.graphs).map(drop)
}

#[cfg(feature = "cuda")]
pub fn run(args: &BenchArgs, number: usize) -> Result<(), Failure> {
    use kiln_ops::{Backend as _, Timed};
    use kiln_tensor::DType;

    use super::phases::Device;
    use super::{Bench, finish, plan, report, report::peaks_table, source};
    use crate::args::DTypeArg;
    use crate::backend::{self, Chosen};

    let chosen = backend::cuda(number, args.machine.vram_limit, args.graphs)?;
    let threads = chosen.threads();
    let Chosen::Cuda(backend) = chosen else {
        return Err(Failure::new("no GPU was chosen"));
    };
    // Before anything is made: a limit that can't be kept is refused at once.
    let dtype = if args.machine.dtype == Some(DTypeArg::F32) { DType::F32 } else { DType::BF16 };
    let mut plan = plan(args, source(args)?, dtype, threads);
    if let (Some(limit), false) = (args.machine.vram_limit, args.peaks) {
        plan.placement = Some(placement(&plan, limit)?);
    }
    let peaks = match args.machine.vram_limit {
        Some(limit) if limit < PEAK_BYTES => Default::default(),
        _ => peaks(&backend)?,
    };
    if args.peaks {
        let text = match args.json {
            true => format!("{:#}\n", serde_json::json!({ "peaks": peaks })),
            false => format!("{}\n\n{}", backend.name(), peaks_table(&peaks)),
        };
        return crate::print(text.as_bytes());
    }
    if args.machine.dtype == Some(DTypeArg::Fp8) && !backend.gpu().has_fp8() {
        return Err(Failure::new(format!("{} has no products of 8-bit floats", backend.name())));
    }
    backend.release_memory();
    let mut report = report(args, &plan, backend.name());
    report.peaks = peaks;
    report.compute_peak = (dtype == DType::BF16).then_some(PRODUCTS);
    report.memory_peak = Some(COPY);
    report.note("operations were timed one at a time; memory is all that the GPU's own is taken up with");
    if let Some(placement) = plan.placement {
        report.note(placement.to_string());
    }
    let device =
        Device::<kiln_cuda::CudaBackend> { held: |b| b.memory_peak() as u64, replayed: |b| b.replayed() };
    finish(args, Bench { plan: &plan, b: Timed::new(*backend), report, device: Some(device) })
}

/// Which of the made-up weights stay.
#[cfg(feature = "cuda")]
fn placement(plan: &super::Plan, limit: u64) -> Result<kiln_model::Placement, Failure> {
    use kiln_model::{MemoryNeed, WeightBytes};
    let (text, config) = (plan.source.text_encoder(), plan.source.transformer());
    let channels = plan.source.vae().map(|vae| vae.decoder_channels());
    let channels = channels.map(|levels| [levels[0], levels[1]]);
    let size = [plan.width, plan.height];
    let others = plan.text_tokens + plan.references * plan.width * plan.height / 256;
    let weights = WeightBytes::new(text.map(|text| (text, 2.0)), (config, 2.0), plan.form);
    let need = MemoryNeed::of(config, channels, size, others, plan.dtype);
    crate::backend::placement(weights, &need, limit)
}

#[cfg(feature = "cuda")]
const PRODUCTS: &str = "bf16 products";
#[cfg(feature = "cuda")]
const COPY: &str = "memory copy";

/// What measuring them takes.
#[cfg(feature = "cuda")]
const PEAK_BYTES: u64 = 3 << 29;

/// What large products, and copies within the GPU's memory, reach: the best of several.
#[cfg(feature = "cuda")]
fn peaks(b: &kiln_cuda::CudaBackend) -> Result<std::collections::BTreeMap<&'static str, f64>, Failure> {
    use kiln_ops::Backend as _;
    use kiln_tensor::{DType, HostTensor, LinearParts, bf16};

    const SIDE: usize = 8192;
    const TIMES: usize = 4;
    // Neither zeros nor all the same: both would flatter.
    let value = |i: usize| bf16::from_f32((i.wrapping_mul(2_654_435_761) >> 7 & 0x3ff) as f32 / 512.0 - 1.0);
    let values: Vec<bf16> = (0..SIDE * SIDE).map(value).collect();
    let host = HostTensor::from_bf16([SIDE, SIDE], values).map_err(|e| Failure::new(e.to_string()))?;
    let x = b.upload(&host, DType::BF16)?;
    let w = b.weight(LinearParts::dense(vec![host]).map_err(kiln_ops::Error::from)?)?;
    let best = |run: &dyn Fn() -> kiln_ops::Result<()>| -> Result<f64, Failure> {
        run()?;
        let mut least = f64::INFINITY;
        for _ in 0..5 {
            let milliseconds = b.time(|| (0..TIMES).try_for_each(|_| run()))?;
            least = least.min(f64::from(milliseconds) / 1e3 / TIMES as f64);
        }
        Ok(least)
    };
    let product = best(&|| b.linear(&x, &w).map(drop))?;
    let eight = [&x; 8];
    let copy = best(&|| b.concat_rows(&eight).map(drop))?;
    let bytes = 2 * 8 * SIDE * SIDE * 2;
    Ok([(PRODUCTS, 2.0 * (SIDE as f64).powi(3) / product), (COPY, bytes as f64 / copy)].into())
}
