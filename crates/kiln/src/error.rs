//! The program's error: what went wrong, in which context, and a hint about what to do.

use std::fmt;

use kiln_base::printable;
use kiln_engine::Explain;

use crate::{cancel, options};

/// The kind of an error, which decides the exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The command failed: 1.
    Failed,
    /// The command line is wrong: 2.
    Usage,
    /// A file has no credentials: 2.
    NoCredentials,
    /// The check refused an image: 3.
    Refused,
    /// Cancelled with Ctrl-C: 130; with SIGTERM: 143.
    Cancelled,
}

/// An error as the user sees it.
#[derive(Debug)]
pub struct CliError {
    pub kind: ErrorKind,
    pub message: String,
    /// What was being done, innermost first.
    pub context: Vec<String>,
    pub hint: Option<String>,
}

impl CliError {
    pub fn new(message: impl Into<String>) -> CliError {
        CliError { kind: ErrorKind::Failed, message: message.into(), context: Vec::new(), hint: None }
    }

    pub fn usage(message: impl Into<String>) -> CliError {
        CliError { kind: ErrorKind::Usage, ..CliError::new(message) }
    }

    pub fn cancelled() -> CliError {
        CliError { kind: ErrorKind::Cancelled, ..CliError::new("cancelled") }
    }

    /// Adds a hint, unless there is one already.
    pub fn hint(mut self, hint: impl Into<String>) -> CliError {
        self.hint.get_or_insert(hint.into());
        self
    }

    /// Adds a general hint, unless there is one already: no error leaves the user without the next step.
    pub fn or_general_hint(mut self) -> CliError {
        self.hint = self.hint.take().or_else(|| general_hint(&self));
        self
    }

    /// Adds what was being done, unless that is the last thing said.
    fn add_context(&mut self, doing: String) {
        if self.context.last() != Some(&doing) {
            self.context.push(doing);
        }
    }

    pub fn exit_code(&self) -> u8 {
        match self.kind {
            ErrorKind::Failed => 1,
            ErrorKind::Usage | ErrorKind::NoCredentials => 2,
            ErrorKind::Refused => 3,
            ErrorKind::Cancelled => cancel::exit_code() as u8,
        }
    }
}

impl fmt::Display for CliError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Names in a message come from files: further lines are indented, so that none looks like a line of Kiln's.
        let indented = |text: &str| printable(text).replace('\n', "\n  ");
        match self.kind {
            ErrorKind::Cancelled => f.write_str(&indented(&self.message))?,
            _ => write!(f, "error: {}", indented(&self.message))?,
        }
        for context in &self.context {
            write!(f, "\n  while {}", indented(context))?;
        }
        self.hint.as_ref().map_or(Ok(()), |hint| write!(f, "\nhint: {}", indented(hint)))
    }
}

/// The exit code of an error of the libraries.
impl From<kiln_engine::ErrorKind> for ErrorKind {
    fn from(kind: kiln_engine::ErrorKind) -> ErrorKind {
        use kiln_engine::ErrorKind::*;
        match kind {
            Value => ErrorKind::Usage,
            Cancelled => ErrorKind::Cancelled,
            Request | Input | Data | Lora | Model | Download | Device | TooLarge | OutOfMemory
            | NotFinite | Diverged | File | Internal => ErrorKind::Failed,
        }
    }
}

impl<E: Explain> From<E> for CliError {
    fn from(error: E) -> CliError {
        if error.is_cancelled() {
            return CliError::cancelled();
        }
        CliError {
            kind: error.kind().into(),
            message: error.message().say(&options::name),
            context: error.context().into_iter().map(str::to_owned).collect(),
            hint: error
                .hint()
                .and_then(|hint| hint.say(&options::name))
                .or_else(|| hint_of_kind(error.kind())),
        }
    }
}

