//! What to do about errors for which the libraries know nothing more specific, in the words of the command line.

use kiln_engine::Model;
use kiln_weights::Component;

use crate::error::{CliError, ErrorKind};

/// What to do about an error for which nothing more specific is known; `None` if it is none.
pub fn general(error: &CliError) -> Option<String> {
    let starts = |words: &[&str]| words.iter().any(|word| error.message.starts_with(word));
    let hint = match error.kind {
        ErrorKind::Cancelled | ErrorKind::Refused => return None,
        ErrorKind::Usage => "`kiln --help` lists the commands, `kiln COMMAND --help` the options of one",
        ErrorKind::Failed if starts(&["can't write", "can't create", "can't save"]) => {
            "check that the disk is not full and that the folder is writable"
        }
        ErrorKind::Failed if starts(&["can't read", "can't open", "can't map", "can't list"]) => {
            "check that the file exists and is readable"
        }
        ErrorKind::Failed if starts(&["can't start"]) => {
            "check the limits on threads and memory (`ulimit -a`)"
        }
        ErrorKind::Failed => {
            "if it happens again, report it with the command and with what `kiln doctor` prints"
        }
    };
    Some(hint.into())
}

/// What to do about an error of the libraries that has no hint of its own.
pub fn of_kind(kind: kiln_engine::ErrorKind) -> Option<String> {
    use kiln_engine::ErrorKind::{Device, Request, Value};
    let hint = match kind {
        Value | Request => "`kiln COMMAND --help` describes the values of every option",
        Device => "`kiln doctor` shows the devices of this machine",
        _ => return None,
    };
    Some(hint.into())
}

/// Refuses a model of which several files could be a component, for commands that have no option to name one. With
/// `vae_given`, its VAE is not used.
pub fn refuse_ambiguous(model: &Model, vae_given: bool) -> Result<(), CliError> {
    let mut ambiguous = model.ambiguous.iter();
    match ambiguous.find(|(component, _)| !(vae_given && *component == Component::Vae)) {
        None => Ok(()),
        Some((component, files)) => {
            let files: Vec<String> = files.iter().map(|file| format!("`{}`", file.display())).collect();
            let (path, files) = (model.path.display(), files.join(", "));
            Err(CliError::new(format!("several files could be the {component} of `{path}`: {files}"))
                .hint("name the model's files in a model.toml"))
        }
    }
}
