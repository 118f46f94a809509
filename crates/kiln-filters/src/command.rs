//! A check by a program: the image on standard input, the prompt in a variable or a file, the answer as exit status.

use std::io::Write;
use std::path::Path;
use std::process::Command;

use kiln_base::{InvalidProgram, Program, ProgramError, ProgramLimits, run_program};
use tempfile::NamedTempFile;

use crate::{InvalidCheck, MAX_ANSWER, Refusal, Waiting, reason};

/// The variable that holds the prompt.
const PROMPT: &str = "KILN_PROMPT";
/// The variable that names a file with the prompt, if it is too long for a variable.
const PROMPT_FILE: &str = "KILN_PROMPT_FILE";
/// The longest prompt that a variable holds, in bytes. Windows takes 32767 characters, Linux 128 KiB.
const MAX_VARIABLE: usize = 32_000;

/// A program that checks.
#[derive(Clone, Debug)]
pub(crate) struct CommandCheck {
    program: Program,
}

impl CommandCheck {
    /// Splits a command into words, and checks that its program is there.
    pub(crate) fn new(text: &str) -> Result<CommandCheck, InvalidCheck> {
        const HINT: &str = "give a program with its arguments, such as \"python3 check.py\", or a URL";
        let (what, hint) = match Program::parse(text) {
            Ok(program) => return Ok(CommandCheck { program }),
            Err(InvalidProgram::Words(problem)) => (format!("the check `{text}`: {problem}"), HINT),
            Err(InvalidProgram::Empty) => ("the check is an empty command".into(), HINT),
            Err(InvalidProgram::Zero) => ("the check contains a zero character".into(), HINT),
            Err(InvalidProgram::NotFound(program)) if program.contains("://") => {
                (format!("the check `{program}` is no http:// or https:// URL"), HINT)
            }
            Err(InvalidProgram::NotFound(program)) => (
                format!("the program of the check, `{program}`, is not found"),
                "give its path, or the name of a program in PATH",
            ),
        };
        Err(InvalidCheck { what, hint })
    }

    /// The command that checks an image of this prompt, which is in `file` if it is long.
    fn command(&self, prompt: &str, file: Option<&Path>) -> Command {
        let mut command = self.program.command();
        match file {
            Some(file) => command.env_remove(PROMPT).env(PROMPT_FILE, file),
            // A variable can't hold a zero character.
            None => command.env(PROMPT, prompt.replace('\0', " ")).env_remove(PROMPT_FILE),
        };
        command
    }

    pub(crate) fn check(&self, png: Vec<u8>, prompt: &str, waiting: &Waiting<'_>) -> Result<(), Refusal> {
        // Removed after the check.
        let file = prompt_file(prompt)
            .map_err(|error| Refusal::Failed(format!("can't write the prompt to a file: {error}")))?;
        let command = self.command(prompt, file.as_ref().map(NamedTempFile::path));
        let Waiting { deadline, cancelled, .. } = *waiting;
        let limits = ProgramLimits { deadline, output: MAX_ANSWER, cancelled };
        let name = self.program.name();
        let ran = run_program(command, png, &limits).map_err(|error| match error {
            ProgramError::Cancelled => Refusal::Cancelled,
            ProgramError::TimedOut => waiting.no_answer(),
            ProgramError::Start(error) => Refusal::Failed(format!("can't start `{name}`: {error}")),
            ProgramError::Wait(error) => Refusal::Failed(format!("can't wait for the check: {error}")),
            ProgramError::TooLong => {
                Refusal::Failed(format!("the check printed more than {MAX_ANSWER} bytes"))
            }
            ProgramError::StaysOpen => {
                Refusal::Failed(format!("`{name}` ended, but what it started keeps its output open"))
            }
        })?;
        match ran.status.code() {
            Some(0) => Ok(()),
            Some(1) => Err(Refusal::Refused(reason(&String::from_utf8_lossy(&ran.output)))),
            _ => {
                let last = String::from_utf8_lossy(&ran.errors);
                let last =
                    last.lines().rev().find_map(reason).map_or(String::new(), |line| format!(": {line}"));
                Err(Refusal::Failed(format!("`{name}` ended with {}{last}", ran.status)))
            }
        }
    }
}

/// A file with a prompt that is too long for a variable.
fn prompt_file(prompt: &str) -> std::io::Result<Option<NamedTempFile>> {
    if prompt.len() <= MAX_VARIABLE {
        return Ok(None);
    }
    let mut file = tempfile::Builder::new().prefix("kiln-prompt-").suffix(".txt").tempfile()?;
    file.write_all(prompt.as_bytes())?;
    Ok(Some(file))
}
