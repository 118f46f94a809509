//! Signing by another program, for keys that never leave a KMS or an HSM. The protocol is c2patool's: with `--signer-info` the
//! program prints `{"alg", "sign_cert"}` as JSON; else it reads what to sign from standard input and prints the raw signature.

use std::time::{Duration, Instant};

use kiln_base::{Program, ProgramError, ProgramLimits, printable_line, run_program};

use crate::{Algorithm, Error, Result, key};

/// Longest that the program may take.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Most bytes that it may print.
const MAX_OUTPUT: usize = 1 << 20;

/// A program that signs.
#[derive(Clone, Debug)]
pub(crate) struct SignCommand {
    program: Program,
    timeout: Duration,
    pub algorithm: Algorithm,
}

impl SignCommand {
    /// Asks the program for its algorithm and certificates.
    pub fn open(program: Program) -> Result<(SignCommand, Vec<Vec<u8>>)> {
        SignCommand::with_timeout(program, TIMEOUT)
    }

    fn with_timeout(program: Program, timeout: Duration) -> Result<(SignCommand, Vec<Vec<u8>>)> {
        let mut command = SignCommand { program, timeout, algorithm: Algorithm::Es256 };
        let printed = command.run(Some("--signer-info"), &[])?;
        let info: serde_json::Value = serde_json::from_slice(&printed)
            .map_err(|_| command.error("printed no JSON for --signer-info"))?;
        let field = |name: &str| {
            let text = info.get(name).and_then(|value| value.as_str());
            text.ok_or_else(|| command.error(&format!("names no `{name}` for --signer-info")))
        };
        let algorithm =
            field("alg")?.parse().map_err(|problem: String| command.error(&format!("names an {problem}")))?;
        let chain = key::chain(field("sign_cert")?.as_bytes())
            .ok_or_else(|| command.error("names no certificate (PEM) in `sign_cert`"))?;
        command.algorithm = algorithm;
        Ok((command, chain))
    }

    pub fn sign(&self, message: &[u8]) -> Result<Vec<u8>> {
        let signed = self.run(None, message)?;
        if signed.is_empty() {
            return Err(self.error("printed no signature"));
        }
        Ok(signed)
    }

    fn error(&self, problem: &str) -> Error {
        Error::Command { command: self.program.to_string(), problem: problem.into() }
    }

    fn run(&self, argument: Option<&str>, input: &[u8]) -> Result<Vec<u8>> {
        let mut command = self.program.command();
        command.args(argument);
        let deadline = Instant::now() + self.timeout;
        let limits = ProgramLimits { deadline, output: MAX_OUTPUT, cancelled: &|| false };
        let ran = run_program(command, input.to_vec(), &limits).map_err(|error| match error {
            ProgramError::Start(error) => self.error(&format!("can't be started: {error}")),
            ProgramError::Wait(error) => self.error(&format!("can't be waited for: {error}")),
            ProgramError::TooLong => self.error(&format!("printed more than {MAX_OUTPUT} bytes")),
            ProgramError::StaysOpen => self.error("ended, but what it started keeps its output open"),
            ProgramError::TimedOut | ProgramError::Cancelled => {
                self.error(&format!("did not end within {} s", self.timeout.as_secs_f32()))
            }
        })?;
        if ran.status.success() {
            return Ok(ran.output);
        }
        let messages = String::from_utf8_lossy(&ran.errors);
        let last = messages.lines().rev().map(str::trim).find(|line| !line.is_empty());
        let last = last.map_or(String::new(), |line| format!(": {}", printable_line(line)));
        Err(self.error(&format!("failed: {}{last}", ran.status)))
    }
}

#[cfg(all(test, unix))]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;
    use crate::key::{Key, read_chain};
    use crate::{NewCredentials, Signer};

    /// Hands what is to be signed to the test, and prints what the test makes of it.
    const SIGNER: &str = r#"cd "$(dirname "$0")"
