//! Models in other files than diffusers' folders: written, described, used, and refused.

use std::fs;

use crate::kit::Kit;

/// The kit's model, its transformer as a GGUF file in a folder of its own, its text encoder and VAE beside it.
fn single_files() -> (Kit, String) {
    let kit = Kit::new();
    let model = kit.model().to_str().unwrap().to_owned();
    let file = "flux-2-klein-4b-Q8_0.gguf";
    kit.kiln(&["quantize", &model, file, "--to", "q8_0", "-q"]).ok();
    kit.kiln(&[
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
    kit.kiln(&["convert", &model, "ae.safetensors", "--part", "vae", "-q"]).ok();
    (kit, file.to_owned())
}

const SMALL: [&str; 10] = ["-W", "64", "-H", "48", "-s", "2", "--max-tokens", "16", "-S", "5"];

#[test]
fn a_file_with_its_parts_beside_it_paints_and_paints_again() {
    let (kit, file) = single_files();
    let tokenizer = kit.model().join("tokenizer");
    let tokenizer = tokenizer.to_str().unwrap();
    let first = ["generate", "fox", "-m", &file, "--tokenizer", tokenizer, "-o", "a.png"];
    kit.kiln(&[&first[..], &SMALL].concat()).ok();
    let info = kit.kiln(&["info", "a.png"]).ok().text().to_owned();
    assert!(info.contains("Q8_0.gguf") && info.contains("tokenizer"), "{info}");
    kit.kiln(&["generate", "--from", "a.png", "-o", "b.png"]).ok();
    assert_eq!(fs::read(kit.path("a.png")).unwrap(), fs::read(kit.path("b.png")).unwrap());
    // The same parts, each by its option.
    let parts = [
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
    kit.kiln(&[&parts[..], &more, &SMALL].concat()).ok();
    assert!(kit.picture("a.png") == kit.picture("c.png"));
}

#[test]
fn what_is_missing_beside_a_file_is_named_with_what_would_do() {
    let (kit, file) = single_files();
    let paint = |args: &[&str]| kit.kiln(&[&["generate", "fox", "-o", "x.png"], args, &SMALL].concat());
    paint(&["-m", &file]).refused(1, &["448 tokens", "tokenizer.json"]);
    fs::remove_file(kit.path("qwen.safetensors")).unwrap();
    paint(&["-m", &file]).refused(1, &["there is no text encoder for", "hidden size 16", "--text-encoder"]);
    fs::remove_file(kit.path("ae.safetensors")).unwrap();
    paint(&["-m", &file]).refused(1, &["there is no vae for", "--vae FILE"]);
    kit.write("model.toml", b"transformer = '../x.gguf'");
    paint(&["-m", "model.toml"]).refused(1, &["model.toml", "not a path below"]);
    kit.write("model.toml", b"transformer = 'flux-2-klein-4b-Q8_0.gguf'\nvea = 'x'");
    paint(&["-m", "model.toml"]).refused(1, &["model.toml", "unknown field `vea`"]);
    kit.write("half.gguf", &fs::read(kit.path(&file)).unwrap()[..3000]);
    paint(&["-m", "half.gguf"]).refused(1, &["half.gguf", "not a valid GGUF file"]);
    let vae = kit.model().join("vae");
    paint(&["-m", &file, "--text-encoder", vae.to_str().unwrap()])
        .refused(1, &["holds no FLUX.2 text encoder: it has a VAE", "hint: "]);
    paint(&["--variant", "kv"]).refused(2, &["inside the program"]);
}

#[test]
fn files_are_described_with_what_they_need() {
    let (kit, file) = single_files();
    let told = kit.kiln(&["info", &file]).ok().text().to_owned();
    for words in [
        "GGUF",
        "FLUX.2 transformer",
        "Black Forest Labs",
        "klein (distilled), by its name",
        "q8_0",
        "hidden size 16",
    ] {
        assert!(told.contains(words), "{words}: {told}");
    }
    let told = kit.kiln(&["info", "ae.safetensors"]).ok().text().to_owned();
    assert!(told.contains("latent diffusion") && told.contains("latent_channels"), "{told}");
    let told = kit.kiln(&["info", "qwen.safetensors", "--json"]).ok().text().to_owned();
    assert!(told.contains("\"layers\":28") || told.contains("\"layers\": 28"), "{told}");
}

#[test]
fn a_model_goes_through_other_layouts_and_comes_back_the_same() {
    let kit = Kit::new();
    let model = kit.model().to_str().unwrap();
    kit.kiln(&["convert", model, "one.safetensors", "-q"]).ok();
    kit.kiln(&["convert", "one.safetensors", "two.gguf", "-q"]).ok();
    kit.kiln(&["convert", "two.gguf", "three", "--shard-size", "1M", "--dtype", "bf16", "-q"]).ok();
    assert!(kit.path("three/config.json").is_file());
    assert!(kit.path("three/diffusion_pytorch_model.safetensors.index.json").is_file());
    let before = kiln_weights::WeightSource::open(kit.model().join("transformer")).unwrap();
    let after = kiln_weights::WeightSource::open(kit.path("three")).unwrap();
    assert!(after.files().count() > 1);
    assert_eq!(before.fingerprint().unwrap(), after.fingerprint().unwrap());
    kit.kiln(&["convert", "one.safetensors", "three"]).refused(1, &["exists already"]);
    kit.kiln(&["convert", "one.safetensors", "x.gguf", "--shard-size", "1M"]).refused(2, &["--shard-size"]);
    kit.kiln(&["quantize", model, "x.safetensors", "--to", "q4_k"]).refused(1, &["takes a GGUF file"]);
    assert!(!kit.path("x.safetensors").exists());
}

#[test]
fn a_folder_with_a_packed_transformer_is_a_model() {
    for (to, words) in [("fp8", "f8_e4m3"), ("q6_k", "q8_0"), ("nvfp4", "nvfp4")] {
        let kit = Kit::new();
        let told = kit
            .kiln(&["quantize", kit.model().to_str().unwrap(), "small", "--to", to])
            .ok()
            .text()
            .to_owned();
        assert!(told.contains("relative_error"), "{told}");
        let paint = ["generate", "fox", "-m", "small", "-o", "a.png"];
        kit.kiln(&[&paint[..], &SMALL].concat()).ok();
        let info = kit.kiln(&["info", "small"]).ok().text().to_owned();
        assert!(info.contains(words), "{to}: {info}");
    }
}
