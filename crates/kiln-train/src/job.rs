//! A whole training, for the command line, the server and Python: check it, encode what is missing, load the transformer,
//! take the steps.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use kiln_engine::{
    Device, DeviceInfo, ErrorKind, Field, Model, Settings, SharedDevice, TrainingVisitor, VariantSource,
    WeightBytes, hint, machine, probe_gpus, with_training_backend,
};
use kiln_nn::ResidencyPlan;
use kiln_nn::transformer::Transformer;
use kiln_ops::TrainingBackend;
use kiln_weights::LoraNaming;

use crate::cache::Cache;
use crate::checkpoint::{RunRecord, SavedState, load_state};
use crate::dataset::{Dataset, Draw, Order};
use crate::encode::{Encoders, EncodingStage};
use crate::estimate::CostEstimate;
use crate::output::{RunFiles, RunLock};
use crate::run::{Outcome, RunOptions, Status, Watcher, run};
use crate::samples::Sampler;
use crate::{AdapterKind, BasePrecision, Error, Example, Result, TrainSettings, Trainer};

/// Noise levels at which the loss is compared before and after a training.
const LEVELS: [f32; 4] = [0.3, 0.5, 0.7, 0.9];

/// Bytes of GPU memory for workspaces and operations that are tried out.
const RESERVE: u64 = 512 << 20;
/// Streamed weights that are on the GPU at once.
const STREAMED_AT_ONCE: u64 = 3;

/// Everything that a training needs.
pub struct TrainJob {
    /// The base model.
    pub model: Arc<Model>,
    /// What to learn.
    pub data: Dataset,
    /// The folder of encoded images and texts.
    pub cache: PathBuf,
    /// The trainer's settings.
    pub settings: TrainSettings,
    /// Whether to choose checkpointing by the device's memory.
    pub auto_checkpointing: bool,
    /// Examples of a batch.
    pub batch: usize,
    /// Batches of a step.
    pub accumulation: usize,
    /// Steps, checkpoints and samples.
    pub options: RunOptions,
    /// The files to write.
    pub files: RunFiles,
    /// Whether to continue from the state in the files.
    pub resume: bool,
    /// Whether a new training may replace the files.
    pub overwrite: bool,
    /// The device and its settings, as from [`with_default_device`].
    pub machine: Settings,
    /// That device, if image jobs use it, too.
    pub shared: Option<SharedDevice>,
}

impl TrainJob {
    /// Checks what can be checked without loading or writing anything, and estimates the costs.
    pub fn check(&self) -> Result<CostEstimate> {
        let output = &self.files.output;
        if !output.extension().is_some_and(|e| e.eq_ignore_ascii_case("safetensors")) {
            let what = format!("a LoRA is a .safetensors file, the output is `{}`", output.display());
            return Err(Error::Settings(what));
        }
        let is_fused = self.options.format.naming != LoraNaming::Diffusers;
        if self.settings.adapter.kind == AdapterKind::Lokr && is_fused {
            let what = "a LoKr can't be written with names of fused q, k and v; Kiln, diffusers and ComfyUI read it with diffusers'";
            return Err(Error::Settings(what.into()));
        }
        CostEstimate::new(&self.model, &self.data, &self.settings, self.batch)
    }

    /// Checks what the run would refuse at its start: the files to write, and what the device can't compute. Nothing is
    /// written.
    pub fn check_run(&self) -> Result<()> {
        self.files.check(self.resume, self.overwrite)?;
        with_training_backend(&self.machine, DeviceCheck { base: self.settings.base })?
    }

    /// Checks that nothing is overwritten by accident and that the disk has room, creates the folder and locks it.
    pub fn prepare_files(&self, estimate: &CostEstimate) -> Result<RunLock> {
        let lock = self.files.prepare(self.resume, self.overwrite)?;
        self.files.check_space(estimate.disk(self.options.steps.div_ceil(self.options.save_every)))?;
        Ok(lock)
    }

