//! `kiln convert` and `kiln quantize`: what they write, what they keep, and what they refuse.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use kiln_tensor::{DType, HostTensor};
use kiln_weights::{Component, WeightSource, save};
use serde_json::{Value, json};

use crate::sandbox::{RunOutput, Sandbox, link_folder};

const SMALL: [&str; 10] = ["-W", "64", "-H", "48", "-s", "2", "--max-tokens", "16", "-S", "5"];

fn report(ran: RunOutput) -> Value {
    serde_json::from_str(ran.ok().text()).unwrap()
}

fn info(sandbox: &Sandbox, path: &str) -> Value {
    report(sandbox.kiln(&["info", "--json", path]))
}

/// The dequantized values of a component, by name.
fn values(sandbox: &Sandbox, path: &str) -> Vec<(String, Vec<f32>)> {
    let source = WeightSource::open_component(sandbox.path(path), Component::Transformer).unwrap();
    let value = |name: &str| source.tensor(name).unwrap().to_f32().unwrap().into_owned();
    source
        .names()
        .filter(|name| !name.ends_with("_scale"))
        .map(|name| (name.to_owned(), value(name)))
        .collect()
}

#[test]
fn a_variant_survives_every_conversion() {
    for (model, variant) in
        [("klein-base", "klein base"), ("klein-kv", "klein KV"), ("klein", "klein (distilled)")]
    {
        let sandbox = Sandbox::with_model(model);
        let folder = sandbox.model().to_str().unwrap();
        sandbox.kiln(&["convert", folder, "one.safetensors", "-q"]).ok();
        sandbox.kiln(&["convert", "one.safetensors", "two.gguf", "-q"]).ok();
        sandbox.kiln(&["quantize", "two.gguf", "three.gguf", "--to", "q8_0", "-q"]).ok();
        sandbox.kiln(&["quantize", folder, "four.safetensors", "--to", "int8", "-q"]).ok();
        sandbox.kiln(&["convert", "three.gguf", "five", "-q"]).ok();
        for file in ["one.safetensors", "two.gguf", "three.gguf", "four.safetensors", "five"] {
            assert_eq!(info(&sandbox, file)["model"]["variant"], variant, "{model} as {file}");
        }
    }
}

#[test]
fn a_variant_that_is_only_a_guess_is_called_one() {
    let sandbox = Sandbox::with_model("klein-base");
    let folder = sandbox.model().to_str().unwrap();
    // A file of another program: without Kiln's metadata.
    let bare = |name: &str| {
        let source = WeightSource::open(sandbox.model().join("transformer")).unwrap();
        let names: Vec<&str> = source.names().collect();
        let tensors: Vec<_> = names.iter().map(|name| (*name, source.tensor(name).unwrap())).collect();
        save::save(sandbox.path(name), &tensors, &Default::default()).unwrap();
    };
    bare("flux-2-klein-base-4b.safetensors");
    bare("x.safetensors");
    let variant = |file: &str| info(&sandbox, file)["model"]["variant"].as_str().unwrap().to_owned();
    let by_name = "klein base (a guess from the file's name)";
    assert_eq!(variant("flux-2-klein-base-4b.safetensors"), by_name);
    assert!(variant("x.safetensors").starts_with("klein (distilled) (a guess, since nothing"));
    // The guess stays one when the name is lost, and becomes a fact when the user says so.
    sandbox.kiln(&["convert", "flux-2-klein-base-4b.safetensors", "y.gguf", "-q"]).ok();
    assert_eq!(variant("y.gguf"), by_name);
    sandbox.kiln(&["convert", "x.safetensors", "z.gguf", "--variant", "base", "-q"]).ok();
    assert_eq!(variant("z.gguf"), "klein base");
    sandbox.kiln(&["convert", "x.safetensors", "dev.gguf", "--variant", "dev"]).fails(1, &["can't be dev"]);
    sandbox
        .kiln(&["convert", folder, "v.gguf", "--part", "vae", "--variant", "base"])
        .fails(2, &["--variant is about a transformer"]);
    sandbox
        .kiln(&["quantize", folder, "f", "--to", "fp8", "--variant", "kv"])
        .fails(2, &["--variant needs a file"]);
    let generate = |file: &str| {
        let args = ["generate", "fox", "--transformer", file, "-m", folder, "-o", "a.png"];
        sandbox.kiln(&[&args[..], &SMALL].concat()).ok().err
    };
    assert!(
        generate("flux-2-klein-base-4b.safetensors").contains("as klein base: a guess from the file's name")
    );
    assert!(!generate("z.gguf").contains("a guess"));
}

