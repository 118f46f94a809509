//! Training a LoRA.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use kiln_engine::{Settings, Sink};
use kiln_models::{ModelFolders, user_cache};
use kiln_tensor::DType;
use kiln_train::dataset::{DataOptions, Dataset, list};
use kiln_train::{
    Cache, EncodingStage, Error, JobWatcher, LoraFormat, Optimizer, Outcome, RunFiles, RunOptions, Status,
    TrainJob, TrainSettings, Watcher, check_variant, with_default_device,
};
use kiln_weights::LoraNaming;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::errors::{self, Kind};
use crate::{settings, wait};

/// Steps, files and the rest; `data` and `settings` replace some of the defaults of kiln-train.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Options {
    steps: u64,
    batch: usize,
    accumulate: usize,
    save_every: u64,
    resume: bool,
    overwrite: bool,
    checkpointing: Option<bool>,
    distilled_anyway: bool,
    names: String,
    dtype: String,
    optimizer: String,
    weight_decay: f32,
    lr: Option<f32>,
    data: Map<String, Value>,
    settings: Map<String, Value>,
}

/// Trains a LoRA on the pictures in a folder. Calls `progress` for every step. Returns a summary as JSON.
#[pyfunction]
#[pyo3(signature = (data, model, output, options, device, dtype, threads=None, vram_limit=None, progress=None))]
#[expect(clippy::too_many_arguments, reason = "Python's keywords")]
pub(crate) fn train(
    py: Python<'_>,
    data: PathBuf,
    model: PathBuf,
    output: PathBuf,
    options: &str,
    device: &str,
    dtype: &str,
    threads: Option<usize>,
    vram_limit: Option<u64>,
    progress: Option<Py<PyAny>>,
) -> PyResult<String> {
    let machine = with_default_device(settings::read(py, device, dtype, threads, vram_limit)?);
    let options: Options = serde_json::from_str(options)
        .map_err(|error| errors::request(py, format!("invalid options of a training: {error}")))?;
    let opened = py.detach(|| ModelFolders::from_env().resolve(Some(&model))?.open());
    let model = Arc::new(opened.map_err(|error| errors::model(py, &error))?);
    let mut failure = None;
    let trained = wait::run_with(
        py,
        |sink| {
            run(
                &data,
                &model,
                &output,
                &options,
                &machine,
                Progress { sink, call: &progress, failure: &mut failure },
            )
        },
        |error| exception(py, error),
    );
    if let Some(failure) = failure {
        return Err(failure);
    }
    let outcome = trained?;
    if outcome.cancelled {
        return Err(errors::exception(py, Kind::Cancelled, "cancelled".into(), None));
    }
    let summary = serde_json::json!({
        "output": output,
        "steps": outcome.step,
        "changes_nothing": outcome.norms.is_zero(),
    });
    Ok(summary.to_string())
}

fn run(
    data: &Path,
    model: &Arc<kiln_engine::Model>,
    output: &Path,
    options: &Options,
    machine: &Settings,
    mut watcher: Progress<'_>,
) -> kiln_train::Result<Outcome> {
    if !options.distilled_anyway {
        check_variant(model)?;
    }
    let naming = match options.names.as_str() {
        "diffusers" => LoraNaming::Diffusers,
        "comfyui" => LoraNaming::Original,
        "kohya" => LoraNaming::Kohya,
        other => {
            return Err(Error::Settings(format!(
                "names must be diffusers, comfyui or kohya, found {other:?}"
            )));
        }
    };
    let dtype = match options.dtype.as_str() {
        "bf16" => DType::BF16,
        "f32" => DType::F32,
        other => return Err(Error::Settings(format!("save_dtype must be bf16 or f32, found {other:?}"))),
    };
    let optimizer = serde_json::from_value(options.optimizer.clone().into())
        .map_err(|error| Error::Settings(format!("optimizer: {error}")))?;
    let optimizer = Optimizer::named(optimizer, options.weight_decay);
    let mut settings: TrainSettings =
        with_defaults(serde_json::to_value(TrainSettings::for_machine(model, machine)), &options.settings)?;
    settings.optimizer = optimizer;
    settings.learning_rate.peak = options.lr.unwrap_or_else(|| optimizer.usual_rate());
    settings.checkpointing = options.checkpointing == Some(true);
    let how: DataOptions = with_defaults(serde_json::to_value(DataOptions::for_model(model)), &options.data)?;
    let no_cache = || Error::data("there is no cache folder for encoded pictures").hint("set KILN_CACHE_DIR");
    let cache = user_cache::folder().ok_or_else(no_cache)?.join("train");
    let format = LoraFormat { naming, dtype, trigger: how.trigger.clone() };
    let data = Dataset::new(list(data)?, how, &Cache::new(&cache))?;
    let job = TrainJob {
        model: Arc::clone(model),
        data,
        cache,
        settings,
        auto_checkpointing: options.checkpointing.is_none(),
        batch: options.batch,
        accumulation: options.accumulate,
        options: RunOptions {
            steps: options.steps,
            save_every: options.save_every,
            sample_every: None,
            format,
            tensorboard: false,
        },
        files: RunFiles::new(output),
        resume: options.resume,
        overwrite: options.overwrite,
        machine: machine.clone(),
    };
    let lock = job.prepare_files(&job.check()?)?;
    job.run(lock, None, &mut watcher)
}