    /// Trains to the end, or until the watcher cancels. `_lock` is that of [`TrainJob::prepare_files`], held until then.
    pub fn run(
        self,
        _lock: RunLock,
        sampler: Option<Sampler>,
        watcher: &mut dyn JobWatcher,
    ) -> Result<Outcome> {
        match self.shared.clone() {
            Some(device) => device.accept_training(RunningJob { job: self, sampler, watcher }),
            None => {
                let machine = self.machine.clone();
                with_training_backend(&machine, RunningJob { job: self, sampler, watcher })?
            }
        }
    }
}

/// `settings` with a device: the first GPU if there is one and none is named, else the CPU.
pub fn with_default_device(mut settings: Settings) -> Settings {
    if settings.device == Device::Auto {
        settings.device = if probe_gpus().usable { Device::Cuda(0) } else { Device::Cpu };
    }
    settings
}

struct RunningJob<'w> {
    job: TrainJob,
    sampler: Option<Sampler>,
    watcher: &'w mut dyn JobWatcher,
}

/// Follows a whole training.
pub trait JobWatcher: Watcher {
    /// `done` of `total` images or captions are encoded.
    fn encoding(&mut self, stage: EncodingStage, done: usize, total: usize);

    /// Something the user should know.
    fn note(&mut self, text: &str);

    /// The transformer is loaded on this device, and its steps take this many bytes of activations.
    fn loaded(&mut self, device: SharedDevice, activations: u64) {
        let _ = (device, activations);
    }

    /// The steps begin, after this many.
    fn starting(&mut self, step: u64);

    /// Samples of this step were generated, onto the sheet at this path, or could not be. An error stops the training.
    fn sampled(&mut self, step: u64, sheet: Result<PathBuf>) -> Result<()>;
}

/// Refuses to train on a distilled model.
pub fn check_variant(model: &Model) -> Result<()> {
    if !model.variant.is_distilled {
        return Ok(());
    }
    let what = format!(
        "`{}` is {}, a distilled model: training undoes the distillation, and its images turn grey and blurred",
        model.recorded_name(),
        model.described_variant()
    );
    let base = base_name(&model.recorded_name());
    let hint = match model.variant_source {
        VariantSource::Stated => hint![
            "train on the base model (",
            Field::Model.to(base),
            ") and use the LoRA with the distilled one"
        ],
        _ => hint![
            "if it is a base model, say so with ", Field::Variant.to("base");
            "train on one (", Field::Model.to(base), ")"
        ],
    };
    Err(Error::data(what).with_hint(hint.or(hint!["train it anyway with ", Field::DistilledAnyway.on()])))
}

/// The base model of a distilled one, by its name or path.
fn base_name(distilled: &str) -> &'static str {
    let name = distilled.rsplit(std::path::is_separator).next().unwrap_or(distilled).to_lowercase();
    // A word of its own: a folder may be called anything.
    let has = |size: &str| name.split(|c: char| !c.is_alphanumeric()).any(|word| word == size);
    if name == "ember" {
        "ember-base"
    } else if has("9b") {
        "klein-base-9b"
    } else if has("4b") {
        "klein-base-4b"
    } else {
        "klein-base-4b or klein-base-9b"
    }
}

/// Checks a device without using it.
struct DeviceCheck {
    base: BasePrecision,
}

impl TrainingVisitor for DeviceCheck {
    type Output = Result<()>;

    fn visit<B: TrainingBackend + 'static>(self, _: B, device: DeviceInfo<B>) -> Result<()> {
        check_precision(self.base, &device)
    }
}

/// Refuses a data type that the device can't compute with.
fn check_precision<B: TrainingBackend>(base: BasePrecision, device: &DeviceInfo<B>) -> Result<()> {
    if base == BasePrecision::Fp8 && !device.has_fp8 {
        let what = format!("{} does not support fp8", device.device);
        return Err(kiln_engine::Error::refused(ErrorKind::Device, what)
            .with_hint(hint!["leave out ", Field::Dtype; "use ", Field::Dtype.to("int8")])
            .into());
    }
    Ok(())
}