#[test]
fn another_transformer_brings_its_own_variant() {
    let (sandbox, base) = (Sandbox::new(), Sandbox::with_model("klein-base"));
    let file = sandbox.path("other.safetensors");
    base.kiln(&["convert", base.model().to_str().unwrap(), file.to_str().unwrap(), "-q"]).ok();
    let mut args = vec!["generate", "fox", "-m", sandbox.model().to_str().unwrap(), "--json", "-o", "a.png"];
    args.extend(["-W", "32", "-H", "32", "-s", "1", "--max-tokens", "16"]);
    let variant = |more: &[&str]| sandbox.kiln(&[&args, more].concat()).ok().events()[0]["variant"].clone();
    assert_eq!(variant(&[]), "klein (distilled)");
    assert_eq!(variant(&["--transformer", "other.safetensors"]), "klein base");
    assert_eq!(
        variant(&["--transformer", "other.safetensors", "--variant", "distilled"]),
        "klein (distilled)"
    );
    let text = "transformer = 'other.safetensors'\nvariant = 'kv'";
    sandbox.write("model.toml", text.as_bytes());
    let variant = info(&sandbox, "model.toml")["variant"].as_str().unwrap().to_owned();
    assert!(variant.starts_with("klein KV (but the transformer's file says klein base"), "{variant}");
}

#[test]
fn settings_that_no_tensor_tells_go_into_the_file() {
    let sandbox = Sandbox::new();
    sandbox.edit_model("text_encoder/config.json", "rms_norm_eps", json!(0.01));
    sandbox.edit_model("text_encoder/config.json", "rope_theta", json!(300.0));
    sandbox.edit_model("transformer/config.json", "rope_theta", json!(70.0));
    sandbox.edit_model("vae/config.json", "batch_norm_eps", json!(0.5));
    let folder = sandbox.model().to_str().unwrap();
    let image = |name: &str, args: &[&str]| {
        let tokenizer = sandbox.model().join("tokenizer");
        let more = ["--tokenizer", tokenizer.to_str().unwrap(), "--dtype", "f32", "-o", name];
        sandbox.kiln(&[&["generate", "fox"], args, &more, &SMALL].concat()).ok();
        sandbox.image(name)
    };
    let exact = image("a.png", &["-m", folder]);
    for end in ["safetensors", "gguf"] {
        let [t, e] = ["t", "e"].map(|stem| format!("{stem}.{end}"));
        sandbox.kiln(&["convert", folder, &t, "-q"]).ok();
        sandbox.kiln(&["convert", folder, &e, "--part", "text-encoder", "-q"]).ok();
        sandbox.kiln(&["convert", folder, "v.safetensors", "--part", "vae", "-q"]).ok();
        let parts = ["--transformer", &t, "--text-encoder", &e, "--vae", "v.safetensors"];
        assert!(exact == image("b.png", &parts), "{end}");
        sandbox.write(
            "model.toml",
            format!("transformer = '{t}'\ntext_encoder = '{e}'\nvae = 'v.safetensors'").as_bytes(),
        );
        assert!(exact == image("c.png", &["-m", "model.toml"]), "{end}");
        // Back to a folder, the configuration is the model's own.
        let back = format!("back-{end}");
        sandbox.kiln(&["convert", &e, &back, "-q"]).ok();
        let text = fs::read(sandbox.path(&back).join("config.json")).unwrap();
        assert_eq!(text, fs::read(sandbox.model().join("text_encoder/config.json")).unwrap());
    }
    let metadata = &info(&sandbox, "e.gguf")["metadata"];
    assert_eq!(metadata["qwen3.rope.freq_base"], "300");
    assert_eq!(metadata["qwen3.attention.layer_norm_rms_epsilon"], "0.01");
}

