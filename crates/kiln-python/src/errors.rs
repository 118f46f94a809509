//! Errors as Python exceptions, with the hint as a second line and as an attribute.

use kiln_engine::Error;
use pyo3::exceptions::{PyException, PyMemoryError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyTuple, PyType};

/// The classes of exceptions. `RequestError` is also a `ValueError`, `OutOfMemoryError` also a `MemoryError`.
struct Classes {
    kiln: Py<PyType>,
    model: Py<PyType>,
    request: Py<PyType>,
    memory: Py<PyType>,
    cancelled: Py<PyType>,
}

static CLASSES: PyOnceLock<Classes> = PyOnceLock::new();

fn classes(py: Python<'_>) -> PyResult<&'static Classes> {
    CLASSES.get_or_try_init(py, || {
        let kiln =
            class(py, "KilnError", "Base class of Kiln's exceptions.", &[py.get_type::<PyException>()])?;
        let base = kiln.bind(py).clone();
        let derived = |name: &str, doc: &str, other: Option<Bound<'_, PyType>>| {
            let bases: Vec<Bound<'_, PyType>> = std::iter::once(base.clone()).chain(other).collect();
            class(py, name, doc, &bases)
        };
        Ok(Classes {
            model: derived("ModelError", "A model can't be found, opened or loaded.", None)?,
            request: derived(
                "RequestError",
                "A request is not valid, or its files can't be read.",
                Some(py.get_type::<PyValueError>()),
            )?,
            memory: derived(
                "OutOfMemoryError",
                "There is too little memory, or no device with enough of it.",
                Some(py.get_type::<PyMemoryError>()),
            )?,
            cancelled: derived("Cancelled", "The job was cancelled.", None)?,
            kiln,
        })
    })
}

fn class(py: Python<'_>, name: &str, doc: &str, bases: &[Bound<'_, PyType>]) -> PyResult<Py<PyType>> {
    let namespace = pyo3::types::PyDict::new(py);
    namespace.set_item("__doc__", doc)?;
    namespace.set_item("__module__", "kiln")?;
    namespace.set_item("hint", py.None())?;
    let class = py.get_type::<PyType>().call1((name, PyTuple::new(py, bases)?, namespace))?;
    Ok(class.cast_into::<PyType>()?.unbind())
}

/// Adds the classes to the module.
pub(crate) fn add(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    let Classes { kiln, model, request, memory, cancelled } = classes(py)?;
    for class in [kiln, model, request, memory, cancelled] {
        let class = class.bind(py);
        module.add(class.name()?, class)?;
    }
    Ok(())
}

/// The kinds of errors.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    Other,
    Model,
    Request,
    Memory,
    Cancelled,
}

/// Creates an exception with a message and what to do about it.
pub(crate) fn exception(py: Python<'_>, kind: Kind, message: String, hint: Option<String>) -> PyErr {
    let create = || {
        let classes = classes(py)?;
        let class = match kind {
            Kind::Other => &classes.kiln,
            Kind::Model => &classes.model,
            Kind::Request => &classes.request,
            Kind::Memory => &classes.memory,
            Kind::Cancelled => &classes.cancelled,
        };
        let text = hint.as_ref().map_or_else(|| message.clone(), |hint| format!("{message}\nhint: {hint}"));
        let error = class.bind(py).call1((text,))?;
        error.setattr("hint", hint)?;
        Ok(PyErr::from_value(error))
    };
    create().unwrap_or_else(|error| error)
}

/// Creates an exception for an invalid request.
pub(crate) fn request(py: Python<'_>, message: impl Into<String>) -> PyErr {
    exception(py, Kind::Request, message.into(), None)
}

/// Converts an error of the engine. `loading`: it comes from opening or loading a model.
pub(crate) fn engine(py: Python<'_>, error: &Error, loading: bool) -> PyErr {
    if error.is_cancelled() {
        return exception(py, Kind::Cancelled, "cancelled".into(), None);
    }
    let mut message = error.to_string();
    let mut outer = error;
    while let Error::Context { doing, source } = outer {
        message.push_str(&format!("\n  while {doing}"));
        outer = source;
    }
    let hint = match outer {
        Error::Request { hint, .. }
        | Error::Value { hint, .. }
        | Error::Combination { hint, .. }
        | Error::Device { hint, .. } => hint.clone(),
        _ => None,
    };
    let kind = match outer {
        Error::Load(_) | Error::Mismatch { .. } | Error::MissingComponent { .. } => Kind::Model,
        // Also true for requests that need too much.
        error if error.is_out_of_memory() => Kind::Memory,
        error if error.is_invalid_request() => Kind::Request,
        _ if loading => Kind::Model,
        _ => Kind::Other,
    };
    exception(py, kind, message, hint)
}

/// Converts an error about finding or opening a model.
pub(crate) fn model(py: Python<'_>, error: &kiln_models::Error) -> PyErr {
    match error {
        kiln_models::Error::Open { source, hint: None } => engine(py, source, true),
        error => exception(py, Kind::Model, error.to_string(), error.hint().map(str::to_owned)),
    }
}
