//! Files that say where they come from: signed credentials.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::Stdio;

use kiln_credentials::CAN_VERIFY;

use crate::sandbox::Sandbox;

fn store(sandbox: &Sandbox, name: &str) -> Option<Vec<u8>> {
    kiln_image::read_manifest_store(&fs::read(sandbox.path(name)).unwrap()).unwrap()
}

#[test]
fn files_are_signed_with_a_key_of_ones_own() {
    let sandbox = Sandbox::new();
    sandbox.generate(&["a fox", "-s", "1", "--sign", "-o", "a.png"]).fails(1, &["kiln credentials new"]);
    assert!(!sandbox.path("a.png").exists());

    let made = sandbox.kiln(&["credentials", "new", "--name", "Ada's studio"]).ok();
    assert!(made.text().contains("Ada's studio"), "{}", made.text());
    sandbox.kiln(&["credentials", "new", "--name", "Ada"]).fails(1, &["exists already"]);
    assert!(sandbox.kiln(&["credentials", "show"]).ok().text().contains("Ada's studio"));

    for name in ["a.png", "a.jpg", "a.webp"] {
        let ran = sandbox.generate(&["a fox", "-s", "1", "--sign", "-o", name]).ok();
        assert!(ran.err.contains("signed as Ada's studio"), "{}", ran.err);
        let bytes = store(&sandbox, name).unwrap();
        assert!(kiln_credentials::is_store(&bytes));
        let text = String::from_utf8_lossy(&bytes);
        assert!(text.contains("c2pa.created") && text.contains("Ada's studio") && !text.contains("fox"));
        let known = if CAN_VERIFY { "trusted: signed by Ada's studio" } else { "present, not checked" };
        assert!(sandbox.kiln(&["info", name]).ok().text().contains(known));
    }
    sandbox.generate(&["a fox", "-s", "1", "-o", "b.png"]).ok();
    assert_eq!(store(&sandbox, "b.png"), None);
    sandbox.kiln(&["config", "set", "sign", "true"]).ok();
    sandbox.generate(&["a fox", "-s", "1", "--no-sign", "-o", "b.png"]).ok();
    assert_eq!(store(&sandbox, "b.png"), None);
    let edit =
        sandbox.generate(&["a fox", "-s", "1", "-i", "a.png", "--producer", "A Service", "-o", "c.png"]).ok();
    let carried = if CAN_VERIFY { "are carried over" } else { "are not carried over" };
    let note = format!("a.png` has credentials (C2PA), which {carried}");
    assert!(edit.err.contains(&note), "{}", edit.err);
    let bytes = store(&sandbox, "c.png").unwrap();
    let text = String::from_utf8_lossy(&bytes);
    for part in
        ["c2pa.opened", "c2pa.edited", "parentOf", "A Service", "compositeWithTrainedAlgorithmicMedia"]
    {
        assert!(text.contains(part), "{part}");
    }
}