#[test]
fn types_that_a_file_cannot_hold_are_refused_at_once() {
    let sandbox = Sandbox::new();
    // Nothing is read: the model does not even exist.
    let quantize = |out: &str, to: &str| sandbox.kiln(&["quantize", "no-such-model", out, "--to", to]);
    for to in ["int8", "fp8", "nvfp4"] {
        quantize("x.gguf", to).fails(2, &[to, "requires a .safetensors file", "x.gguf", "hint: "]);
    }
    for to in ["q8_0", "q4_k", "q4_k_m", "Q5_K_M"] {
        quantize("x.safetensors", to).fails(2, &["requires a .gguf file", "x.safetensors", "hint: "]);
    }
    for out in ["x.ckpt", "x.bin", "x.pt", "x.PTH", "-", "x.json"] {
        quantize(out, "fp8").fails(2, &[out, ".safetensors and .gguf", "hint: "]);
        sandbox.kiln(&["convert", "no-such-model", out]).fails(2, &[out, ".safetensors and .gguf"]);
    }
    assert!(sandbox.names().is_empty());
}

#[test]
fn a_name_with_a_version_is_a_folder_and_sft_is_safetensors() {
    let sandbox = Sandbox::new();
    let folder = sandbox.model().to_str().unwrap();
    sandbox.kiln(&["convert", folder, "flux.2", "-q"]).ok();
    assert!(sandbox.path("flux.2/config.json").is_file());
    sandbox.kiln(&["convert", folder, "a.sft", "-q"]).ok();
    assert_eq!(info(&sandbox, "a.sft")["format"], "safetensors");
    sandbox.kiln(&["convert", folder, "odd.ckpt/", "-q"]).ok();
    assert!(sandbox.path("odd.ckpt").is_dir());
}

#[test]
fn the_input_is_never_overwritten() {
    let sandbox = Sandbox::new();
    let folder = sandbox.model().to_str().unwrap();
    sandbox.kiln(&["convert", folder, "a.safetensors", "-q"]).ok();
    #[cfg(unix)]
    std::os::unix::fs::symlink("a.safetensors", sandbox.path("link.safetensors")).unwrap();
    // Windows lets administrators alone make a symbolic link.
    #[cfg(windows)]
    fs::hard_link(sandbox.path("a.safetensors"), sandbox.path("link.safetensors")).unwrap();
    fs::hard_link(sandbox.path("a.safetensors"), sandbox.path("hard.safetensors")).unwrap();
    let before = fs::read(sandbox.path("a.safetensors")).unwrap();
    for (from, to) in [
        ("a.safetensors", "a.safetensors"),
        ("a.safetensors", "./a.safetensors"),
        ("a.safetensors", if cfg!(windows) { "A.SafeTensors" } else { "a.safetensors" }),
        ("a.safetensors", "link.safetensors"),
        ("link.safetensors", "a.safetensors"),
        ("a.safetensors", "hard.safetensors"),
    ] {
        sandbox.kiln(&["convert", from, to, "--dtype", "f32"]).fails(1, &["would be overwritten", "hint: "]);
        for kind in ["fp8", "int8"] {
            sandbox.kiln(&["quantize", from, to, "--to", kind]).fails(1, &["would be overwritten"]);
        }
    }
    assert!(before == fs::read(sandbox.path("a.safetensors")).unwrap());
    // Not over other weights of the model, either; but over any other file.
    let vae = sandbox.model().join("vae/diffusion_pytorch_model.safetensors");
    sandbox.kiln(&["convert", folder, vae.to_str().unwrap()]).fails(1, &["would be overwritten"]);
    sandbox.write("b.gguf", b"old");
    sandbox.kiln(&["convert", "a.safetensors", "b.gguf", "-q"]).ok();
    assert_eq!(info(&sandbox, "b.gguf")["format"], "GGUF");
}