/// What to do about an error for which nothing more specific is known; `None` if it is none.
fn general_hint(error: &CliError) -> Option<String> {
    let starts = |words: &[&str]| words.iter().any(|word| error.message.starts_with(word));
    let hint = match error.kind {
        ErrorKind::Cancelled | ErrorKind::Refused | ErrorKind::NoCredentials => return None,
        ErrorKind::Usage => "`kiln --help` lists the commands, `kiln COMMAND --help` the options of one",
        ErrorKind::Failed if starts(&["can't write", "can't create", "can't save"]) => {
            "check that the disk is not full and that the folder is writable"
        }
        ErrorKind::Failed if starts(&["can't read", "can't open", "can't map", "can't list"]) => {
            "check that the file exists and is readable"
        }
        ErrorKind::Failed if starts(&["can't start"]) && cfg!(windows) => {
            "check that memory is free, or end other programs"
        }
        ErrorKind::Failed if starts(&["can't start"]) => {
            "check the limits on threads and memory (`ulimit -a`)"
        }
        ErrorKind::Failed => {
            "if it happens again, report it with the command and with what `kiln doctor --report` writes"
        }
    };
    Some(hint.into())
}

/// What to do about an error of the libraries that has no hint of its own.
fn hint_of_kind(kind: kiln_engine::ErrorKind) -> Option<String> {
    use kiln_engine::ErrorKind::{Device, Request, Value};
    let hint = match kind {
        Value | Request => "`kiln COMMAND --help` describes the values of every option",
        Device => "`kiln doctor` shows the devices of this machine",
        _ => return None,
    };
    Some(hint.into())
}

/// Adds context to an error: what the program was doing.
pub trait ErrorContext<T> {
    fn with_context(self, what: impl FnOnce() -> String) -> Result<T, CliError>;
}

impl<T, E: Into<CliError>> ErrorContext<T> for Result<T, E> {
    fn with_context(self, what: impl FnOnce() -> String) -> Result<T, CliError> {
        self.map_err(|e| {
            let mut error = e.into();
            if error.kind != ErrorKind::Cancelled {
                error.add_context(what());
            }
            error
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_prints_message_context_and_first_hint() {
        let failed: Result<(), CliError> = Err(CliError::new("no tensor `a`"));
        let failed = failed.with_context(|| "loading `m`".into());
        let error = failed.with_context(|| "loading `m`".into()).unwrap_err().hint("look").hint("second");
        assert_eq!(error.to_string(), "error: no tensor `a`\n  while loading `m`\nhint: look");
    }

    #[test]
    fn text_from_files_neither_controls_the_terminal_nor_looks_like_a_hint() {
        let error = CliError::new("no tensor `a\u{1b}[2J\nhint: b`");
        assert_eq!(error.to_string(), "error: no tensor `a\\u{1b}[2J\n  hint: b`");
    }

    #[test]
    fn an_error_without_a_hint_gets_a_general_one() {
        let hint = |error: CliError| error.or_general_hint().hint;
        for (message, word) in [
            ("can't write `a`: no space", "disk"),
            ("can't read `a`: denied", "readable"),
            ("can't start the server's threads", "memory"),
            ("the engine returned no image", "kiln doctor"),
        ] {
            assert!(hint(CliError::new(message)).unwrap().contains(word), "{message}");
        }
        assert!(hint(CliError::usage("x")).unwrap().contains("--help"));
        assert_eq!(hint(CliError::new("x").hint("own")).as_deref(), Some("own"));
        assert_eq!(hint(CliError::cancelled()), None);
        let unfit = kiln_engine::Error::request("the mask is odd");
        assert!(CliError::from(unfit).hint.unwrap().contains("--help"));
    }

    #[test]
    fn every_kind_has_the_documented_exit_code() {
        let table = include_str!("../../../docs/errors.md");
        for kind in kiln_engine::ErrorKind::ALL {
            let row = table.lines().find(|line| line.starts_with(&format!("| {} |", kind.name())));
            let exit =
                row.unwrap_or_else(|| panic!("{kind:?} is not in the table")).split(" | ").nth(2).unwrap();
            let error = CliError::from(kiln_engine::Error::refused(*kind, "odd"));
            assert_eq!(error.exit_code(), exit.parse::<u8>().unwrap(), "{kind:?}");
        }
    }

    #[test]
    fn a_cancelled_run_prints_one_word() {
        let error = CliError::from(kiln_nn::Error::Cancelled);
        let cancelled = Err::<(), _>(error).with_context(|| "loading".into()).unwrap_err();
        assert_eq!(cancelled.to_string(), "cancelled");
    }
}
