//! What `kiln bench` measures, from its arguments.

use std::sync::Arc;

use kiln_engine::{Device, DeviceInfo, LoraRef, Precision, Settings, WeightResidency, machine};
use kiln_tensor::DType;
use kiln_weights::LinearPrecision;

use super::config::ModelConfig;
use super::source::ModelSource;
use crate::args::{BenchArgs, PhaseArg, SizeArg};
use crate::error::CliError;
use crate::models;

/// Memory left for activations when creating synthetic weights.
const ACTIVATION_MEMORY: u64 = 4 << 30;

/// Unmeasured runs on a GPU after the first: the backend may use them to choose kernels and graphs.
pub const TUNING_RUNS: usize = 4;

/// What to measure.
pub struct BenchPlan {
    pub source: ModelSource,
    pub dtype: DType,
    /// Precision of the transformer's linear layers.
    pub linear_precision: LinearPrecision,
    pub loras: Vec<LoraRef>,
    pub width: usize,
    pub height: usize,
    pub references: usize,
    /// Images per step.
    pub batch: usize,
    pub text_tokens: usize,
    /// Measured runs, after a warm-up run.
    pub repeat: usize,
    pub phases: Vec<PhaseArg>,
    /// Which weights stay on the device; `None` for all.
    pub residency: Option<WeightResidency>,
}

impl BenchPlan {
    /// Builds the plan from the arguments.
    pub fn new<B>(args: &BenchArgs, device: &DeviceInfo<B>) -> Result<BenchPlan, CliError> {
        let source = source(args)?;
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
}

/// The engine's settings. Without a device, measures the CPU.
pub fn settings(args: &BenchArgs) -> Result<Settings, CliError> {
    let mut settings = Settings { graphs: args.graphs, ..args.machine.settings()? };
    if settings.device == Device::Auto {
        settings.device = Device::Cpu;
    }
    Ok(settings)
}

/// The model to measure.
pub fn source(args: &BenchArgs) -> Result<ModelSource, CliError> {
    if let Some(path) = &args.model {
        let model = models::resolve(Some(path))?.open()?;
        models::refuse_ambiguous(&model, false)?;
        return Ok(ModelSource::Files(Arc::new(model)));
    }
    let size = args.synthetic.unwrap_or(SizeArg::Klein4b);
    let config =
        ModelConfig::new(size).map_err(|e| CliError::new(format!("invalid config of {size:?}: {e}")))?;
    let available = machine::memory_limit().unwrap_or(u64::MAX);
    let budget = available.saturating_sub(ACTIVATION_MEMORY.min(available / 2));
    Ok(ModelSource::Synthetic { config: Box::new(config), budget, stored: args.stored })
}