#[test]
fn models_are_found_by_name() {
    let sandbox = Sandbox::new();
    fs::create_dir_all(sandbox.path("models")).unwrap();
    link_folder(sandbox.model(), &sandbox.path("models/tiny"));
    let kiln = |args: &[&str]| -> RunOutput {
        sandbox.command(args).env("KILN_MODELS", "models").output().unwrap().into()
    };
    kiln(&["convert", "tiny", "a.gguf", "-q"]).ok();
    assert_eq!(info(&sandbox, "a.gguf")["metadata"]["general.name"], "tiny");
    kiln(&["quantize", "tiny", "b.safetensors", "--to", "fp8", "-q"]).ok();
    kiln(&["quantize", "tiny", "small", "--to", "int8", "-q"]).ok();
    assert!(sandbox.path("small/model_index.json").is_file());
    kiln(&["convert", "tinny", "c.gguf"]).fails(1, &["`tinny` does not exist", "nearest: tiny"]);
    kiln(&["quantize", "tinny", "c", "--to", "int8"]).fails(1, &["nearest: tiny"]);
}

#[cfg(feature = "ember")]
#[test]
fn the_built_in_model_is_converted_with_its_defaults() {
    let sandbox = Sandbox::new();
    sandbox.kiln(&["convert", "ember", "e.safetensors", "-q"]).ok();
    let (whole, file) = (info(&sandbox, "ember"), info(&sandbox, "e.safetensors"));
    assert_eq!(file["model"]["variant"], whole["variant"]);
    sandbox.write("model.toml", b"transformer = 'e.safetensors'");
    let manifest = info(&sandbox, "model.toml");
    for field in ["variant", "default_size", "default_steps"] {
        assert_eq!(manifest[field], whole[field], "{field}");
    }
    // Its int8 attention matrices become convolutions, and stay what they are.
    sandbox.kiln(&["convert", "ember", "vae.safetensors", "--part", "vae", "-q"]).ok();
    let apple = |name: &str, vae: &[&str]| {
        sandbox.kiln(&[&["generate", "an apple", "-S", "1", "-o", name], vae].concat()).ok();
        sandbox.image(name)
    };
    assert!(apple("a.png", &[]) == apple("b.png", &["--vae", "vae.safetensors"]));
}

#[test]
fn quantized_weights_keep_their_type_and_their_values() {
    let sandbox = Sandbox::new();
    let folder = sandbox.model().to_str().unwrap();
    for (to, stored) in [("nvfp4", "nvfp4"), ("int8", "i8"), ("fp8", "f8_e4m3")] {
        let [a, b, c, d] = ["a", "b", "c", "d"].map(|stem| format!("{stem}-{to}.safetensors"));
        sandbox.kiln(&["quantize", folder, &a, "--to", to, "-q"]).ok();
        let changed = report(sandbox.kiln(&["convert", &a, &b, "--names", "diffusers", "--json"]));
        assert_eq!(changed["tensors_changed"], Value::Null, "{changed}");
        // q, k and v of one layer have one scale here: they come from a fused layer.
        sandbox.kiln(&["convert", &b, &c, "-q"]).ok();
        sandbox.kiln(&["convert", &c, "folder", "--shard-size", "100K", "-q"]).ok();
        sandbox.kiln(&["convert", "folder", &d, "-q"]).ok();
        for file in [&b, &c, "folder", &d] {
            assert!(values(&sandbox, &a) == values(&sandbox, file), "{to}: {file}");
        }
        let source = WeightSource::open(sandbox.path(&d)).unwrap();
        let name = "double_blocks.0.img_attn.qkv.weight";
        assert_eq!(source.storage_name(name), Some(stored), "{to}");
        let small = fs::metadata(sandbox.path(&d)).unwrap().len();
        assert!(small < fs::metadata(sandbox.path(&a)).unwrap().len() * 11 / 10, "{to} grew");
        fs::remove_dir_all(sandbox.path("folder")).unwrap();
        // GGUF has none of these types, and the report says what became of them.
        let wide = report(sandbox.kiln(&["convert", &d, "w.gguf", "--json"]));
        let layers = &wide["tensors_changed"][format!("{to} to bf16")];
        assert!(layers.as_u64().is_some_and(|n| n >= 12), "{to}: {wide}");
    }
}

