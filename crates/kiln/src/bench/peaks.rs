//! The ceilings that operations are held against: the CPU's units, or what a GPU's own products and copies reach.

use std::collections::BTreeMap;
use std::time::Instant;

use kiln_cpu::{Peak, Peaks};
use kiln_engine::{DeviceInfo, Isa};
use kiln_ops::Backend;
use kiln_tensor::{DType, HostTensor, LinearParts, bf16};
use kiln_weights::LinearForm;

use super::Plan;
use super::report::{Report, peaks_table};
use crate::args::BenchArgs;
use crate::failure::Failure;

const PRODUCTS: &str = "bf16 products";
const COPY: &str = "memory copy";
/// What measuring a device's ceilings takes.
const BYTES: u64 = 3 << 29;

/// Prints the ceilings alone.
pub fn print<B: Backend>(args: &BenchArgs, backend: &B, device: &DeviceInfo<B>) -> Result<(), Failure> {
    let (rates, title) = match device.isa {
        Some(_) => {
            let peaks = Peaks::measure(device.threads);
            let rates = peaks.all().map(|peak| (peak.name, peak.rate)).collect();
            (rates, format!("{} threads at once", device.threads))
        }
        None => (of_device(backend)?, backend.name()),
    };
    let text = match args.json {
        true => {
            let json = serde_json::json!({ "threads": device.threads, "peaks": rates });
            format!("{json:#}\n")
        }
        false => format!("{title}\n\n{}", peaks_table(&rates)),
    };
    crate::print(text.as_bytes())
}

/// Measures the ceilings and takes them into a report.
pub fn fill<B: Backend>(
    report: &mut Report,
    args: &BenchArgs,
    plan: &Plan,
    backend: &B,
    device: &DeviceInfo<B>,
) -> Result<(), Failure> {
    let Some(isa) = device.isa else {
        if args.machine.vram_limit.is_none_or(|limit| limit >= BYTES) {
            report.peaks = of_device(backend)?;
        }
        report.compute_peak = (plan.dtype == DType::BF16).then_some(PRODUCTS);
        report.memory_peak = Some(COPY);
        report.note("operations were timed one at a time; memory is all that the GPU's own is taken up with");
        return Ok(());
    };
    let peaks = Peaks::measure(device.threads);
    let products = if matches!(plan.form, LinearForm::Int8 { .. }) { DType::I8 } else { plan.dtype };
    report.peaks(&peaks, ceiling(&peaks, isa, products));
    Ok(())
}

/// The peak of the unit that products of this dtype run on.
fn ceiling(peaks: &Peaks, isa: Isa, dtype: DType) -> Option<&Peak> {
    match (isa, dtype) {
        (Isa::Portable, _) => None,
        (Isa::Amx, DType::BF16) => peaks.amx_bf16.as_ref(),
        (Isa::Amx, DType::I8) => peaks.amx_int8.as_ref(),
        _ => peaks.fma_f32.as_ref(),
    }
}

/// What large products, and copies within the device's memory, reach: the best of several.
fn of_device<B: Backend>(b: &B) -> Result<BTreeMap<&'static str, f64>, Failure> {
    const SIDE: usize = 8192;
    const TIMES: usize = 8;
    // Neither zeros nor all the same: both would flatter.
    let value = |i: usize| bf16::from_f32((i.wrapping_mul(2_654_435_761) >> 7 & 0x3ff) as f32 / 512.0 - 1.0);
    let values: Vec<bf16> = (0..SIDE * SIDE).map(value).collect();
    let wrong = |e: &dyn std::fmt::Display| Failure::new(e.to_string());
    let host = HostTensor::from_bf16([SIDE, SIDE], values).map_err(|e| wrong(&e))?;
    let x = b.upload(&host, DType::BF16)?;
    let w = b.weight(LinearParts::dense(vec![host]).map_err(|e| wrong(&e))?, kiln_ops::Residency::Device)?;
    let best = |run: &dyn Fn() -> kiln_ops::Result<()>| -> Result<f64, Failure> {
        run()?;
        let mut least = f64::INFINITY;
        for _ in 0..5 {
            b.synchronize()?;
            let start = Instant::now();
            (0..TIMES).try_for_each(|_| run())?;
            b.synchronize()?;
            least = least.min(start.elapsed().as_secs_f64() / TIMES as f64);
        }
        Ok(least)
    };
    let product = best(&|| b.linear(&x, &w).map(drop))?;
    let eight = [&x; 8];
    let copy = best(&|| b.concat_rows(&eight).map(drop))?;
    let bytes = 2 * 8 * SIDE * SIDE * 2;
    Ok([(PRODUCTS, 2.0 * (SIDE as f64).powi(3) / product), (COPY, bytes as f64 / copy)].into())
}
