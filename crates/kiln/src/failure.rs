//! How a run ends badly: what happened, while doing what, and what to do about it.

use std::fmt;
use std::process::ExitCode;

use clap::CommandFactory;

use crate::args::Cli;
use crate::hints;

/// The kind decides the exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The work could not be done: 1.
    Failed,
    /// The command line makes no sense: 2.
    Usage,
    /// Ctrl-C: 130.
    Cancelled,
}

/// Why there is no picture.
#[derive(Debug)]
pub struct Failure {
    pub kind: Kind,
    pub message: String,
    /// What was being done, innermost first.
    pub context: Vec<String>,
    pub hint: Option<String>,
}

impl Failure {
    pub fn new(message: impl Into<String>) -> Failure {
        Failure { kind: Kind::Failed, message: message.into(), context: Vec::new(), hint: None }
    }

    pub fn usage(message: impl Into<String>) -> Failure {
        Failure { kind: Kind::Usage, ..Failure::new(message) }
    }

    pub fn cancelled() -> Failure {
        Failure { kind: Kind::Cancelled, ..Failure::new("cancelled") }
    }

    /// Adds what to do, unless there already is something better.
    pub fn hint(mut self, hint: impl Into<String>) -> Failure {
        self.hint.get_or_insert(hint.into());
        self
    }

    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self.kind {
            Kind::Failed => 1,
            Kind::Usage => 2,
            Kind::Cancelled => 130,
        })
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            Kind::Cancelled => f.write_str(&self.message)?,
            _ => write!(f, "error: {}", self.message)?,
        }
        for context in &self.context {
            write!(f, "\n  while {context}")?;
        }
        self.hint.as_ref().map_or(Ok(()), |hint| write!(f, "\nhint: {hint}"))
    }
}

impl From<kiln_engine::Error> for Failure {
    fn from(error: kiln_engine::Error) -> Self {
        use kiln_engine::Error;
        let hint = hints::engine(&error).map(|hint| with_options(&hint));
        match error {
            Error::While { doing, source } => {
                let mut failure = Failure::from(*source);
                failure.context.push(doing);
                failure
            }
            Error::Model(error) => error.into(),
            Error::Combination { what, .. } => Failure { hint, ..Failure::usage(with_options(&what)) },
            error => Failure { hint, ..Failure::new(error.to_string()) },
        }
    }
}

/// A text with the fields of a request in backticks, with the options of the command line in their place.
fn with_options(text: &str) -> String {
    let command = Cli::command();
    let generate = command.find_subcommand("generate");
    let option = |field: &str| {
        let mut arguments = generate?.get_arguments().filter(|argument| argument.get_id() == field);
        arguments.next()?.get_long().map(|long| format!("--{long}"))
    };
    let words = text.split('`').enumerate().map(|(i, word)| match i % 2 {
        0 => word.to_owned(),
        _ => option(word).unwrap_or_else(|| format!("`{word}`")),
    });
    words.collect()
}

impl From<kiln_model::Error> for Failure {
    fn from(error: kiln_model::Error) -> Self {
        if matches!(error, kiln_model::Error::Cancelled) {
            return Failure::cancelled();
        }
        Failure { hint: hints::model(&error), ..Failure::new(error.to_string()) }
    }
}

impl From<kiln_weights::Error> for Failure {
    fn from(error: kiln_weights::Error) -> Self {
        Failure { hint: hints::weights(&error), ..Failure::new(error.to_string()) }
    }
}

impl From<kiln_image::Error> for Failure {
    fn from(error: kiln_image::Error) -> Self {
        Failure { hint: hints::image(&error), ..Failure::new(error.to_string()) }
    }
}

impl From<kiln_ops::Error> for Failure {
    fn from(error: kiln_ops::Error) -> Self {
        Failure { hint: hints::ops(&error), ..Failure::new(error.to_string()) }
    }
}

impl From<kiln_hub::Error> for Failure {
    fn from(error: kiln_hub::Error) -> Self {
        match &error {
            kiln_hub::Error::Cancelled => Failure::cancelled(),
            kiln_hub::Error::Name { .. } => {
                Failure { kind: Kind::Usage, hint: hints::hub(&error), ..Failure::new(error.to_string()) }
            }
            _ => Failure { hint: hints::hub(&error), ..Failure::new(error.to_string()) },
        }
    }
}

/// Adds to an error what was being done.
pub trait While<T> {
    fn while_doing(self, what: impl FnOnce() -> String) -> Result<T, Failure>;
}

impl<T, E: Into<Failure>> While<T> for Result<T, E> {
    fn while_doing(self, what: impl FnOnce() -> String) -> Result<T, Failure> {
        self.map_err(|e| {
            let mut failure = e.into();
            if failure.kind != Kind::Cancelled {
                failure.context.push(what());
            }
            failure
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_prints_message_context_and_hint() {
        let failed: Result<(), Failure> = Err(Failure::new("no tensor `a`"));
        let failure = failed.while_doing(|| "loading `m`".into()).unwrap_err().hint("look").hint("worse");
        assert_eq!(failure.to_string(), "error: no tensor `a`\n  while loading `m`\nhint: look");
    }

    #[test]
    fn a_cancelled_run_says_so_and_no_more() {
        let failure = Failure::from(kiln_model::Error::Cancelled);
        let cancelled = Err::<(), _>(failure).while_doing(|| "loading".into()).unwrap_err();
        assert_eq!(cancelled.to_string(), "cancelled");
    }
}