/// Defaults with some values replaced; an unknown name is an error.
fn with_defaults<T: DeserializeOwned>(
    defaults: serde_json::Result<Value>,
    given: &Map<String, Value>,
) -> kiln_train::Result<T> {
    let invalid = |error: serde_json::Error| Error::Settings(format!("invalid setting: {error}"));
    let mut all = defaults.map_err(invalid)?;
    for (name, value) in given {
        let Some(place) = all.get_mut(name) else {
            let names: Vec<&str> =
                all.as_object().into_iter().flatten().map(|(name, _)| name.as_str()).collect();
            return Err(Error::Settings(format!("there is no setting `{name}`, only {}", names.join(", "))));
        };
        match (place, value) {
            (Value::Object(place), Value::Object(value)) => place.extend(value.clone()),
            (place, value) => *place = value.clone(),
        }
    }
    serde_json::from_value(all).map_err(invalid)
}

fn exception(py: Python<'_>, error: &Error) -> PyErr {
    match error {
        Error::Engine(error) => errors::engine(py, error, true),
        Error::Data { what, hint } => errors::exception(py, Kind::Request, what.clone(), hint.clone()),
        Error::Diverged { what, saved } => {
            let hint = match saved {
                Some(step) => format!("continue from step {step} with resume=True and a lower lr (a third)"),
                None => "start again with a lower lr (a third) or a longer warm-up".into(),
            };
            errors::exception(py, Kind::Other, what.clone(), Some(hint))
        }
        Error::Settings(_) | Error::Example(_) | Error::InUse { .. } => {
            errors::request(py, error.to_string())
        }
        error => errors::exception(py, Kind::Other, error.to_string(), None),
    }
}

/// Calls Python's progress function, and stops the training if it raises.
struct Progress<'a> {
    sink: &'a dyn Sink,
    call: &'a Option<Py<PyAny>>,
    failure: &'a mut Option<PyErr>,
}

impl Progress<'_> {
    fn tell(&mut self, kind: &str, fill: impl FnOnce(&Bound<'_, PyDict>) -> PyResult<()>) {
        let (Some(call), None) = (self.call, self.failure.as_ref()) else { return };
        let told = Python::attach(|py| {
            let event = PyDict::new(py);
            event.set_item("kind", kind)?;
            fill(&event)?;
            call.call1(py, (event,)).map(drop)
        });
        *self.failure = told.err();
    }
}

impl Watcher for Progress<'_> {
    fn stepped(&mut self, status: &Status) {
        self.tell("step", |event| {
            event.set_item("step", status.report.step)?;
            event.set_item("steps", status.steps)?;
            event.set_item("loss", status.smoothed)?;
            event.set_item("learning_rate", status.report.learning_rate)?;
            event.set_item("seconds_left", status.remaining().as_secs_f64())
        });
    }

    fn is_cancelled(&self) -> bool {
        self.failure.is_some() || self.sink.cancelled()
    }

    fn saved(&mut self, step: u64, lora: &Path, _: bool) -> kiln_train::Result<()> {
        self.tell("saved", |event| {
            event.set_item("step", step)?;
            event.set_item("path", lora)
        });
        Ok(())
    }
}

impl JobWatcher for Progress<'_> {
    fn encoding(&mut self, stage: EncodingStage, done: usize, total: usize) {
        let kind = match stage {
            EncodingStage::Texts => "captions",
            EncodingStage::Pictures => "pictures",
        };
        self.tell(kind, |event| {
            event.set_item("done", done)?;
            event.set_item("total", total)
        });
    }

    fn note(&mut self, text: &str) {
        self.tell("note", |event| event.set_item("text", text));
    }

    fn starting(&mut self, step: u64) {
        self.tell("start", |event| event.set_item("step", step));
    }

    fn sampled(&mut self, step: u64, sheet: kiln_train::Result<PathBuf>) -> kiln_train::Result<()> {
        let sheet = sheet?;
        self.tell("sampled", |event| {
            event.set_item("step", step)?;
            event.set_item("path", sheet)
        });
        Ok(())
    }
}