#[test]
fn keys_that_do_not_fit_are_refused_before_anything_is_generated() {
    let sandbox = Sandbox::new();
    sandbox.kiln(&["credentials", "new", "--name", "a", "--folder", "one"]).ok();
    sandbox.kiln(&["credentials", "new", "--name", "b", "--folder", "two"]).ok();
    sandbox.write("text.pem", b"no key");
    for (key, certificate, words) in [
        ("one/key.pem", "two/certificate.pem", "does not belong to the certificate"),
        ("one/key.pem", "one/root.pem", "that of an authority"),
        ("text.pem", "one/certificate.pem", "has no private key"),
        ("one/key.pem", "text.pem", "has no certificate"),
        ("none.pem", "one/certificate.pem", "can't read"),
    ] {
        let args = ["a", "--sign-key", key, "--sign-cert", certificate, "-o", "a.png"];
        sandbox.generate(&args).fails(1, &[words]);
        assert!(!sandbox.path("a.png").exists());
    }
    for option in ["--producer", "--timestamp-url"] {
        let args = ["a", option, "http://127.0.0.1:1/", "-o", "a.png"];
        sandbox.generate(&args).fails(2, &[&format!("{option} has no effect without --sign")]);
    }
    let key = ["--sign-key", "one/key.pem", "--sign-cert", "one/certificate.pem"];
    let args = [&["a", "--timestamp-url", "http://127.0.0.1:1/", "-o", "a.png"], &key[..]].concat();
    sandbox.generate(&args).fails(1, &["no time stamp from `http://127.0.0.1:1/`", "hint: "]);
    sandbox
        .kiln(&["config", "set", "timestamp_url", "stamps"])
        .fails(2, &["expected an http:// or https:// URL"]);
    sandbox.kiln(&["config", "set", "timestamp_url", "http://127.0.0.1:1/"]).ok();
    sandbox.generate(&[&["a", "-o", "a.png"], &key[..]].concat()).fails(1, &["no time stamp"]);
    assert!(!sandbox.path("a.png").exists());
    sandbox.generate(&["a", "-o", "b.png"]).ok();
}

#[test]
fn a_server_says_at_the_start_what_its_files_say() {
    let sandbox = Sandbox::new();
    let model = sandbox.model().to_str().unwrap();
    let serve = ["serve", "--port", "0", "--data", "served", "-m", model, "--no-ai-mark"];
    sandbox.kiln(&[&serve[..], &["--sign"]].concat()).fails(1, &["there is no key to sign with"]);
    sandbox.kiln(&["credentials", "new", "--name", "Ada's studio"]).ok();
    let mut server =
        sandbox.command(&[&serve[..], &["--sign"]].concat()).stderr(Stdio::piped()).spawn().unwrap();
    let mut told = String::new();
    for line in BufReader::new(server.stderr.take().unwrap()).lines().map(Result::unwrap) {
        told += &line;
        if line.contains(" at http://") {
            break;
        }
    }
    server.kill().unwrap();
    server.wait().unwrap();
    assert!(told.contains("files won't say that a model made the images"), "{told}");
    assert!(told.contains("files are signed as Ada's studio") && told.contains("until="), "{told}");
}

/// As c2patool's signers: `--signer-info`, else a signature of standard input.
#[cfg(unix)]
#[test]
fn a_program_signs_with_a_key_that_kiln_does_not_see() {
    let sandbox = Sandbox::new();
    let args = ["a", "--sign-with", "sh signer.sh", "-o", "a.png"];
    let failing = "#!/bin/sh\nexit 3\n";
    sandbox.write("signer.sh", failing.as_bytes());
    sandbox.generate(&args).fails(1, &["`sh signer.sh` failed"]);
    sandbox.write("signer.sh", b"echo '{\"alg\":\"rot13\",\"sign_cert\":\"\"}'");
    sandbox.generate(&args).fails(1, &["unknown algorithm `rot13`"]);
    let of_environment = b"echo \"${KILN_API_KEY-no key}, ${AWS_PROFILE-no profile}\" >&2; exit 1";
    sandbox.write("signer.sh", of_environment);
    let generate = |environment: &[(&str, &str)]| {
        let mut command =
            sandbox.command(&[&["generate", "-m", sandbox.model().to_str().unwrap()], &args[..]].concat());
        command.envs(environment.iter().copied());
        String::from_utf8(command.output().unwrap().stderr).unwrap()
    };
    let told = generate(&[("KILN_API_KEY", "secret"), ("AWS_PROFILE", "signing")]);
    assert!(told.contains("failed: exit status: 1: no key, signing"), "{told}");
    sandbox.generate(&["a", "--sign-with", "no-such-program --x", "-o", "a.png"]).fails(2, &["is not found"]);
    sandbox
        .generate(&["a", "--sign-with", "sh 'signer.sh", "-o", "a.png"])
        .fails(2, &["a quote is not closed"]);
    assert!(!sandbox.path("a.png").exists());
}
