//! Models in other formats than diffusers' folders: writing, describing and using them.

use std::fs;

use kiln_tensor::HostTensor;
use kiln_weights::{WeightSource, save};

use crate::sandbox::Sandbox;

/// The sandbox's model as single files: a GGUF transformer, next to it a text encoder and a VAE.
fn single_files() -> (Sandbox, String) {
    let sandbox = Sandbox::new();
    let model = sandbox.model().to_str().unwrap().to_owned();
    let file = "flux-2-klein-4b-Q8_0.gguf";
    sandbox.kiln(&["quantize", &model, file, "--to", "q8_0", "-q"]).ok();
    sandbox
        .kiln(&[
            "convert",
            &model,
            "qwen.safetensors",
            "--part",
            "text-encoder",
            "--names",
            "diffusers",
            "-q",
        ])
        .ok();
    sandbox.kiln(&["convert", &model, "ae.safetensors", "--part", "vae", "-q"]).ok();
    (sandbox, file.to_owned())
}

const SMALL: [&str; 10] = ["-W", "64", "-H", "48", "-s", "2", "--max-tokens", "16", "-S", "5"];

#[test]
fn a_transformer_file_uses_the_components_next_to_it() {
    let (sandbox, file) = single_files();
    let tokenizer = sandbox.model().join("tokenizer");
    let tokenizer = tokenizer.to_str().unwrap();
    let first = ["generate", "fox", "-m", &file, "--tokenizer", tokenizer, "-o", "a.png"];
    sandbox.kiln(&[&first[..], &SMALL].concat()).ok();
    let info = sandbox.kiln(&["info", "a.png"]).ok().text().to_owned();
    assert!(info.contains("Q8_0.gguf") && info.contains("tokenizer"), "{info}");
    sandbox.kiln(&["generate", "--from", "a.png", "-o", "b.png"]).ok();
    assert_eq!(fs::read(sandbox.path("a.png")).unwrap(), fs::read(sandbox.path("b.png")).unwrap());
    // The same components, each given by its option.
    let components = [
        "generate",
        "fox",
        "--transformer",
        &file,
        "--text-encoder",
        "qwen.safetensors",
        "--vae",
        "ae.safetensors",
    ];
    let more = ["--tokenizer", tokenizer, "--variant", "distilled", "-o", "c.png", "--no-recipe"];
    sandbox.kiln(&[&components[..], &more, &SMALL].concat()).ok();
    assert!(sandbox.image("a.png") == sandbox.image("c.png"));
}

#[test]
fn missing_components_of_a_file_are_named_with_a_hint() {
    let (sandbox, file) = single_files();
    let generate =
        |args: &[&str]| sandbox.kiln(&[&["generate", "fox", "-o", "x.png"], args, &SMALL].concat());
    generate(&["-m", &file]).fails(1, &["448 tokens", "tokenizer.json"]);
    fs::remove_file(sandbox.path("qwen.safetensors")).unwrap();
    generate(&["-m", &file]).fails(1, &["there is no text encoder for", "hidden size 16", "--text-encoder"]);
    fs::remove_file(sandbox.path("ae.safetensors")).unwrap();
    generate(&["-m", &file]).fails(1, &["there is no vae for", "--vae"]);
    sandbox.write("model.toml", b"transformer = '../x.gguf'");
    generate(&["-m", "model.toml"]).fails(1, &["model.toml", "not a path below"]);
    sandbox.write("model.toml", b"transformer = 'flux-2-klein-4b-Q8_0.gguf'\nvea = 'x'");
    generate(&["-m", "model.toml"]).fails(1, &["model.toml", "unknown field `vea`"]);
    sandbox.write("half.gguf", &fs::read(sandbox.path(&file)).unwrap()[..3000]);
    generate(&["-m", "half.gguf"]).fails(1, &["half.gguf", "not a valid GGUF file"]);
    let vae = sandbox.model().join("vae");
    generate(&["-m", &file, "--text-encoder", vae.to_str().unwrap()])
        .fails(1, &["holds no FLUX.2 text encoder: it has a VAE", "hint: "]);
    generate(&["--variant", "kv"]).fails(2, &["the built-in model"]);
}

