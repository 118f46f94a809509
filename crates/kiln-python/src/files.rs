//! Work on files of models: downloading, describing, converting and quantizing them.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use kiln_catalog::export::{
    ConvertOptions, ExportWatcher, QuantType, QuantizeOptions, SourceComponent, quantize_model,
    report_properties,
};
use kiln_catalog::{FileOrigin, trust_with};
use kiln_engine::Sink;
use kiln_tensor::DType;
use kiln_weights::Component;
use kiln_weights::export::{Storage, TensorNames};
use pyo3::prelude::*;

use crate::{errors, wait};

/// Cancels an export when its sink is cancelled.
struct Watcher<'a>(&'a dyn Sink);

impl ExportWatcher for Watcher<'_> {
    fn update(&self, _: usize, _: usize) -> kiln_weights::Result<()> {
        if self.is_cancelled() { Err(kiln_weights::Error::Cancelled) } else { Ok(()) }
    }

    fn is_cancelled(&self) -> bool {
        self.0.cancelled()
    }
}

fn component(py: Python<'_>, part: Option<&str>) -> PyResult<Option<Component>> {
    let Some(part) = part else { return Ok(None) };
    let named = Component::ALL.into_iter().find(|component| component.folder() == part.replace('-', "_"));
    let what = || format!("part must be transformer, text_encoder or vae, found {part:?}");
    named.map(Some).ok_or_else(|| errors::request(py, what()))
}

fn all_threads(threads: Option<usize>) -> usize {
    let all = || std::thread::available_parallelism().map_or(1, usize::from);
    threads.filter(|threads| *threads > 0).unwrap_or_else(all)
}

/// How often progress is reported.
const PROGRESS: Duration = Duration::from_millis(100);

/// Downloads a model. Calls `progress` with the file, the bytes so far and the total. Returns a summary as JSON.
#[pyfunction]
#[pyo3(signature = (name, accept_license=false, progress=None))]
pub(crate) fn pull(
    py: Python<'_>,
    name: &str,
    accept_license: bool,
    progress: Option<Py<PyAny>>,
) -> PyResult<String> {
    let mut failure = None;
    let pulled = wait::run(py, |sink| -> kiln_catalog::Result<String> {
        let mut told: Option<Instant> = None;
        let summary = kiln_catalog::pull(name, accept_license, &mut |at| {
            let is_due = told.is_none_or(|last| last.elapsed() > PROGRESS) || at.done == at.total;
            if let Some(progress) = progress.as_ref().filter(|_| is_due) {
                told = Some(Instant::now());
                let told = Python::attach(|py| progress.call1(py, (at.file, at.done, at.total)).map(drop));
                failure = told.err();
            }
            failure.is_none() && !sink.cancelled()
        })?;
        let summary = serde_json::json!({
            "folder": summary.snapshot,
            "commit": summary.commit,
            "files": summary.files,
            "bytes": summary.bytes,
            "downloaded": summary.downloaded,
        });
        Ok(summary.to_string())
    });
    failure.map_or(pulled, Err)
}

/// Describes a model, a weight file or an image, as JSON.
#[pyfunction]
pub(crate) fn info(py: Python<'_>, path: PathBuf) -> PyResult<String> {
    wait::run(py, |_| -> kiln_catalog::Result<String> {
        let description = kiln_catalog::info::describe(&path)?;
        match description.problem {
            Some(problem) => Err(problem),
            None => Ok(description.properties.to_json()),
        }
    })
}

/// Says where an image file comes from, as JSON. `file`: its bytes, or nothing to read the one of this name. `trust`: PEM files.
#[pyfunction]
#[pyo3(signature = (name, file=None, trust=Vec::new()))]
pub(crate) fn verify(
    py: Python<'_>,
    name: PathBuf,
    file: Option<Vec<u8>>,
    trust: Vec<PathBuf>,
) -> PyResult<String> {
    wait::run(py, |_| -> kiln_catalog::Result<String> {
        let trust = trust_with(&trust)?;
        let origin = match file {
            Some(file) => FileOrigin::of(&name.to_string_lossy(), file, &trust)?,
            None => FileOrigin::of_file(&name, &trust)?,
        };
        Ok(serde_json::json!(origin).to_string())
    })
}

/// Quantizes a model. Returns the report as JSON.
#[pyfunction]
#[pyo3(signature = (model, out, to, part=None, threads=None))]
pub(crate) fn quantize(
    py: Python<'_>,
    model: PathBuf,
    out: PathBuf,
    to: &str,
    part: Option<&str>,
    threads: Option<usize>,
) -> PyResult<String> {
    let Some(to) = QuantType::from_name(to) else {
        let names: Vec<&str> = QuantType::ALL.iter().map(|kind| kind.name()).collect();
        return Err(errors::request(py, format!("to must be one of {}, found {to:?}", names.join(", "))));
    };
    let options =
        QuantizeOptions { to, component: component(py, part)?, variant: None, threads: all_threads(threads) };
    wait::run(py, |sink| -> kiln_catalog::Result<String> {
        let report = quantize_model(&model, &out, &options, &Watcher(sink))?;
        Ok(report_properties(&out, &report, Some(to.name())).to_json())
    })
}

/// Converts a component of a model. Returns the report as JSON.
#[pyfunction]
#[pyo3(signature = (model, out, part=None, dtype=None, names=None, shard_size=None, threads=None))]
#[expect(clippy::too_many_arguments, reason = "Python's keywords")]
pub(crate) fn convert(
    py: Python<'_>,
    model: PathBuf,
    out: PathBuf,
    part: Option<&str>,
    dtype: Option<&str>,
    names: Option<&str>,
    shard_size: Option<u64>,
    threads: Option<usize>,
) -> PyResult<String> {
    let storage = match dtype {
        None => Storage::Keep,
        Some("f32") => Storage::Dense(DType::F32),
        Some("bf16") => Storage::Dense(DType::BF16),
        Some("f16") => Storage::Dense(DType::F16),
        Some(other) => {
            return Err(errors::request(py, format!("dtype must be f32, bf16 or f16, found {other:?}")));
        }
    };
    let names = match names {
        None => None,
        Some("diffusers") => Some(TensorNames::Diffusers),
        Some("original") => Some(TensorNames::Original),
        Some(other) => {
            return Err(errors::request(py, format!("names must be diffusers or original, found {other:?}")));
        }
    };
    let part = component(py, part)?;
    let options = ConvertOptions { names, storage, threads: all_threads(threads), shard_size };
    wait::run(py, |sink| -> kiln_catalog::Result<String> {
        let report = SourceComponent::open(&model, part, None)?.write(&out, &options, &Watcher(sink))?;
        Ok(report_properties(&out, &report, None).to_json())
    })
}
