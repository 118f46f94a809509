//! Peak rates that operations are compared with: those of the CPU's units, or of large products and copies on a GPU.

use std::collections::BTreeMap;
use std::time::Instant;

use kiln_cpu::{Peak, Peaks};
use kiln_engine::{DeviceInfo, Isa};
use kiln_ops::Backend;
use kiln_tensor::{DType, HostLinear, HostTensor, bf16};
use kiln_weights::LinearPrecision;

use super::plan::BenchPlan;
use super::report::{BenchReport, peaks_table};
use crate::args::BenchArgs;
use crate::error::CliError;

const PRODUCTS: &str = "bf16 products";
const COPY: &str = "memory copy";
/// GPU memory needed for measuring the peaks.
const BYTES: u64 = 3 << 29;

/// Measures and prints the peaks.
pub fn print<B: Backend>(args: &BenchArgs, backend: &B, device: &DeviceInfo<B>) -> Result<(), CliError> {
    let (rates, title) = match device.isa {
        Some(_) => {
            let peaks = Peaks::measure(device.threads);
            let rates = peaks.all().map(|peak| (peak.name, peak.rate)).collect();
            (rates, format!("{} threads", device.threads))
        }
        None => (measure_device(backend)?, backend.name()),
    };
    let text = if args.json {
        let json = serde_json::json!({ "threads": device.threads, "peaks": rates });
        format!("{json:#}\n")
    } else {
        format!("{title}\n\n{}", peaks_table(&rates))
    };
    crate::output::print(text.as_bytes())
}

/// Measures the peaks and adds them to a report.
pub fn fill<B: Backend>(
    report: &mut BenchReport,
    args: &BenchArgs,
    plan: &BenchPlan,
    backend: &B,
    device: &DeviceInfo<B>,
) -> Result<(), CliError> {
    let Some(isa) = device.isa else {
        if args.machine.vram_limit.is_none_or(|limit| limit >= BYTES) {
            report.peaks = measure_device(backend)?;
        }
        report.compute_peak = (plan.dtype == DType::BF16).then_some(PRODUCTS);
        report.memory_peak = Some(COPY);
        report.note("operations were timed one at a time; `beyond weights` is all GPU memory in use, weights included");
        return Ok(());
    };
    let peaks = Peaks::measure(device.threads);
    let products =
        if matches!(plan.linear_precision, LinearPrecision::Int8 { .. }) { DType::I8 } else { plan.dtype };
    report.set_peaks(&peaks, compute_peak(&peaks, isa, products));
    Ok(())
}

/// Returns the peak of the unit that computes products of this dtype.
fn compute_peak(peaks: &Peaks, isa: Isa, dtype: DType) -> Option<&Peak> {
    match (isa, dtype) {
        (Isa::Portable, _) => None,
        (Isa::Amx, DType::BF16) => peaks.amx_bf16.as_ref(),
        (Isa::Amx, DType::I8) => peaks.amx_int8.as_ref(),
        (Isa::NeonBf16, DType::BF16) => peaks.vector_bf16.as_ref(),
        (Isa::NeonDotprod | Isa::NeonI8mm | Isa::NeonBf16, DType::I8) => peaks.vector_int8.as_ref(),
        _ => peaks.fma_f32.as_ref(),
    }
}

/// Measures large products and copies within the device's memory; best of several runs.
fn measure_device<B: Backend>(b: &B) -> Result<BTreeMap<&'static str, f64>, CliError> {
    const SIDE: usize = 8192;
    const TIMES: usize = 8;
    // Varied values: zeros or constants run faster.
    let value = |i: usize| bf16::from_f32((i.wrapping_mul(2_654_435_761) >> 7 & 0x3ff) as f32 / 512.0 - 1.0);
    let values: Vec<bf16> = (0..SIDE * SIDE).map(value).collect();
    let tensor_error = |e: &dyn std::fmt::Display| CliError::new(e.to_string());
    let host = HostTensor::from_bf16([SIDE, SIDE], values).map_err(|e| tensor_error(&e))?;
    let x = b.upload(&host, DType::BF16)?;
    let w = b.load_weight(
        HostLinear::dense(vec![host]).map_err(|e| tensor_error(&e))?,
        kiln_ops::Residency::Device,
    )?;
    let best = |run: &dyn Fn() -> kiln_ops::Result<()>| -> Result<f64, CliError> {
        run()?;
        let mut fastest = f64::INFINITY;
        for _ in 0..5 {
            b.synchronize()?;
            let start = Instant::now();
            (0..TIMES).try_for_each(|_| run())?;
            b.synchronize()?;
            fastest = fastest.min(start.elapsed().as_secs_f64() / TIMES as f64);
        }
        Ok(fastest)
    };
    let product = best(&|| b.linear(&x, &w).map(drop))?;
    let eight = [&x; 8];
    let copy = best(&|| b.concat_rows(&eight).map(drop))?;
    let bytes = 2 * 8 * SIDE * SIDE * 2;
    Ok([(PRODUCTS, 2.0 * (SIDE as f64).powi(3) / product), (COPY, bytes as f64 / copy)].into())
}
