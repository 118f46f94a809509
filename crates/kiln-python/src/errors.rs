//! Errors as Python exceptions, with the hint as a second line and as an attribute.

use kiln_engine::{ErrorKind, Explain, Field};
use pyo3::exceptions::{PyException, PyMemoryError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyTuple, PyType};

/// The classes of exceptions. `RequestError` is also a `ValueError`, `OutOfMemoryError` also a `MemoryError`.
struct Classes {
    kiln: Py<PyType>,
    model: Py<PyType>,
    request: Py<PyType>,
    device: Py<PyType>,
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
            device: derived("DeviceError", "A device is not available, or lacks a capability.", None)?,
            memory: derived(
                "OutOfMemoryError",
                "There is too little memory.",
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
    let Classes { kiln, model, request, device, memory, cancelled } = classes(py)?;
    for class in [kiln, model, request, device, memory, cancelled] {
        let class = class.bind(py);
        module.add(class.name()?, class)?;
    }
    Ok(())
}

/// The kinds of exceptions.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    Other,
    Model,
    Request,
    Device,
    Memory,
    Cancelled,
}

impl From<ErrorKind> for Kind {
    fn from(kind: ErrorKind) -> Kind {
        match kind {
            ErrorKind::Value | ErrorKind::Request | ErrorKind::Input | ErrorKind::Data => Kind::Request,
            ErrorKind::Lora | ErrorKind::Model | ErrorKind::Download => Kind::Model,
            ErrorKind::Device => Kind::Device,
            ErrorKind::TooLarge | ErrorKind::OutOfMemory => Kind::Memory,
            ErrorKind::Cancelled => Kind::Cancelled,
            ErrorKind::NotFinite | ErrorKind::Diverged | ErrorKind::File | ErrorKind::Internal => Kind::Other,
        }
    }
}

/// Creates an exception with a message and what to do about it.
pub(crate) fn exception(py: Python<'_>, kind: Kind, message: String, hint: Option<String>) -> PyErr {
    let create = || {
        let classes = classes(py)?;
        let class = match kind {
            Kind::Other => &classes.kiln,
            Kind::Model => &classes.model,
            Kind::Request => &classes.request,
            Kind::Device => &classes.device,
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

/// The exception of every kind of error, for the test that compares them with the documentation.
#[pyfunction]
pub(crate) fn exceptions(py: Python<'_>) -> Vec<(&'static str, PyErr)> {
    let raised = |kind: &ErrorKind| explained(py, &kiln_engine::Error::refused(*kind, "odd"));
    ErrorKind::ALL.iter().map(|kind| (kind.name(), raised(kind))).collect()
}

/// Creates an exception for an invalid request.
pub(crate) fn request(py: Python<'_>, message: impl Into<String>) -> PyErr {
    exception(py, Kind::Request, message.into(), None)
}

/// Converts an error of the libraries.
pub(crate) fn explained(py: Python<'_>, error: &impl Explain) -> PyErr {
    let mut message = error.message().say(&name);
    error.context().iter().for_each(|doing| message += &format!("\n  while {doing}"));
    exception(py, error.kind().into(), message, error.hint().and_then(|hint| hint.say(&name)))
}

/// Says a field as a keyword argument: `dtype="f32"`; `None` if there is none.
fn name(field: Field, value: Option<&str>) -> Option<String> {
    let name = match field {
        Field::Embeds => "prompt_embeds",
        Field::OriginalPrompt
        | Field::OutputCompression
        | Field::UpsampleModel
        | Field::UpsampleUrl
        | Field::Wildcards
        | Field::Variant => return None,
        field => field.name(),
    };
    let value = match value {
        None => String::new(),
        Some("true") => "True".into(),
        Some(number) if number.parse::<f64>().is_ok() => number.into(),
        Some(text) => format!("{text:?}"),
    };
    Some(format!("{name}={value}"))
}
