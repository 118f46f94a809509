//! Whose signatures are trusted, besides those of the authorities on C2PA's list.

use std::path::Path;

use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;

use crate::{Error, Result};

/// Root certificates.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trust {
    /// All of them, as PEM texts.
    pub(crate) pem: String,
    /// Those that are the user's own.
    pub(crate) own: String,
}

impl Trust {
    /// Adds the certificates of a PEM file.
    pub fn add(&mut self, path: &Path) -> Result<()> {
        self.pem += &read(path)?;
        Ok(())
    }

    /// Adds the certificates of a PEM file that are the user's own.
    pub fn add_own(&mut self, path: &Path) -> Result<()> {
        let text = read(path)?;
        self.own += &text;
        self.pem += &text;
        Ok(())
    }
}

/// Reads the certificates of a PEM file, and a line's end.
fn read(path: &Path) -> Result<String> {
    let failed = |source| Error::File { action: "read", path: path.into(), source };
    let bytes = kiln_base::read_regular(path).map_err(failed)?;
    let all: std::result::Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
    let text = String::from_utf8(bytes).ok().filter(|_| all.is_ok_and(|all| !all.is_empty()));
    let text = text.ok_or_else(|| Error::content(path, "has no certificate (PEM)"))?;
    Ok(text + "\n")
}
