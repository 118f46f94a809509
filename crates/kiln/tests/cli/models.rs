//! Incomplete, damaged or mismatched models and LoRAs.

use std::fs;

use kiln_golden::testdata;
use kiln_tensor::HostTensor;
use kiln_weights::{WeightSource, save};
use serde_json::json;

use crate::sandbox::{RunOutput, Sandbox, link_folder};

const TRANSFORMER: &str = "transformer/diffusion_pytorch_model.safetensors";

#[track_caller]
fn fails(sandbox: &Sandbox, words: &[&str]) {
    sandbox.generate(&["fox", "-o", "out.png"]).fails(1, words);
    assert!(sandbox.names().is_empty(), "{:?}", sandbox.names());
}

/// A safetensors file with this header and `data` bytes of data.
fn file(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

#[test]
fn a_path_that_is_not_a_model_gets_a_hint() {
    let sandbox = Sandbox::new();
    let model = sandbox.model().display().to_string();
    sandbox.kiln(&["generate", "fox", "-m", "none"]).fails(1, &["`none` does not exist", "hint: "]);
    sandbox
        .kiln(&["generate", "fox", "-m", &format!("{model}/vae")])
        .fails(1, &["no `model_index.json`", &format!("hint: the model is the parent folder: -m {model}")]);
    sandbox
        .kiln(&["generate", "fox", "-m", &format!("{model}/model_index.json")])
        .fails(1, &["model_index.json", "safetensors", "hint: give a model folder"]);
    sandbox.edit_model("model_index.json", "_class_name", json!("StableDiffusionPipeline"));
    fails(&sandbox, &["model_index.json", "StableDiffusionPipeline", "FLUX.2"]);
    sandbox.edit_model("model_index.json", "scheduler", json!(["diffusers", "DDIMScheduler"]));
    fails(&sandbox, &["model_index.json", "the scheduler is `DDIMScheduler`"]);
    sandbox.write_to_model("model_index.json", b"{");
    fails(&sandbox, &["model_index.json", "line 1"]);
}

#[test]
fn a_model_in_the_models_folder_is_found_by_name() {
    let sandbox = Sandbox::new();
    fs::create_dir_all(sandbox.path("models")).unwrap();
    link_folder(sandbox.model(), &sandbox.path("models/klein"));
    let kiln = |args: &[&str]| -> RunOutput {
        sandbox.command(args).env("KILN_MODELS", "models").output().unwrap().into()
    };
    let small = ["-W", "16", "-H", "16", "-s", "1", "--max-tokens", "16"];
    kiln(&[&["generate", "fox", "-m", "klein", "-o", "a.png"], &small[..]].concat()).ok();
    assert!(kiln(&["info", "a.png"]).ok().text().contains("path          klein\n"));
    kiln(&["generate", "--from", "a.png", "-o", "b.png"]).ok();
    assert_eq!(fs::read(sandbox.path("a.png")).unwrap(), fs::read(sandbox.path("b.png")).unwrap());
    assert!(kiln(&["info", "klein"]).ok().text().contains("model folder"));
    assert!(kiln(&["doctor"]).ok().text().contains("klein"));
    kiln(&["generate", "fox", "-m", "klien"]).fails(1, &["`klien` does not exist", "nearest: klein"]);
    kiln(&["info", "klien"]).fails(1, &["nearest: klein"]);
}

#[test]
fn missing_components_are_named() {
    let sandbox = Sandbox::new();
    sandbox.remove_from_model("vae");
    fails(&sandbox, &["no `vae/config.json`", "--vae"]);
    let sandbox = Sandbox::new();
    sandbox.remove_from_model("text_encoder");
    fails(&sandbox, &["no `text_encoder/config.json`", "--embeds"]);
    let sandbox = Sandbox::new();
    sandbox.remove_from_model("transformer");
    fails(&sandbox, &["no `transformer`", "`config.json`", "hint: "]);
    let sandbox = Sandbox::new();
    sandbox.remove_from_model(TRANSFORMER);
    fails(&sandbox, &["no weights", "transformer", "hint: "]);
    let sandbox = Sandbox::new();
    sandbox.remove_from_model("text_encoder/model-00002-of-00002.safetensors");
    fails(&sandbox, &["model.safetensors.index.json", "model-00002-of-00002.safetensors", "hint: "]);
    fails(&Sandbox::with_model("dev"), &["text_encoder", "--embeds"]);
}

#[test]
fn a_mismatched_text_encoder_is_an_error_with_both_sizes() {
    let sandbox = Sandbox::new();
    // As with klein 4B's transformer (3 × 2560) and klein 9B's text encoder (4096).
    sandbox.edit_model("transformer/config.json", "joint_attention_dim", json!(7680));
    sandbox.edit_model("text_encoder/config.json", "hidden_size", json!(4096));
    fails(
        &sandbox,
        &[
            "don't fit",
            "hidden size 2560",
            "hidden size 4096",
            "hint: the components belong to different models",
        ],
    );
}

#[test]
fn weights_that_do_not_fit_their_config_are_named() {
    let sandbox = Sandbox::new();
    sandbox.edit_model("transformer/config.json", "num_attention_heads", json!(2));
    fails(&sandbox, &["has shape", "expected", "diffusion_pytorch_model.safetensors", "hint: "]);
    let sandbox = Sandbox::new();
    sandbox.edit_model("transformer/config.json", "num_single_layers", json!(3));
    fails(&sandbox, &["no tensor `single_transformer_blocks.2.", "nearest: "]);
    let sandbox = Sandbox::new();
    sandbox.edit_model("text_encoder/config.json", "num_hidden_layers", json!(12));
    fails(&sandbox, &["text_encoder/config.json", "num_hidden_layers is 12", "27"]);
}

#[test]
fn damaged_weight_files_are_named() {
    let valid = fs::read(Sandbox::new().model().join(TRANSFORMER)).unwrap();
    let entry = |dtype: &str, offsets: &str| {
        format!(r#"{{"a":{{"dtype":"{dtype}","shape":[2],"data_offsets":{offsets}}}}}"#)
    };
    let overlap = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}"#;
    let cases = [
        (Vec::new(), "the file is empty"),
        (valid[..valid.len() - 100].to_vec(), "not a valid safetensors file"),
        (valid[..5].to_vec(), "at least 8 bytes"),
        (file("{}", 0)[..9].to_vec(), "announces a header of 2 bytes"),
        (b"\xff\xff\xff\xff\xff\xff\xff\x7f{}".to_vec(), "announces a header"),
        (file("not json", 0), "header is not JSON"),
        (file(&entry("F32", "[0,16]"), 16), "tensor `a`"),
        (file(&entry("C128", "[0,32]"), 32), "dtype C128"),
        (file(overlap, 12), "inside `a`"),
        (b"<!doctype html>".to_vec(), "not a valid safetensors file"),
    ];
    for (bytes, words) in cases {
        let sandbox = Sandbox::new();
        sandbox.write_to_model(TRANSFORMER, &bytes);
        fails(&sandbox, &[TRANSFORMER, words, "hint: "]);
    }
}

#[test]
fn an_unsupported_dtype_is_not_reported_as_damage() {
    let sandbox = Sandbox::new();
    sandbox.write_to_model(TRANSFORMER, &file(r#"{"a":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}"#, 1));
    let ran = sandbox.generate(&["fox"]);
    assert!(!ran.err.contains("download is incomplete"), "{}", ran.err);
    ran.fails(1, &[TRANSFORMER, "dtype F4", "hint: "]);
}

#[test]
fn an_invalid_index_is_named() {
    let sandbox = Sandbox::new();
    let index = "text_encoder/model.safetensors.index.json";
    sandbox.write_to_model(index, b"{\"weight_map\": 3}");
    fails(&sandbox, &[index, "not a valid list of shards", "hint: "]);
}

#[test]
fn an_absurd_config_is_not_blamed_on_the_size() {
    let sandbox = Sandbox::new();
    for heads in [10_000_000_u64, 1 << 40] {
        sandbox.edit_model("transformer/config.json", "num_attention_heads", json!(heads));
        let ran = sandbox.generate(&["fox", "-o", "out.png"]);
        assert!(!ran.err.contains("-W"), "{}", ran.err);
        ran.fails(1, &["config.json", "hint: "]);
    }
}

#[test]
fn non_finite_results_are_an_error_with_a_hint() {
    let sandbox = Sandbox::new();
    let lora = format!("{}:3e38", testdata().join("tiny/lora/lora_diffusers.safetensors").display());
    sandbox
        .generate(&["fox", "-o", "out.png", "--lora", &lora])
        .fails(1, &["the latent after step 1 of 2 is not finite", "hint: ", "a LoRA"]);
    assert!(sandbox.names().is_empty());
}

#[test]
fn a_chat_template_that_can_not_be_followed_is_an_error() {
    let sandbox = Sandbox::new();
    sandbox.write_to_model("tokenizer/chat_template.jinja", b"{{ messages[0].content | trim }}");
    fails(
        &sandbox,
        &["tokenizer.json", "the chat template is not supported: it changes the prompt", "hint: "],
    );
}

#[test]
fn a_missing_tensor_is_named_with_similar_names() {
    let sandbox = Sandbox::new();
    let source = WeightSource::open(kiln_golden::testdata().join("tiny/klein/transformer")).unwrap();
    let missing = "single_transformer_blocks.1.attn.to_out.weight";
    assert!(source.contains(missing));
    let names: Vec<String> = source.names().filter(|n| *n != missing).map(str::to_owned).collect();
    let tensors: Vec<_> = names.iter().map(|n| (n.as_str(), source.tensor(n).unwrap())).collect();
    sandbox.remove_from_model(TRANSFORMER);
    save::save(sandbox.model().join(TRANSFORMER), &tensors, &Default::default()).unwrap();
    fails(&sandbox, &[missing, "nearest: ", "while loading the model", "hint: "]);
}

#[test]
fn a_lora_that_does_not_fit_is_an_error_with_the_reason() {
    let sandbox = Sandbox::new();
    let save = |name: &str, module: &str, rows: usize, cols: usize| {
        let (down, up) =
            (format!("transformer.{module}.lora_A.weight"), format!("transformer.{module}.lora_B.weight"));
        let tensors =
            [(down.as_str(), HostTensor::zeros([4, cols])), (up.as_str(), HostTensor::zeros([rows, 4]))];
        save::save(sandbox.path(name), &tensors, &Default::default()).unwrap();
    };
    save("size.safetensors", "transformer_blocks.0.attn.to_q", 3072, 3072);
    save("name.safetensors", "transformer_blocks.99.attn.to_q", 128, 128);
    let lora = |path: &str, words: &[&str]| {
        sandbox.generate(&["fox", "-o", "out.png", "--lora", path]).fails(1, words);
        assert!(!sandbox.names().contains(&"out.png".into()));
    };
    let sizes =
        ["size.safetensors", "made for FLUX.2 klein 4B", "128 wide", "hint: a LoRA fits only the model"];
    lora("size.safetensors", &sizes);
    lora(
        "name.safetensors:0.5",
        &["name.safetensors", "1 of its 1 modules match nothing", "hint: a LoRA fits only"],
    );
    lora("none.safetensors", &["none.safetensors", "while reading a LoRA"]);
    save("flux1.safetensors", "transformer_blocks.0.ff.net.0.proj", 12288, 3072);
    lora("flux1.safetensors", &["made for FLUX.1", "hint: a LoRA fits only the model"]);
    let model = sandbox.model().join(TRANSFORMER);
    lora(
        model.to_str().unwrap(),
        &["not a LoRA but a model: it has a transformer", "hint: use a model with -m"],
    );
    // Nothing but the text encoder: no option makes it useful.
    let (down, up) = ("text_encoder.a.lora_A.weight", "text_encoder.a.lora_B.weight");
    let text = [(down, HostTensor::zeros([4, 16])), (up, HostTensor::zeros([16, 4]))];
    save::save(sandbox.path("text.safetensors"), &text, &Default::default()).unwrap();
    for partial in [&[][..], &["--lora-partial"]] {
        let ran = sandbox.generate(&[&["fox", "--lora", "text.safetensors"], partial].concat());
        assert!(!ran.err.contains("--lora-partial"), "{}", ran.err);
        ran.fails(1, &["changes the text encoder", "hint: there is nothing in it for the transformer"]);
    }
    lora(
        ".",
        &["LoRA `.` is a folder, expected one with one LoRA: several weights", "hint: name the LoRA's file"],
    );
    for (wrong, found) in [("nan", "`nan`"), ("abc", "`abc`"), ("", "nothing")] {
        let ran = sandbox.generate(&["fox", "--lora", &format!("name.safetensors:{wrong}")]);
        ran.fails(2, &["--lora", &format!("{found}, expected a finite number")]);
    }
}

/// All tensors of a component, changed by `change`, in a file without a configuration.
fn changed(
    sandbox: &Sandbox,
    component: &str,
    name: &str,
    change: &dyn Fn(&str, HostTensor) -> Option<HostTensor>,
) -> String {
    let source = WeightSource::open(sandbox.model().join(component)).unwrap();
    let tensors = source.names().filter_map(|name| Some((name, change(name, source.tensor(name).unwrap())?)));
    let tensors: Vec<_> = tensors.collect();
    save::save(sandbox.path(name), &tensors, &Default::default()).unwrap();
    name.to_owned()
}

#[test]
fn a_transposed_matrix_is_blamed_itself() {
    let sandbox = Sandbox::new();
    for matrix in [
        "transformer_blocks.0.ff.linear_out.weight",
        "transformer_blocks.0.ff.linear_in.weight",
        "single_transformer_blocks.0.attn.to_out.weight",
        "context_embedder.weight",
    ] {
        let file = changed(&sandbox, "transformer", "t.safetensors", &|name, tensor| {
            let [rows, cols] = *tensor.shape().dims() else { return Some(tensor) };
            Some(if name == matrix { HostTensor::zeros([cols, rows]) } else { tensor })
        });
        sandbox.kiln(&["info", &file]).fails(1, &[matrix, "hint: the matrix is transposed"]);
    }
}

#[test]
fn parts_of_other_models_are_named() {
    let sandbox = Sandbox::new();
    let file = changed(&sandbox, "text_encoder", "e.safetensors", &|name, tensor| {
        Some(tensor).filter(|_| !name.contains("q_norm") && !name.contains("k_norm"))
    });
    let refused = ["--text-encoder", &file];
    sandbox
        .generate(&[&["fox"], &refused[..]].concat())
        .fails(1, &["has no q_norm and k_norm", "hint: take the whole"]);
    let file = changed(&sandbox, "vae", "v.safetensors", &|name, tensor| match name {
        "decoder.conv_in.weight" => Some(HostTensor::zeros([32, 16, 3, 3])),
        name => Some(tensor).filter(|_| !name.starts_with("bn.")),
    });
    sandbox
        .generate(&["fox", "--vae", &file])
        .fails(1, &["a VAE of FLUX.1", "hint: use FLUX.2's autoencoder"]);
}

#[test]
fn a_part_of_a_split_gguf_file_is_named() {
    let sandbox = Sandbox::new();
    // Magic, version 3, no tensors, two settings: split.no and split.count, both u16 (type 2).
    let mut file = b"GGUF\x03\0\0\0".to_vec();
    file.extend(0u64.to_le_bytes());
    file.extend(2u64.to_le_bytes());
    for (key, value) in [("split.no", 1u16), ("split.count", 3)] {
        file.extend((key.len() as u64).to_le_bytes());
        file.extend(key.as_bytes());
        file.extend(2u32.to_le_bytes());
        file.extend(value.to_le_bytes());
    }
    sandbox.write("m-00002-of-00003.gguf", &file);
    let ran = sandbox.kiln(&["generate", "fox", "-m", "m-00002-of-00003.gguf"]);
    ran.fails(1, &["can't read", "part 2 of 3 of a split GGUF", "llama-gguf-split --merge"]);
}

#[test]
fn a_file_that_is_not_an_autoencoder_is_named() {
    let sandbox = Sandbox::new();
    let lora = testdata().join("tiny/lora/lora_diffusers.safetensors");
    let ran = sandbox.generate(&["fox", "-o", "out.png", "--vae", lora.to_str().unwrap()]);
    ran.fails(1, &["lora_diffusers.safetensors", "neither TAEF2 nor a FLUX.2 autoencoder"]);
    sandbox.generate(&["fox", "--vae", "none"]).fails(1, &["`none`", "while opening the autoencoder"]);
    assert!(sandbox.names().is_empty());
}

#[test]
fn a_model_without_tokenizer_uses_the_built_in_one() {
    let sandbox = Sandbox::new();
    sandbox.remove_from_model("tokenizer");
    let info = sandbox.kiln(&["info", sandbox.model().to_str().unwrap()]).ok();
    assert!(info.text().contains("built into Kiln"), "{}", info.text());
    // The random model's vocabulary is small: tokens beyond it are an error.
    fails(&sandbox, &["token"]);
}

#[test]
fn a_model_in_one_file_gives_the_same_image() {
    let sandbox = Sandbox::new();
    let (mut tensors, mut metadata) = (Vec::new(), std::collections::BTreeMap::new());
    for component in ["transformer", "text_encoder", "vae"] {
        let source = WeightSource::open(sandbox.model().join(component)).unwrap();
        let named = source.names().map(|name| (format!("{component}.{name}"), source.tensor(name).unwrap()));
        tensors.extend(named.collect::<Vec<_>>());
    }
    let configs =
        ["model_index.json", "transformer/config.json", "text_encoder/config.json", "vae/config.json"];
    let others =
        ["scheduler/scheduler_config.json", "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"];
    for name in configs.iter().chain(&others) {
        metadata.insert((*name).to_owned(), fs::read_to_string(sandbox.model().join(name)).unwrap());
    }
    let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor.clone())).collect();
    save::save(sandbox.path("packed.safetensors"), &tensors, &metadata).unwrap();

    sandbox.generate(&["fox", "-S", "1", "-o", "folder.png"]).ok();
    let packed =
        ["generate", "fox", "-m", "packed.safetensors", "--max-tokens", "32", "-W", "64", "-H", "64"];
    sandbox.kiln(&[&packed[..], &["-s", "2", "-S", "1", "-o", "file.png"]].concat()).ok();
    assert_eq!(sandbox.image("folder.png"), sandbox.image("file.png"));
    sandbox.kiln(&["generate", "--from", "file.png", "-o", "again.png"]).ok();
    assert_eq!(fs::read(sandbox.path("file.png")).unwrap(), fs::read(sandbox.path("again.png")).unwrap());
    let info = sandbox.kiln(&["info", "packed.safetensors"]).ok();
    assert!(
        info.text().contains("model in one file") && info.text().contains("klein (distilled)"),
        "{}",
        info.text()
    );
}