if [ "$1" = --signer-info ]; then cat info.json; exit; fi
cat > message.part && mv message.part message
until [ -e signature ]; do sleep 0.01; done
cat signature; rm signature"#;

    fn script(folder: &Path, text: &str) -> Program {
        let path = folder.join("signer.sh");
        fs::write(&path, text).unwrap();
        Program::parse(&format!("sh '{}'", path.display())).unwrap()
    }

    /// A key of one's own, as the program would tell of it.
    fn key(folder: &Path) -> Key {
        let files = NewCredentials::in_folder(folder);
        files.create("Ada").unwrap();
        let certificate = fs::read_to_string(&files.certificate).unwrap();
        let info = serde_json::json!({ "alg": "es256", "sign_cert": certificate, "reserve_size": 20000 });
        fs::write(folder.join("info.json"), info.to_string()).unwrap();
        assert_eq!(read_chain(&files.certificate).unwrap().len(), 1);
        Key::open(&files.key).unwrap()
    }

    #[test]
    fn a_program_signs_what_it_reads() {
        let folder = tempfile::tempdir().unwrap();
        let (folder, key) = (folder.path(), key(folder.path()));
        let program = script(folder, SIGNER);
        let [message, part, signature] = ["message", "part", "signature"].map(|name| folder.join(name));
        std::thread::scope(|scope| {
            let signer = scope.spawn(|| Signer::command(program));
            while !message.exists() && !signer.is_finished() {
                std::thread::sleep(Duration::from_millis(5));
            }
            // Written whole before it has its name.
            fs::write(&part, key.sign(&fs::read(&message).unwrap()).unwrap()).unwrap();
            fs::rename(&part, &signature).unwrap();
            let signer = signer.join().unwrap().unwrap();
            assert_eq!(signer.name(), "Ada");
        });
    }

    #[test]
    fn a_signature_of_another_key_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        key(folder.path());
        fs::write(folder.path().join("signature"), [7; 64]).unwrap();
        let refused = Signer::command(script(folder.path(), SIGNER)).map(|_| ());
        assert!(matches!(refused, Err(Error::KeyMismatch)), "{refused:?}");
    }

    #[track_caller]
    fn assert_refused(text: &str, timeout: Duration, problem: &str) {
        let (folder, begin) = (tempfile::tempdir().unwrap(), Instant::now());
        let refused = SignCommand::with_timeout(script(folder.path(), text), timeout).map(|_| ());
        let message = refused.unwrap_err().to_string();
        assert!(message.contains(problem) && message.contains("signer.sh"), "{message}");
        assert!(begin.elapsed() < Duration::from_secs(15), "{:?}", begin.elapsed());
    }

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn programs_that_answer_wrongly_are_refused() {
        assert_refused("echo no token >&2; exit 3", LONG, "failed: exit status: 3: no token");
        assert_refused("echo hello", LONG, "printed no JSON");
        assert_refused("echo '{\"alg\":\"es256\"}'", LONG, "names no `sign_cert`");
        assert_refused("echo '{\"alg\":\"rot13\",\"sign_cert\":\"\"}'", LONG, "unknown algorithm `rot13`");
        assert_refused("kill -9 $$", LONG, "signal: 9");
    }

    #[test]
    fn programs_that_hang_or_flood_are_stopped_with_what_they_started() {
        assert_refused("sleep 600", Duration::from_millis(500), "did not end within 0.5 s");
        assert_refused("sleep 600 & wait", Duration::from_millis(500), "did not end within 0.5 s");
        assert_refused("yes", LONG, "printed more than 1048576 bytes");
        // What it leaves behind is killed, and its output counts.
        assert_refused("sleep 600 & echo '{}'", LONG, "names no `alg`");
    }

    /// It left the group of the program, so that it goes on.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_process_that_left_the_group_and_holds_the_output_is_not_waited_for() {
        assert_refused("setsid sleep 10 & sleep 0.2; echo '{}'", LONG, "keeps its output open");
    }
}
