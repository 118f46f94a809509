//! Who signs image files, checked before anything is generated.

use std::path::PathBuf;
use std::sync::Arc;

use kiln_base::Program;
use kiln_engine::{Credentials, KeySource};

use crate::args::SignArgs;
use crate::error::CliError;
use crate::settings;

impl SignArgs {
    /// Opens the key and its certificate, if files are to be signed.
    pub fn credentials(&self) -> Result<Option<Arc<Credentials>>, CliError> {
        if self.no_sign {
            return Ok(None);
        }
        let has_signer = self.sign_key.is_some() || self.sign_with.is_some();
        if !self.sign && !has_signer && !settings::get().sign.unwrap_or(false) {
            let options = [("--producer", &self.producer), ("--timestamp-url", &self.timestamp_url)];
            return match options.iter().find(|(_, value)| value.is_some()) {
                Some((option, _)) => {
                    Err(CliError::usage(format!("{option} has no effect without --sign")).hint("add --sign"))
                }
                None => Ok(None),
            };
        }
        let source = match (&self.sign_with, &self.sign_key, &self.sign_cert) {
            (Some(command), ..) => {
                let program = Program::parse(command);
                let invalid = |problem| {
                    CliError::usage(format!("invalid --sign-with: {problem}")).hint(
                        "give a program with its arguments, such as \"python3 sign.py\"; no shell runs it",
                    )
                };
                KeySource::Program(program.map_err(invalid)?)
            }
            (None, Some(key), Some(certificate)) => {
                KeySource::Files { key: key.clone(), certificate: certificate.clone() }
            }
            _ => KeySource::Folder(folder()?),
        };
        let timestamp_url = self.timestamp_url.as_ref().or(settings::get().timestamp_url.as_ref());
        let opened = Credentials::open(source, self.producer.clone(), timestamp_url.map(String::as_str))?;
        Ok(Some(Arc::new(opened)))
    }
}

/// The folder of the user's own key and certificates.
pub fn folder() -> Result<PathBuf, CliError> {
    let missing = || CliError::new("there is no data folder").hint("set HOME, or give another folder");
    kiln_base::folders::credentials().ok_or_else(missing)
}