impl TrainingVisitor for RunningJob<'_> {
    type Output = Result<Outcome>;

    fn visit<B: TrainingBackend + 'static>(self, b: B, device: DeviceInfo<B>) -> Result<Outcome> {
        let RunningJob { job, sampler, watcher } = self;
        let TrainJob { model, data, cache, mut settings, auto_checkpointing, batch, .. } = job;
        let TrainJob { accumulation, options, files, resume, shared, .. } = job;
        check_precision(settings.base, &device)?;
        let precision = settings.base.linear(device.threads);
        let is_shared = shared.as_ref().is_some_and(|shared| shared.has_transformer(&model, precision));
        let estimate = |settings: &TrainSettings| CostEstimate::new(&model, &data, settings, batch);
        if auto_checkpointing {
            let free = device.vram.or_else(machine::memory_limit);
            let estimate = estimate(&settings)?;
            let needed = if is_shared { estimate.memory() - estimate.weights } else { estimate.memory() };
            settings.checkpointing = free.is_some_and(|free| needed + RESERVE > free);
            if settings.checkpointing {
                watcher.note("activations are computed twice to save memory (checkpointing)");
            }
        }
        let mut cache = Cache::new(cache);
        let encoders = Encoders::new(&model, &b.numerics(), settings.dtype(), &cache)?;
        if let Some(note) = encoders.truncation_note(&data)? {
            watcher.note(&note);
        }
        encoders.encode_missing(&b, device.vram, &data, &mut cache, &mut |stage, done, total| {
            watcher.encoding(stage, done, total);
            !watcher.is_cancelled()
        })?;
        device.release_memory(&b);
        let record = RunRecord {
            base: model.recorded_name(),
            base_fingerprint: model.transformer.fingerprint()?.to_owned(),
            data: data.hash(),
            batch,
            accumulation,
            // The result does not depend on it.
            settings: TrainSettings { checkpointing: false, ..settings.clone() },
        };
        let saved = if resume { Some(load_state(&files.state(), &record)?) } else { None };
        let (state, changes) = saved.map(|SavedState { state, changes }| (state, changes)).unzip();
        let changes: Vec<String> = changes.unwrap_or_default();
        changes.iter().for_each(|change| watcher.note(&format!("continuing with other settings: {change}")));
        let (weights, config) = (model.transformer.weights()?, &model.transformer.config);
        let costs = estimate(&settings)?;
        let found = shared.map(|shared| shared.transformer(&b, &model, precision, settings.dtype()));
        let mut lent = SharedDevice::of(&b, &device);
        let transformer = match found.transpose()?.flatten() {
            Some(transformer) => {
                lent = lent.with_transformer(&b, &model, precision, &transformer)?;
                transformer
            }
            None => {
                let plan = residency(&model.weight_bytes(precision), &costs, device.vram, watcher)?;
                let vars = weights.root().with_precision(precision);
                let transformer = Transformer::load(&b, &vars, config, settings.dtype(), &plan)?;
                if plan.is_all_on_device() {
                    lent = lent.with_transformer(&b, &model, precision, &transformer)?;
                }
                transformer
            }
        };
        watcher.loaded(lent, costs.activations);
        let (order, noise) = (Order::new(&data, settings.seed), settings.clone());
        let mut trainer = match &state {
            Some(state) => Trainer::restore(&b, transformer, settings, state)?,
            None => Trainer::new(&b, transformer, settings)?,
        };
        let first = trainer.steps();
        let probes = probes(&data, |draw| encoders.example(&data, draw, &mut cache))?;
        let before = fixed_loss(&mut trainer, &probes)?;
        device.take_notes(&b).iter().for_each(|note| watcher.note(note));
        watcher.starting(first);
        let mut batches = |step: u64| {
            let draws = order.step(step, batch * accumulation);
            let examples = draws.into_iter().map(|draw| encoders.example(&data, draw, &mut cache));
            let examples = examples.collect::<Result<Vec<Example>>>()?;
            noise.prepare(step, &examples.chunks(batch).collect::<Vec<_>>())
        };
        let mut watcher = StepWatcher { watcher, sampler };
        let judge_anew = !changes.is_empty();
        let outcome = run(&mut trainer, &mut batches, &files, &record, &options, judge_anew, &mut watcher)?;
        let StepWatcher { watcher, .. } = watcher;
        device.take_notes(&b).iter().for_each(|note| watcher.note(note));
        if !outcome.cancelled {
            let (after, last) = (fixed_loss(&mut trainer, &probes)?, outcome.step);
            watcher.note(&format!(
                "loss at fixed noise: {before:.5} after step {first}, {after:.5} after step {last}"
            ));
        }
        Ok(outcome)
    }
}

