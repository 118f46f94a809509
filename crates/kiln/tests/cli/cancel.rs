//! Cancelling with Ctrl-C.

use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::sandbox::{Sandbox, interrupt};

#[test]
fn ctrl_c_stops_within_a_step_and_leaves_nothing() {
    let sandbox = Sandbox::with_model("klein-base");
    let model = sandbox.model().to_str().unwrap();
    let args = ["generate", "fox", "-m", model, "-W", "64", "-H", "64", "-s", "9000", "-o", "a.png"];
    let outputs = ["--latents-out", "l.safetensors"];
    let mut child = sandbox.command(&[&args[..], &outputs].concat()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.starts_with("step 2/")));
    let interrupted = Instant::now();
    interrupt(&child);
    let last = lines.last().unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert_eq!(last, "cancelled");
    assert!(interrupted.elapsed() < Duration::from_secs(60));
    assert!(sandbox.names().is_empty(), "{:?}", sandbox.names());
}

#[test]
fn a_cancelled_batch_keeps_only_complete_images() {
    let sandbox = Sandbox::new();
    let model = sandbox.model().to_str().unwrap();
    let args =
        ["generate", "fox", "-m", model, "-W", "64", "-H", "64", "-s", "1", "-b", "900", "-o", "a.png"];
    let mut child = sandbox.command(&args).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.starts_with("saved `a-2.png`")));
    interrupt(&child);
    let last = lines.last().unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(last.starts_with("cancelled after ") && last.ends_with(" of 900 images"), "{last}");
    for name in sandbox.names() {
        assert_eq!(sandbox.image(&name).width(), 64);
    }
}

#[test]
fn ctrl_c_ends_the_rewriting_of_a_prompt() {
    let sandbox = Sandbox::new();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/v1", listener.local_addr().unwrap());
    let model = sandbox.model().to_str().unwrap();
    let args =
        ["generate", "fox", "-m", model, "-W", "64", "-H", "64", "-o", "a.png", "--upsample-url", &url];
    let child = sandbox.command(&args).stderr(Stdio::piped()).spawn().unwrap();
    // A service that takes the request and never answers.
    let _connection = listener.accept().unwrap();
    let interrupted = Instant::now();
    interrupt(&child);
    let ended = child.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(130));
    assert!(String::from_utf8_lossy(&ended.stderr).ends_with("cancelled\n"));
    assert!(interrupted.elapsed() < Duration::from_secs(10));
    assert!(sandbox.names().is_empty(), "{:?}", sandbox.names());
}

#[test]
fn a_cancelled_conversion_leaves_nothing() {
    let sandbox = Sandbox::new();
    let values = (0..512 * 512).map(|i| (i % 509) as f32 / 509.0).collect();
    let matrix = kiln_tensor::HostTensor::from_f32([512, 512], values).unwrap();
    let mut names = vec!["single_stream_modulation.linear.weight".to_owned()];
    names.extend((0..300).map(|i| format!("single_transformer_blocks.{i}.attn.to_out.weight")));
    let tensors: Vec<_> = names.iter().map(|name| (name.as_str(), matrix.clone())).collect();
    kiln_weights::save::save(sandbox.path("a.safetensors"), &tensors, &Default::default()).unwrap();
    let args = ["quantize", "a.safetensors", "b.gguf", "--to", "q4_k", "--threads", "1"];
    let mut child = sandbox.command(&args).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.ends_with(" of 301 tensors")));
    interrupt(&child);
    let last = lines.last().unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert_eq!(last, "cancelled");
    assert_eq!(sandbox.names(), ["a.safetensors"]);
}
