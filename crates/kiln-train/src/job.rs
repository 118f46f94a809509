//! A whole training on one backend: encode what is missing, load the transformer, take the steps.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use kiln_engine::{DeviceInfo, Model, TrainingVisitor, Variant, VariantSource};
use kiln_model::ResidencyPlan;
use kiln_model::transformer::Transformer;
use kiln_ops::TrainingBackend;

use crate::cache::Cache;
use crate::checkpoint::{RunRecord, load_state};
use crate::dataset::{Dataset, Order};
use crate::encode::{Encoders, EncodingStage};
use crate::output::RunFiles;
use crate::run::{Outcome, RunOptions, Status, Stepper, Watcher, run};
use crate::{AdapterModule, Error, Example, Result, StepReport, TrainSettings, Trainer, TrainerState};

/// Everything that a training needs.
pub struct TrainJob<'w> {
    /// The base model.
    pub model: Arc<Model>,
    /// What to learn.
    pub data: Dataset,
    /// The folder of encoded pictures and texts.
    pub cache: PathBuf,
    /// The trainer's settings.
    pub settings: TrainSettings,
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
    /// Follows the training.
    pub watcher: &'w mut dyn JobWatcher,
}

/// Follows a whole training.
pub trait JobWatcher: Watcher {
    /// Pictures or captions are encoded: so many of so many.
    fn encoding(&mut self, stage: EncodingStage, done: usize, total: usize);

    /// Something the user should know.
    fn note(&mut self, text: &str);

    /// The steps begin, after this many.
    fn starting(&mut self, step: u64);
}

/// Refuses to train on a distilled model.
pub fn check_variant(model: &Model) -> Result<()> {
    if !matches!(model.variant, Variant::Distilled | Variant::Kv) {
        return Ok(());
    }
    let what = format!(
        "`{}` is {}, a distilled model: training undoes the distillation, and its pictures turn grey and blurred",
        model.recorded_name(),
        model.described_variant()
    );
    let hint = match model.variant_source {
        VariantSource::Stated => {
            "train on the base model (klein-base-4b, klein-base-9b) and use the LoRA with the distilled one"
        }
        _ => {
            "if it is a base model, say so with --variant base; else train on one (klein-base-4b, klein-base-9b)"
        }
    };
    Err(Error::data(what).hint(format!("{hint}; --distilled-anyway trains it nevertheless")))
}

impl TrainingVisitor for TrainJob<'_> {
    type Output = Result<Outcome>;

    fn visit<B: TrainingBackend + 'static>(self, b: B, device: DeviceInfo<B>) -> Result<Outcome> {
        let TrainJob { model, data, cache, settings, batch, accumulation, options, files, resume, watcher } =
            self;
        let mut cache = Cache::new(cache);
        let encoders = Encoders::new(&model, &b.numerics(), settings.dtype())?;
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
            settings: settings.clone(),
        };
        let state = if resume { Some(load_state(&files.state(), &record)?) } else { None };
        let (weights, config) = (model.transformer.weights()?, &model.transformer.config);
        let plan = ResidencyPlan::all_on_device();
        let transformer = Transformer::load(&b, &weights.root(), config, settings.dtype(), &plan)?;
        let order = Order::new(&data, settings.seed);
        let mut trainer = match &state {
            Some(state) => Trainer::restore(&b, transformer, settings, state)?,
            None => Trainer::new(&b, transformer, settings)?,
        };
        watcher.starting(trainer.steps());
        let mut batches = |step: u64| {
            let draws = order.step(step, batch * accumulation);
            let examples = draws.into_iter().map(|draw| encoders.example(&data, draw, &mut cache));
            let examples = examples.collect::<Result<Vec<Example>>>()?;
            Ok(examples.chunks(batch).map(<[Example]>::to_vec).collect())
        };
        run(&mut trainer, &mut batches, &files, &record, &options, &mut Upcast(watcher))
    }
}

/// Passes a job's watcher on as that of its steps.
struct Upcast<'w>(&'w mut dyn JobWatcher);

impl Watcher for Upcast<'_> {
    fn stepped(&mut self, status: &Status) {
        self.0.stepped(status);
    }

    fn is_cancelled(&self) -> bool {
        self.0.is_cancelled()
    }

    fn saved(&mut self, step: u64, lora: &Path, is_sample: bool) -> Result<()> {
        self.0.saved(step, lora, is_sample)
    }
}

impl<B: TrainingBackend> Stepper for Trainer<B> {
    fn step(&mut self, batches: &[&[Example]]) -> Result<StepReport> {
        Trainer::step(self, batches)
    }

    fn steps(&self) -> u64 {
        Trainer::steps(self)
    }

    fn state(&self) -> Result<TrainerState> {
        Trainer::state(self)
    }

    fn adapter(&self) -> Result<Vec<AdapterModule>> {
        Ok(match self.ema_adapter()? {
            Some(average) => average,
            None => Trainer::adapter(self)?,
        })
    }
}
