//! A check by a program: the image on standard input, the prompt in a variable or a file, the answer as exit status.
//!
//! The program runs in a process group of its own, on Windows a job object, which is killed when the time is over, when the check is cancelled and
//! when the program has ended: nothing that it started goes on. Pipes are served by threads that end with them.

use std::io::{ErrorKind, Read, Write};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use tempfile::NamedTempFile;

use crate::{InvalidCheck, MAX_ANSWER, POLL, Refusal, Waiting, reason, words};

/// How long the pipes may stay open after the program has ended.
const CLOSING: Duration = Duration::from_secs(2);
/// The variable that holds the prompt.
const PROMPT: &str = "KILN_PROMPT";
/// The variable that names a file with the prompt, if it is too long for a variable.
const PROMPT_FILE: &str = "KILN_PROMPT_FILE";
/// The longest prompt that a variable holds, in bytes. Windows takes 32767 characters, Linux 128 KiB.
const MAX_VARIABLE: usize = 32_000;
/// Variables with secrets of the server, which a check does not need.
const SECRETS: [&str; 6] = [
    "KILN_API_KEY",
    "KILN_WEBHOOK_SECRET",
    "KILN_UPSAMPLE_KEY",
    "OPENAI_API_KEY",
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
];

/// A program and its arguments.
#[derive(Clone, Debug)]
pub(crate) struct CommandCheck {
    program: String,
    arguments: Vec<String>,
}

impl CommandCheck {
    /// Splits a command into words, and checks that its program is there.
    pub(crate) fn new(text: &str) -> Result<CommandCheck, InvalidCheck> {
        const HINT: &str = "give a program with its arguments, such as \"python3 check.py\", or a URL";
        let invalid = |what: String| InvalidCheck { what, hint: HINT };
        let words =
            words::split(text).map_err(|problem| invalid(format!("the check `{text}`: {problem}")))?;
        let mut words = words.into_iter();
        let Some(program) = words.next().filter(|program| !program.is_empty()) else {
            return Err(invalid("the check is an empty command".into()));
        };
        if words.clone().chain([program.clone()]).any(|word| word.contains('\0')) {
            return Err(invalid("the check contains a zero character".into()));
        }
        if program.contains("://") {
            return Err(invalid(format!("the check `{program}` is no http:// or https:// URL")));
        }
        if !is_found(&program) {
            return Err(InvalidCheck {
                what: format!("the program of the check, `{program}`, is not found"),
                hint: "give its path, or the name of a program in PATH",
            });
        }
        Ok(CommandCheck { program, arguments: words.collect() })
    }

