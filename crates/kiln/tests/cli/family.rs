//! A model of another family than FLUX.2: [Pebble](kiln_family::pebble), which exists for these tests alone.

use std::collections::BTreeMap;

use kiln_tensor::HostTensor;
use kiln_weights::save;
use serde_json::Value;

use crate::sandbox::{Sandbox, max_difference};

/// A size in whole tokens of Pebble, but not of FLUX.2.
const SIZE: [&str; 4] = ["-W", "40", "-H", "24"];

fn generate(sandbox: &Sandbox, out: &str, more: &[&str]) {
    sandbox.generate(&[&["a fox", "-o", out, "-S", "5"], &SIZE[..], more].concat()).ok();
}

fn info(sandbox: &Sandbox, path: &str) -> Value {
    serde_json::from_str(sandbox.kiln(&["info", "--json", path]).ok().text()).unwrap()
}

#[test]
fn another_family_has_its_own_tokens_defaults_and_texts() {
    let sandbox = Sandbox::with_model("pebble");
    generate(&sandbox, "a.png", &[]);
    let image = sandbox.image("a.png");
    assert_eq!((image.width(), image.height()), (40, 24));
    let folder = sandbox.model().to_str().unwrap().to_owned();
    let described = info(&sandbox, &folder);
    assert_eq!((&described["variant"], &described["default_size"]), (&"Pebble".into(), &"64x64".into()));
    assert_eq!((&described["default_steps"], &described["default_guidance"]), (&3.into(), &3.0.into()));
    assert_eq!(described["transformer"]["double_blocks"], 0);
    assert_eq!(described["text_encoder"]["text_layers"], serde_json::json!([2]));
    generate(&sandbox, "b.png", &["--negative", "a hen"]);
    assert!(max_difference(&image, &sandbox.image("b.png")) > 0);
    generate(&sandbox, "c.png", &["--init", "a.png", "--strength", "0.6"]);
    let rounded = sandbox.generate(&["a fox", "-W", "41", "-H", "24", "-o", "d.png"]);
    assert!(rounded.err.contains("width 41 is rounded down to 40, a multiple of 8"), "{}", rounded.err);
}

#[test]
fn its_files_are_converted_to_every_layout_and_back() {
    let sandbox = Sandbox::with_model("pebble");
    let folder = sandbox.model().to_str().unwrap().to_owned();
    generate(&sandbox, "whole.png", &[]);
    sandbox.kiln(&["convert", &folder, "pebble.safetensors", "-q"]).ok();
    let one = info(&sandbox, "pebble.safetensors");
    assert_eq!((&one["kind"], &one["names"]), (&"Pebble transformer".into(), &"Pebble".into()));
    sandbox.kiln(&["convert", "pebble.safetensors", "transformer", "-q"]).ok();
    assert_eq!(info(&sandbox, "transformer")["names"], "diffusers");
    sandbox.kiln(&["convert", "transformer", "two.gguf", "-q"]).ok();
    let two = info(&sandbox, "two.gguf");
    assert_eq!(two["metadata"]["general.architecture"], "pebble");
    sandbox.kiln(&["quantize", "two.gguf", "three.gguf", "--to", "q8_0", "-q"]).ok();
    let part = |name: &str| format!("{folder}/{name}");
    let (text_encoder, vae, tokenizer) = (part("text_encoder"), part("vae"), part("tokenizer"));
    let others = ["--text-encoder", &text_encoder, "--vae", &vae, "--tokenizer", &tokenizer];
    let whole = sandbox.image("whole.png");
    for (file, exact) in [("pebble.safetensors", true), ("transformer", true), ("three.gguf", false)] {
        let args =
            [&["generate", "a fox", "-m", file, "--max-tokens", "32", "-s", "2", "-S", "5"], &SIZE[..]];
        sandbox.kiln(&[&args.concat(), &others[..], &["-o", "part.png"]].concat()).ok();
        let difference = max_difference(&whole, &sandbox.image("part.png"));
        assert!(if exact { difference == 0 } else { difference < 40 }, "{file}: {difference}");
    }
}

#[test]
fn its_loras_have_names_of_either_layout() {
    let sandbox = Sandbox::with_model("pebble");
    generate(&sandbox, "plain.png", &[]);
    let values = |count: usize| (0..count).map(|i| ((i * 37 % 19) as f32 - 9.0) / 20.0).collect::<Vec<_>>();
    let down = HostTensor::from_f32([2, 96], values(2 * 96)).unwrap();
    let up = HostTensor::from_f32([32, 2], values(32 * 2)).unwrap();
    for (file, module) in [
        ("own.safetensors", "diffusion_model.grains.1.out"),
        ("diffusers.safetensors", "transformer.single_transformer_blocks.1.attn.to_out"),
        ("kohya.safetensors", "lora_unet_grains_1_out"),
    ] {
        let names = ["lora_A", "lora_B"].map(|leaf| format!("{module}.{leaf}.weight"));
        let tensors = [(names[0].as_str(), down.clone()), (&names[1], up.clone())];
        save::save(sandbox.path(file), &tensors, &BTreeMap::new()).unwrap();
        generate(&sandbox, &format!("{file}.png"), &["--lora", file]);
    }
    let images = ["own", "diffusers", "kohya"].map(|n| sandbox.image(&format!("{n}.safetensors.png")));
    assert!(max_difference(&sandbox.image("plain.png"), &images[0]) > 0);
    assert_eq!(max_difference(&images[0], &images[1]), 0);
    assert_eq!(max_difference(&images[0], &images[2]), 0);
}

#[test]
#[cfg(all(feature = "ember", feature = "serve"))]
fn a_server_generates_with_it() {
    use base64::Engine as _;

    let sandbox = Sandbox::with_model("pebble");
    generate(&sandbox, "a.png", &["-s", "2"]);
    let server = crate::serve::TestServer::start(&sandbox, &["-m", sandbox.model().to_str().unwrap()]);
    assert_eq!(server.call("GET", "/v1/models", None).1["data"][0]["kiln"]["unit"], 8);
    let body = serde_json::json!({
        "prompt": "a fox", "size": "40x24", "seed": 5, "steps": 2, "max_tokens": 32
    });
    let (status, response) = server.call("POST", "/v1/images/generations", Some(body));
    assert_eq!(status, 200, "{response}");
    let encoded = response["data"][0]["b64_json"].as_str().unwrap();
    sandbox.write("b.png", &base64::prelude::BASE64_STANDARD.decode(encoded).unwrap());
    assert_eq!(max_difference(&sandbox.image("a.png"), &sandbox.image("b.png")), 0);
}