#[test]
fn an_int8_file_under_other_names_is_still_used_in_int8() {
    let sandbox = Sandbox::new();
    let folder = sandbox.model().to_str().unwrap();
    sandbox.kiln(&["quantize", folder, "a.safetensors", "--to", "int8", "-q"]).ok();
    sandbox.kiln(&["convert", "a.safetensors", "b.safetensors", "-q"]).ok();
    let image = |file: &str| {
        let args = ["generate", "fox", "-m", folder, "--transformer", file, "-o", "x.png", "--json"];
        let ran = sandbox.kiln(&[&args[..], &SMALL].concat()).ok();
        assert_eq!(ran.events()[0]["dtype"], "int8", "{file}");
        sandbox.image("x.png")
    };
    assert!(image("a.safetensors") == image("b.safetensors"));
}

#[test]
fn a_report_names_the_types_that_were_really_written() {
    let sandbox = Sandbox::new();
    let folder = sandbox.model().to_str().unwrap();
    let told = report(sandbox.kiln(&["quantize", folder, "a.gguf", "--to", "Q4_K", "--json"]));
    // Only the outputs of the single blocks have rows of whole blocks of 256.
    assert_eq!(told["asked_for"], "q4_k");
    assert_eq!((&told["layers"]["q4_k"], &told["layers"]["q8_0"]), (&2.into(), &10.into()), "{told}");
    assert_eq!(told["q4_k"]["single_transformer_blocks.attn.to_out"]["layers"], 2);
    assert_eq!(told["q8_0"]["transformer_blocks.attn.to_q"]["layers"], 1);
    let stored = info(&sandbox, "a.gguf")["stored"].clone();
    let text = sandbox.kiln(&["quantize", folder, "b.gguf", "--to", "q4_k"]).ok().text().to_owned();
    assert!(text.contains("q4_k  2\n") && text.contains("q8_0  10\n"), "{text}");
    assert!(stored["single_blocks"].as_str().unwrap().contains("2 q4_k, 2 q8_0"), "{stored}");

    // Rows of 24 fit no blocks at all.
    let tensors = [
        ("single_stream_modulation.linear.weight", HostTensor::zeros([6, 4])),
        ("single_transformer_blocks.0.attn.to_out.weight", HostTensor::zeros([4, 24])),
        ("single_transformer_blocks.1.attn.to_out.weight", HostTensor::zeros([4, 32])),
    ];
    let tensors = tensors.map(|(name, t)| (name, t.to_dtype(DType::BF16).unwrap()));
    save::save(sandbox.path("odd.safetensors"), &tensors, &Default::default()).unwrap();
    for (out, to, fits) in [("c.gguf", "q4_0", "q4_0"), ("d.safetensors", "nvfp4", "nvfp4")] {
        let told = report(sandbox.kiln(&["quantize", "odd.safetensors", out, "--to", to, "--json"]));
        assert_eq!((&told["layers"]["bf16"], &told["layers"][fits]), (&1.into(), &1.into()), "{told}");
    }
}