#[test]
fn info_describes_files_and_what_they_need() {
    let (sandbox, file) = single_files();
    fs::copy(sandbox.model().join("tokenizer/tokenizer.json"), sandbox.path("tokenizer.json")).unwrap();
    let info = sandbox.kiln(&["info", &file]).ok().text().to_owned();
    for words in [
        "GGUF",
        "FLUX.2 transformer",
        "Black Forest Labs",
        "variant       klein (distilled)\n",
        "text encoder  qwen.safetensors\n",
        "vae           ae.safetensors\n",
        "tokenizer     tokenizer.json\n",
        "q8_0",
        "hidden size 16",
    ] {
        assert!(info.contains(words), "{words}: {info}");
    }
    let info = sandbox.kiln(&["info", "ae.safetensors"]).ok().text().to_owned();
    assert!(info.contains("latent diffusion") && info.contains("latent channels"), "{info}");
    let info = sandbox.kiln(&["info", "qwen.safetensors", "--json"]).ok().text().to_owned();
    assert!(info.contains("\"layers\":28") || info.contains("\"layers\": 28"), "{info}");
}

#[test]
fn conversion_to_other_formats_and_back_is_lossless() {
    let sandbox = Sandbox::new();
    let model = sandbox.model().to_str().unwrap();
    sandbox.kiln(&["convert", model, "one.safetensors", "-q"]).ok();
    sandbox.kiln(&["convert", "one.safetensors", "two.gguf", "-q"]).ok();
    sandbox.kiln(&["convert", "two.gguf", "three", "--shard-size", "1M", "--dtype", "bf16", "-q"]).ok();
    assert!(sandbox.path("three/config.json").is_file());
    assert!(sandbox.path("three/diffusion_pytorch_model.safetensors.index.json").is_file());
    let before = WeightSource::open(sandbox.model().join("transformer")).unwrap();
    let after = kiln_weights::WeightSource::open(sandbox.path("three")).unwrap();
    assert!(after.files().count() > 1);
    assert_eq!(before.fingerprint().unwrap(), after.fingerprint().unwrap());
    sandbox.kiln(&["convert", "one.safetensors", "three"]).fails(1, &["exists already"]);
    sandbox.kiln(&["convert", "one.safetensors", "x.gguf", "--shard-size", "1M"]).fails(2, &["--shard-size"]);
    sandbox.kiln(&["quantize", model, "x.safetensors", "--to", "q4_k"]).fails(2, &["requires a .gguf file"]);
    assert!(!sandbox.path("x.safetensors").exists());
}

#[test]
fn a_folder_with_a_quantized_transformer_is_a_model() {
    for (to, words) in [("fp8", "f8_e4m3"), ("q6_k", "q8_0"), ("nvfp4", "nvfp4")] {
        let sandbox = Sandbox::new();
        let info = sandbox
            .kiln(&["quantize", sandbox.model().to_str().unwrap(), "small", "--to", to])
            .ok()
            .text()
            .to_owned();
        assert!(info.contains("relative error"), "{info}");
        let generate = ["generate", "fox", "-m", "small", "-o", "a.png"];
        sandbox.kiln(&[&generate[..], &SMALL].concat()).ok();
        let info = sandbox.kiln(&["info", "small"]).ok().text().to_owned();
        assert!(info.contains(words), "{to}: {info}");
    }
}

#[test]
fn a_named_component_needs_no_choice_among_others() {
    let (sandbox, file) = single_files();
    let model = sandbox.model().to_str().unwrap().to_owned();
    fs::copy(sandbox.model().join("tokenizer/tokenizer.json"), sandbox.path("tokenizer.json")).unwrap();
    let generate =
        |args: &[&str]| sandbox.kiln(&[&["generate", "fox", "-o", "x.png"], args, &SMALL].concat());
    generate(&["-m", &file]).ok();
    let alone = sandbox.image("x.png");
    fs::copy(sandbox.path("ae.safetensors"), sandbox.path("ae2.safetensors")).unwrap();
    generate(&["-m", &file])
        .fails(1, &["several files could be the VAE", "`ae.safetensors`, `ae2.safetensors`", "with --vae"]);
    generate(&["-m", &file, "--vae", "ae2.safetensors"]).ok();
    assert!(alone == sandbox.image("x.png"));
    fs::copy(sandbox.path("qwen.safetensors"), sandbox.path("qwen2.safetensors")).unwrap();
    let vae = ["--vae", "ae.safetensors"];
    generate(&[&["-m", &file], &vae[..]].concat())
        .fails(1, &["several files could be the text encoder", "`qwen2.safetensors`", "with --text-encoder"]);
    let both = ["--vae", "ae.safetensors", "--text-encoder", "qwen2.safetensors"];
    generate(&[&["-m", &file], &both[..]].concat()).ok();
    assert!(alone == sandbox.image("x.png"));
    let info = sandbox.kiln(&["info", &file]).ok().text().to_owned();
    assert!(info.contains("name one with --vae") && info.contains("name one with --text-encoder"), "{info}");
    sandbox.kiln(&["bench", "-m", &file]).fails(1, &["several files could be the", "model.toml"]);

    // A folder with two transformers.
    sandbox.kiln(&["convert", &model, "flux-2-klein-base-4b.gguf", "-q"]).ok();
    generate(&[&["-m", "."], &both[..]].concat()).fails(1, &["several transformers", "--transformer"]);
    generate(&[&["-m", ".", "--transformer", &file], &both[..]].concat()).ok();
    assert!(alone == sandbox.image("x.png"));
    // The other components are those of the named model, wherever the transformer lies.
    fs::create_dir(sandbox.path("elsewhere")).unwrap();
    fs::rename(sandbox.path(&file), sandbox.path("elsewhere/t.gguf")).unwrap();
    fs::remove_file(sandbox.path("ae2.safetensors")).unwrap();
    fs::remove_file(sandbox.path("qwen2.safetensors")).unwrap();
    generate(&["-m", ".", "--transformer", "elsewhere/t.gguf"]).ok();
    assert!(alone == sandbox.image("x.png"));
}

