//! `kiln bench`: every phase and operation, with synthetic weights and with a model's.

use serde_json::Value;

use crate::sandbox::Sandbox;

fn bench(sandbox: &Sandbox, args: &[&str]) -> Value {
    let quick = ["bench", "--json", "--repeat", "1", "--max-tokens", "32", "--size", "64x48"];
    serde_json::from_str(sandbox.kiln(&[&quick, args].concat()).ok().text()).unwrap()
}

fn phases(report: &Value) -> Vec<&str> {
    report["phases"].as_array().unwrap().iter().map(|p| p["phase"].as_str().unwrap()).collect()
}

#[test]
fn a_missing_lora_is_an_error_at_once() {
    let sandbox = Sandbox::new();
    let ran = sandbox.kiln(&["bench", "--synthetic", "tiny", "--lora", "nope", "-v"]);
    assert!(!ran.err.contains("loading"), "weights were created first:\n{}", ran.err);
    ran.fails(1, &["`nope`", "while reading a LoRA", "hint: check the path"]);
}

#[test]
fn synthetic_weights_run_every_phase_and_operation() {
    let sandbox = Sandbox::new();
    let report = bench(&sandbox, &["--synthetic", "tiny", "--refs", "2"]);
    assert_eq!(phases(&report), ["text encode", "vae encode, 2 references", "vae decode", "step"]);
    let step = &report["phases"][3];
    let operations = step["operations"].as_array().unwrap();
    let find = |name: &str, size: &str| {
        let matches = |op: &&Value| op["operation"] == name && op["size"] == size;
        operations.iter().find(matches).unwrap_or_else(|| panic!("no {name} {size} in {operations:#?}"))
    };
    // 32 text tokens, 12 of the image, 24 of its references; two single blocks of 128 channels.
    let projection = find("ada_linear_swiglu", "68 × 128 → 768");
    assert_eq!(projection["calls"], 2.0);
    assert_eq!(projection["flops"], f64::from(2 * 2 * 68 * 128 * 1152));
    let attention = find("norm_rope_attention", "68 × 68, 1 heads × 128");
    assert_eq!(attention["flops"], f64::from(3 * 4 * 68 * 68 * 128));
    let sum: f64 = operations.iter().map(|op| op["seconds"].as_f64().unwrap()).sum();
    assert!(sum > 0.0 && sum <= step["seconds"][0].as_f64().unwrap());
    assert_eq!(report["load"][0]["part"], "text encoder");
    assert!(report["peaks"]["memory, read"].as_f64().unwrap() > 1e8);
    assert!(sandbox.names().is_empty());
}

#[test]
fn a_models_weights_are_measured_in_the_chosen_phases() {
    let sandbox = Sandbox::with_model("klein-kv");
    let model = sandbox.model().to_str().unwrap();
    let report = bench(&sandbox, &["-m", model, "--refs", "1", "--phase", "step", "--dtype", "bf16"]);
    assert_eq!(phases(&report), ["first step, caching references", "step, cached references"]);
    assert_eq!(report["dtype"], "bf16");
    assert!(report["load"][0]["weight_bytes"].as_u64().unwrap() > 1000);
    let report = bench(&sandbox, &["-m", model, "--phase", "text", "--phase", "decode"]);
    assert_eq!(phases(&report), ["text encode", "vae decode"]);
}

#[test]
fn the_default_output_is_tables() {
    let sandbox = Sandbox::new();
    let args = ["bench", "--synthetic", "tiny", "--size", "32x32", "--repeat", "1", "--phase", "decode"];
    let ran = sandbox.kiln(&args).ok();
    for words in
        ["tiny (synthetic weights)", "32×32", "beyond weights", "conv2d", "between operations", "of peak"]
    {
        assert!(ran.text().contains(words), "`{words}` is missing in:\n{}", ran.text());
    }
    assert!(!ran.text().contains("conv2d 32 × 32"), "{}", ran.text());
    let ran = sandbox.kiln(&[&args[..], &["-v"]].concat()).ok();
    assert!(ran.text().contains("conv2d 32 × 32, 32 → 3, 3 × 3"), "{}", ran.text());
}

#[test]
fn peaks_need_no_model() {
    let sandbox = Sandbox::new();
    let ran = sandbox.kiln(&["bench", "--peaks", "--threads", "1"]).ok();
    assert!(ran.text().contains("memory, copy") && ran.text().contains("GB/s"), "{}", ran.text());
    let json: Value =
        serde_json::from_str(sandbox.kiln(&["bench", "--peaks", "--json"]).ok().text()).unwrap();
    assert!(json["threads"].as_u64() > Some(0) && json["peaks"]["memory, read"].is_f64());
}

#[test]
fn invalid_options_are_errors() {
    let sandbox = Sandbox::new();
    sandbox.kiln(&["bench", "--size", "100x64"]).fails(2, &["multiples of 16"]);
    sandbox.kiln(&["bench", "--synthetic", "70b"]).fails(2, &["9b-kv"]);
    sandbox.kiln(&["bench", "-m", ".", "--synthetic", "4b"]).fails(2, &["cannot be used with"]);
    sandbox.kiln(&["bench", "-m", "none"]).fails(1, &["none", "hint: "]);
    sandbox.kiln(&["bench", "--device", "cuda:99"]).fails(1, &["cuda:99", "--device cpu"]);
}

/// One command and one file: the machine, the conformance of its kernels, the times; nothing of the user's.
#[test]
fn a_report_holds_the_machine_its_conformance_and_its_times_and_nothing_private() {
    let sandbox = Sandbox::with_model("klein");
    let model = sandbox.model().to_str().unwrap();
    let quick =
        ["bench", "--report", "report.json", "--repeat", "1", "--max-tokens", "32", "--size", "64x48"];
    let ran = sandbox.kiln(&[&quick[..], &["--device", "cpu", "-m", model]].concat()).ok();
    assert!(ran.text().contains("cases passed"), "{}", ran.text());
    let text = std::fs::read_to_string(sandbox.path("report.json")).unwrap();
    let report: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(report["format"], "kiln-report-1");
    assert!(report["cpu"]["threads"].as_u64().unwrap() > 0 && report["system"]["os"].is_string());
    let device = &report["devices"][0];
    assert_eq!((&device["device"], &device["problems"]), (&"cpu".into(), &Value::Array(Vec::new())));
    let conformance = &device["conformance"];
    assert_eq!(conformance["failed"], 0, "{conformance:#}");
    assert!(conformance["checked"].as_u64().unwrap() > 80, "{conformance:#}");
    assert_eq!(phases(&device["inference"]), ["text encode", "vae decode", "step"]);
    assert!(!device["inference"]["phases"][2]["operations"].as_array().unwrap().is_empty());
    assert_eq!(phases(&device["training"]), ["training step"]);
    let private = [model, sandbox.path("").to_str().unwrap(), "red fox"].map(str::to_owned);
    let names =
        ["USER", "LOGNAME", "HOSTNAME", "HOME"].into_iter().filter_map(|name| std::env::var(name).ok());
    for word in private.into_iter().chain(names.filter(|name| name.len() > 4)) {
        assert!(!text.contains(&word), "`{word}` is in the report");
    }
    sandbox.kiln(&["bench", "--report", "none/report.json"]).fails(1, &["none", "no such folder"]);
    sandbox.kiln(&["bench", "--report", "a.json", "--peaks"]).fails(2, &["cannot be used with"]);
}
