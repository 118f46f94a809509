//! One measurement: the phases of an image, or training steps, on the backend that the arguments name.

use kiln_engine::{
    BackendVisitor, DeviceInfo, Precision, plan_residency, with_backend, with_training_backend,
};
use kiln_ops::Backend;

use super::phases::PhaseBench;
use super::plan::{self, BenchPlan};
use super::report::BenchReport;
use super::train::TrainBench;
use super::{image, peaks};
use crate::args::{BenchArgs, PhaseArg};
use crate::error::{CliError, ErrorContext};

/// Measures steps of a training.
pub fn training(args: &BenchArgs) -> Result<BenchReport, CliError> {
    with_training_backend(&plan::settings(args)?, TrainBench { args })?
}

/// Measures the phases of an image. With `--peaks`, prints the machine's peaks and returns nothing.
pub fn phases(args: &BenchArgs) -> Result<Option<BenchReport>, CliError> {
    let settings = plan::settings(args)?;
    // Before weights are created, which takes long.
    for lora in &args.loras {
        kiln_weights::Lora::open(&lora.path).with_context(|| "reading a LoRA".into())?;
    }
    let Some((plan, mut report)) = with_backend(&settings, BenchVisitor { args })?? else { return Ok(None) };
    if plan.phases.contains(&PhaseArg::Image) {
        image::measure(args, &settings, &plan, &mut report)?;
    }
    Ok(Some(report))
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
