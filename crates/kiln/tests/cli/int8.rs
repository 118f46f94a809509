//! `--dtype int8` and `kiln quantize`.

use std::fs;

use kiln_image::Picture;
use kiln_tensor::DType;
use kiln_weights::WeightSource;
use serde_json::Value;

use crate::kit::Kit;

const TRANSFORMER: &str = "transformer/diffusion_pytorch_model.safetensors";

fn quantize(kit: &Kit, out: &str) -> Value {
    let model = kit.model().to_str().unwrap();
    let ran = kit.kiln(&["quantize", model, out, "--to", "int8", "--json"]).ok();
    serde_json::from_str(ran.text()).unwrap()
}

/// Root mean square difference in levels.
fn difference(a: &Picture, b: &Picture) -> f64 {
    let squares = a.pixels().iter().zip(b.pixels()).map(|(&a, &b)| (f64::from(a) - f64::from(b)).powi(2));
    (squares.sum::<f64>() / a.pixels().len() as f64).sqrt()
}

#[test]
fn rounding_at_load_and_beforehand_give_the_same_picture_near_that_of_bf16() {
    let kit = Kit::new();
    quantize(&kit, "small");
    let picture = |name: &str, model: Option<&str>, args: &[&str]| {
        let mut all = vec!["fox", "-S", "1", "-o", name];
        all.extend(model.iter().flat_map(|m| ["-m", m]));
        kit.generate(&[&all, args].concat()).ok();
        kit.picture(name)
    };
    let exact = picture("exact.png", None, &["--dtype", "bf16"]);
    let at_load = picture("load.png", None, &["--dtype", "int8"]);
    let stored = picture("stored.png", Some("small"), &[]);
    assert_eq!(at_load, stored);
    assert_eq!(stored, picture("threads.png", Some("small"), &["--threads", "3", "--dtype", "int8"]));
    let (int8, other) =
        (difference(&exact, &at_load), difference(&exact, &picture("o.png", None, &["-S", "2"])));
    assert!(int8 > 0.0 && int8 < 4.0 && int8 < other / 4.0, "{int8} levels, another seed {other}");
    // Widened, the stored integers are weights as any other.
    let wide = picture("wide.png", Some("small"), &["--dtype", "f32"]);
    assert!(difference(&exact, &wide) < 4.0 && wide != stored);
}

#[test]
fn a_recipe_in_int8_is_made_again_in_int8() {
    let kit = Kit::new();
    kit.generate(&["fox", "-S", "1", "--dtype", "int8", "-o", "a.png"]).ok();
    let info: Value = serde_json::from_str(kit.kiln(&["info", "--json", "a.png"]).ok().text()).unwrap();
    assert_eq!(info["recipe"]["dtype"], "int8");
    kit.kiln(&["generate", "--from", "a.png", "-o", "b.png"]).ok();
    assert_eq!(fs::read(kit.path("a.png")).unwrap(), fs::read(kit.path("b.png")).unwrap());
}

#[test]
fn rounding_is_told_block_by_block() {
    let kit = Kit::new();
    let ran = kit.generate(&["fox", "-o", "a.png", "--dtype", "int8", "--json", "-v"]).ok();
    let events = ran.events();
    let told = |event: &&Value| event["what"].as_str().is_some_and(|what| what.contains("in 8 bits"));
    assert_eq!(events.iter().rfind(told).unwrap()["what"], "transformer in 8 bits, 3/3");
    assert_eq!(events[0]["dtype"], "int8");
}

