//! `kiln bench`: measures a model phase by phase, whole images through the engine, requests through a server, and training
//! steps.

mod config;
mod image;
pub mod memory;
mod peaks;
mod phases;
mod report;
#[cfg(feature = "serve")]
mod server;
mod source;
mod table;
mod train;

use std::collections::BTreeMap;
use std::sync::Arc;

use kiln_engine::{
    BackendVisitor, DeviceInfo, Precision, Settings, machine, plan_residency, with_backend,
    with_training_backend,
};
use kiln_family::FAMILIES;
use kiln_ops::Backend;
use kiln_weights::LinearPrecision;

use crate::args::{BenchArgs, PhaseArg, SizeArg};
use crate::error::{CliError, ErrorContext};
use crate::{hints, models};
use config::ModelConfig;
use phases::{BenchPlan, PhaseBench};
use report::BenchReport;
use source::ModelSource;

/// Memory left for activations when creating synthetic weights.
const ACTIVATION_MEMORY: u64 = 4 << 30;

pub fn run(args: &BenchArgs) -> Result<(), CliError> {
    #[cfg(feature = "serve")]
    if args.server {
        return server::run(args);
    }
    let settings = settings(args)?;
    // Before weights are created, which takes long.
    for lora in &args.loras {
        kiln_weights::Lora::open(&lora.path).with_context(|| "reading a LoRA".into())?;
    }
    if args.train {
        let report = with_training_backend(&settings, train::TrainBench { args })??;
        let text = if args.json { report.to_json() } else { report.to_text(args.verbose) };
        return crate::print(text.as_bytes());
    }
    let Some((plan, mut report)) = with_backend(&settings, BenchVisitor { args })?? else { return Ok(()) };
    if plan.phases.contains(&PhaseArg::Image) {
        image::measure(args, &settings, &plan, &mut report)?;
    }
    let text = if args.json { report.to_json() } else { report.to_text(args.verbose) };
    crate::print(text.as_bytes())
}

fn settings(args: &BenchArgs) -> Result<Settings, CliError> {
    let mut settings = Settings { graphs: args.graphs, ..args.machine.settings()? };
    if settings.device == kiln_engine::Device::Auto {
        settings.device = kiln_engine::Device::Cpu;
    }
    Ok(settings)
}

/// Measures the phases on a backend. With `--peaks`, prints the machine's peaks and returns nothing.
struct BenchVisitor<'a> {
    args: &'a BenchArgs,
}

impl BackendVisitor for BenchVisitor<'_> {
    type Output = Result<Option<(BenchPlan, BenchReport)>, CliError>;

    fn visit<B: Backend + 'static>(self, backend: B, device: DeviceInfo<B>) -> Self::Output {
        let args = self.args;
        if args.peaks {
            peaks::print(args, &backend, &device)?;
            return Ok(None);
        }
        let precision = args.machine.dtype.unwrap_or_default();
        if precision == Precision::Fp8 && !device.has_fp8 {
            let name = backend.name();
            return Err(
                CliError::new(format!("{name} does not support fp8")).hint("use --dtype int8 on a CPU")
            );
        }
        // Before any weights are created: a limit that is too low is an error at once.
        let mut plan = plan(args, source(args)?, &device)?;
        if let Some(limit) = args.machine.vram_limit.filter(|_| device.is_asynchronous) {
            let model = plan.source.model(1)?;
            let others = plan.text_tokens + plan.references * model.grid_tokens([plan.width, plan.height]);
            let estimate = model.memory_estimate([plan.width, plan.height], others, plan.dtype);
            plan.residency =
                Some(plan_residency(model.weight_bytes(plan.linear_precision), &estimate, limit)?);
        }
        let mut report = report(args, &plan, backend.name());
        peaks::fill(&mut report, args, &plan, &backend, &device)?;
        device.release_memory(&backend);
        if let Some(residency) = plan.residency {
            report.note(residency.to_string());
        }
        let only_image = !plan.phases.is_empty() && plan.phases.iter().all(|p| *p == PhaseArg::Image);
        if !only_image {
            report = PhaseBench { plan: &plan, b: backend, report, device }.run()?;
        }
        Ok(Some((plan, report)))
    }
}

/// Builds the plan from the arguments.
fn plan<B>(args: &BenchArgs, source: ModelSource, device: &DeviceInfo<B>) -> Result<BenchPlan, CliError> {
    let threads = device.threads;
    let precision = match args.machine.dtype.unwrap_or_default() {
        Precision::Auto => device.default_precision(&*source.model(1)?),
        precision => precision,
    };
    let linear_precision = match precision {
        Precision::Int8 => LinearPrecision::Int8 { threads },
        Precision::Fp8 => LinearPrecision::Fp8,
        _ => LinearPrecision::Float,
    };
    let (width, height) = args.size.unwrap_or((512, 512));
    let text_tokens = match args.max_tokens {
        Some(tokens) => tokens as usize,
        None => source.model(1)?.default_tokens(),
    };
    Ok(BenchPlan {
        source,
        dtype: precision.dtype(),
        linear_precision,
        loras: args.loras.clone(),
        width,
        height,
        references: args.refs as usize,
        batch: args.batch as usize,
        text_tokens,
        repeat: args.repeat.unwrap_or(3) as usize,
        phases: args.phases.clone(),
        residency: None,
    })
}

/// Returns an empty report.
fn report(args: &BenchArgs, plan: &BenchPlan, backend: String) -> BenchReport {
    BenchReport {
        kiln: env!("CARGO_PKG_VERSION"),
        model: plan.source.name(),
        backend,
        dtype: match plan.linear_precision {
            LinearPrecision::Int8 { .. } => "int8".into(),
            LinearPrecision::Fp8 | LinearPrecision::StoredFp8 => "fp8".into(),
            LinearPrecision::Float => plan.dtype.to_string(),
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

fn source(args: &BenchArgs) -> Result<ModelSource, CliError> {
    if let Some(path) = &args.model {
        let model = models::resolve(Some(path))?.open()?;
        hints::refuse_ambiguous(&model, false)?;
        return Ok(ModelSource::Files(Arc::new(model)));
    }
    let size = args.synthetic.unwrap_or(SizeArg::Klein4b);
    let config =
        ModelConfig::new(size).map_err(|e| CliError::new(format!("invalid config of {size:?}: {e}")))?;
    let available = machine::memory_limit().unwrap_or(u64::MAX);
    let budget = available.saturating_sub(ACTIVATION_MEMORY.min(available / 2));
    Ok(ModelSource::Synthetic { config: Box::new(config), budget, stored: args.stored })
}

/// Parses `512x384`.
pub fn parse_size(text: &str) -> Result<(usize, usize), String> {
    let unit = FAMILIES[0].latent.pixels_per_token();
    let invalid = || format!("expected WIDTHxHEIGHT in pixels, multiples of {unit}, such as 1024x768");
    let (width, height) = text.split_once(['x', '×']).ok_or_else(invalid)?;
    let side =
        |text: &str| text.parse::<usize>().ok().filter(|n| *n >= unit && n % unit == 0 && *n <= 16_384);
    Ok((side(width).ok_or_else(invalid)?, side(height).ok_or_else(invalid)?))
}
