//! Training a LoRA.

use std::path::{Path, PathBuf};

use kiln_catalog::ModelFolders;
use kiln_engine::{ComponentPaths, Sink};
use kiln_train::{EncodingStage, JobWatcher, PreparedTraining, Status, TrainRequest, Watcher};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::errors::{self, Kind};
use crate::{settings, wait};

/// Trains a LoRA as the JSON of a request says. Calls `progress` for every step. Returns a summary as JSON.
#[pyfunction]
#[pyo3(signature = (request, device, dtype, threads=None, vram_limit=None, progress=None))]
pub(crate) fn train(
    py: Python<'_>,
    request: &str,
    device: &str,
    dtype: &str,
    threads: Option<usize>,
    vram_limit: Option<u64>,
    progress: Option<Py<PyAny>>,
) -> PyResult<String> {
    let machine = settings::read(py, device, dtype, threads, vram_limit)?;
    let request = parse(py, request)?;
    let output = request.output.clone();
    let mut failure = None;
    let trained = wait::run(py, |sink| {
        let folders = ModelFolders::from_env();
        let training = PreparedTraining::new(request, folders, &ComponentPaths::default(), machine)?;
        training.run(&mut Progress { sink, call: &progress, failure: &mut failure })
    });
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

/// The fields of a request with their descriptions, as JSON.
#[pyfunction]
pub(crate) fn train_fields() -> String {
    Value::Object(kiln_engine::json_fields::<TrainRequest>()).to_string()
}

/// Reads a request; an error names the field.
fn parse(py: Python<'_>, text: &str) -> PyResult<TrainRequest> {
    serde_json::from_str(text).map_err(|error| {
        let fields: Map<String, Value> = serde_json::from_str(text).unwrap_or_default();
        let wrong = fields.into_iter().find_map(|(name, value)| {
            let error = TrainRequest::deserialize(Map::from_iter([(name.clone(), value)])).err()?;
            Some(format!("{name}: {error}"))
        });
        errors::request(py, wrong.unwrap_or_else(|| error.to_string()))
    })
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
            EncodingStage::Images => "images",
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
