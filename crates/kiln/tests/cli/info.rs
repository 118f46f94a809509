//! `kiln info`, `kiln doctor`, `kiln completions`, `--help` and `--version`.

use kiln_golden::testdata;
use kiln_tensor::HostTensor;
use serde_json::Value;

use crate::sandbox::{Sandbox, pattern, png};

fn json(sandbox: &Sandbox, args: &[&str]) -> Value {
    serde_json::from_str(sandbox.kiln(args).ok().text()).unwrap()
}

#[test]
fn info_describes_a_model_folder() {
    let sandbox = Sandbox::with_model("klein-base");
    let model = sandbox.model().to_str().unwrap();
    let ran = sandbox.kiln(&["info", model]).ok();
    for line in [
        "variant           klein base",
        "default steps     50",
        "default guidance  4.0",
        "tokenizer         in the folder",
    ] {
        assert!(ran.text().contains(line), "`{line}` is missing in:\n{}", ran.text());
    }
    let info = json(&sandbox, &["info", "--json", model]);
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
fn info_has_no_problem_with_models_that_work() {
    for name in ["klein", "klein-kv", "klein-small-decoder", "dev"] {
        let sandbox = Sandbox::with_model(name);
        let info = json(&sandbox, &["info", "--json", sandbox.model().to_str().unwrap()]);
        assert!(!info.to_string().contains("problem"), "{name}: {info}");
    }
}

#[test]
fn info_and_generate_tell_of_two_claims_about_the_variant() {
    let (sandbox, base) = (Sandbox::new(), Sandbox::with_model("klein-base"));
    base.kiln(&["convert", base.model().to_str().unwrap(), "t", "-q"]).ok();
    let shard = base.path("t/diffusion_pytorch_model-00001-of-00001.safetensors");
    sandbox.write_to_model("transformer/diffusion_pytorch_model.safetensors", &std::fs::read(shard).unwrap());
    let model = sandbox.model().to_str().unwrap();
    let variant = "klein (distilled) (but the transformer's file says klein base)";
    assert_eq!(json(&sandbox, &["info", "--json", model])["variant"], variant);
    let ran = sandbox.generate(&["fox", "-o", "a.png"]).ok();
    assert!(ran.err.contains("the transformer's file says klein base"), "{}", ran.err);
    let ran = sandbox.generate(&["fox", "-o", "a.png", "--variant", "distilled"]).ok();
    assert!(!ran.err.contains("says klein base"), "{}", ran.err);
}

#[test]
fn info_on_a_broken_model_shows_the_rest_and_fails() {
    let sandbox = Sandbox::new();
    let name = "transformer/diffusion_pytorch_model.safetensors";
    sandbox.write_to_model(name, b"broken");
    let ran = sandbox.kiln(&["info", sandbox.model().to_str().unwrap()]);
    assert!(ran.text().contains("problem") && ran.text().contains("hidden size"), "{}", ran.text());
    ran.fails(1, &[name]);
}

#[test]
fn info_describes_weight_files() {
    let sandbox = Sandbox::new();
    let tiny = testdata().join("tiny");
    let kind = |path: &str| json(&sandbox, &["info", "--json", tiny.join(path).to_str().unwrap()]);
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
    let file = sandbox.model().join("transformer/diffusion_pytorch_model.safetensors");
    let transformer = json(&sandbox, &["info", "--json", file.to_str().unwrap()]);
    assert_eq!(
        (&transformer["kind"], &transformer["single_blocks"]),
        (&"FLUX.2 transformer".into(), &2.into())
    );
    assert_eq!(kind("klein/vae")["kind"], "FLUX.2 autoencoder (VAE)");
    assert_eq!(kind("klein/text_encoder")["layers"], 28);
    let tensors = [("latents", HostTensor::zeros([1, 16, 128]))];
    kiln_weights::save::save(sandbox.path("l.safetensors"), &tensors, &Default::default()).unwrap();
    assert_eq!(json(&sandbox, &["info", "--json", "l.safetensors"])["first"]["latents"], "f32 [1, 16, 128]");
}

#[test]
fn info_says_what_a_lora_leaves_open_and_why_it_is_refused() {
    let sandbox = Sandbox::new();
    let save = |tensors: &[(&str, HostTensor)], metadata: &[(&str, &str)]| {
        let metadata = metadata.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        kiln_weights::save::save(sandbox.path("l.safetensors"), tensors, &metadata).unwrap();
        let ran = sandbox.kiln(&["info", "--json", "l.safetensors"]);
        let info: Value = serde_json::from_str(ran.text()).unwrap();
        assert_eq!(
            (&info["kind"], ran.code),
            (&"LoRA".into(), i32::from(!info["problem"].is_null())),
            "{info}"
        );
        info
    };
    let lokr = [
        ("lycoris_proj_out.lokr_w1", HostTensor::zeros([1, 1])),
        ("lycoris_proj_out.lokr_w2_a", HostTensor::zeros([4, 2])),
        ("lycoris_proj_out.lokr_w2_b", HostTensor::zeros([2, 4])),
        ("lycoris_proj_out.alpha", HostTensor::from_f32([1], vec![1.0]).unwrap()),
    ];
    let note = save(&lokr, &[])["notes"][0].to_string();
    assert!(note.contains("alpha / rank (0.5)"), "{note}");
    let problem = save(&lokr, &[("lora_adapter_metadata", r#"{"peft_type":"OFT"}"#)])["problem"].to_string();
    assert!(problem.contains("peft_type (OFT)"), "{problem}");
    let module = "transformer.transformer_blocks.0.attn.to_q";
    let [down, up] = ["A", "B"].map(|ab| format!("{module}.lora_{ab}.weight"));
    for (key, expected) in [
        ("lora_B.weight", "has no `"),
        ("lora.up.weight", "has no `"),
        ("diff_b", "changes a norm or a bias"),
        ("set_weight", "replaces a weight"),
        ("boft_R", "an adapter of type BOFT"),
        ("ia3_l.weight", "an adapter of type IA3"),
        ("a1.weight", "an adapter of type GLoRA"),
    ] {
        let key = format!("{module}.{key}");
        let problem = save(&[(&key, HostTensor::zeros([2, 2]))], &[])["problem"].to_string();
        assert!(problem.contains(expected), "{problem}");
    }
    let matrices = [(down.as_str(), HostTensor::zeros([1, 128])), (up.as_str(), HostTensor::zeros([128, 1]))];
    assert!(save(&matrices, &[])["problem"].is_null());
    for (key, expected) in [
        ("text_encoder.x.lora_A.weight", "changes the text encoder"),
        ("x_embedder.weight", "not LoRA keys"),
        ("transformer.foo.diff", "FLUX.2 does not have 1 of its 2 modules"),
    ] {
        let tensors = [&matrices[..], &[(key, HostTensor::zeros([2, 2]))]].concat();
        let info = save(&tensors, &[]);
        assert!(info["problem"].to_string().contains(expected), "{info}");
        assert_eq!(info["layers"], 1, "{info}");
    }
}

#[test]
fn info_and_generate_accept_the_folder_of_a_lora() {
    let sandbox = Sandbox::new();
    let lora = std::fs::read(testdata().join("tiny/lora/lora_diffusers.safetensors")).unwrap();
    std::fs::create_dir(sandbox.path("ink")).unwrap();
    sandbox.write("ink/adapter_model.safetensors", &lora);
    sandbox.write("ink/adapter_config.json", br#"{"peft_type":"LORA","r":4,"lora_alpha":16}"#);
    assert_eq!(json(&sandbox, &["info", "--json", "ink"])["scale"], serde_json::json!([4.0]));
    let ran = sandbox.generate(&["fox", "-o", "a.png", "--lora", "ink:0.5"]).ok();
    assert!(ran.err.contains("lora ink: "), "{}", ran.err);
    sandbox.write("ink/adapter_config.json", b"");
    let words = ["adapter_config.json", "it is empty", "hint: take the LoRA and its adapter_config.json"];
    sandbox.generate(&["fox", "-o", "b.png", "--lora", "ink"]).fails(1, &words);
    sandbox.kiln(&["info", "ink"]).fails(1, &words);
}

#[test]
fn info_shows_the_recipe_of_an_image() {
    let sandbox = Sandbox::new();
    sandbox.generate(&["a red fox", "-S", "42", "-o", "fox.png"]).ok();
    let ran = sandbox.kiln(&["info", "fox.png"]).ok();
    for line in [
        "kind         image",
        "format       PNG",
        "prompt      a red fox",
        "seed        42",
        "variant       klein (distilled)",
    ] {
        assert!(ran.text().contains(line), "`{line}` is missing in:\n{}", ran.text());
    }
    let recipe = &json(&sandbox, &["info", "--json", "fox.png"])["recipe"];
    assert_eq!((&recipe["seed"], &recipe["steps"], &recipe["width"]), (&42.into(), &2.into(), &64.into()));
    assert_eq!(recipe["model"]["transformer"].as_str().unwrap().len(), 64);
    assert_eq!(recipe["kiln"], env!("CARGO_PKG_VERSION"));

    sandbox.write("plain.png", &png(&pattern(65, 70)));
    let ran = sandbox.kiln(&["info", "plain.png"]).ok();
    assert!(
        ran.text().contains("width        65") && ran.text().contains("recipe       none"),
        "{}",
        ran.text()
    );
}

#[test]
fn info_rejects_unknown_files() {
    let sandbox = Sandbox::new();
    sandbox.write("text.txt", b"some text");
    sandbox.kiln(&["info", "text.txt"]).fails(1, &["text.txt", "safetensors"]);
    sandbox.kiln(&["info", "none"]).fails(1, &["none", "hint: "]);
    sandbox.kiln(&["info", "."]).fails(1, &["no weights", "hint: "]);
    sandbox.kiln(&["info"]).fails(2, &["<PATH>"]);
}

#[test]
fn doctor_describes_the_machine() {
    let sandbox = Sandbox::new();
    let ran = sandbox.kiln(&["doctor"]).ok();
    let [driver, nvrtc] = if cfg!(windows) { ["nvcuda", "nvrtc64"] } else { ["libcuda", "libnvrtc"] };
    for line in ["cpu", "threads", "portable", "memory", "available", "built in", driver, nvrtc, "temporary"]
    {
        assert!(ran.text().contains(line), "`{line}` is missing in:\n{}", ran.text());
    }
    let report = json(&sandbox, &["doctor", "--json"]);
    assert!(report["memory"]["total"].as_u64().unwrap() > 1 << 20);
    assert_eq!(report["cpu"]["kernels"][0], "portable");
    assert!(!ran.text().to_lowercase().contains("cudnn"), "{}", ran.text());
    assert!(sandbox.names().is_empty());
}

#[test]
fn every_shell_has_completions() {
    let sandbox = Sandbox::new();
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        assert!(sandbox.kiln(&["completions", shell]).ok().text().contains("mask-padding"), "{shell}");
    }
    sandbox.kiln(&["completions", "cmd"]).fails(2, &["SHELL"]);
}

#[test]
fn help_lists_every_option() {
    let sandbox = Sandbox::new();
    let help = sandbox.kiln(&["generate", "--help"]).ok();
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
    let version = sandbox.kiln(&["--version"]).ok();
    assert_eq!(version.text(), concat!("kiln ", env!("CARGO_PKG_VERSION"), "\n"));
}
