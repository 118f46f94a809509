//! The program's error: what went wrong, in which context, and a hint about what to do.

use std::fmt;
use std::process::ExitCode;

use clap::CommandFactory;
use kiln_base::printable;

use crate::args::Cli;
use crate::{cancel, hints};

/// The kind of an error, which decides the exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The command failed: 1.
    Failed,
    /// The command line is wrong: 2.
    Usage,
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
        self.hint = self.hint.take().or_else(|| hints::general(&self));
        self
    }

    /// Adds what was being done, unless that is the last thing said.
    fn add_context(&mut self, doing: String) {
        if self.context.last() != Some(&doing) {
            self.context.push(doing);
        }
    }

    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self.kind {
            ErrorKind::Failed => 1,
            ErrorKind::Usage => 2,
            ErrorKind::Refused => 3,
            ErrorKind::Cancelled => cancel::exit_code() as u8,
        })
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

impl From<kiln_engine::Error> for CliError {
    fn from(error: kiln_engine::Error) -> Self {
        use kiln_engine::Error;
        let hint = hints::engine(&error).map(|hint| fields_to_options(&hint));
        match error {
            Error::Context { doing, source } => {
                let mut error = CliError::from(*source);
                error.add_context(doing);
                error
            }
            Error::Model(error) => error.into(),
            Error::Combination { what, .. } => CliError { hint, ..CliError::usage(fields_to_options(&what)) },
            Error::Value { what, .. } => CliError { hint, ..CliError::usage(what) },
            error => CliError { hint, ..CliError::new(error.to_string()) },
        }
    }
}

/// Replaces request fields in backticks with the command line's options: `` `mask` `` becomes `--mask`.
fn fields_to_options(text: &str) -> String {
    let command = Cli::command();
    let commands = ["generate", "train"].map(|name| command.find_subcommand(name));
    let option = |field: &str| {
        let arguments = commands.iter().flatten().flat_map(|command| command.get_arguments());
        let mut arguments = arguments.filter(|argument| argument.get_id() == field);
        arguments.next()?.get_long().map(|long| format!("--{long}"))
    };
    let words = text.split('`').enumerate().map(|(i, word)| match i % 2 {
        0 => word.to_owned(),
        _ => option(word).unwrap_or_else(|| format!("`{word}`")),
    });
    words.collect()
}

impl From<kiln_model::Error> for CliError {
    fn from(error: kiln_model::Error) -> Self {
        if matches!(error, kiln_model::Error::Cancelled) {
            return CliError::cancelled();
        }
        CliError { hint: hints::model(&error), ..CliError::new(error.to_string()) }
    }
}

impl From<kiln_weights::Error> for CliError {
    fn from(error: kiln_weights::Error) -> Self {
        if matches!(error, kiln_weights::Error::Cancelled) {
            return CliError::cancelled();
        }
        CliError { hint: hints::weights(&error), ..CliError::new(error.to_string()) }
    }
}

impl From<kiln_image::Error> for CliError {
    fn from(error: kiln_image::Error) -> Self {
        let kind = match error {
            // The name given with -o.
            kiln_image::Error::Format { .. } => ErrorKind::Usage,
            _ => ErrorKind::Failed,
        };
        CliError { kind, hint: hints::image(&error), ..CliError::new(error.to_string()) }
    }
}

impl From<kiln_ops::Error> for CliError {
    fn from(error: kiln_ops::Error) -> Self {
        CliError { hint: hints::ops(&error), ..CliError::new(error.to_string()) }
    }
}

impl From<kiln_train::Error> for CliError {
    fn from(error: kiln_train::Error) -> Self {
        use kiln_train::Error;
        match error {
            Error::Engine(error) => error.into(),
            Error::Model(error) => error.into(),
            Error::Weights(error) => error.into(),
            Error::Image(error) => error.into(),
            Error::Ops(error) => error.into(),
            Error::Models(error) => error.into(),
            Error::Context { doing, source } => {
                let mut error = CliError::from(*source);
                error.add_context(doing);
                error
            }
            Error::Value { what, hint, .. } => {
                let hint =
                    hint.map_or_else(|| "see `kiln train --help`".into(), |hint| fields_to_options(&hint));
                CliError::usage(fields_to_options(&what)).hint(hint)
            }
            Error::Settings(_) => {
                CliError { hint: hints::train(&error), ..CliError::usage(error.to_string()) }
            }
            error => CliError { hint: hints::train(&error), ..CliError::new(error.to_string()) },
        }
    }
}

impl From<kiln_hub::Error> for CliError {
    fn from(error: kiln_hub::Error) -> Self {
        match &error {
            kiln_hub::Error::Cancelled => CliError::cancelled(),
            kiln_hub::Error::InvalidName { .. } | kiln_hub::Error::Variable { .. } => CliError {
                kind: ErrorKind::Usage,
                hint: hints::hub(&error),
                ..CliError::new(error.to_string())
            },
            _ => CliError { hint: hints::hub(&error), ..CliError::new(error.to_string()) },
        }
    }
}

impl From<kiln_models::Error> for CliError {
    fn from(error: kiln_models::Error) -> Self {
        use kiln_models::Error;
        match error {
            Error::Usage { what, hint } => CliError::usage(what).hint(hint),
            Error::Missing { what, hint } => CliError::new(what).hint(hint),
            Error::Open { source, hint: None } => (*source).into(),
            Error::Open { source, hint } => CliError { hint, ..CliError::from(*source) },
            Error::Hub(error) => error.into(),
        }
    }
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
            ("can't start the server's threads", "ulimit"),
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
    fn a_cancelled_run_prints_one_word() {
        let error = CliError::from(kiln_model::Error::Cancelled);
        let cancelled = Err::<(), _>(error).with_context(|| "loading".into()).unwrap_err();
        assert_eq!(cancelled.to_string(), "cancelled");
    }
}
