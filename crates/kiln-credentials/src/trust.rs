//! Whose signatures are trusted, besides those of the authorities on C2PA's list.

use std::path::Path;

use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;

use crate::{Error, Result};

/// Root certificates.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trust {
    /// As PEM texts.
    pub(crate) pem: String,
}

impl Trust {
    /// Adds the certificates of a PEM file.
    pub fn add(&mut self, path: &Path) -> Result<()> {
        let failed = |source| Error::File { action: "read", path: path.into(), source };
        let bytes = kiln_base::read_regular(path).map_err(failed)?;
        let all: std::result::Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
        let text = String::from_utf8(bytes).ok().filter(|_| all.is_ok_and(|all| !all.is_empty()));
        self.pem += &text.ok_or_else(|| Error::content(path, "has no certificate (PEM)"))?;
        self.pem.push('\n');
        Ok(())
    }
}