#[test]
fn presets_mix_types_as_llama_cpp_does() {
    let sandbox = Sandbox::new();
    // Wide enough for blocks of 256.
    let mut tensors = vec![("single_stream_modulation.linear.weight".to_owned(), HostTensor::zeros([6, 4]))];
    for name in ["to_q", "to_k", "to_v", "to_out.0"] {
        tensors.push((format!("transformer_blocks.0.attn.{name}.weight"), HostTensor::zeros([2, 256])));
    }
    let tensors: Vec<_> = tensors.iter().map(|(name, t)| (name.as_str(), t.clone())).collect();
    save::save(sandbox.path("t.safetensors"), &tensors, &Default::default()).unwrap();
    let told = report(sandbox.kiln(&["quantize", "t.safetensors", "t.gguf", "--to", "Q4_K_M", "--json"]));
    assert_eq!(told["asked_for"], "q4_k_m");
    assert_eq!(told["layers"], json!({ "q4_k": 1, "q5_k": 1 }));
    let source = WeightSource::open(sandbox.path("t.gguf")).unwrap();
    assert_eq!(source.storage_name("double_blocks.0.img_attn.qkv.weight"), Some("q5_k"));
    let metadata = source.metadata();
    assert_eq!((metadata["general.file_type"].as_str(), metadata["general.name"].as_str()), ("15", "t"));
    assert_eq!(
        (metadata["general.type"].as_str(), metadata["general.architecture"].as_str()),
        ("model", "flux")
    );
    sandbox.kiln(&["quantize", "t.safetensors", "u.gguf", "--to", "q8_0", "-q"]).ok();
    let source = WeightSource::open(sandbox.path("u.gguf")).unwrap();
    assert_eq!(source.metadata()["general.file_type"], "7");
    sandbox.kiln(&["quantize", "t.safetensors", "v.gguf", "--to", "q4_k_xl"]).fails(2, &["q4_k_m", "q3_k_l"]);
}

#[test]
fn part_names_what_is_quantized_also_in_a_folder() {
    let sandbox = Sandbox::new();
    let folder = sandbox.model().to_str().unwrap();
    let quantize = |out: &str, to: &str, part: &str| {
        sandbox.kiln(&["quantize", folder, out, "--to", to, "--part", part, "-q"])
    };
    for out in ["v.gguf", "v"] {
        quantize(out, "q8_0", "vae").fails(2, &["a VAE has no layers to quantize", "hint: "]);
    }
    quantize("e", "int8", "text-encoder").fails(2, &["int8 is a type for transformers", "hint: "]);
    quantize("e", "q8_0", "text-encoder").ok();
    let same = |out: &str, file: &str| {
        fs::read(sandbox.path(out).join(file)).unwrap() == fs::read(sandbox.model().join(file)).unwrap()
    };
    assert!(
        same("e", "transformer/diffusion_pytorch_model.safetensors") && same("e", "text_encoder/config.json")
    );
    assert!(!sandbox.path("e/text_encoder/model.safetensors.index.json").exists());
    let told = info(&sandbox, "e");
    assert!(told["text_encoder"]["dtypes"].to_string().contains("q8_0"), "{told}");
    assert!(!told["transformer"]["dtypes"].to_string().contains("q8_0"), "{told}");
    sandbox.kiln(&[&["generate", "fox", "-m", "e", "-o", "a.png"][..], &SMALL].concat()).ok();
    quantize("t", "fp8", "transformer").ok();
    assert!(same("t", "text_encoder/model.safetensors.index.json"));
    // A file that is a VAE, without --part.
    sandbox.kiln(&["convert", folder, "ae.safetensors", "--part", "vae", "-q"]).ok();
    sandbox
        .kiln(&["quantize", "ae.safetensors", "b.gguf", "--to", "q8_0"])
        .fails(2, &["a VAE has no layers"]);
    let dev = Sandbox::with_model("dev");
    dev.kiln(&["quantize", dev.model().to_str().unwrap(), "e", "--to", "q8_0", "--part", "text-encoder"])
        .fails(1, &["has no text encoder"]);
    assert!(dev.names().is_empty());
}