#[test]
fn quantize_writes_a_model_folder_and_says_what_it_lost() {
    let kit = Kit::new();
    let report = quantize(&kit, "small");
    assert!(report["bytes_after"].as_u64() < report["bytes_before"].as_u64(), "{report}");
    let to_q = &report["int8"]["transformer_blocks.attn.to_q"];
    assert_eq!((&to_q["layers"], &to_q["weights"]), (&1.into(), &(128 * 128).into()));
    assert!((1e-3..2e-2).contains(&to_q["relative_error"].as_f64().unwrap()), "{report}");
    for same in ["model_index.json", "transformer/config.json", "tokenizer/tokenizer.json", "vae/config.json"]
    {
        let (ours, theirs) = (kit.path("small").join(same), kit.model().join(same));
        assert_eq!(fs::read(ours).unwrap(), fs::read(theirs).unwrap(), "{same}");
    }
    assert_eq!(kit.names(), ["small"]);
    let source = WeightSource::open(kit.path("small").join(TRANSFORMER)).unwrap();
    let dtype = |name: &str| source.entry(name).map(|(dtype, _)| dtype);
    assert_eq!(dtype("single_transformer_blocks.0.attn.to_out.weight"), Some(DType::I8));
    for exact in
        ["x_embedder", "context_embedder", "proj_out", "norm_out.linear", "single_stream_modulation.linear"]
    {
        assert_eq!(dtype(&format!("{exact}.weight")), Some(DType::BF16), "{exact}");
    }
    let info: Value = serde_json::from_str(kit.kiln(&["info", "--json", "small"]).ok().text()).unwrap();
    // Twelve in the double block, two in each of two single blocks.
    assert_eq!(info["transformer"]["int8_layers"], 12 + 2 * 2);
    let ran = kit.kiln(&["quantize", kit.model().to_str().unwrap(), "again", "--to", "int8", "-q"]).ok();
    assert!(ran.text().is_empty() && ran.err.is_empty());
    let [a, b] = ["small", "again"].map(|out| fs::read(kit.path(out).join(TRANSFORMER)).unwrap());
    assert!(a == b);
}

#[test]
fn a_lora_goes_over_integers_too() {
    let kit = Kit::new();
    quantize(&kit, "small");
    let lora = kiln_golden::in_tree().join("tiny/lora/lora_diffusers.safetensors");
    let lora = format!("{}:2", lora.display());
    let picture = |name: &str, args: &[&str]| {
        kit.generate(&[&["fox", "-S", "1", "-o", name], args].concat()).ok();
        kit.picture(name)
    };
    let exact = picture("a.png", &["--dtype", "bf16", "--lora", &lora]);
    let int8 = picture("b.png", &["-m", "small", "--lora", &lora]);
    let without = picture("c.png", &["-m", "small"]);
    assert!(difference(&exact, &int8) < difference(&without, &int8), "the LoRA changes nothing");
}

#[test]
fn quantize_refuses_what_it_can_not_do_and_leaves_nothing() {
    let kit = Kit::new();
    let model = kit.model().to_str().unwrap().to_owned();
    quantize(&kit, "small");
    kit.kiln(&["quantize", "small", "twice", "--to", "int8"])
        .refused(1, &["in 8 bits already", "while quantizing `small", "hint: use the model as it is"]);
    kit.kiln(&["quantize", &model, "small", "--to", "int8"])
        .refused(1, &["`small` exists already", "hint: "]);
    kit.kiln(&["quantize", &model, "no/such/folder", "--to", "int8"]).refused(1, &["`no/such`", "hint: "]);
    kit.kiln(&["quantize", "none", "out", "--to", "int8"]).refused(1, &["none"]);
    kit.write("file.safetensors", b"x");
    kit.kiln(&["quantize", "file.safetensors", "out", "--to", "int8"]).refused(1, &["is a file", "hint: "]);
    kit.kiln(&["quantize", &model, "out", "--to", "int4"]).refused(2, &["int4", "int8"]);
    kit.kiln(&["quantize", &model, "out"]).refused(2, &["--to"]);
    kit.put_into_model(TRANSFORMER, b"broken");
    kit.kiln(&["quantize", &model, "out", "--to", "int8"])
        .refused(1, &["diffusion_pytorch_model.safetensors"]);
    assert_eq!(kit.names(), ["file.safetensors", "small"]);
}
