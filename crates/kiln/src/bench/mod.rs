//! `kiln bench`: how fast this machine runs a model, phase by phase and operation by operation.

mod cuda;
mod memory;
mod phases;
mod report;
#[cfg(feature = "serve")]
mod server;
mod sizes;
mod source;
mod table;

use std::collections::BTreeMap;

use kiln_cpu::{CpuBackend, Isa, Peak, Peaks};
use kiln_ops::{Backend, Timed};
use kiln_tensor::DType;
use kiln_weights::LinearForm;

use crate::args::{BenchArgs, DTypeArg, SizeArg};
use crate::failure::Failure;
use crate::models::Found;
use crate::values::Device;
use crate::{backend, machine};
use phases::{Bench, Plan};
use report::Report;
use sizes::Sizes;
use source::Source;

/// Memory that stays free for the work itself when weights are made up.
const FOR_WORK: u64 = 4 << 30;

pub fn run(args: &BenchArgs) -> Result<(), Failure> {
    #[cfg(feature = "serve")]
    if args.server {
        return server::run(args);
    }
    match args.machine.device {
        Some(Device::Cuda(number)) => cuda::run(args, number),
        _ => on_cpu(args),
    }
}

fn on_cpu(args: &BenchArgs) -> Result<(), Failure> {
    let backend = backend::cpu(&args.machine)?;
    let peaks = Peaks::measure(backend.threads());
    if args.peaks {
        return print_peaks(args, &backend, &peaks);
    }
    let source = source(args)?;
    let dtype = match (args.machine.dtype.unwrap_or_default(), &source) {
        (DTypeArg::F32, _) => DType::F32,
        (DTypeArg::Bf16 | DTypeArg::Int8, _) => DType::BF16,
        (DTypeArg::Fp8, _) => {
            return Err(Failure::new("the CPU has no products of 8-bit floats").hint("say --dtype int8"));
        }
        (DTypeArg::Auto, Source::Folder(folder)) => backend::suitable_dtype(backend.isa(), folder),
        // Weights that are made up have 16 bits.
        (DTypeArg::Auto, Source::Synthetic { .. }) if backend.isa().multiplies_bf16() => DType::BF16,
        (DTypeArg::Auto, Source::Synthetic { .. }) => DType::F32,
    };
    let plan = plan(args, source, dtype, backend.threads());
    let mut report = report(args, &plan, backend.name());
    let products = if matches!(plan.form, LinearForm::Int8 { .. }) { DType::I8 } else { dtype };
    report.peaks(&peaks, ceiling(&peaks, backend.isa(), products));
    finish(args, Bench { plan: &plan, b: Timed::new(backend), report, device: None })
}

/// What the arguments ask for.
fn plan(args: &BenchArgs, source: Source, dtype: DType, threads: usize) -> Plan {
    let form = match args.machine.dtype {
        Some(DTypeArg::Int8) => LinearForm::Int8 { threads },
        Some(DTypeArg::Fp8) => LinearForm::Fp8,
        _ => LinearForm::Float,
    };
    let (width, height) = args.size.unwrap_or((512, 512));
    Plan {
        source,
        dtype,
        form,
        loras: args.loras.clone(),
        width,
        height,
        references: args.refs as usize,
        batch: args.batch as usize,
        text_tokens: args.max_tokens.map_or(512, |n| n as usize),
        repeat: args.repeat.unwrap_or(3),
        phases: args.phases.clone(),
        placement: None,
    }
}

/// A report on nothing yet.
fn report(args: &BenchArgs, plan: &Plan, backend: String) -> Report {
    Report {
        kiln: env!("CARGO_PKG_VERSION"),
        model: plan.source.name(),
        backend,
        dtype: match plan.form {
            LinearForm::Int8 { .. } => "int8".into(),
            LinearForm::Fp8 | LinearForm::StoredFp8 => "fp8".into(),
            LinearForm::Float => plan.dtype.to_string(),
        },
        width: plan.width,
        height: plan.height,
        references: plan.references,
        text_tokens: plan.text_tokens,
        peaks: BTreeMap::new(),
        compute_peak: None,
        memory_peak: None,
        load: Vec::new(),
        phases: Vec::new(),
        memory_beyond_weights: None,
        notes: Vec::new(),
        quiet: args.json,
    }
}

fn finish<B: Backend>(args: &BenchArgs, bench: Bench<'_, B>) -> Result<(), Failure> {
    let report = bench.run()?;
    let text = if args.json { report.to_json() } else { report.to_text(args.verbose) };
    crate::print(text.as_bytes())
}

fn source(args: &BenchArgs) -> Result<Source, Failure> {
    if let Some(path) = &args.model {
        return Ok(Source::Folder(Box::new(Found::find(Some(path))?.open()?)));
    }
    let size = args.synthetic.unwrap_or(SizeArg::Klein4b);
    let sizes = Sizes::of(size).map_err(|e| Failure::new(format!("the sizes of {size:?}: {e}")))?;
    let available = machine::memory_limit().unwrap_or(u64::MAX);
    let budget = available.saturating_sub(FOR_WORK.min(available / 2));
    Ok(Source::Synthetic { sizes: Box::new(sizes), budget })
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

fn print_peaks(args: &BenchArgs, backend: &CpuBackend, peaks: &Peaks) -> Result<(), Failure> {
    let rates: BTreeMap<_, _> = peaks.all().map(|peak| (peak.name, peak.rate)).collect();
    let text = match args.json {
        true => {
            let json = serde_json::json!({ "threads": backend.threads(), "peaks": rates });
            format!("{json:#}\n")
        }
        false => format!("{} threads at once\n\n{}", backend.threads(), report::peaks_table(&rates)),
    };
    crate::print(text.as_bytes())
}

/// `512x384`
pub fn parse_size(text: &str) -> Result<(usize, usize), String> {
    let wrong = || "expected WIDTHxHEIGHT in pixels, multiples of 16 such as 1024x768".to_owned();
    let (width, height) = text.split_once(['x', '×']).ok_or_else(wrong)?;
    let side = |text: &str| text.parse::<usize>().ok().filter(|n| *n >= 16 && n % 16 == 0 && *n <= 16_384);
    Ok((side(width).ok_or_else(wrong)?, side(height).ok_or_else(wrong)?))
}
