//! `info`, `doctor`, `completions`, `--help` and `--version`.

use kiln_golden::in_tree;
use kiln_tensor::HostTensor;
use serde_json::Value;

use crate::kit::{Kit, pattern, png};

fn json(kit: &Kit, args: &[&str]) -> Value {
    serde_json::from_str(kit.kiln(args).ok().text()).unwrap()
}

#[test]
fn info_describes_a_model_folder() {
    let kit = Kit::with_model("klein-base");
    let model = kit.model().to_str().unwrap();
    let ran = kit.kiln(&["info", model]).ok();
    for line in [
        "variant           klein base",
        "default_steps     50",
        "default_guidance  4.0",
        "tokenizer         in the folder",
    ] {
        assert!(ran.text().contains(line), "`{line}` is missing in:\n{}", ran.text());
    }
    let info = json(&kit, &["info", "--json", model]);
    let transformer = &info["transformer"];
    assert_eq!((&transformer["double_blocks"], &transformer["single_blocks"]), (&1.into(), &2.into()));
    assert_eq!((&transformer["heads"], &transformer["dim"]), (&1.into(), &128.into()));
    assert_eq!(transformer["dtypes"][0], "bf16");
    assert_eq!(transformer["bytes"].as_u64(), transformer["parameters"].as_u64().map(|n| 2 * n));
    assert_eq!(
        (&info["text_encoder"]["hidden_size"], &info["text_encoder"]["files"]),
        (&16.into(), &2.into())
    );
    assert_eq!(info["vae"]["latent_channels"], 32);
    assert!(info["memory"]["1024x1024"].as_u64() > info["memory"]["512x512"].as_u64());
}

#[test]
fn info_on_a_broken_model_shows_the_rest_and_fails() {
    let kit = Kit::new();
    let name = "transformer/diffusion_pytorch_model.safetensors";
    kit.put_into_model(name, b"broken");
    let ran = kit.kiln(&["info", kit.model().to_str().unwrap()]);
    assert_eq!(ran.code, 1);
    assert!(ran.text().contains("problem") && ran.text().contains("hidden_size"), "{}", ran.text());
    assert!(ran.err.contains("error: ") && ran.err.contains(name), "{}", ran.err);
}

#[test]
fn info_tells_what_a_weight_file_is() {
    let kit = Kit::new();
    let tiny = in_tree().join("tiny");
    let kind = |path: &str| json(&kit, &["info", "--json", tiny.join(path).to_str().unwrap()]);
    let lora = kind("lora/lora_diffusers_alpha8.safetensors");
    assert_eq!((&lora["kind"], &lora["rank"], &lora["scale"][0]), (&"LoRA".into(), &4.into(), &2.0.into()));
    assert!(lora["targets"].as_array().unwrap().contains(&"to_q".into()), "{lora}");
    assert!(lora["metadata"]["lora_adapter_metadata"].is_string(), "{lora}");
    assert_eq!(lora["base"], "a FLUX.2 model 128 wide");
    let kohya = kind("lora/lora_kohya_alpha8.safetensors");
    assert_eq!(
        (&kohya["layout"][0], &kohya["scale"][0]),
        (&"kohya and musubi (lora_unet_*)".into(), &2.0.into())
    );
    assert_eq!(kohya["targets"], lora["targets"]);
    let transformer = kind("klein/transformer/diffusion_pytorch_model.safetensors");
    assert_eq!(
        (&transformer["kind"], &transformer["single_blocks"]),
        (&"FLUX.2 transformer".into(), &2.into())
    );
    assert_eq!(kind("klein/vae")["kind"], "FLUX.2 autoencoder (VAE)");
    assert_eq!(kind("klein/text_encoder")["layers"], 28);
    let tensors = [("latents", HostTensor::zeros([1, 16, 128]))];
    kiln_weights::save::save(kit.path("l.safetensors"), &tensors, &Default::default()).unwrap();
    assert_eq!(json(&kit, &["info", "--json", "l.safetensors"])["first"]["latents"], "f32 [1, 16, 128]");
}

#[test]
fn info_shows_how_a_picture_was_made() {
    let kit = Kit::new();
    kit.generate(&["a red fox", "-S", "42", "-o", "fox.png"]).ok();
    let ran = kit.kiln(&["info", "fox.png"]).ok();
    for line in [
        "kind    picture",
        "format  PNG",
        "prompt      a red fox",
        "seed        42",
        "variant       klein (distilled)",
    ] {
        assert!(ran.text().contains(line), "`{line}` is missing in:\n{}", ran.text());
    }
    let recipe = &json(&kit, &["info", "--json", "fox.png"])["recipe"];
    assert_eq!((&recipe["seed"], &recipe["steps"], &recipe["width"]), (&42.into(), &2.into(), &64.into()));
    assert_eq!(recipe["model"]["transformer"].as_str().unwrap().len(), 64);
    assert_eq!(recipe["kiln"], env!("CARGO_PKG_VERSION"));

    kit.write("plain.png", &png(&pattern(65, 70)));
    let ran = kit.kiln(&["info", "plain.png"]).ok();
    assert!(ran.text().contains("width   65") && ran.text().contains("recipe  none"), "{}", ran.text());
}

#[test]
fn info_refuses_what_it_does_not_know() {
    let kit = Kit::new();
    kit.write("text.txt", b"some text");
    kit.kiln(&["info", "text.txt"]).refused(1, &["text.txt", "safetensors"]);
    kit.kiln(&["info", "none"]).refused(1, &["none", "hint: "]);
    kit.kiln(&["info", "."]).refused(1, &["no weights", "hint: "]);
    kit.kiln(&["info"]).refused(2, &["<PATH>"]);
}

#[test]
fn doctor_says_what_the_machine_offers() {
    let kit = Kit::new();
    let ran = kit.kiln(&["doctor"]).ok();
    for line in ["cpu", "threads", "portable", "memory", "available", "libcuda", "libnvrtc", "temporary"] {
        assert!(ran.text().contains(line), "`{line}` is missing in:\n{}", ran.text());
    }
    let report = json(&kit, &["doctor", "--json"]);
    assert!(report["memory"]["total"].as_u64().unwrap() > 1 << 20);
    assert_eq!(report["cpu"]["kernels"][0], "portable");
    assert!(kit.names().is_empty());
}

#[test]
fn completions_are_there_for_every_shell() {
    let kit = Kit::new();
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        assert!(kit.kiln(&["completions", shell]).ok().text().contains("mask-padding"), "{shell}");
    }
    kit.kiln(&["completions", "cmd"]).refused(2, &["SHELL"]);
}

#[test]
fn help_names_every_option() {
    let kit = Kit::new();
    let help = kit.kiln(&["generate", "--help"]).ok();
    let options = [
        "-m, --model",
        "-o, --output",
        "-W, --width",
        "-H, --height",
        "-s, --steps",
        "-S, --seed",
        "-g, --guidance",
        "-n, --negative",
        "-r, --ref",
        "--init",
        "--mask",
        "--strength",
        "--mask-padding",
        "--lora",
        "-b, --batch",
        "--sigmas",
        "--schedule",
        "--rng",
        "--device",
        "--dtype",
        "--threads",
        "--max-tokens",
        "--embeds",
        "--vae",
        "--noise",
        "--latents-out",
        "--preview",
        "--json",
        "-q",
        "-v",
        "--from",
        "Examples:",
    ];
    for option in options {
        assert!(help.text().contains(option), "{option}");
    }
    let version = kit.kiln(&["--version"]).ok();
    assert_eq!(version.text(), concat!("kiln ", env!("CARGO_PKG_VERSION"), "\n"));
}
