//! `kiln bench`: measures a model phase by phase, whole images through the engine, requests through a server, and training
//! steps.

mod config;
pub mod image;
pub mod memory;
mod peaks;
mod phases;
pub mod plan;
mod report;
pub mod source;
mod table;
mod train;

use kiln_engine::{
    BackendVisitor, DeviceInfo, Precision, plan_residency, with_backend, with_training_backend,
};
use kiln_ops::Backend;

use crate::args::{BenchArgs, PhaseArg};
use crate::error::{CliError, ErrorContext};
use crate::output;
use phases::PhaseBench;
use plan::BenchPlan;
use report::BenchReport;

pub fn run(args: &BenchArgs) -> Result<(), CliError> {
    let settings = plan::settings(args)?;
    // Before weights are created, which takes long.
    for lora in &args.loras {
        kiln_weights::Lora::open(&lora.path).with_context(|| "reading a LoRA".into())?;
    }
    if args.train {
        let report = with_training_backend(&settings, train::TrainBench { args })??;
        let text = if args.json { report.to_json() } else { report.to_text(args.verbose) };
        return output::print(text.as_bytes());
    }
    let Some((plan, mut report)) = with_backend(&settings, BenchVisitor { args })?? else { return Ok(()) };
    if plan.phases.contains(&PhaseArg::Image) {
        image::measure(args, &settings, &plan, &mut report)?;
    }
    let text = if args.json { report.to_json() } else { report.to_text(args.verbose) };
    output::print(text.as_bytes())
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
        let mut plan = BenchPlan::new(args, &device)?;
        if let Some(limit) = args.machine.vram_limit.filter(|_| device.is_asynchronous) {
            let model = plan.source.model(1)?;
            let others = plan.text_tokens + plan.references * model.grid_tokens([plan.width, plan.height]);
            let estimate = model.memory_estimate([plan.width, plan.height], others, plan.dtype);
            plan.residency =
                Some(plan_residency(model.weight_bytes(plan.linear_precision), &estimate, limit)?);
        }
        let mut report = BenchReport::new(args, &plan, backend.name());
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
