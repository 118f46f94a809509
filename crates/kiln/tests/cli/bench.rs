//! `bench`: every phase and operation, with made-up weights and with a model's own.

use serde_json::Value;

use crate::kit::Kit;

fn bench(kit: &Kit, args: &[&str]) -> Value {
    let quick = ["bench", "--json", "--repeat", "1", "--max-tokens", "32", "--size", "64x48"];
    serde_json::from_str(kit.kiln(&[&quick, args].concat()).ok().text()).unwrap()
}

fn phases(report: &Value) -> Vec<&str> {
    report["phases"].as_array().unwrap().iter().map(|p| p["phase"].as_str().unwrap()).collect()
}

#[test]
fn made_up_weights_run_every_phase_and_operation() {
    let kit = Kit::new();
    let report = bench(&kit, &["--synthetic", "tiny", "--refs", "2"]);
    assert_eq!(phases(&report), ["text encode", "vae encode, 2 references", "vae decode", "step"]);
    let step = &report["phases"][3];
    let operations = step["operations"].as_array().unwrap();
    let find = |name: &str, size: &str| {
        let fits = |op: &&Value| op["operation"] == name && op["size"] == size;
        operations.iter().find(fits).unwrap_or_else(|| panic!("no {name} {size} in {operations:#?}"))
    };
    // 32 text tokens, 12 of the picture, 24 of its references; two single blocks of 128 channels.
    let projection = find("ada_linear_split", "68 × 128 → 1152");
    assert_eq!(projection["calls"], 2.0);
    assert_eq!(projection["flops"], f64::from(2 * 2 * 68 * 128 * 1152));
    let attention = find("attention", "68 × 68, 1 heads × 128");
    assert_eq!(attention["flops"], f64::from(3 * 4 * 68 * 68 * 128));
    let sum: f64 = operations.iter().map(|op| op["seconds"].as_f64().unwrap()).sum();
    assert!(sum > 0.0 && sum <= step["seconds"][0].as_f64().unwrap());
    assert_eq!(report["load"][0]["part"], "text encoder");
    assert!(report["peaks"]["memory, read"].as_f64().unwrap() > 1e8);
    assert!(kit.names().is_empty());
}

#[test]
fn a_models_own_weights_are_measured_and_phases_chosen() {
    let kit = Kit::with_model("klein-kv");
    let model = kit.model().to_str().unwrap();
    let report = bench(&kit, &["-m", model, "--refs", "1", "--phase", "step", "--dtype", "bf16"]);
    assert_eq!(phases(&report), ["first step, keeping the references", "step, references kept"]);
    assert_eq!(report["dtype"], "bf16");
    assert!(report["load"][0]["weight_bytes"].as_u64().unwrap() > 1000);
    let report = bench(&kit, &["-m", model, "--phase", "text", "--phase", "decode"]);
    assert_eq!(phases(&report), ["text encode", "vae decode"]);
}

#[test]
fn tables_are_for_people() {
    let kit = Kit::new();
    let args = ["bench", "--synthetic", "tiny", "--size", "32x32", "--repeat", "1", "--phase", "decode"];
    let ran = kit.kiln(&args).ok();
    for words in ["tiny (synthetic weights)", "32×32", "beyond weights", "conv2d", "between them", "of peak"]
    {
        assert!(ran.text().contains(words), "`{words}` is missing in:\n{}", ran.text());
    }
    assert!(!ran.text().contains("conv2d 32 × 32"), "{}", ran.text());
    let ran = kit.kiln(&[&args[..], &["-v"]].concat()).ok();
    assert!(ran.text().contains("conv2d 32 × 32, 32 → 3, 3 × 3"), "{}", ran.text());
}

#[test]
fn peaks_alone_need_no_model() {
    let kit = Kit::new();
    let ran = kit.kiln(&["bench", "--peaks", "--threads", "1"]).ok();
    assert!(ran.text().contains("memory, copy") && ran.text().contains("GB/s"), "{}", ran.text());
    let json: Value = serde_json::from_str(kit.kiln(&["bench", "--peaks", "--json"]).ok().text()).unwrap();
    assert!(json["threads"].as_u64() > Some(0) && json["peaks"]["memory, read"].is_f64());
}

#[test]
fn what_can_not_be_measured_is_refused() {
    let kit = Kit::new();
    kit.kiln(&["bench", "--size", "100x64"]).refused(2, &["multiples of 16"]);
    kit.kiln(&["bench", "--synthetic", "70b"]).refused(2, &["9b-kv"]);
    kit.kiln(&["bench", "-m", ".", "--synthetic", "4b"]).refused(2, &["cannot be used with"]);
    kit.kiln(&["bench", "-m", "none"]).refused(1, &["none", "hint: "]);
    kit.kiln(&["bench", "--device", "cuda:99"]).refused(1, &["cuda:99", "--device cpu"]);
}
