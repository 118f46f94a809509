//! Who signs image files.

use std::path::PathBuf;
use std::sync::Arc;

use kiln_engine::{Credentials, KeySource};
use pyo3::prelude::*;

use crate::errors;

/// A key with its certificate.
#[pyclass(frozen, module = "kiln")]
pub(crate) struct Signer {
    pub credentials: Arc<Credentials>,
}

#[pymethods]
impl Signer {
    /// Opens a key and its certificate (PEM), by default those of `kiln credentials new`. What does not fit or has expired is
    /// refused. `producer` is a name besides the certificate's; `timestamp_url` an authority that adds time stamps (RFC 3161).
    #[new]
    #[pyo3(signature = (key=None, certificate=None, *, producer=None, timestamp_url=None))]
    fn new(
        py: Python<'_>,
        key: Option<PathBuf>,
        certificate: Option<PathBuf>,
        producer: Option<String>,
        timestamp_url: Option<String>,
    ) -> PyResult<Signer> {
        let source = match (key, certificate) {
            (Some(key), Some(certificate)) => KeySource::Files { key, certificate },
            (None, None) => match kiln_base::folders::credentials() {
                Some(folder) => KeySource::Folder(folder),
                None => return Err(errors::request(py, "there is no data folder")),
            },
            _ => {
                return Err(errors::request(py, "a key needs its certificate, and a certificate its key"));
            }
        };
        let opened = py.detach(|| Credentials::open(source, producer, timestamp_url.as_deref()));
        let credentials = opened.map_err(|error| errors::explained(py, &error))?;
        Ok(Signer { credentials: Arc::new(credentials) })
    }

    /// Whom the certificate names.
    #[getter]
    fn name(&self) -> &str {
        self.credentials.signer.name()
    }

    /// The last day on which the certificate is valid, as YYYY-MM-DD.
    #[getter]
    fn valid_until(&self) -> String {
        self.credentials.signer.valid_until().date()
    }

    fn __repr__(&self) -> String {
        format!("<kiln.Signer {:?}, until {}>", self.name(), self.valid_until())
    }
}
