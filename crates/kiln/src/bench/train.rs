//! Measures training steps, as `kiln train` takes them.

use std::thread;
use std::time::Instant;

use kiln_engine::{DeviceInfo, Model, TrainingVisitor};
use kiln_nn::ResidencyPlan;
use kiln_nn::transformer::Transformer;
use kiln_ops::TrainingBackend;
use kiln_tensor::DType;
use kiln_train::{Example, ReferenceLatents, TrainSettings, Trainer};

use super::memory::MemorySampler;
use super::phases::noise;
use super::plan::{BenchPlan, TUNING_RUNS};
use super::report::{BenchReport, PhaseResult};
use crate::args::BenchArgs;
use crate::error::CliError;

/// Measures steps of a LoRA training on a backend.
pub struct TrainBench<'a> {
    pub args: &'a BenchArgs,
}

impl TrainingVisitor for TrainBench<'_> {
    type Output = Result<BenchReport, CliError>;

    fn visit<B: TrainingBackend + 'static>(self, b: B, device: DeviceInfo<B>) -> Self::Output {
        let args = self.args;
        let plan = BenchPlan::new(args, &device)?;
        let mut report = BenchReport::new(args, &plan, b.name());
        let model = plan.source.model(1)?;
        let (component, weights) = (&model.transformer, model.transformer.weights()?);
        let vars = weights.root().with_precision(plan.linear_precision);
        let start = Instant::now();
        let residency = ResidencyPlan::all_on_device();
        let transformer = Transformer::load(&b, &vars, &component.config, plan.dtype, &residency)?;
        b.synchronize()?;
        report.loaded("transformer", start.elapsed().as_secs_f64(), weights);
        let settings = TrainSettings {
            bf16: plan.dtype == DType::BF16,
            checkpointing: args.checkpointing,
            ..TrainSettings::default()
        };
        let mut trainer = Trainer::new(&b, transformer, settings.clone())?;
        let example = example(&plan, &model)?;
        let batch: Vec<Example> = vec![example; plan.batch];
        report.begin("training step");
        device.release_memory(&b);
        let sampler = MemorySampler::start();
        let warm_up = if device.is_asynchronous { 1 + TUNING_RUNS } else { 1 };
        let mut seconds = Vec::with_capacity(plan.repeat);
        let mut prepared = settings.prepare(0, &[&batch])?;
        for run in 0..warm_up + plan.repeat {
            let start = Instant::now();
            // The next step's noise is drawn meanwhile, as in a training.
            let next = thread::scope(|scope| {
                let next = scope.spawn(|| settings.prepare(run as u64 + 1, &[&batch]));
                trainer.step_prepared(&prepared)?;
                b.synchronize()?;
                next.join().map_err(|_| CliError::new("drawing noise failed"))?.map_err(CliError::from)
            })?;
            prepared = next;
            if run >= warm_up {
                seconds.push(start.elapsed().as_secs_f64());
            }
        }
        let synthetic = weights.synthetic_bytes().map_or(0, |(_, distinct)| distinct);
        let memory = if device.is_asynchronous {
            Some(device.counters(&b).peak_memory)
        } else {
            sampler.peak().map(|peak| peak.saturating_sub(synthetic))
        };
        // Operations are timed in a step of their own, which waits for each.
        let timer = device.timer(&b);
        timer.pause(false);
        trainer.step(&[&batch])?;
        report.phase(PhaseResult::new("training step", seconds, memory, timer.take(), 1));
        Ok(report)
    }
}

/// An example of the plan's size, with noise as latents and text.
fn example(plan: &BenchPlan, model: &Model) -> Result<Example, CliError> {
    let config = &model.transformer.config;
    let [height, width] = model.grid([plan.width, plan.height]);
    let latents = noise([height * width, config.in_channels])?;
    let reference = ReferenceLatents { latents: latents.clone(), height, width };
    // In the dtype of activations, as the cache of `kiln train` keeps it.
    let text = noise([plan.text_tokens, config.joint_attention_dim])?;
    let text = text.to_dtype(plan.dtype).map_err(|e| CliError::new(e.to_string()))?;
    Ok(Example { latents, height, width, references: vec![reference; plan.references], text })
}
