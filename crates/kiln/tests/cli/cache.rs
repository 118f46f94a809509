//! The cache of encoded texts.

use std::fs;
use std::path::PathBuf;

use crate::sandbox::Sandbox;

fn entries(sandbox: &Sandbox) -> Vec<PathBuf> {
    let files = fs::read_dir(sandbox.cache().join("text")).into_iter().flatten().map(|e| e.unwrap().path());
    // Hashes of weights are there, too, once the files are some seconds old.
    let is_text = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "safetensors");
    let mut all: Vec<_> = files.filter(is_text).collect();
    all.sort();
    all
}

/// The phases of a run, and the components it loaded.
fn phases(sandbox: &Sandbox, args: &[&str]) -> Vec<String> {
    let ran = sandbox.generate(&[args, &["--json", "-v"]].concat()).ok();
    let of = |e: &serde_json::Value| match e["event"].as_str()? {
        "progress" if e["phase"] == "load" => Some(format!("load {}", e["what"].as_str()?)),
        "phase" => Some(e["phase"].as_str()?.to_owned()),
        _ => None,
    };
    ran.events().iter().filter_map(of).collect()
}

#[test]
fn a_second_run_neither_loads_nor_runs_the_text_encoder() {
    let sandbox = Sandbox::new();
    let first = phases(&sandbox, &["a red fox", "-S", "1", "-o", "1.png"]);
    assert!(first.contains(&"load text encoder".into()) && first.contains(&"text".into()), "{first:?}");
    assert_eq!(entries(&sandbox).len(), 1);
    let second = phases(&sandbox, &["a red fox", "-S", "1", "-o", "2.png"]);
    assert!(!second.iter().any(|p| p.contains("text")), "{second:?}");
    assert!(second.contains(&"load transformer".into()), "{second:?}");
    let without = phases(&sandbox, &["a red fox", "-S", "1", "--no-cache", "-o", "3.png"]);
    assert!(without.contains(&"text".into()), "{without:?}");
    // Recipes hold no times, so the files are equal with and without the cache.
    let bytes = ["1.png", "2.png", "3.png"].map(|name| fs::read(sandbox.path(name)).unwrap());
    assert!(bytes[0] == bytes[1] && bytes[1] == bytes[2]);
}

#[test]
fn prompts_lengths_and_dtypes_are_separate_entries() {
    let sandbox = Sandbox::new();
    let run = |args: &[&str]| drop(sandbox.generate(&[args, &["-s", "1", "-o", "x.png"]].concat()).ok());
    run(&["a fox"]);
    run(&["a hen"]);
    run(&["a fox", "--max-tokens", "40"]);
    // One of them is this machine's `auto`.
    run(&["a fox", "--dtype", "f32"]);
    run(&["a fox", "--dtype", "bf16"]);
    assert_eq!(entries(&sandbox).len(), 4);
    run(&["a fox", "--threads", "1"]);
    run(&["a fox", "-S", "9", "-W", "32"]);
    assert_eq!(entries(&sandbox).len(), 4);
}

#[test]
fn a_damaged_entry_is_replaced() {
    let sandbox = Sandbox::new();
    sandbox.generate(&["a red fox", "-S", "1", "-o", "1.png"]).ok();
    let entry = entries(&sandbox).remove(0);
    let good = fs::read(&entry).unwrap();
    fs::write(&entry, &good[..good.len() / 2]).unwrap();
    sandbox.generate(&["a red fox", "-S", "1", "-o", "2.png"]).ok();
    assert_eq!(fs::read(&entry).unwrap(), good);
    assert_eq!(fs::read(sandbox.path("1.png")).unwrap(), fs::read(sandbox.path("2.png")).unwrap());
}

#[test]
fn an_unwritable_cache_is_a_note_not_an_error() {
    let sandbox = Sandbox::new();
    fs::write(sandbox.cache().join("text"), "in the way").unwrap();
    let ran = sandbox.generate(&["a red fox", "-o", "1.png"]).ok();
    assert!(ran.err.contains("the encoded text is not cached"), "{}", ran.err);
    sandbox.generate(&["a red fox", "-o", "2.png", "--no-cache"]).ok();
    assert_eq!(fs::read(sandbox.cache().join("text")).unwrap(), b"in the way");
}

#[test]
fn doctor_shows_the_cache() {
    let sandbox = Sandbox::new();
    sandbox.generate(&["a red fox", "-o", "1.png"]).ok();
    let report: serde_json::Value =
        serde_json::from_str(sandbox.kiln(&["doctor", "--json"]).ok().text()).unwrap();
    assert_eq!(report["kept"]["texts"], 1);
    assert!(report["kept"]["bytes"].as_u64().unwrap() > 1000);
    assert_eq!(report["kept"]["limit"], 256 << 20);
    let folder = sandbox.cache().join("text");
    assert_eq!(report["kept"]["folder"], folder.to_str().unwrap());
}
