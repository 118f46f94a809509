//! Every golden case through the command line: the image must match that of diffusers within one level.

use std::fs;

use kiln_golden::testdata;
use kiln_tensor::HostTensor;
use kiln_weights::{WeightSource, save};
use serde_json::Value;

use crate::sandbox::{Sandbox, golden, max_difference};

fn list(value: &Value) -> Vec<Value> {
    value.as_array().cloned().unwrap_or_else(|| vec![value.clone()])
}

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// The command line options for the case that the JSON file describes.
fn options(case: &Value, sandbox: &Sandbox) -> Vec<String> {
    let call = &case["call_kwargs"];
    let mut args = vec!["--one-generator".to_owned()];
    let mut give = |option: &str, value: String| args.extend([option.to_owned(), value]);
    let numbers = [
        ("-W", "width"),
        ("-H", "height"),
        ("-s", "num_inference_steps"),
        ("-g", "guidance_scale"),
        ("-b", "num_images_per_prompt"),
        ("--max-tokens", "max_sequence_length"),
        ("--strength", "strength"),
        ("--mask-padding", "padding_mask_crop"),
    ];
    for (option, key) in numbers {
        if !call[key].is_null() {
            give(option, call[key].to_string());
        }
    }
    let joined = |value: &Value| list(value).iter().map(plain).collect::<Vec<_>>().join(",");
    give("-S", joined(&case["seed"]));
    if !call["sigmas"].is_null() {
        give("--sigmas", joined(&call["sigmas"]));
    }
    if !case["negative_prompt"].is_null() {
        let prompts: Value = serde_json::from_slice(&fs::read(golden("prompts.json")).unwrap()).unwrap();
        give("-n", plain(&prompts["P2"]["prompt"]));
    }
    for key in ["reference_images", "image_reference"] {
        for file in list(&case[key]).iter().filter(|f| !f.is_null()) {
            give("-r", golden(&plain(file)));
        }
    }
    for (option, key) in [("--init", "source_image"), ("--mask", "mask")] {
        if !case[key].is_null() {
            give(option, golden(&plain(&case[key])));
        }
    }
    for (file, weight) in list(&case["lora"]).iter().zip(list(&case["lora_weight"])) {
        if !file.is_null() {
            give("--lora", format!("{}:{weight}", testdata().join("tiny").join(plain(file)).display()));
        }
    }
    if call["prompt"].is_null() {
        let dump = WeightSource::open(golden(&format!("{}.safetensors", plain(&case["case"])))).unwrap();
        let name = dump.names().find(|name| name.ends_with("prompt_embeds")).unwrap().to_owned();
        let embeds: HostTensor = dump.tensor(&name).unwrap();
        save::save(sandbox.path("embeds.safetensors"), &[("prompt_embeds", embeds)], &Default::default())
            .unwrap();
        give("--embeds", "embeds.safetensors".into());
    } else {
        args.extend(list(&call["prompt"]).iter().map(plain));
    }
    args
}

#[test]
fn every_golden_case_matches_diffusers() {
    let mut files: Vec<_> =
        fs::read_dir(testdata().join("reference")).unwrap().map(|e| e.unwrap().path()).collect();
    files.retain(|f| f.extension().is_some_and(|e| e == "json") && f.with_extension("safetensors").exists());
    files.sort();
    let mut count = 0;
    for file in files {
        let case: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        let Some(images) = case["images"].as_array() else { continue };
        let sandbox = Sandbox::with_model(case["model"].as_str().unwrap());
        let mut args = vec!["generate".into(), "-m".into(), sandbox.model().to_str().unwrap().to_owned()];
        args.extend(["--dtype", "f32", "--device", "cpu", "-o", "out.png"].map(String::from));
        args.extend(options(&case, &sandbox));
        sandbox.kiln(&args.iter().map(String::as_str).collect::<Vec<_>>()).ok();
        for (i, image) in images.iter().enumerate() {
            let name = if images.len() == 1 { "out.png".into() } else { format!("out-{}.png", i + 1) };
            let expected = kiln_image::open(golden(image.as_str().unwrap()).as_ref()).unwrap();
            assert!(max_difference(&sandbox.image(&name), &expected) <= 1, "{} {i}", file.display());
        }
        count += 1;
    }
    assert!(count > 20, "only {count} cases were found");
}
