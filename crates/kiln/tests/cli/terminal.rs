//! Text from files can't control the terminal.

use std::collections::BTreeMap;
use std::fs;

use kiln_tensor::HostTensor;
use kiln_weights::save;

use crate::sandbox::{RunOutput, Sandbox, pattern};

const NASTY: &str = "\u{1b}]0;owned\u{7}\u{1b}[2J\u{9b}31m\u{202e}";

/// Asserts that the nasty text is shown, and escaped.
#[track_caller]
fn is_safe(ran: &RunOutput) {
    let all = format!("{}{}", String::from_utf8_lossy(&ran.out), ran.err);
    assert!(!all.contains(['\u{1b}', '\u{7}', '\u{9b}', '\u{202e}']), "{all:?}");
    assert!(all.contains("\\u{1b}]0;owned"), "{all}");
}

#[test]
fn recipes_metadata_and_tensor_names_are_escaped() {
    let sandbox = Sandbox::new();
    let recipe = serde_json::json!({ "prompt": NASTY, NASTY: 1 }).to_string();
    let image = kiln_image::encode(&pattern(64, 64), kiln_image::Format::Png, Some(&recipe)).unwrap();
    sandbox.write("a.png", &image);
    is_safe(&sandbox.kiln(&["info", "a.png"]).ok());
    let metadata = BTreeMap::from([("note".to_owned(), NASTY.to_owned())]);
    let tensors = [(NASTY, HostTensor::zeros([1]))];
    save::save(sandbox.path("t.safetensors"), &tensors, &metadata).unwrap();
    is_safe(&sandbox.kiln(&["info", "t.safetensors"]).ok());
    // An error with the name of the tensor.
    save::save(
        sandbox.path("two.safetensors"),
        &[(NASTY, HostTensor::zeros([1])), ("b", HostTensor::zeros([1]))],
        &metadata,
    )
    .unwrap();
    is_safe(&sandbox.generate(&["fox", "--noise", "two.safetensors"]));
}

#[test]
fn file_names_and_configurations_in_errors_are_escaped() {
    let sandbox = Sandbox::new();
    let name = format!("{NASTY}.png");
    is_safe(&sandbox.generate(&["fox", "-r", &name]));
    fs::write(sandbox.path("model.toml"), format!("transformer = 'a'\n\"{NASTY}\" = 1").replace('\u{7}', ""))
        .unwrap();
    let ran = sandbox.kiln(&["generate", "fox", "-m", "model.toml"]);
    assert!(!ran.err.contains('\u{1b}'), "{:?}", ran.err);
    // What is written is named, too. On Windows such names are an error.
    let ran = sandbox.generate(&["fox", "-s", "1", "-o", &name]);
    is_safe(&if cfg!(windows) { ran } else { ran.ok() });
}

#[test]
fn a_line_break_in_a_name_makes_no_line_of_its_own() {
    let sandbox = Sandbox::new();
    let ran = sandbox.generate(&["fox", "-r", "a\nhint: run this"]);
    assert!(!ran.err.contains("\nhint: run this"), "{}", ran.err);
    ran.fails(1, &["hint: check the path"]);
}