#[test]
fn outputs_that_cannot_be_written_are_refused_and_leave_nothing() {
    let sandbox = Sandbox::new();
    let folder = sandbox.model().to_str().unwrap();
    fs::create_dir(sandbox.path("dir.gguf")).unwrap();
    let fails = |out: &str, words: &[&str]| {
        sandbox.kiln(&["convert", folder, out]).fails(1, words);
        sandbox.kiln(&["quantize", folder, out, "--to", "q8_0"]).fails(1, words);
    };
    fails("no/where.gguf", &["there is no folder `no`", "hint: "]);
    fails("no/folder", &["there is no folder `no`", "hint: "]);
    fails("dir.gguf", &["`dir.gguf` is a folder", "hint: "]);
    fails(".", &["exists already"]);
    assert_eq!(sandbox.names(), ["dir.gguf"]);
    sandbox.write("file", b"x");
    fails("file/a.gguf", &["there is no folder `file`"]);
}

#[test]
fn one_shard_of_several_is_refused() {
    let sandbox = Sandbox::new();
    let folder = sandbox.model().join("text_encoder");
    let convert =
        |name: &str, out: &str| sandbox.kiln(&["convert", folder.join(name).to_str().unwrap(), out, "-q"]);
    convert("model-00001-of-00002.safetensors", "a.gguf").fails(1, &["one of several shards", "index.json"]);
    convert("model.safetensors.index.json", "b.gguf").ok();
    convert("", "c.gguf").ok();
    assert_eq!(info(&sandbox, "b.gguf")["layers"], 28);
    assert_eq!(sandbox.names(), ["b.gguf", "c.gguf"]);
}

#[cfg(unix)]
#[test]
fn a_full_disk_leaves_nothing() {
    let sandbox = Sandbox::new();
    let folder = sandbox.model().to_str().unwrap();
    sandbox.write("a.gguf", b"old");
    for args in [["convert", "a.gguf"], ["convert", "folder"]] {
        // A limit of 8 blocks per file, reported as an error instead of a signal.
        let script = format!("trap '' XFSZ; ulimit -f 8; exec \"$0\" {} '{folder}' {}", args[0], args[1]);
        let program = std::path::Path::new("sh");
        let mut command = sandbox.command_of(program, &["-c", &script, env!("CARGO_BIN_EXE_kiln")]);
        RunOutput::from(command.output().unwrap()).fails(1, &["can't write"]);
    }
    assert_eq!(sandbox.names(), ["a.gguf"]);
    assert_eq!(fs::read(sandbox.path("a.gguf")).unwrap(), b"old");
}

/// The tensors of a component's folder, changed.
fn changed(
    folder: &Path,
    change: impl FnOnce(&mut BTreeMap<String, HostTensor>),
) -> BTreeMap<String, HostTensor> {
    let source = WeightSource::open(folder).unwrap();
    let mut tensors = source.names().map(|name| (name.to_owned(), source.tensor(name).unwrap())).collect();
    change(&mut tensors);
    tensors
}

fn save_tensors(file: &Path, tensors: &BTreeMap<String, HostTensor>) {
    let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor.clone())).collect();
    save::save(file, &tensors, &Default::default()).unwrap();
}

