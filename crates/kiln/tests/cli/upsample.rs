//! Prompts that are rewritten before the image is generated: by dev's text encoder, another Mistral, or a chat service.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::thread::JoinHandle;

use kiln_golden::testdata;
use kiln_weights::{Component, WeightSource};
use serde_json::{Value, json};

use crate::sandbox::Sandbox;

const QUICK: [&str; 4] = ["-S", "1", "--device", "cpu"];

/// The recipe of an image.
fn recipe(sandbox: &Sandbox, name: &str) -> Value {
    let bytes = std::fs::read(sandbox.path(name)).unwrap();
    serde_json::from_str(&kiln_image::read_recipe(&bytes).unwrap().unwrap()).unwrap()
}

#[test]
fn a_rewritten_prompt_is_shown_kept_and_used() {
    let sandbox = Sandbox::with_dev();
    let args = ["a cat", "--upsample", "0.15", "--dtype", "f32", "-o", "a.png"];
    let ran = sandbox.generate(&[&args[..], &QUICK].concat()).ok();
    let recipe = recipe(&sandbox, "a.png");
    let prompt = recipe["prompt"].as_str().unwrap();
    assert_eq!(recipe["original_prompt"], "a cat");
    assert_ne!(prompt, "a cat");
    assert!(ran.err.contains(&format!("the prompt is now: {prompt}")), "{}", ran.err);
    // The recipe's prompt is used as it is.
    sandbox.kiln(&["generate", "--from", "a.png", "-o", "again.png", "--device", "cpu"]).ok();
    assert_eq!(sandbox.image("again.png").pixels(), sandbox.image("a.png").pixels());
    sandbox.generate(&[&[prompt, "--dtype", "f32", "-o", "typed.png"][..], &QUICK].concat()).ok();
    assert_eq!(sandbox.image("typed.png").pixels(), sandbox.image("a.png").pixels());
    // A new prompt has no original.
    sandbox.kiln(&["generate", "a fox", "--from", "a.png", "-o", "fox.png", "--device", "cpu"]).ok();
    assert_eq!(self::recipe(&sandbox, "fox.png").get("original_prompt"), None);
}

#[test]
fn the_same_seed_rewrites_the_same_way_and_edits_see_the_image() {
    let sandbox = Sandbox::with_dev();
    let image = testdata().join("dev/reference/ref_a_80x70.png").display().to_string();
    let prompt = |name: &str, more: &[&str]| {
        let args = ["a cat", "--upsample=1.5", "-o", name, "--device", "cpu", "--dtype", "f32"];
        sandbox.generate(&[&args[..], more].concat()).ok();
        recipe(&sandbox, name)["prompt"].as_str().unwrap().to_owned()
    };
    let first = prompt("a.png", &["-S", "1"]);
    assert_eq!(first, prompt("b.png", &["-S", "1"]));
    assert_ne!(first, prompt("c.png", &["-S", "1", "-r", &image]));
}

#[test]
fn klein_takes_a_mistral_that_is_named() {
    let (klein, dev) = (Sandbox::new(), Sandbox::with_dev());
    let (encoder, folder) = (dev.model().join("text_encoder"), dev.model());
    for (name, path) in [("a.png", encoder.as_path()), ("b.png", folder)] {
        let args = ["a cat", "--upsample-model", path.to_str().unwrap(), "-o", name];
        klein.generate(&[&args[..], &QUICK].concat()).ok();
        assert_eq!(recipe(&klein, name)["original_prompt"], "a cat");
    }
    klein
        .generate(&["a cat", "--upsample"])
        .fails(1, &["can't rewrite prompts: it is not a Mistral", "--upsample-model"]);
    klein.kiln(&["generate", "a cat", "-m", "ember", "--upsample"]).fails(1, &["it is not a Mistral"]);
}

