//! `--dtype int8` and `kiln quantize`.

use std::fs;

use kiln_image::RgbImage;
use kiln_tensor::DType;
use kiln_weights::WeightSource;
use serde_json::Value;

use crate::sandbox::Sandbox;

const TRANSFORMER: &str = "transformer/diffusion_pytorch_model.safetensors";

fn quantize(sandbox: &Sandbox, out: &str) -> Value {
    let model = sandbox.model().to_str().unwrap();
    let ran = sandbox.kiln(&["quantize", model, out, "--to", "int8", "--json"]).ok();
    serde_json::from_str(ran.text()).unwrap()
}

/// The root mean square difference, in levels.
fn rms_difference(a: &RgbImage, b: &RgbImage) -> f64 {
    let squares = a.pixels().iter().zip(b.pixels()).map(|(&a, &b)| (f64::from(a) - f64::from(b)).powi(2));
    (squares.sum::<f64>() / a.pixels().len() as f64).sqrt()
}

#[test]
fn quantizing_at_load_and_ahead_give_images_close_to_bf16() {
    let sandbox = Sandbox::new();
    quantize(&sandbox, "small");
    let image = |name: &str, model: Option<&str>, args: &[&str]| {
        let mut all = vec!["fox", "-S", "1", "-o", name];
        all.extend(model.iter().flat_map(|m| ["-m", m]));
        sandbox.generate(&[&all, args].concat()).ok();
        sandbox.image(name)
    };
    let exact = image("exact.png", None, &["--dtype", "bf16"]);
    let at_load = &image("load.png", None, &["--dtype", "int8"]);
    let stored = image("stored.png", Some("small"), &[]);
    // Rows are rotated when they are quantized at load, and used as they are stored.
    assert_ne!(*at_load, stored);
    assert_eq!(stored, image("threads.png", Some("small"), &["--threads", "3", "--dtype", "int8"]));
    let other = rms_difference(&exact, &image("o.png", None, &["-S", "2"]));
    for int8 in [at_load, &stored].map(|image| rms_difference(&exact, image)) {
        assert!(int8 > 0.0 && int8 < 4.0 && int8 < other / 4.0, "{int8} levels, another seed {other}");
    }
    // The stored integers can be dequantized to other types.
    let wide = image("wide.png", Some("small"), &["--dtype", "f32"]);
    assert!(rms_difference(&exact, &wide) < 4.0 && wide != stored);
}

#[test]
fn a_recipe_remembers_int8() {
    let sandbox = Sandbox::new();
    sandbox.generate(&["fox", "-S", "1", "--dtype", "int8", "-o", "a.png"]).ok();
    let info: Value = serde_json::from_str(sandbox.kiln(&["info", "--json", "a.png"]).ok().text()).unwrap();
    assert_eq!(info["recipe"]["dtype"], "int8");
    sandbox.kiln(&["generate", "--from", "a.png", "-o", "b.png"]).ok();
    assert_eq!(fs::read(sandbox.path("a.png")).unwrap(), fs::read(sandbox.path("b.png")).unwrap());
}

#[test]
fn quantizing_at_load_reports_each_block() {
    let sandbox = Sandbox::new();
    let ran = sandbox.generate(&["fox", "-o", "a.png", "--dtype", "int8", "--json", "-v"]).ok();
    let events = ran.events();
    let quantizing = |event: &&Value| event["what"].as_str().is_some_and(|what| what.contains("quantizing"));
    assert_eq!(events.iter().rfind(quantizing).unwrap()["what"], "quantizing the transformer, 3/3");
    assert_eq!(events[0]["dtype"], "int8");
}