#[cfg(feature = "serve")]
#[test]
fn a_server_with_an_ambiguous_model_does_not_start() {
    let (sandbox, file) = single_files();
    fs::copy(sandbox.model().join("tokenizer/tokenizer.json"), sandbox.path("tokenizer.json")).unwrap();
    fs::copy(sandbox.path("qwen.safetensors"), sandbox.path("qwen2.safetensors")).unwrap();
    sandbox
        .kiln(&["serve", "-m", &file, "--port", "0"])
        .fails(1, &["several files could be the text encoder", "`qwen2.safetensors`", "hint: "]);
}

#[test]
fn info_and_generate_agree_about_files_that_cannot_be_used() {
    let (sandbox, file) = single_files();
    let refused = |path: &str, words: &[&str]| {
        let ran = sandbox.kiln(&["info", path]);
        assert!(ran.text().contains("problem"), "{}", ran.text());
        ran.fails(1, words);
    };
    // The text encoder has a vocabulary of its own, and its tokenizer is missing.
    sandbox.kiln(&[&["generate", "fox", "-m", &file], &SMALL[..]].concat()).fails(1, &["448 tokens"]);
    refused(&file, &["448 tokens"]);
    let source = WeightSource::open(sandbox.model().join("transformer")).unwrap();
    let keep = |name: &str, keep: &dyn Fn(&str) -> bool| {
        let names: Vec<&str> = source.names().filter(|name| keep(name)).collect();
        let tensors: Vec<_> = names.iter().map(|name| (*name, source.tensor(name).unwrap())).collect();
        save::save(sandbox.path(name), &tensors, &Default::default()).unwrap();
    };
    let missing = "single_transformer_blocks.1.attn.to_out.weight";
    keep("one.safetensors", &|name| name != missing);
    refused("one.safetensors", &["no tensor", missing]);
    keep("head.safetensors", &|name| name != "x_embedder.weight");
    refused("head.safetensors", &["tensors that every FLUX.2 transformer has are missing"]);
    // A config.json that does not fit the weights.
    sandbox.edit_model("transformer/config.json", "num_single_layers", 3.into());
    refused(
        sandbox.model().to_str().unwrap(),
        &["no tensor `single_transformer_blocks.2.attn.norm_k.weight`", "config.json"],
    );
}

#[test]
fn a_text_encoder_in_a_foreign_format_is_named() {
    let sandbox = Sandbox::new();
    let file = sandbox.path("klein.safetensors");
    let model = sandbox.model();
    fs::copy(model.join("transformer/diffusion_pytorch_model.safetensors"), &file).unwrap();
    let source = WeightSource::open(model.join("text_encoder")).unwrap();
    let mut tensors: Vec<(String, HostTensor)> =
        source.names().map(|name| (name.to_owned(), source.tensor(name).unwrap())).collect();
    tensors.push(("model.layers.0.self_attn.q_proj.weight.absmax".into(), HostTensor::zeros([4])));
    let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor.clone())).collect();
    save::save(sandbox.path("qwen.safetensors"), &tensors, &Default::default()).unwrap();
    let run = sandbox.kiln(&["generate", "a fox", "-m", file.to_str().unwrap(), "-W", "64", "-H", "64"]);
    assert_eq!(run.code, 1);
    assert!(run.err.contains("bitsandbytes") && run.err.contains("qwen.safetensors"), "{}", run.err);
}
