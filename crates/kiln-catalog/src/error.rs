//! Why a model could not be found, opened or downloaded.

use kiln_engine::{ErrorKind, Explain, Hint, Text, hint};

/// An error about a model, with what to do about it.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the fields are")]
pub enum Error {
    /// Invalid arguments or environment variables.
    #[error("{what}")]
    Usage { what: Text, hint: Hint },
    /// A model that does not exist, or that this build can't use.
    #[error("{what}")]
    Missing { what: String, hint: Hint },
    /// A model that can't be opened.
    #[error("{source}")]
    Open { source: Box<kiln_engine::Error>, hint: Option<Hint> },
    /// A download that failed.
    #[error(transparent)]
    Hub(#[from] kiln_hub::Error),
}

/// Result with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    pub(crate) fn usage(what: impl Into<Text>, hint: impl Into<Hint>) -> Error {
        Error::Usage { what: what.into(), hint: hint.into() }
    }

    pub(crate) fn missing(what: impl Into<String>, hint: impl Into<Hint>) -> Error {
        Error::Missing { what: what.into(), hint: hint.into() }
    }

    pub(crate) fn engine(error: impl Into<kiln_engine::Error>) -> Error {
        Error::Open { source: Box::new(error.into()), hint: None }
    }
}

impl Explain for Error {
    fn kind(&self) -> ErrorKind {
        match self {
            Error::Usage { .. } => ErrorKind::Value,
            Error::Missing { .. } => ErrorKind::Model,
            Error::Open { source, .. } => source.kind(),
            Error::Hub(kiln_hub::Error::Cancelled) => ErrorKind::Cancelled,
            Error::Hub(kiln_hub::Error::InvalidName { .. } | kiln_hub::Error::Variable { .. }) => {
                ErrorKind::Value
            }
            Error::Hub(_) => ErrorKind::Download,
        }
    }

    fn message(&self) -> Text {
        match self {
            Error::Usage { what, .. } => what.clone(),
            Error::Open { source, .. } => source.message(),
            Error::Missing { .. } | Error::Hub(_) => self.to_string().into(),
        }
    }

    fn context(&self) -> Vec<&str> {
        match self {
            Error::Open { source, .. } => source.context(),
            Error::Usage { .. } | Error::Missing { .. } | Error::Hub(_) => Vec::new(),
        }
    }

    fn hint(&self) -> Option<Hint> {
        match self {
            Error::Usage { hint, .. } | Error::Missing { hint, .. } => Some(hint.clone()),
            Error::Open { source, hint } => hint.clone().or_else(|| source.hint()),
            Error::Hub(error) => hub(error),
        }
    }
}

/// What to do about a failed download.
fn hub(error: &kiln_hub::Error) -> Option<Hint> {
    use kiln_hub::Error;
    let list = |files: &[kiln_hub::RemoteFile]| {
        let shown = files.iter().take(30);
        let shown = shown.map(|file| format!("\n  {} ({})", file.path, crate::values::bytes(file.size)));
        let more = files.len().saturating_sub(30);
        let more = if more > 0 { format!("\n  and {more} more") } else { String::new() };
        shown.collect::<String>() + &more
    };
    let text: &'static str = match error {
        Error::InvalidName { .. } => {
            let names = kiln_family::aliases().map(|alias| alias.name).collect::<Vec<_>>().join(", ");
            return Some(format!("known names: {names}; or give OWNER/REPO").into());
        }
        Error::NoCache => "set HF_HOME to a folder",
        Error::Variable { .. } => "correct the variable, or unset it",
        Error::Unauthorised { repo, .. } => {
            return Some(hint![format!(
                "check the name; if the model is gated, accept its terms on its page ({repo}) and put an access token \
                 of that account into HF_TOKEN"
            )]);
        }
        Error::Gated { page, .. } => {
            return Some(hint![format!(
                "accept the terms on {page} with the account of the access token in HF_TOKEN"
            )]);
        }
        Error::NotFound { .. } => "check the name; it must match the model's page",
        Error::Connection { .. } => {
            "check the connection (HTTPS_PROXY sets a proxy) and run the same command again: the download resumes"
        }
        Error::BadResponse { .. } => "check HF_ENDPOINT, or try again later",
        Error::UnsafeName { .. } => "don't trust this repository",
        Error::Checksum { .. } => "run the same command again: it downloads that file anew",
        Error::NoMatch { files, .. } | Error::Ambiguous { files, .. } => {
            return Some(format!("add a colon and a file name, or a part of it:{}", list(files)).into());
        }
        Error::NoSpace { .. } => {
            "free some space, or set HF_HOME to a folder on a larger disk; `kiln models` lists what is there"
        }
        Error::InProgress { .. } => "wait for it to finish",
        Error::Io { doing: "remove", .. } if cfg!(windows) => {
            "end the programs that use it, such as `kiln serve`, and check that you may write to its folder"
        }
        Error::Io { source, .. } if source.kind() == std::io::ErrorKind::FileTooLarge => {
            "the disk takes no files of this size, as FAT32 none of 4 GiB; HF_HOME sets another folder"
        }
        Error::Io { .. } => {
            "check that the folder is writable and the disk is not full; HF_HOME sets another folder"
        }
        Error::Cancelled => return None,
    };
    Some(text.into())
}