#[test]
fn quantize_writes_a_model_folder_and_reports_errors() {
    let sandbox = Sandbox::new();
    let report = quantize(&sandbox, "small");
    assert!(report["bytes_after"].as_u64() < report["bytes_before"].as_u64(), "{report}");
    let to_q = &report["int8"]["transformer_blocks.attn.to_q"];
    assert_eq!((&to_q["layers"], &to_q["weights"]), (&1.into(), &(128 * 128).into()));
    assert!((1e-3..2e-2).contains(&to_q["relative_error"].as_f64().unwrap()), "{report}");
    for same in ["model_index.json", "transformer/config.json", "tokenizer/tokenizer.json", "vae/config.json"]
    {
        let (ours, theirs) = (sandbox.path("small").join(same), sandbox.model().join(same));
        assert_eq!(fs::read(ours).unwrap(), fs::read(theirs).unwrap(), "{same}");
    }
    assert_eq!(sandbox.names(), ["small"]);
    let source = WeightSource::open(sandbox.path("small").join(TRANSFORMER)).unwrap();
    let dtype = |name: &str| source.entry(name).map(|(dtype, _)| dtype);
    assert_eq!(dtype("single_transformer_blocks.0.attn.to_out.weight"), Some(DType::I8));
    for exact in
        ["x_embedder", "context_embedder", "proj_out", "norm_out.linear", "single_stream_modulation.linear"]
    {
        assert_eq!(dtype(&format!("{exact}.weight")), Some(DType::BF16), "{exact}");
    }
    let info: Value = serde_json::from_str(sandbox.kiln(&["info", "--json", "small"]).ok().text()).unwrap();
    // Twelve in the double block, two in each of two single blocks.
    assert_eq!(info["transformer"]["int8_layers"], 12 + 2 * 2);
    let ran =
        sandbox.kiln(&["quantize", sandbox.model().to_str().unwrap(), "again", "--to", "int8", "-q"]).ok();
    assert!(ran.text().is_empty() && ran.err.is_empty());
    let [a, b] = ["small", "again"].map(|out| fs::read(sandbox.path(out).join(TRANSFORMER)).unwrap());
    assert!(a == b);
}

#[test]
fn a_lora_works_with_int8() {
    let sandbox = Sandbox::new();
    quantize(&sandbox, "small");
    let lora = kiln_golden::testdata().join("tiny/lora/lora_diffusers.safetensors");
    let lora = format!("{}:2", lora.display());
    let image = |name: &str, args: &[&str]| {
        sandbox.generate(&[&["fox", "-S", "1", "-o", name], args].concat()).ok();
        sandbox.image(name)
    };
    let exact = image("a.png", &["--dtype", "bf16", "--lora", &lora]);
    let int8 = image("b.png", &["-m", "small", "--lora", &lora]);
    let without = image("c.png", &["-m", "small"]);
    assert!(rms_difference(&exact, &int8) < rms_difference(&without, &int8), "the LoRA changes nothing");
}

#[test]
fn a_failing_quantize_leaves_nothing() {
    let sandbox = Sandbox::new();
    let model = sandbox.model().to_str().unwrap().to_owned();
    quantize(&sandbox, "small");
    sandbox
        .kiln(&["quantize", "small", "twice", "--to", "int8"])
        .fails(1, &["int8 already", "while quantizing `small", "hint: use the model as it is"]);
    sandbox
        .kiln(&["quantize", &model, "small", "--to", "int8"])
        .fails(1, &["`small` exists already", "hint: "]);
    sandbox.kiln(&["quantize", &model, "no/such/folder", "--to", "int8"]).fails(1, &["`no/such`", "hint: "]);
    sandbox.kiln(&["quantize", "none", "out", "--to", "int8"]).fails(1, &["none"]);
    sandbox.write("file.safetensors", b"x");
    sandbox.kiln(&["quantize", "file.safetensors", "out", "--to", "int8"]).fails(1, &["is a file", "hint: "]);
    sandbox.kiln(&["quantize", &model, "out", "--to", "int4"]).fails(2, &["int4", "int8"]);
    sandbox.kiln(&["quantize", &model, "out"]).fails(2, &["--to"]);
    sandbox.write_to_model(TRANSFORMER, b"broken");
    sandbox
        .kiln(&["quantize", &model, "out", "--to", "int8"])
        .fails(1, &["diffusion_pytorch_model.safetensors"]);
    assert_eq!(sandbox.names(), ["file.safetensors", "small"]);
}
