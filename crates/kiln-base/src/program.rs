//! Programs of the user's, such as a check of images or a signer: started without a shell and without Kiln's secrets, with
//! limits for time and output.
//!
//! A program runs in a process group of its own, on Windows a job object, which is killed when the time is over, when the caller
//! cancels and when the program has ended: nothing that it started goes on. Pipes are served by threads that end with them.

use std::ffi::OsStr;
use std::fmt;
use std::io::{self, ErrorKind, Read, Write};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use crate::words;

/// How often a waiting caller looks whether it is cancelled.
const POLL: Duration = Duration::from_millis(20);
/// How long the pipes may stay open after the program has ended.
const CLOSING: Duration = Duration::from_secs(2);
/// Variables of other programs that Kiln reads as well and that hold a token. All that start with `KILN_` are withheld, too.
const TOKENS: [&str; 3] = ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "OPENAI_API_KEY"];
const OWN_PREFIX: &str = "KILN_";

/// A program and its arguments.
#[derive(Clone, Debug)]
pub struct Program {
    name: String,
    arguments: Vec<String>,
}

/// Why a text names no program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InvalidProgram {
    /// It can't be split into words.
    Words(&'static str),
    /// It has no words.
    Empty,
    /// No word of a command can hold a zero character.
    Zero,
    /// There is no such file, also not in `PATH`.
    NotFound(String),
}

/// How long a program may run, and how much it may print.
#[derive(Clone, Copy)]
pub struct ProgramLimits<'a> {
    /// When it must have ended.
    pub deadline: Instant,
    /// Most bytes on standard output. Of standard error, as many are kept.
    pub output: usize,
    /// Whether the caller has given up.
    pub cancelled: &'a dyn Fn() -> bool,
}

/// How a program ended.
#[derive(Debug)]
pub struct ProgramOutput {
    /// Its exit status.
    pub status: ExitStatus,
    /// What it printed.
    pub output: Vec<u8>,
    /// The beginning of its messages.
    pub errors: Vec<u8>,
}

/// Why a program has no output.
#[derive(Debug)]
pub enum ProgramError {
    /// It can't be started.
    Start(io::Error),
    /// It can't be waited for.
    Wait(io::Error),
    /// It printed more than the limit.
    TooLong,
    /// It did not end in time.
    TimedOut,
    /// It has ended, but what it started left its group and keeps standard output open.
    StaysOpen,
    /// The caller gave up.
    Cancelled,
}

impl fmt::Display for InvalidProgram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            InvalidProgram::Words(problem) => f.write_str(problem),
            InvalidProgram::Empty => f.write_str("it is empty"),
            InvalidProgram::Zero => f.write_str("it contains a zero character"),
            InvalidProgram::NotFound(name) => write!(f, "the program `{name}` is not found"),
        }
    }
}

impl Program {
    /// Splits a command into words, and checks that its program is there.
    pub fn parse(text: &str) -> Result<Program, InvalidProgram> {
        let mut words = words::split(text).map_err(InvalidProgram::Words)?.into_iter();
        let name = words.next().filter(|name| !name.is_empty()).ok_or(InvalidProgram::Empty)?;
        let arguments: Vec<_> = words.collect();
        if arguments.iter().chain([&name]).any(|word| word.contains('\0')) {
            return Err(InvalidProgram::Zero);
        }
        if !is_found(&name) {
            return Err(InvalidProgram::NotFound(name));
        }
        Ok(Program { name, arguments })
    }

    /// Its name or path.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Prepares a run: more arguments and variables may be added. The program sees all of the environment but the tokens that
    /// Kiln reads.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.name);
        command.args(&self.arguments);
        let withheld = std::env::vars_os().map(|(name, _)| name).filter(|name| is_withheld(name));
        withheld.for_each(|name| {
            command.env_remove(name);
        });
        command
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        self.arguments.iter().try_for_each(|argument| write!(f, " {argument}"))
    }
}

/// Whether a variable is Kiln's own, or a token that it reads.
fn is_withheld(name: &OsStr) -> bool {
    let name = name.to_string_lossy();
    let is_own = name.get(..OWN_PREFIX.len()).is_some_and(|start| start.eq_ignore_ascii_case(OWN_PREFIX));
    is_own || TOKENS.iter().any(|token| name.eq_ignore_ascii_case(token))
}

impl ProgramLimits<'_> {
    /// Fails if the time is over or the caller has given up.
    fn proceed(&self) -> Result<(), ProgramError> {
        if (self.cancelled)() {
            return Err(ProgramError::Cancelled);
        }
        if Instant::now() >= self.deadline { Err(ProgramError::TimedOut) } else { Ok(()) }
    }

    /// Waits for a message of another thread.
    fn receive<T>(&self, from: &Receiver<T>) -> Result<T, ProgramError> {
        loop {
            match from.recv_timeout(POLL) {
                Ok(message) => return Ok(message),
                Err(RecvTimeoutError::Timeout) => self.proceed()?,
                Err(RecvTimeoutError::Disconnected) => return Err(ProgramError::StaysOpen),
            }
        }
    }
}

