//! Signing by another program, for keys that never leave a KMS or an HSM. The protocol is c2patool's: with `--signer-info` the
//! program prints `{"alg", "sign_cert"}` as JSON; else it reads what to sign from standard input and prints the raw signature.

use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::{Algorithm, Error, Result, key};

/// Longest that the program may take.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Most bytes that it may print.
const MAX_OUTPUT: u64 = 1 << 20;

/// A program that signs.
#[derive(Clone, Debug)]
pub(crate) struct SignCommand {
    words: Vec<String>,
    pub algorithm: Algorithm,
}

impl SignCommand {
    /// Asks the program for its algorithm and certificates.
    pub fn open(words: Vec<String>) -> Result<(SignCommand, Vec<Vec<u8>>)> {
        let mut command = SignCommand { words, algorithm: Algorithm::Es256 };
        let printed = command.run(&["--signer-info"], &[])?;
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
        let signed = self.run(&[], message)?;
        if signed.is_empty() {
            return Err(self.error("printed no signature"));
        }
        Ok(signed)
    }

    fn error(&self, problem: &str) -> Error {
        Error::Command { command: self.words.join(" "), problem: problem.into() }
    }

    fn run(&self, arguments: &[&str], input: &[u8]) -> Result<Vec<u8>> {
        let Some((program, own)) = self.words.split_first() else { return Err(self.error("is empty")) };
        let mut child = Command::new(program)
            .args(own)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| self.error(&format!("can't be started: {error}")))?;
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
        std::thread::scope(|scope| {
            // A program need not read all of its input.
            scope.spawn(move || stdin.map(|mut stdin| stdin.write_all(input)));
            let reading = scope.spawn(move || {
                let mut printed = Vec::new();
                stdout.map(|stdout| stdout.take(MAX_OUTPUT).read_to_end(&mut printed));
                printed
            });
            let began = Instant::now();
            let status = loop {
                match child.try_wait() {
                    Ok(Some(status)) => break status,
                    Ok(None) if began.elapsed() < TIMEOUT => std::thread::sleep(Duration::from_millis(2)),
                    _ => {
                        let _ = child.kill();
                        let _ = child.wait();
                        return Err(self.error(&format!("did not end within {} s", TIMEOUT.as_secs())));
                    }
                }
            };
            let printed = reading.join().unwrap_or_default();
            if status.success() { Ok(printed) } else { Err(self.error(&format!("failed: {status}"))) }
        })
    }
}