/// Which of the transformer's weights stay on a GPU with this much memory; the others are streamed as they are used.
fn residency(
    weights: &WeightBytes,
    estimate: &CostEstimate,
    vram: Option<u64>,
    watcher: &mut dyn JobWatcher,
) -> Result<ResidencyPlan> {
    let Some(vram) = vram else { return Ok(ResidencyPlan::all_on_device()) };
    let others = estimate.memory() - estimate.weights + weights.dequantized + RESERVE;
    if others + weights.transformer <= vram {
        return Ok(ResidencyPlan::all_on_device());
    }
    let ring = STREAMED_AT_ONCE * weights.largest;
    let Some(resident) = vram.checked_sub(others + ring) else {
        let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
        let (has, needs) = (gib(vram), gib(others + ring));
        let what = format!("this training needs at least {needs:.1} GiB of GPU memory, there are {has:.1}");
        return Err(kiln_engine::Error::refused(ErrorKind::TooLarge, what)
            .with_hint(hint![
                "use ", Field::Checkpointing.on();
                "use a smaller ", Field::Resolution;
                "use ", Field::Batch.to("1");
                "use ", Field::Optimizer.to("adamw8bit")
            ])
            .into());
    };
    let streamed = (weights.transformer - resident) as f64 / f64::from(1 << 30);
    watcher
        .note(&format!("{streamed:.1} GiB of the weights stay in host memory and are copied for every use"));
    Ok(ResidencyPlan::new(resident, weights.transformer))
}

/// One example for each noise level, from all parts of the data.
fn probes(data: &Dataset, mut example: impl FnMut(Draw) -> Result<Example>) -> Result<Vec<Example>> {
    let entry = |i: usize| i * data.entries.len() / LEVELS.len();
    let draw = |i| Draw { entry: entry(i), flip: false, drop_caption: false, drop_references: false };
    (0..LEVELS.len()).map(|i| example(draw(i))).collect()
}

/// The mean loss of the probes, always with the same noise: unlike the losses of the steps, it can be compared.
fn fixed_loss<B: TrainingBackend>(trainer: &mut Trainer<B>, probes: &[Example]) -> Result<f32> {
    let mut sum = 0.0;
    for (i, level) in LEVELS.iter().enumerate() {
        sum += trainer.evaluate(&probes[i..=i], &[*level], i as u64)?;
    }
    Ok(sum / LEVELS.len() as f32)
}

/// Adapts a job's watcher to one of its steps, and generates samples.
struct StepWatcher<'w> {
    watcher: &'w mut dyn JobWatcher,
    sampler: Option<Sampler>,
}

impl Watcher for StepWatcher<'_> {
    fn stepped(&mut self, status: &Status) {
        self.watcher.stepped(status);
    }

    fn is_cancelled(&self) -> bool {
        self.watcher.is_cancelled()
    }

    fn saved(&mut self, step: u64, lora: &Path, is_sample: bool) -> Result<()> {
        self.watcher.saved(step, lora, is_sample)?;
        match &self.sampler {
            Some(sampler) if is_sample && !self.watcher.is_cancelled() => {
                self.watcher.sampled(step, sampler.sample(Some(lora), step))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::base_name;

    #[test]
    fn the_base_model_is_named_by_a_word_of_the_path() {
        for (distilled, base) in [
            ("ember", "ember-base"),
            ("models/FLUX.2-klein-9B", "klein-base-9b"),
            ("flux-2-klein-4b-fp8.safetensors", "klein-base-4b"),
            ("/tmp/.tmp19bskb", "klein-base-4b or klein-base-9b"),
        ] {
            assert_eq!(base_name(distilled), base);
        }
    }
}
