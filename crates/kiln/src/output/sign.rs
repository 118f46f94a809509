//! Who signs image files, checked before anything is generated.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use kiln_base::Program;
use kiln_catalog::ModelFolders;
use kiln_credentials::{NewCredentials, Signer};
use kiln_engine::Credentials;

use crate::args::SignArgs;
use crate::error::CliError;
use crate::settings;

impl SignArgs {
    /// Opens the key and its certificate, if files are to be signed.
    pub fn credentials(&self) -> Result<Option<Arc<Credentials>>, CliError> {
        let has_signer = self.sign_key.is_some() || self.sign_with.is_some();
        if !self.sign && !has_signer && !settings::get().sign.unwrap_or(false) {
            return match self.producer {
                Some(_) => Err(CliError::usage("--producer has no effect without --sign").hint("add --sign")),
                None => Ok(None),
            };
        }
        let signer = match (&self.sign_with, &self.sign_key, &self.sign_cert) {
            (Some(command), ..) => {
                let program = Program::parse(command);
                let invalid = |problem| {
                    CliError::usage(format!("invalid --sign-with: {problem}"))
                        .hint("give a program with its arguments, such as \"python3 sign.py\"; no shell runs it")
                };
                Signer::command(program.map_err(invalid)?)?
            }
            (None, Some(key), Some(certificate)) => Signer::open(key, certificate)?,
            _ => {
                let files = NewCredentials::in_folder(&folder()?);
                if !files.key.is_file() {
                    let message = format!("there is no key to sign with in `{}`", files.key.display());
                    return Err(CliError::new(message).hint(
                        "make one with `kiln credentials new`, or give --sign-key and --sign-cert, or --sign-with",
                    ));
                }
                Signer::open(&files.key, &files.certificate)?
            }
        };
        Ok(Some(Arc::new(Credentials { signer, producer: self.producer.clone() })))
    }
}

/// The folder of the user's own key and certificates, in the data folder.
pub fn folder() -> Result<PathBuf, CliError> {
    let data = ModelFolders::own().and_then(|own| own.parent().map(Path::to_path_buf));
    let missing = || CliError::new("there is no data folder").hint("set HOME, or give another folder");
    Ok(data.ok_or_else(missing)?.join("credentials"))
}