    /// The command that checks an image of this prompt, which is in `file` if it is long.
    fn command(&self, prompt: &str, file: Option<&Path>) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        match file {
            Some(file) => command.env_remove(PROMPT).env(PROMPT_FILE, file),
            // A variable can't hold a zero character.
            None => command.env(PROMPT, prompt.replace('\0', " ")).env_remove(PROMPT_FILE),
        };
        for name in SECRETS {
            command.env_remove(name);
        }
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        command
    }

    pub(crate) fn check(&self, png: Vec<u8>, prompt: &str, waiting: &Waiting<'_>) -> Result<(), Refusal> {
        let failed =
            |error: std::io::Error| Refusal::Failed(format!("can't start `{}`: {error}", self.program));
        // Removed after the check.
        let file = prompt_file(prompt)
            .map_err(|error| Refusal::Failed(format!("can't write the prompt to a file: {error}")))?;
        let mut command = self.command(prompt, file.as_ref().map(NamedTempFile::path));
        let mut child = ChildGroup::new(start(&mut command).map_err(failed)?);
        if let Some(mut stdin) = child.child.stdin.take() {
            // A program that does not read the whole image closes the pipe; its answer counts all the same.
            std::thread::spawn(move || drop(stdin.write_all(&png)));
        }
        let stdout = read(child.child.stdout.take());
        let stderr = read(child.child.stderr.take());
        let status = child.wait(waiting, &stdout)?;
        let closing = Waiting { deadline: waiting.deadline.min(Instant::now() + CLOSING), ..*waiting };
        let answer = closing.receive(&stdout.done)?;
        stdout.check_length()?;
        match status.code() {
            Some(0) => Ok(()),
            Some(1) => Err(Refusal::Refused(reason(&String::from_utf8_lossy(&answer)))),
            _ => {
                let output = closing.receive(&stderr.done).unwrap_or_default();
                let last = String::from_utf8_lossy(&output);
                let last =
                    last.lines().rev().find_map(reason).map_or(String::new(), |line| format!(": {line}"));
                Err(Refusal::Failed(format!("`{}` ended with {status}{last}", self.program)))
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

/// Starts a program. A script that was written a moment ago may still be open for writing in a process that is being
/// forked; that passes.
fn start(command: &mut Command) -> std::io::Result<Child> {
    const ATTEMPTS: usize = 5;
    for _ in 1..ATTEMPTS {
        match command.spawn() {
            Err(error) if error.kind() == ErrorKind::ExecutableFileBusy => std::thread::sleep(POLL),
            result => return result,
        }
    }
    command.spawn()
}

/// Whether a program is a file, or in `PATH`.
fn is_found(program: &str) -> bool {
    // Windows adds the extension by itself.
    let with_extension = format!("{program}.exe");
    let name = |folder: &Path| {
        folder.join(program).is_file() || (cfg!(windows) && folder.join(&with_extension).is_file())
    };
    if Path::new(program).components().count() > 1 {
        return name(Path::new(""));
    }
    std::env::var_os("PATH").is_some_and(|path| std::env::split_paths(&path).any(|folder| name(&folder)))
}

/// A running program; its whole process group is killed when this is dropped.
struct ChildGroup {
    child: Child,
    /// `None` if Windows refused: then the program itself is killed, but not what it has started.
    #[cfg(windows)]
    tree: Option<kiln_windows::ProcessTree>,
}

impl ChildGroup {
    fn new(child: Child) -> ChildGroup {
        ChildGroup {
            #[cfg(windows)]
            tree: kiln_windows::ProcessTree::new(&child).ok(),
            child,
        }
    }

    /// Waits until the program ends, and ends what it has started.
    fn wait(mut self, waiting: &Waiting<'_>, output: &Output) -> Result<ExitStatus, Refusal> {
        let mut pause = Duration::from_millis(1);
        let failed = |error| Refusal::Failed(format!("can't wait for the check: {error}"));
        while !self.has_ended().map_err(failed)? {
            output.check_length()?;
            waiting.proceed()?;
            std::thread::sleep(pause);
            pause = (2 * pause).min(POLL);
        }
        self.kill();
        self.child.wait().map_err(failed)
    }

    /// Whether the program has ended. Its process id stays taken, so that it still names the group.
    #[cfg(unix)]
    fn has_ended(&mut self) -> std::io::Result<bool> {
        use rustix::process::{WaitId, WaitIdOptions, waitid};
        let Some(id) = self.group() else { return Ok(self.child.try_wait()?.is_some()) };
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        match waitid(WaitId::Pid(id), options) {
            Ok(status) => Ok(status.is_some()),
            Err(rustix::io::Errno::INTR) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    #[cfg(windows)]
    fn has_ended(&mut self) -> std::io::Result<bool> {
        Ok(self.child.try_wait()?.is_some())
    }

    #[cfg(unix)]
    fn group(&self) -> Option<rustix::process::Pid> {
        i32::try_from(self.child.id()).ok().and_then(rustix::process::Pid::from_raw)
    }

    /// Kills the program and what it has started, unless it is waited for already.
    fn kill(&mut self) {
        #[cfg(unix)]
        if let Some(group) = self.group() {
            // Fails if nothing is left of the group.
            let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        }
        #[cfg(windows)]
        let _ = self.tree.as_ref().map(kiln_windows::ProcessTree::kill);
        let _ = self.child.kill();
    }
}

impl Drop for ChildGroup {
    fn drop(&mut self) {
        // A program that was waited for has a status; its process id may belong to another one by now.
        if self.child.try_wait().is_ok_and(|status| status.is_none()) {
            self.kill();
            let _ = self.child.wait();
        }
    }
}

/// What a program prints.
struct Output {
    /// All of it, up to [`MAX_ANSWER`] bytes, once the pipe is closed.
    done: Receiver<Vec<u8>>,
    /// Gets a message if there is more.
    too_long: Receiver<()>,
}

impl Output {
    /// Fails if there is more than is read.
    fn check_length(&self) -> Result<(), Refusal> {
        let too_long = || Refusal::Failed(format!("the check printed more than {MAX_ANSWER} bytes"));
        self.too_long.try_recv().map_or(Ok(()), |()| Err(too_long()))
    }
}

/// Reads a pipe to its end on a thread of its own, and keeps its beginning.
fn read(pipe: Option<impl Read + Send + 'static>) -> Output {
    let ((done, done_receiver), (too_long, too_long_receiver)) = (channel(), channel());
    std::thread::spawn(move || {
        let (mut kept, mut buffer) = (Vec::new(), [0; 8192]);
        let mut pipe = pipe;
        while let Some(pipe) = &mut pipe {
            match pipe.read(&mut buffer) {
                Ok(0) => break,
                Ok(n) => {
                    let room = MAX_ANSWER - kept.len();
                    kept.extend_from_slice(&buffer[..n.min(room)]);
                    if n > room {
                        let _ = too_long.send(());
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        let _ = done.send(kept);
    });
    Output { done: done_receiver, too_long: too_long_receiver }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_gets_no_secrets_of_the_server() {
        let check = CommandCheck { program: "check".into(), arguments: Vec::new() };
        let command = check.command("a cat", None);
        let set: Vec<_> = command.get_envs().map(|(name, value)| (name.to_str(), value.is_some())).collect();
        for name in ["KILN_API_KEY", "KILN_UPSAMPLE_KEY", "OPENAI_API_KEY", "HF_TOKEN"] {
            assert!(set.contains(&(Some(name), false)), "{name}");
        }
        assert!(set.contains(&(Some(PROMPT), true)));
    }
}
