//! Models and LoRAs that are not whole, or not of one piece.

use std::fs;

use kiln_golden::in_tree;
use kiln_tensor::HostTensor;
use kiln_weights::{WeightSource, save};
use serde_json::json;

use crate::kit::{Kit, Ran};

const TRANSFORMER: &str = "transformer/diffusion_pytorch_model.safetensors";

#[track_caller]
fn refused(kit: &Kit, words: &[&str]) {
    kit.generate(&["fox", "-o", "out.png"]).refused(1, words);
    assert!(kit.names().is_empty(), "{:?}", kit.names());
}

/// A safetensors file with this header and so many bytes of data.
fn file(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

#[test]
fn a_path_that_is_no_model_is_told_apart() {
    let kit = Kit::new();
    let model = kit.model().display().to_string();
    kit.kiln(&["generate", "fox", "-m", "none"]).refused(1, &["`none` does not exist", "hint: "]);
    kit.kiln(&["generate", "fox", "-m", &format!("{model}/vae")]).refused(
        1,
        &["no `model_index.json`", &format!("hint: the model is the folder around it: -m {model}")],
    );
    kit.kiln(&["generate", "fox", "-m", &format!("{model}/model_index.json")])
        .refused(1, &["model_index.json", "safetensors", "hint: give the folder"]);
    kit.edit_model("model_index.json", "_class_name", json!("StableDiffusionPipeline"));
    refused(&kit, &["model_index.json", "StableDiffusionPipeline", "FLUX.2"]);
    kit.put_into_model("model_index.json", b"{");
    refused(&kit, &["model_index.json", "line 1"]);
}

#[cfg(unix)]
#[test]
fn a_model_in_the_models_folder_goes_by_its_name() {
    let kit = Kit::new();
    fs::create_dir_all(kit.path("models")).unwrap();
    std::os::unix::fs::symlink(kit.model(), kit.path("models/klein")).unwrap();
    let kiln =
        |args: &[&str]| -> Ran { kit.command(args).env("KILN_MODELS", "models").output().unwrap().into() };
    let small = ["-W", "16", "-H", "16", "-s", "1", "--max-tokens", "16"];
    kiln(&[&["generate", "fox", "-m", "klein", "-o", "a.png"], &small[..]].concat()).ok();
    assert!(kiln(&["info", "a.png"]).ok().text().contains("path          klein\n"));
    kiln(&["generate", "--from", "a.png", "-o", "b.png"]).ok();
    assert_eq!(fs::read(kit.path("a.png")).unwrap(), fs::read(kit.path("b.png")).unwrap());
    assert!(kiln(&["info", "klein"]).ok().text().contains("model folder"));
    assert!(kiln(&["doctor"]).ok().text().contains("klein"));
    kiln(&["generate", "fox", "-m", "klien"]).refused(1, &["`klien` does not exist", "nearest: klein"]);
    kiln(&["info", "klien"]).refused(1, &["nearest: klein"]);
    kiln(&["generate", "fox", "-m", "ember-base"])
        .refused(1, &["ember-base.safetensors", "tools/ember", "`models`"]);
}

#[test]
fn missing_parts_are_named() {
    let kit = Kit::new();
    kit.take_from_model("vae");
    refused(&kit, &["no `vae/config.json`", "--vae FILE"]);
    let kit = Kit::new();
    kit.take_from_model("text_encoder");
    refused(&kit, &["no `text_encoder/config.json`", "--embeds FILE"]);
    let kit = Kit::new();
    kit.take_from_model("transformer");
    refused(&kit, &["no `transformer`", "`config.json`", "hint: "]);
    let kit = Kit::new();
    kit.take_from_model(TRANSFORMER);
    refused(&kit, &["no weights", "transformer", "hint: "]);
    let kit = Kit::new();
    kit.take_from_model("text_encoder/model-00002-of-00002.safetensors");
    refused(&kit, &["model.safetensors.index.json", "model-00002-of-00002.safetensors", "hint: "]);
    refused(&Kit::with_model("dev"), &["text_encoder", "--embeds FILE"]);
}

#[test]
fn a_transformer_beside_another_models_text_encoder_is_told_with_both_sizes() {
    let kit = Kit::new();
    // As when klein 4B's transformer (3 × 2560) lies beside klein 9B's text encoder (4096).
    kit.edit_model("transformer/config.json", "joint_attention_dim", json!(7680));
    kit.edit_model("text_encoder/config.json", "hidden_size", json!(4096));
    refused(
        &kit,
        &["don't fit", "hidden size 2560", "hidden size 4096", "hint: the parts come from different models"],
    );
}

#[test]
fn weights_that_do_not_fit_their_configuration_are_named() {
    let kit = Kit::new();
    kit.edit_model("transformer/config.json", "num_attention_heads", json!(2));
    refused(&kit, &["has shape", "expected", "diffusion_pytorch_model.safetensors", "hint: "]);
    let kit = Kit::new();
    kit.edit_model("transformer/config.json", "num_single_layers", json!(3));
    refused(&kit, &["no tensor `single_transformer_blocks.2.", "nearest: "]);
    let kit = Kit::new();
    kit.edit_model("text_encoder/config.json", "num_hidden_layers", json!(12));
    refused(&kit, &["text_encoder/config.json", "12 layers", "27"]);
}

#[test]
fn damaged_weight_files_are_named() {
    let whole = fs::read(Kit::new().model().join(TRANSFORMER)).unwrap();
    let entry = |dtype: &str, offsets: &str| {
        format!(r#"{{"a":{{"dtype":"{dtype}","shape":[2],"data_offsets":{offsets}}}}}"#)
    };
    let overlap = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}"#;
    let cases = [
        (Vec::new(), "the file is empty"),
        (whole[..whole.len() - 100].to_vec(), "not a valid safetensors file"),
        (whole[..5].to_vec(), "at least 8 bytes"),
        (file("{}", 0)[..9].to_vec(), "announces a header of 2 bytes"),
        (b"\xff\xff\xff\xff\xff\xff\xff\x7f{}".to_vec(), "announces a header"),
        (file("not json", 0), "header is not JSON"),
        (file(&entry("F32", "[0,16]"), 16), "tensor `a`"),
        (file(&entry("C128", "[0,32]"), 32), "dtype C128"),
        (file(overlap, 12), "inside `a`"),
        (b"<!doctype html>".to_vec(), "not a valid safetensors file"),
    ];
    for (bytes, words) in cases {
        let kit = Kit::new();
        kit.put_into_model(TRANSFORMER, &bytes);
        refused(&kit, &[TRANSFORMER, words, "hint: "]);
    }
}

#[test]
fn a_type_that_is_not_read_is_no_damage() {
    let kit = Kit::new();
    kit.put_into_model(TRANSFORMER, &file(r#"{"a":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}"#, 1));
    let ran = kit.generate(&["fox"]);
    assert!(!ran.err.contains("download is not complete"), "{}", ran.err);
    ran.refused(1, &[TRANSFORMER, "dtype F4", "hint: "]);
}

#[test]
fn an_index_that_makes_no_sense_is_named() {
    let kit = Kit::new();
    let index = "text_encoder/model.safetensors.index.json";
    kit.put_into_model(index, b"{\"weight_map\": 3}");
    refused(&kit, &[index, "not a valid list of shards", "hint: "]);
}

#[test]
fn an_absurd_configuration_is_not_blamed_on_the_size() {
    let kit = Kit::new();
    for heads in [10_000_000_u64, 1 << 40] {
        kit.edit_model("transformer/config.json", "num_attention_heads", json!(heads));
        let ran = kit.generate(&["fox", "-o", "out.png"]);
        assert!(!ran.err.contains("-W"), "{}", ran.err);
        ran.refused(1, &["config.json", "hint: "]);
    }
}

#[test]
fn results_that_are_no_numbers_are_told_with_what_may_be_wrong() {
    let kit = Kit::new();
    let lora = format!("{}:3e38", in_tree().join("tiny/lora/lora_diffusers.safetensors").display());
    kit.generate(&["fox", "-o", "out.png", "--lora", &lora]).refused(1, &["not finite", "hint: ", "--lora"]);
    assert!(kit.names().is_empty());
}

#[test]
fn a_missing_tensor_is_named_with_its_nearest() {
    let kit = Kit::new();
    let source = WeightSource::open(kit.model().join("transformer")).unwrap();
    let lost = "single_transformer_blocks.1.attn.to_out.weight";
    assert!(source.contains(lost));
    let names: Vec<String> = source.names().filter(|n| *n != lost).map(str::to_owned).collect();
    let tensors: Vec<_> = names.iter().map(|n| (n.as_str(), source.tensor(n).unwrap())).collect();
    kit.take_from_model(TRANSFORMER);
    save::save(kit.model().join(TRANSFORMER), &tensors, &Default::default()).unwrap();
    refused(&kit, &[lost, "nearest: ", "while loading the model", "hint: "]);
}

#[test]
fn a_lora_that_does_not_fit_is_told_why() {
    let kit = Kit::new();
    let save = |name: &str, module: &str, rows: usize, cols: usize| {
        let (down, up) =
            (format!("transformer.{module}.lora_A.weight"), format!("transformer.{module}.lora_B.weight"));
        let tensors =
            [(down.as_str(), HostTensor::zeros([4, cols])), (up.as_str(), HostTensor::zeros([rows, 4]))];
        save::save(kit.path(name), &tensors, &Default::default()).unwrap();
    };
    save("size.safetensors", "transformer_blocks.0.attn.to_q", 3072, 3072);
    save("name.safetensors", "transformer_blocks.99.attn.to_q", 128, 128);
    let lora = |path: &str, words: &[&str]| {
        kit.generate(&["fox", "-o", "out.png", "--lora", path]).refused(1, words);
        assert!(!kit.names().contains(&"out.png".into()));
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
    let model = kit.model().join(TRANSFORMER);
    lora(model.to_str().unwrap(), &["are not LoRA keys", "hint: "]);
    lora(".", &["LoRA `.` is a folder, expected a safetensors file", "hint: "]);
    for wrong in ["nan", "abc", ""] {
        let ran = kit.generate(&["fox", "--lora", &format!("name.safetensors:{wrong}")]);
        ran.refused(2, &["--lora", &format!("`{wrong}`, expected a finite number")]);
    }
}

#[test]
fn an_autoencoder_that_is_none_is_named() {
    let kit = Kit::new();
    let lora = in_tree().join("tiny/lora/lora_diffusers.safetensors");
    let ran = kit.generate(&["fox", "-o", "out.png", "--vae", lora.to_str().unwrap()]);
    ran.refused(1, &["lora_diffusers.safetensors", "neither TAEF2 nor a FLUX.2 autoencoder"]);
    kit.generate(&["fox", "--vae", "none"]).refused(1, &["`none`", "while opening the autoencoder"]);
    assert!(kit.names().is_empty());
}

#[test]
fn a_model_without_tokenizer_uses_the_one_that_is_built_in() {
    let kit = Kit::new();
    kit.take_from_model("tokenizer");
    let info = kit.kiln(&["info", kit.model().to_str().unwrap()]).ok();
    assert!(info.text().contains("built into Kiln"), "{}", info.text());
    // The random model knows few of its tokens, and says so instead of reading past its table.
    refused(&kit, &["token"]);
}

#[test]
fn a_model_in_one_file_gives_the_same_picture() {
    let kit = Kit::new();
    let (mut tensors, mut metadata) = (Vec::new(), std::collections::BTreeMap::new());
    for part in ["transformer", "text_encoder", "vae"] {
        let source = WeightSource::open(kit.model().join(part)).unwrap();
        let named = source.names().map(|name| (format!("{part}.{name}"), source.tensor(name).unwrap()));
        tensors.extend(named.collect::<Vec<_>>());
    }
    let configs =
        ["model_index.json", "transformer/config.json", "text_encoder/config.json", "vae/config.json"];
    let others =
        ["scheduler/scheduler_config.json", "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"];
    for name in configs.iter().chain(&others) {
        metadata.insert((*name).to_owned(), fs::read_to_string(kit.model().join(name)).unwrap());
    }
    let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor.clone())).collect();
    save::save(kit.path("packed.safetensors"), &tensors, &metadata).unwrap();

    kit.generate(&["fox", "-S", "1", "-o", "folder.png"]).ok();
    let packed =
        ["generate", "fox", "-m", "packed.safetensors", "--max-tokens", "32", "-W", "64", "-H", "64"];
    kit.kiln(&[&packed[..], &["-s", "2", "-S", "1", "-o", "file.png"]].concat()).ok();
    assert_eq!(kit.picture("folder.png"), kit.picture("file.png"));
    kit.kiln(&["generate", "--from", "file.png", "-o", "again.png"]).ok();
    assert_eq!(fs::read(kit.path("file.png")).unwrap(), fs::read(kit.path("again.png")).unwrap());
    let info = kit.kiln(&["info", "packed.safetensors"]).ok();
    assert!(
        info.text().contains("model in one file") && info.text().contains("klein (distilled)"),
        "{}",
        info.text()
    );
}
