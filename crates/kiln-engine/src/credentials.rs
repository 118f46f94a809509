//! Who signs image files, opened in the same way by every door.

use std::fmt;
use std::path::PathBuf;

use kiln_base::Program;
use kiln_credentials::{NewCredentials, Signer};

use crate::error::{Error, Result};

/// Where the key is that signs.
#[derive(Clone, Debug)]
pub enum KeySource {
    /// In the folder of `kiln credentials new`.
    Folder(PathBuf),
    /// In PEM files.
    Files {
        /// The private key, in PKCS#8.
        key: PathBuf,
        /// Its certificate, and those above it.
        certificate: PathBuf,
    },
    /// Elsewhere: a program signs.
    Program(Program),
}

/// Who signs image files, and in whose name.
pub struct Credentials {
    /// The key with its certificate.
    pub signer: Signer,
    /// Who provides the images, besides the certificate's name.
    pub producer: Option<String>,
}

impl Credentials {
    /// Opens a key, and refuses one that validators would not accept. With an authority of time stamps (RFC 3161), that is
    /// asked for one.
    pub fn open(
        source: KeySource,
        producer: Option<String>,
        timestamp_url: Option<&str>,
    ) -> Result<Credentials> {
        let signer = match source {
            KeySource::Folder(folder) => NewCredentials::in_folder(&folder).open(),
            KeySource::Files { key, certificate } => Signer::open(&key, &certificate),
            KeySource::Program(program) => Signer::command(program),
        };
        let signer = match timestamp_url {
            Some(url) => signer.and_then(|signer| signer.with_time_stamps(url)),
            None => signer,
        };
        Ok(Credentials { signer: signer.map_err(Error::Credentials)?, producer })
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Credentials of {:?}", self.signer.name())
    }
}