#[test]
fn a_bias_with_swapped_halves_survives_a_conversion() {
    let sandbox = Sandbox::new();
    let bias = HostTensor::from_f32([256], (0..256).map(|i| i as f32).collect()).unwrap();
    let tensors = changed(&sandbox.model().join("transformer"), |tensors| {
        tensors.insert("norm_out.linear.bias".into(), bias.clone());
    });
    save_tensors(&sandbox.path("in.safetensors"), &tensors);
    sandbox.kiln(&["convert", "in.safetensors", "out.safetensors", "-q"]).ok();
    let stored = WeightSource::open(sandbox.path("out.safetensors")).unwrap();
    let stored = stored.tensor("final_layer.adaLN_modulation.1.bias").unwrap();
    assert_eq!(stored.to_f32().unwrap()[0], 128.0);
    let read = WeightSource::open_component(sandbox.path("out.safetensors"), Component::Transformer).unwrap();
    assert_eq!(read.tensor("norm_out.linear.bias").unwrap(), bias);
}

#[test]
fn what_generate_refuses_is_not_converted() {
    let sandbox = Sandbox::new();
    let extra = [
        "norm_out.linear.pre_scale",
        "other.single_stream_modulation.linear.weight",
        "single_transformer_blocks.7.attn.norm_q.weight",
    ];
    for name in extra {
        let tensors = changed(&sandbox.model().join("transformer"), |tensors| {
            tensors.insert(name.into(), HostTensor::zeros([4]));
        });
        save_tensors(&sandbox.path("in.safetensors"), &tensors);
        sandbox.kiln(&["convert", "in.safetensors", "out.safetensors"]).fails(1, &[name]);
        sandbox.kiln(&["quantize", "in.safetensors", "out.gguf", "--to", "q8_0"]).fails(1, &[name]);
        sandbox.kiln(&["info", "in.safetensors"]).fails(1, &[name]);
    }
    let integers = HostTensor::new(DType::I64, [128, 128], vec![1; 8 * 128 * 128].into()).unwrap();
    let integers = changed(&sandbox.model().join("transformer"), |tensors| {
        tensors.insert("x_embedder.weight".into(), integers);
    });
    save_tensors(&sandbox.path("in.safetensors"), &integers);
    sandbox.kiln(&["info", "in.safetensors"]).fails(1, &["x_embedder.weight", "expected floats"]);
}

#[test]
fn a_vae_with_values_that_are_not_finite_is_refused() {
    let sandbox = Sandbox::new();
    for (name, value, words) in [
        ("decoder.conv_in.bias", f32::NAN, "not finite"),
        ("bn.running_var", f32::INFINITY, "not finite"),
        ("bn.running_var", -1.0, "negative"),
    ] {
        let tensors = changed(&sandbox.model().join("vae"), |tensors| {
            let shape = tensors[name].shape().clone();
            tensors.insert(name.into(), HostTensor::from_f32(&shape, vec![value; shape.numel()]).unwrap());
        });
        save_tensors(&sandbox.path("vae.safetensors"), &tensors);
        let model = sandbox.model().to_str().unwrap().to_owned();
        let args =
            ["generate", "x", "-m", &model, "--vae", "vae.safetensors", "-W", "64", "-H", "64", "-s", "1"];
        sandbox.kiln(&args).fails(1, &[name, words]);
    }
}

#[test]
fn the_config_beside_a_file_with_a_usual_name_counts() {
    let sandbox = Sandbox::new();
    sandbox.edit_model("text_encoder/config.json", "rope_scaling", json!({"rope_type": "yarn"}));
    let index = sandbox.model().join("text_encoder/model.safetensors.index.json");
    let transformer = sandbox.model().join("transformer/diffusion_pytorch_model.safetensors");
    let tokenizer = sandbox.model().join("tokenizer");
    let [index, transformer, tokenizer] = [&index, &transformer, &tokenizer].map(|p| p.to_str().unwrap());
    let small = ["-W", "64", "-H", "64", "-s", "1"];
    let args = ["generate", "x", "-m", transformer, "--text-encoder", index, "--tokenizer", tokenizer];
    sandbox.kiln(&[&args[..], &small[..]].concat()).fails(1, &["scaled rotary embeddings"]);
    sandbox.kiln(&["convert", index, "out.gguf"]).fails(1, &["scaled rotary embeddings"]);
}
