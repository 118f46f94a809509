//! `kiln bench`: how fast this machine runs a model, phase by phase, and whole images through the engine.

mod image;
mod memory;
mod peaks;
mod phases;
mod report;
#[cfg(feature = "serve")]
mod server;
mod sizes;
mod source;
mod table;

use std::collections::BTreeMap;
use std::sync::Arc;

use kiln_engine::{DeviceInfo, Precision, Settings, WithBackend, machine, place, with_backend};
use kiln_ops::{Backend, Timed};
use kiln_weights::LinearForm;

use crate::args::{BenchArgs, PhaseArg, SizeArg};
use crate::failure::Failure;
use crate::models::Found;
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
    let settings = settings(args);
    let Some((plan, mut report)) = with_backend(&settings, Phases { args })?? else { return Ok(()) };
    if plan.phases.contains(&PhaseArg::Picture) {
        image::measure(args, &settings, &plan, &mut report)?;
    }
    let text = if args.json { report.to_json() } else { report.to_text(args.verbose) };
    crate::print(text.as_bytes())
}

fn settings(args: &BenchArgs) -> Settings {
    let mut settings = Settings { graphs: args.graphs, ..args.machine.settings() };
    if settings.device == kiln_engine::Device::Auto {
        settings.device = kiln_engine::Device::Cpu;
    }
    settings
}

/// Measures the phases, or prints the machine's ceilings and gives nothing.
struct Phases<'a> {
    args: &'a BenchArgs,
}

impl WithBackend for Phases<'_> {
    type Result = Result<Option<(Plan, Report)>, Failure>;

    fn with<B: Backend + 'static>(self, backend: B, device: DeviceInfo<B>) -> Self::Result {
        let args = self.args;
        if args.peaks {
            peaks::print(args, &backend, &device)?;
            return Ok(None);
        }
        let precision = args.machine.dtype.unwrap_or_default();
        if precision == Precision::Fp8 && !device.has_fp8 {
            let name = backend.name();
            return Err(Failure::new(format!("{name} has no products of 8-bit floats"))
                .hint("say --dtype int8 on a CPU"));
        }
        // Before anything is made: a limit that can't be kept is refused at once.
        let mut plan = plan(args, source(args)?, &device)?;
        if let Some(limit) = args.machine.vram_limit.filter(|_| device.is_asynchronous) {
            let model = plan.source.model(1)?;
            let others = plan.text_tokens + plan.references * plan.width * plan.height / 256;
            let need = model.memory_need([plan.width, plan.height], others, plan.dtype);
            plan.placement = Some(place(model.weight_bytes(plan.form), &need, limit)?);
        }
        let mut report = report(args, &plan, backend.name());
        peaks::fill(&mut report, args, &plan, &backend, &device)?;
        device.release_memory(&backend);
        if let Some(placement) = plan.placement {
            report.note(placement.to_string());
        }
        let only_whole = !plan.phases.is_empty() && plan.phases.iter().all(|p| *p == PhaseArg::Picture);
        if !only_whole {
            report = Bench { plan: &plan, b: Timed::new(backend), report, device }.run()?;
        }
        Ok(Some((plan, report)))
    }
}

/// What the arguments ask for.
fn plan<B>(args: &BenchArgs, source: Source, device: &DeviceInfo<B>) -> Result<Plan, Failure> {
    let threads = device.threads;
    let precision = match args.machine.dtype.unwrap_or_default() {
        Precision::Auto => device.suitable_precision(&*source.model(1)?),
        asked => asked,
    };
    let form = match precision {
        Precision::Int8 => LinearForm::Int8 { threads },
        Precision::Fp8 => LinearForm::Fp8,
        _ => LinearForm::Float,
    };
    let (width, height) = args.size.unwrap_or((512, 512));
    Ok(Plan {
        source,
        dtype: precision.dtype(),
        form,
        loras: args.loras.clone(),
        width,
        height,
        references: args.refs as usize,
        batch: args.batch as usize,
        text_tokens: args.max_tokens.map_or(512, |n| n as usize),
        repeat: args.repeat.unwrap_or(3) as usize,
        phases: args.phases.clone(),
        placement: None,
    })
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

fn source(args: &BenchArgs) -> Result<Source, Failure> {
    if let Some(path) = &args.model {
        return Ok(Source::Model(Arc::new(Found::find(Some(path))?.open()?)));
    }
    let size = args.synthetic.unwrap_or(SizeArg::Klein4b);
    let sizes = Sizes::of(size).map_err(|e| Failure::new(format!("the sizes of {size:?}: {e}")))?;
    let available = machine::memory_limit().unwrap_or(u64::MAX);
    let budget = available.saturating_sub(FOR_WORK.min(available / 2));
    Ok(Source::Synthetic { sizes: Box::new(sizes), budget })
}

/// `512x384`
pub fn parse_size(text: &str) -> Result<(usize, usize), String> {
    let wrong = || "expected WIDTHxHEIGHT in pixels, multiples of 16 such as 1024x768".to_owned();
    let (width, height) = text.split_once(['x', '×']).ok_or_else(wrong)?;
    let side = |text: &str| text.parse::<usize>().ok().filter(|n| *n >= 16 && n % 16 == 0 && *n <= 16_384);
    Ok((side(width).ok_or_else(wrong)?, side(height).ok_or_else(wrong)?))
}
