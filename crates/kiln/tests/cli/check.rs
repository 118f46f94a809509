//! `--check-with`: a refused image is never written, and the exit code says so.
#![cfg(unix)]

use std::fs;
use std::time::{Duration, Instant};

use crate::sandbox::Sandbox;

/// Refuses prompts with `bad` in them.
const SCRIPT: &str = "cat > seen.png\ncase \"$KILN_PROMPT\" in *bad*) echo \"too bad\"; exit 1;; esac\n";

fn sandbox(script: &str) -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.write("check.sh", script.as_bytes());
    sandbox
}

#[test]
fn an_accepted_image_is_written_as_without_a_check() {
    let sandbox = sandbox(SCRIPT);
    sandbox.generate(&["fox", "-S", "1", "-o", "a.png"]).ok();
    sandbox.generate(&["fox", "-S", "1", "-o", "b.png", "--check-with", "sh check.sh"]).ok();
    let read = |name: &str| fs::read(sandbox.path(name)).unwrap();
    assert_eq!(read("a.png"), read("b.png"));
    assert_eq!(sandbox.image("seen.png"), sandbox.image("b.png"));
    assert_eq!(kiln_image::read_recipe(&read("seen.png")).unwrap(), None, "the check gets the pixels alone");
}

#[test]
fn a_refused_image_is_not_written() {
    let sandbox = sandbox(SCRIPT);
    let check = ["--check-with", "sh check.sh"];
    let refused = sandbox.generate(&[&["bad fox", "-S", "1", "-o", "a.png"], &check[..]].concat());
    refused.fails(3, &["the image was refused: too bad", "hint: "]);
    let to_stdout = sandbox.generate(&[&["bad fox", "-S", "1", "-o", "-"], &check[..]].concat());
    assert!(to_stdout.out.is_empty());
    to_stdout.fails(3, &["too bad"]);
    let latents = ["bad fox", "-S", "1", "-o", "a.png", "--latents-out", "latents.safetensors"];
    sandbox.generate(&[&latents, &check[..]].concat()).fails(3, &["too bad"]);
    assert_eq!(sandbox.names(), ["check.sh", "seen.png"]);
}

#[test]
fn a_prompt_that_is_too_long_for_a_variable_is_checked() {
    let sandbox =
        sandbox("cat > /dev/null\ngrep -q bad \"$KILN_PROMPT_FILE\" && echo \"too bad\" && exit 1\nexit 0\n");
    for (last, name) in [("good", "a.png"), ("bad", "b.png")] {
        sandbox.write("prompts.txt", format!("{}{last}\n", "fox ".repeat(50_000)).as_bytes());
        let args = ["--prompt-file", "prompts.txt", "-S", "1", "-o", name, "--check-with", "sh check.sh"];
        let ran = sandbox.generate(&args);
        assert_eq!(ran.code, if last == "bad" { 3 } else { 0 }, "{}", ran.err);
    }
    assert_eq!(sandbox.names(), ["a.png", "check.sh", "prompts.txt"]);
}

#[test]
fn each_image_is_checked_by_itself() {
    let sandbox = sandbox(SCRIPT);
    sandbox.write("prompts.txt", b"a fox\na bad fox\na hen\n");
    let args =
        ["--prompt-file", "prompts.txt", "-S", "5", "-o", "{n}.png", "--json", "--check-with", "sh check.sh"];
    let ran = sandbox.generate(&args);
    assert_eq!(ran.code, 3, "{}", ran.err);
    assert!(ran.err.contains("1 of 3 images were refused") && ran.err.contains("number 2"), "{}", ran.err);
    let events = ran.events();
    let named = |name: &str| events.iter().filter(|event| event["event"] == name).collect::<Vec<_>>();
    assert_eq!(named("image").len(), 2);
    let refused = named("refused");
    assert_eq!((refused.len(), &refused[0]["image"], &refused[0]["seed"]), (1, &1.into(), &6.into()));
    assert_eq!(refused[0]["reason"], "the image was refused: too bad");
    assert_eq!(named("error").len(), 1);
    assert_eq!(sandbox.names(), ["1.png", "3.png", "check.sh", "prompts.txt", "seen.png"]);
}

#[test]
fn a_check_that_fails_or_hangs_refuses() {
    let sandbox = sandbox("cat > /dev/null\necho model missing >&2\nexit 9\n");
    let fox = ["fox", "-S", "1", "-o", "a.png", "--check-with", "sh check.sh"];
    sandbox.generate(&fox).fails(3, &["exit status: 9", "model missing"]);
    sandbox.write("check.sh", b"sleep 600\n");
    let begin = Instant::now();
    sandbox.generate(&[&fox[..], &["--check-timeout", "1"]].concat()).fails(3, &["no answer within 1 s"]);
    assert!(begin.elapsed() < Duration::from_secs(60));
    assert_eq!(sandbox.names(), ["check.sh"]);
}

#[test]
fn a_check_that_can_not_be_run_is_a_usage_error() {
    let sandbox = Sandbox::new();
    let generate = |check: &str| sandbox.generate(&["fox", "-o", "a.png", "--check-with", check]);
    generate("no-such-check").fails(2, &["`no-such-check`, is not found", "hint: "]);
    generate("'sh check.sh").fails(2, &["a quote is not closed"]);
    generate("").fails(2, &["empty command"]);
    generate("http://").fails(2, &["URL"]);
    sandbox.generate(&["fox", "--check-timeout", "5"]).fails(2, &["--check-with"]);
    sandbox.generate(&["fox", "--check-with", "true", "--check-timeout", "0"]).fails(2, &["--check-timeout"]);
    assert!(sandbox.names().is_empty());
}

#[test]
fn upscaled_images_are_checked_and_previews_are_off() {
    let sandbox = sandbox(SCRIPT);
    sandbox.write("small.png", &crate::sandbox::png(&crate::sandbox::pattern(40, 40)));
    let model = sandbox.model().to_str().unwrap().to_owned();
    let args = ["upscale", "small.png", "-m", &model, "-p", "a bad fox", "-s", "1", "--tile-size", "64"];
    let args = [&args[..], &["-S", "1", "--preview=blocks", "--check-with", "sh check.sh"]].concat();
    let ran = sandbox.kiln(&args);
    assert!(ran.err.contains("--preview has no effect"), "{}", ran.err);
    ran.fails(3, &["too bad"]);
    assert_eq!(sandbox.image("seen.png").width(), 80);
    assert_eq!(sandbox.names(), ["check.sh", "seen.png", "small.png"]);
}
