//! Options of `kiln serve` and `kiln worker` that every job would fail with are refused at the start.

use std::io::Read;
use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::sandbox::{RunOutput, Sandbox};

/// Far more than a refusal takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// Runs a command that should refuse to start; panics if it serves.
fn run(sandbox: &Sandbox, args: &[&str]) -> RunOutput {
    let mut child = sandbox.command(args).stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let started = Instant::now();
    let code = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status.code().unwrap_or(-1);
        }
        if started.elapsed() > PATIENCE {
            child.kill().unwrap();
            panic!("it starts with {args:?}");
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let mut err = String::new();
    child.stderr.take().unwrap().read_to_string(&mut err).unwrap();
    RunOutput { code, out: Vec::new(), err }
}

#[test]
fn options_that_every_job_would_fail_with_are_refused() {
    let sandbox = Sandbox::new();
    sandbox.write("file.txt", b"no weights");
    sandbox.write("image.png", b"\x89PNG\r\n\x1a\n");
    for (args, code, words) in [
        (&["--vae", "nope"][..], 1, "`nope`"),
        (&["--vae", "file.txt"], 1, "file.txt"),
        (&["--vae", "image.png"], 1, "image.png"),
        (&["--preview-vae", "nope"], 1, "`nope`"),
        (&["--preview-vae", "file.txt"], 1, "file.txt"),
        (&["--loras", "file.txt"], 2, "--loras needs a folder"),
        (&["--vaes", "file.txt"], 2, "--vaes needs a folder"),
        (&["--timeout", "0"], 2, "'--timeout <S>'"),
        (&["--timeout", "18446744073709551615"], 2, "'--timeout <S>'"),
        (&["--grace", "18446744073709551615"], 2, "'--grace <S>'"),
        (&["--max-pixels", "0"], 2, "'--max-pixels <N>'"),
        (&["--max-steps", "0"], 2, "'--max-steps <N>'"),
        (&["--max-side", "0"], 2, "'--max-side <N>'"),
        (&["--max-batch", "0"], 2, "'--max-batch <N>'"),
        (&["--dtype", "fp8", "--device", "cpu"], 1, "no fp8"),
        (&["--dtype", "nope"], 2, "'--dtype <TYPE>'"),
        (&["--device", "nope"], 2, "'--device <DEVICE>'"),
        (&["--device", "cuda:99"], 1, "cuda:99"),
        (&["--threads", "0"], 2, "'--threads <N>'"),
        (&["--vram-limit", "0"], 2, "'--vram-limit <SIZE>'"),
        (&["--model-memory", "0"], 2, "'--model-memory <SIZE>'"),
        (&["--preload", "nope", "--model-memory", "1G"], 2, "`nope`"),
        (&["--cache", "nan"], 2, "'--cache"),
        (&["--check-with", "nope"], 2, "`nope`"),
        (&["--otlp", "nope"], 2, "'--otlp <URL>'"),
        (&["-m", "nope"], 1, "nope"),
    ] {
        let serve = &["serve", "--port", "0", "--data", "served"][..];
        let worker = &["worker", "--queue", "nats://127.0.0.1:1"][..];
        for command in [serve, worker].into_iter().take(if cfg!(feature = "fleet") { 2 } else { 1 }) {
            let all = [command, args].concat();
            println!("{all:?}");
            run(&sandbox, &all).fails(code, &[words]);
        }
    }
    assert!(!sandbox.path("served").exists(), "the data folder is left alone");
}

#[test]
fn options_of_the_server_alone_are_refused_if_they_make_no_sense() {
    let sandbox = Sandbox::new();
    sandbox.write("file.txt", b"x");
    for (args, code, words) in [
        (&["--keep", "0"][..], 2, "'--keep <N>'"),
        (&["--linger", "18446744073709551615"], 2, "'--linger <S>'"),
        (&["--max-inputs", "0"], 2, "'--max-inputs <SIZE>'"),
        (&["--gallery-limit", "1M"], 2, "'--gallery-limit <SIZE>'"),
        (&["--queue", "0"], 2, "'--queue"),
        (&["--queue-length", "0"], 2, "'--queue-length <N>'"),
        (&["--allow-host", "http://kiln.home"], 2, "'--allow-host <NAME>'"),
        (&["--allow-host", "kiln.home:7860"], 2, "'--allow-host <NAME>'"),
        (&["--allow-host", ""], 2, "'--allow-host <NAME>'"),
        (&["--host", "nope"], 2, "'--host <ADDRESS>'"),
        (&["--port", "99999"], 2, "'--port <N>'"),
        (&["--trusted-proxy", "nope"], 2, "'--trusted-proxy <ADDRESS>'"),
        (&["--api-key", ""], 2, "the API key is empty"),
        (&["--api-key-file", "nope"], 1, "`nope`"),
        (&["--tls-cert", "file.txt"], 2, "--tls-key"),
        (&["--tls-cert", "file.txt", "--tls-key", "file.txt"], 1, "file.txt"),
        (&["--webhook-secret", "x"], 2, "webhook secret"),
        (&["--model-alias", "gpt=nope"], 2, "`nope`"),
        (&["--model-alias", "gpt"], 2, "'--model-alias"),
        (&["--upsample-model", "nope"], 1, "nope"),
        (&["--upsample-url", "nope"], 2, "nope"),
        (&["--config", "nope"], 1, "nope"),
        (&["--data", "file.txt"], 1, "file.txt"),
    ] {
        let all = [&["serve", "--port", "0"][..], args].concat();
        println!("{all:?}");
        run(&sandbox, &all).fails(code, &[words]);
    }
}
