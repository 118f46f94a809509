//! dev from separate files: found beside each other, by fit, in other names and types.

use std::fs;

use serde_json::Value;

use crate::sandbox::{RunOutput, Sandbox, max_difference};

fn generate(sandbox: &Sandbox, model: &str, to: &str, more: &[&str]) -> RunOutput {
    let size = ["-W", "64", "-H", "64", "-s", "2", "-S", "4", "--dtype", "f32", "--device", "cpu"];
    sandbox.kiln(&[&["generate", "a fox", "-m", model, "-o", to][..], &size, more].concat())
}

fn info(sandbox: &Sandbox, path: &str) -> Value {
    serde_json::from_slice(&sandbox.kiln(&["info", "--json", path]).ok().out).unwrap()
}

/// ComfyUI's folders with a transformer in BFL's names, and the text encoder of `name`, made by these arguments.
fn convert_all(sandbox: &Sandbox, text_encoder: &str, how: &[&str]) {
    let model = sandbox.model().to_str().unwrap();
    for folder in ["diffusion_models", "text_encoders", "vae"] {
        fs::create_dir_all(sandbox.path(folder)).unwrap();
    }
    sandbox.kiln(&["convert", model, "diffusion_models/flux2-dev.safetensors"]).ok();
    sandbox.kiln(&["convert", model, "vae/flux2-vae.safetensors", "--part", "vae"]).ok();
    let to = format!("text_encoders/{text_encoder}");
    sandbox.kiln(&[&[how[0], model, &to, "--part", "text-encoder"], &how[1..]].concat()).ok();
}

#[test]
fn a_transformer_alone_finds_its_components_in_comfyuis_folders() {
    let sandbox = Sandbox::with_dev();
    generate(&sandbox, sandbox.model().to_str().unwrap(), "folder.png", &[]).ok();
    convert_all(&sandbox, "mistral.safetensors", &["convert", "--names", "diffusers"]);
    // klein's text encoder is as wide as the tiny dev's, and no choice.
    let klein = Sandbox::new();
    let klein = klein.model().to_str().unwrap();
    sandbox.kiln(&["convert", klein, "text_encoders/qwen.safetensors", "--part", "text-encoder"]).ok();
    let transformer = "diffusion_models/flux2-dev.safetensors";
    generate(&sandbox, transformer, "files.png", &[]).ok();
    assert_eq!(sandbox.image("files.png").pixels(), sandbox.image("folder.png").pixels());
    let found = info(&sandbox, transformer);
    assert!(found["model"]["text_encoder"].as_str().unwrap().ends_with("mistral.safetensors"), "{found}");

    // Rotated in llama.cpp's order: the same up to rounding.
    fs::remove_file(sandbox.path("text_encoders/mistral.safetensors")).unwrap();
    convert_all(&sandbox, "mistral.gguf", &["convert"]);
    generate(&sandbox, transformer, "gguf.png", &[]).ok();
    assert!(max_difference(&sandbox.image("gguf.png"), &sandbox.image("folder.png")) <= 1);

    fs::remove_file(sandbox.path("text_encoders/mistral.gguf")).unwrap();
    let both = ["no text encoder for", "qwen.safetensors` is Qwen3 with hidden size", "--text-encoder"];
    generate(&sandbox, transformer, "none.png", &[]).fails(1, &both);
}

#[test]
fn info_tells_what_a_text_encoders_file_holds() {
    let sandbox = Sandbox::with_dev();
    convert_all(&sandbox, "mistral.safetensors", &["convert", "--names", "diffusers"]);
    let whole = info(&sandbox, "text_encoders/mistral.safetensors");
    assert_eq!((&whole["family"], &whole["layers"]), (&"Mistral".into(), &33.into()), "{whole}");
    assert_eq!(
        (&whole["vision_tower"], &whole["prompt_upsampling"]),
        (&true.into(), &"yes, with images".into())
    );
    assert_eq!(whole["embedded_tokenizer"], "not in the file");
    let gguf =
        ["quantize", sandbox.model().to_str().unwrap(), "m.gguf", "--to", "q8_0", "--part", "text-encoder"];
    let ran = sandbox.kiln(&gguf).ok();
    assert!(ran.err.contains("note: the vision tower is left out"), "{}", ran.err);
    let gguf = info(&sandbox, "m.gguf");
    assert_eq!(
        (&gguf["vision_tower"], &gguf["prompt_upsampling"]),
        (&false.into(), &"yes, without images".into())
    );
    assert_eq!(gguf["rotary_rows"], "interleaved, as llama.cpp writes them");
    assert!(gguf["stored"]["layers"].as_str().unwrap().contains("q8_0"), "{gguf}");
}

#[test]
fn quantized_transformers_and_text_encoders_of_dev_generate() {
    let sandbox = Sandbox::with_dev();
    let model = sandbox.model().to_str().unwrap();
    generate(&sandbox, model, "folder.png", &[]).ok();
    let quantize = |to: &str, kind: &str, more: &[&str]| {
        sandbox.kiln(&[&["quantize", model, to, "--to", kind], more].concat()).ok();
    };
    quantize("dev-Q4_K.gguf", "q4_k", &[]);
    quantize("dev-fp8.safetensors", "fp8", &[]);
    quantize("mistral-Q8_0.gguf", "q8_0", &["--part", "text-encoder"]);
    quantize("mistral-fp8.safetensors", "fp8", &["--part", "text-encoder"]);
    let vae = format!("{model}/vae");
    for (transformer, text_encoder) in
        [("dev-Q4_K.gguf", "mistral-Q8_0.gguf"), ("dev-fp8.safetensors", "mistral-fp8.safetensors")]
    {
        let to = format!("{transformer}.png");
        generate(&sandbox, transformer, &to, &["--text-encoder", text_encoder, "--vae", &vae]).ok();
        let difference = max_difference(&sandbox.image(&to), &sandbox.image("folder.png"));
        assert!(difference > 0 && difference < 128, "{transformer}: {difference}");
        let described = info(&sandbox, transformer);
        assert_eq!(described["names"], "Black Forest Labs");
    }
    // Converted back, the text encoder has transformers' order of rows, and gives the same image.
    let back = ["convert", "mistral-Q8_0.gguf", "back.safetensors", "--names", "diffusers", "--dtype", "f32"];
    sandbox.kiln(&back).ok();
    let with = |text_encoder: &str, to: &str| {
        generate(&sandbox, "dev-Q4_K.gguf", to, &["--text-encoder", text_encoder, "--vae", &vae]).ok();
        sandbox.image(to)
    };
    assert!(max_difference(&with("back.safetensors", "a.png"), &with("mistral-Q8_0.gguf", "b.png")) <= 1);
}
