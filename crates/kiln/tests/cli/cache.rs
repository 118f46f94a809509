//! Encoded texts that are kept from run to run.

use std::fs;
use std::path::PathBuf;

use crate::kit::Kit;

fn entries(kit: &Kit) -> Vec<PathBuf> {
    let mut all: Vec<_> =
        fs::read_dir(kit.cache().join("text")).into_iter().flatten().map(|e| e.unwrap().path()).collect();
    all.sort();
    all
}

/// The phases a run went through, and the parts it loaded.
fn phases(kit: &Kit, args: &[&str]) -> Vec<String> {
    let ran = kit.generate(&[args, &["--json", "-v"]].concat()).ok();
    let of = |e: &serde_json::Value| match e["event"].as_str()? {
        "progress" if e["phase"] == "load" => Some(format!("load {}", e["what"].as_str()?)),
        "phase" => Some(e["phase"].as_str()?.to_owned()),
        _ => None,
    };
    ran.events().iter().filter_map(of).collect()
}

#[test]
fn a_second_run_neither_loads_nor_runs_the_text_encoder() {
    let kit = Kit::new();
    let first = phases(&kit, &["a red fox", "-S", "1", "-o", "1.png"]);
    assert!(first.contains(&"load text encoder".into()) && first.contains(&"text".into()), "{first:?}");
    assert_eq!(entries(&kit).len(), 1);
    let second = phases(&kit, &["a red fox", "-S", "1", "-o", "2.png"]);
    assert!(!second.iter().any(|p| p.contains("text")), "{second:?}");
    assert!(second.contains(&"load transformer".into()), "{second:?}");
    let without = phases(&kit, &["a red fox", "-S", "1", "--no-cache", "-o", "3.png"]);
    assert!(without.contains(&"text".into()), "{without:?}");
    // Recipes name the time of nothing: the files are equal, with and without.
    let bytes = ["1.png", "2.png", "3.png"].map(|name| fs::read(kit.path(name)).unwrap());
    assert!(bytes[0] == bytes[1] && bytes[1] == bytes[2]);
}

#[test]
fn other_words_lengths_and_types_are_other_entries() {
    let kit = Kit::new();
    let run = |args: &[&str]| drop(kit.generate(&[args, &["-s", "1", "-o", "x.png"]].concat()).ok());
    run(&["a fox"]);
    run(&["a hen"]);
    run(&["a fox", "--max-tokens", "40"]);
    // One of them is what `auto` stands for on this machine.
    run(&["a fox", "--dtype", "f32"]);
    run(&["a fox", "--dtype", "bf16"]);
    assert_eq!(entries(&kit).len(), 4);
    run(&["a fox", "--threads", "1"]);
    run(&["a fox", "-S", "9", "-W", "32"]);
    assert_eq!(entries(&kit).len(), 4);
}

#[test]
fn a_damaged_entry_is_made_again() {
    let kit = Kit::new();
    kit.generate(&["a red fox", "-S", "1", "-o", "1.png"]).ok();
    let entry = entries(&kit).remove(0);
    let good = fs::read(&entry).unwrap();
    fs::write(&entry, &good[..good.len() / 2]).unwrap();
    kit.generate(&["a red fox", "-S", "1", "-o", "2.png"]).ok();
    assert_eq!(fs::read(&entry).unwrap(), good);
    assert_eq!(fs::read(kit.path("1.png")).unwrap(), fs::read(kit.path("2.png")).unwrap());
}

#[test]
fn a_cache_that_can_not_be_written_is_told_and_does_no_harm() {
    let kit = Kit::new();
    fs::write(kit.cache().join("text"), "in the way").unwrap();
    let ran = kit.generate(&["a red fox", "-o", "1.png"]).ok();
    assert!(ran.err.contains("the encoded text is not kept"), "{}", ran.err);
    kit.generate(&["a red fox", "-o", "2.png", "--no-cache"]).ok();
    assert_eq!(fs::read(kit.cache().join("text")).unwrap(), b"in the way");
}

#[test]
fn doctor_shows_the_cache() {
    let kit = Kit::new();
    kit.generate(&["a red fox", "-o", "1.png"]).ok();
    let report: serde_json::Value =
        serde_json::from_str(kit.kiln(&["doctor", "--json"]).ok().text()).unwrap();
    assert_eq!(report["kept"]["texts"], 1);
    assert!(report["kept"]["bytes"].as_u64().unwrap() > 1000);
    assert_eq!(report["kept"]["limit"], 256 << 20);
    let folder = kit.cache().join("text");
    assert_eq!(report["kept"]["folder"], folder.to_str().unwrap());
}