#[test]
fn files_that_lack_what_rewriting_takes_are_refused_before_they_are_read() {
    let sandbox = Sandbox::with_dev();
    let weights =
        WeightSource::open_component(sandbox.model().join("text_encoder"), Component::TextEncoder).unwrap();
    let image = testdata().join("dev/reference/ref_a_80x70.png").display().to_string();
    for (file, left_out, more, words) in [
        ("no_head.safetensors", "lm_head", vec![], "has no `lm_head.weight`"),
        ("blind.safetensors", "vision_tower", vec!["-r", image.as_str()], "it has no vision tower"),
    ] {
        let tensors: Vec<_> = weights
            .names()
            .filter(|name| !name.starts_with(left_out))
            .map(|name| (name, weights.tensor(name).unwrap()))
            .collect();
        kiln_weights::save::save(sandbox.path(file), &tensors, &Default::default()).unwrap();
        let args = ["a cat", "--upsample-model", file];
        sandbox.generate(&[&args[..], &more].concat()).fails(1, &["can't rewrite prompts", words, "hint: "]);
    }
}

#[test]
fn temperatures_are_checked() {
    let sandbox = Sandbox::new();
    sandbox.generate(&["--upsample", "a cat"]).fails(2, &["write the prompt before --upsample"]);
    for wrong in ["0", "-1", "9", "nan"] {
        let option = format!("--upsample={wrong}");
        sandbox.generate(&["a cat", &option]).fails(2, &["above 0 and at most 5"]);
    }
}

/// A chat service that answers one request. Returns its address and what it was asked.
fn service(status: &'static str, answer: Value) -> (String, JoinHandle<(String, Value)>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/v1", listener.local_addr().unwrap());
    let asked = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let (mut text, mut buffer) = (Vec::new(), [0; 65536]);
        let body = loop {
            let count = stream.read(&mut buffer).unwrap();
            text.extend_from_slice(&buffer[..count]);
            let head = text.windows(4).position(|w| w == b"\r\n\r\n");
            if let Some(Ok(body)) = head.map(|end| serde_json::from_slice::<Value>(&text[end + 4..])) {
                break body;
            }
            assert!(count > 0, "the request has no body");
        };
        let answer = answer.to_string();
        let head =
            format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", answer.len());
        stream.write_all((head + &answer).as_bytes()).unwrap();
        let head = String::from_utf8_lossy(&text).split("\r\n\r\n").next().unwrap_or_default().to_owned();
        (head, body)
    });
    (url, asked)
}

#[test]
fn a_chat_service_rewrites_the_prompt() {
    let sandbox = Sandbox::new();
    let (url, asked) =
        service("200 OK", json!({ "choices": [{ "message": { "content": " a small red fox\n" } }] }));
    let model = sandbox.model().to_str().unwrap();
    let args = [
        "generate",
        "a fox",
        "-m",
        model,
        "-W",
        "64",
        "-H",
        "64",
        "-s",
        "1",
        "-S",
        "1",
        "--device",
        "cpu",
        "-o",
        "a.png",
        "--upsample-url",
        &url,
        "--upsample-model",
        "some/model",
    ];
    let output = sandbox.command(&args).env("KILN_UPSAMPLE_KEY", "secret").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let (head, body) = asked.join().unwrap();
    assert!(head.starts_with("POST /v1/chat/completions"), "{head}");
    assert!(head.to_lowercase().contains("authorization: bearer secret"), "{head}");
    assert_eq!((&body["model"], &body["messages"][1]["content"]), (&json!("some/model"), &json!("a fox")));
    let recipe = recipe(&sandbox, "a.png");
    assert_eq!((&recipe["prompt"], &recipe["original_prompt"]), (&json!("a small red fox"), &json!("a fox")));
}

#[test]
fn a_chat_service_that_fails_is_named_with_its_reason() {
    let sandbox = Sandbox::new();
    for (status, answer, words) in [
        ("401 Unauthorized", json!({ "error": { "message": "no key" } }), "status 401: no key"),
        ("200 OK", json!({ "choices": [] }), "an answer without a text"),
    ] {
        let (url, asked) = service(status, answer);
        sandbox
            .generate(&["a fox", "--upsample-url", &url])
            .fails(1, &["the chat service at", words, "hint: "]);
        asked.join().unwrap();
    }
    sandbox
        .generate(&["a fox", "--upsample-url", "localhost"])
        .fails(2, &["is not the address of a chat service"]);
}