/// Runs a prepared command, with `input` on its standard input, until it ends or meets a limit.
pub fn run_program(
    mut command: Command,
    input: Vec<u8>,
    limits: &ProgramLimits<'_>,
) -> Result<ProgramOutput, ProgramError> {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    let mut child = ChildGroup::new(start(&mut command).map_err(ProgramError::Start)?);
    if let Some(mut stdin) = child.child.stdin.take() {
        // A program that does not read all of it closes the pipe; its answer counts all the same.
        std::thread::spawn(move || drop(stdin.write_all(&input)));
    }
    let output = read(child.child.stdout.take(), limits.output);
    let errors = read(child.child.stderr.take(), limits.output);
    let status = child.wait(limits, &output)?;
    let closing = ProgramLimits { deadline: limits.deadline.min(Instant::now() + CLOSING), ..*limits };
    let printed = closing.receive(&output.done).map_err(|error| match error {
        ProgramError::TimedOut => ProgramError::StaysOpen,
        error => error,
    })?;
    output.check_length()?;
    // Of a program that succeeded, nobody reads the messages.
    let errors = if status.success() { None } else { closing.receive(&errors.done).ok() };
    Ok(ProgramOutput { status, output: printed, errors: errors.unwrap_or_default() })
}

/// Starts a program. A script that was written a moment ago may still be open for writing in a process that is being
/// forked; that passes.
fn start(command: &mut Command) -> io::Result<Child> {
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
    fn wait(mut self, limits: &ProgramLimits<'_>, output: &Output) -> Result<ExitStatus, ProgramError> {
        let mut pause = Duration::from_millis(1);
        while !self.has_ended().map_err(ProgramError::Wait)? {
            output.check_length()?;
            limits.proceed()?;
            std::thread::sleep(pause);
            pause = (2 * pause).min(POLL);
        }
        self.kill();
        self.child.wait().map_err(ProgramError::Wait)
    }

    /// Whether the program has ended. Its process id stays taken, so that it still names the group.
    #[cfg(unix)]
    fn has_ended(&mut self) -> io::Result<bool> {
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
    fn has_ended(&mut self) -> io::Result<bool> {
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
    /// All of it, up to the limit, once the pipe is closed.
    done: Receiver<Vec<u8>>,
    /// Gets a message if there is more.
    too_long: Receiver<()>,
}

impl Output {
    /// Fails if there is more than is read.
    fn check_length(&self) -> Result<(), ProgramError> {
        self.too_long.try_recv().map_or(Ok(()), |()| Err(ProgramError::TooLong))
    }
}

/// Reads a pipe to its end on a thread of its own, and keeps its beginning.
fn read(pipe: Option<impl Read + Send + 'static>, limit: usize) -> Output {
    let ((done, done_receiver), (too_long, too_long_receiver)) = (channel(), channel());
    std::thread::spawn(move || {
        let (mut kept, mut buffer) = (Vec::new(), [0; 8192]);
        let mut pipe = pipe;
        while let Some(pipe) = &mut pipe {
            match pipe.read(&mut buffer) {
                Ok(0) => break,
                Ok(n) => {
                    let room = limit - kept.len();
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
    fn a_program_gets_the_environment_without_keys_and_tokens() {
        for name in [
            "KILN_API_KEY",
            "KILN_WEBHOOK_SECRET",
            "KILN_UPSAMPLE_KEY",
            "Kiln_Data",
            "OPENAI_API_KEY",
            "HF_TOKEN",
        ] {
            assert!(is_withheld(OsStr::new(name)), "{name}");
        }
        for name in
            ["PATH", "HOME", "AWS_SECRET_ACCESS_KEY", "GOOGLE_APPLICATION_CREDENTIALS", "KILN", "É_KILN_"]
        {
            assert!(!is_withheld(OsStr::new(name)), "{name}");
        }
    }

    #[cfg(unix)]
    fn run(script: &str, time: Duration) -> Result<ProgramOutput, ProgramError> {
        let mut command = Program::parse("sh -c").unwrap().command();
        command.arg(script);
        let limits = ProgramLimits { deadline: Instant::now() + time, output: 1000, cancelled: &|| false };
        run_program(command, b"input".to_vec(), &limits)
    }

    #[cfg(unix)]
    #[test]
    fn output_status_and_messages_are_returned() {
        let ran = run("cat; echo why >&2; exit 3", Duration::from_secs(20)).unwrap();
        assert_eq!(
            (ran.status.code(), &ran.output[..], &ran.errors[..]),
            (Some(3), &b"input"[..], &b"why\n"[..])
        );
    }

    #[cfg(unix)]
    #[test]
    fn a_program_that_hangs_or_floods_is_stopped() {
        let begin = Instant::now();
        assert!(matches!(run("sleep 600", Duration::from_millis(300)), Err(ProgramError::TimedOut)));
        assert!(matches!(run("yes", Duration::from_secs(20)), Err(ProgramError::TooLong)));
        let ran = run("sleep 600 & echo done", Duration::from_secs(20)).unwrap();
        assert_eq!(ran.output, b"done\n");
        assert!(begin.elapsed() < Duration::from_secs(15));
    }

    /// It left its group, so that it is not killed; the caller goes on all the same.
    #[cfg(target_os = "linux")]
    #[test]
    fn output_that_a_process_of_another_group_holds_open_is_not_waited_for() {
        let begin = Instant::now();
        let ran = run("setsid sleep 8 & sleep 0.2; echo done", Duration::from_secs(60));
        assert!(matches!(ran, Err(ProgramError::StaysOpen)), "{ran:?}");
        assert!(begin.elapsed() < Duration::from_secs(7));
    }

    #[test]
    fn texts_that_name_no_program_are_refused() {
        assert!(matches!(Program::parse("'a"), Err(InvalidProgram::Words(_))));
        assert_eq!(Program::parse("  ").unwrap_err(), InvalidProgram::Empty);
        assert_eq!(Program::parse("a\0b").unwrap_err(), InvalidProgram::Zero);
        let name = "no-such-program-anywhere";
        assert_eq!(Program::parse(name).unwrap_err(), InvalidProgram::NotFound(name.into()));
    }
}
