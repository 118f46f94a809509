//! `kiln pull` of FLUX.2 [dev]: its licence, the components that complete it, interruptions.

use std::fs;

use crate::hub::server::{Hub, HubBehavior};
use crate::hub::{run, served};
use crate::sandbox::{RunOutput, Sandbox, interrupt};

/// A hub with files of FLUX.2 [dev], which hold nothing.
fn dev_hub(behavior: HubBehavior) -> Hub {
    let comfy = [
        "split_files/diffusion_models/flux2_dev_fp8mixed.safetensors",
        "split_files/text_encoders/mistral_3_small_flux2_fp8.safetensors",
        "split_files/vae/flux2-vae.safetensors",
    ];
    let named = |path: &str| (path.to_owned(), served(path.into()));
    let comfy = comfy.map(named).to_vec();
    let gguf = vec![named("flux2-dev-Q4_K_S.gguf"), named("flux2-dev-Q8_0.gguf")];
    let repos = vec![("Comfy-Org/flux2-dev".into(), comfy), ("city96/FLUX.2-dev-gguf".into(), gguf)];
    Hub::start_all(repos, behavior)
}

#[test]
fn a_licence_is_told_and_accepted_before_a_download() {
    let sandbox = Sandbox::new();
    let hub = dev_hub(HubBehavior::default());
    let downloads = || {
        let requests = hub.requests.lock().unwrap();
        requests.iter().filter(|request| request.path.contains("/resolve/")).count()
    };
    let licence =
        ["FLUX.2 [dev] Non-Commercial License (https://huggingface.co/black-forest-labs/FLUX.2-dev/"];
    let how = ["must be accepted", "`dev-gguf:Q4_K_S` with --accept-license"];
    run(&sandbox, &hub, &["pull", "dev-gguf:Q4_K_S"]).fails(1, &[&licence[..], &how].concat());
    run(&sandbox, &hub, &["pull", "dev-gguf:Q4_K_S", "--json"]).fails(1, &how);
    run(&sandbox, &hub, &["generate", "fox", "-m", "dev-gguf:Q4_K_S", "--yes"]).fails(1, &how);
    assert_eq!(downloads(), 0);

    let ran = run(&sandbox, &hub, &["pull", "dev-gguf:Q4_K_S", "--accept-license"]).ok();
    assert!(
        ran.err.contains(licence[0]) && ran.err.contains("with `split_files/text_encoders/mis"),
        "{}",
        ran.err
    );
    assert_eq!(downloads(), 3, "the transformer, the text encoder and the autoencoder");
    // Nothing is left to accept.
    let again = run(&sandbox, &hub, &["pull", "dev-gguf:Q4_K_S", "--json"]).ok();
    let pulled: serde_json::Value = serde_json::from_str(again.text()).unwrap();
    assert_eq!((&pulled["fetched"], &pulled["files"]), (&0.into(), &3.into()));
    assert_eq!(pulled["licence"], "FLUX.2 [dev] Non-Commercial License");
    assert_eq!(pulled["with"][0], "dev-encoder");
    let quiet = run(&sandbox, &hub, &["pull", "dev-fp8", "--accept-license", "-q"]).ok();
    assert_eq!((quiet.err.as_str(), downloads()), ("", 4));
}

#[test]
fn a_pull_of_dev_fetches_what_is_used_and_nothing_else() {
    let sandbox = Sandbox::new();
    let used = [
        "LICENSE.md",
        "model_index.json",
        "scheduler/scheduler_config.json",
        "text_encoder/config.json",
        "text_encoder/model-00001-of-00002.safetensors",
        "text_encoder/model-00002-of-00002.safetensors",
        "text_encoder/model.safetensors.index.json",
        "tokenizer/tokenizer.json",
        "transformer/config.json",
        "transformer/diffusion_pytorch_model.safetensors",
        "vae/diffusion_pytorch_model.safetensors",
    ];
    // Copies of the same weights, images and code.
    let unused =
        ["README.md", "flux2-dev.safetensors", "ae.safetensors", "teaser.png", "vae/model.bin", "a/b.json"];
    let file = |path: &&str| ((*path).to_owned(), served((*path).into()));
    let repo = used.iter().chain(&unused).map(file).collect();
    let hub = Hub::start("black-forest-labs/FLUX.2-dev", repo, HubBehavior::default());
    run(&sandbox, &hub, &["pull", "dev"]).fails(1, &["Non-Commercial", "--accept-license"]);
    assert!(!sandbox.path("data/hf/hub").exists(), "nothing is written before the licence is accepted");
    let pulled = run(&sandbox, &hub, &["pull", "dev", "--accept-license"]).ok();
    let licence = pulled.err.find("Non-Commercial").unwrap();
    assert!(
        licence < pulled.err.find("1/").unwrap(),
        "the licence is told before the download: {}",
        pulled.err
    );
    let requests = hub.requests.lock().unwrap();
    let mut fetched: Vec<_> =
        requests.iter().filter_map(|r| Some(r.path.split_once("/resolve/")?.1.split_once('/')?.1)).collect();
    fetched.sort_unstable();
    assert_eq!(fetched, used);
}

#[test]
fn an_interrupted_pull_of_dev_asks_again_and_fetches_the_rest() {
    use std::process::Stdio;
    const TRANSFORMER: usize = 9_000;
    let sandbox = Sandbox::new();
    let mut comfy = Vec::new();
    for file in [
        "text_encoders/mistral_3_small_flux2_fp8",
        "text_encoders/mistral_3_small_flux2_bf16",
        "vae/flux2-vae",
    ] {
        comfy.push((
            format!("split_files/{file}.safetensors"),
            served([file.as_bytes(), &[7; 40_000]].concat()),
        ));
    }
    let gguf = vec![("flux2-dev-Q4_K_S.gguf".into(), served(vec![1; TRANSFORMER]))];
    let repos = vec![("Comfy-Org/flux2-dev".into(), comfy), ("city96/FLUX.2-dev-gguf".into(), gguf)];
    let hub = Hub::start_all(repos, HubBehavior { stall_after: Some(30_000), ..HubBehavior::default() });
    let mut pull = sandbox.command(&["pull", "dev-gguf:Q4_K_S", "--accept-license"]);
    let child = pull.env("HF_ENDPOINT", hub.endpoint()).stderr(Stdio::piped()).spawn().unwrap();
    // The transformer is whole, the text encoder is not.
    let present = || {
        let blobs = sandbox.path("data/hf/hub/models--Comfy-Org--flux2-dev/blobs");
        let files = fs::read_dir(blobs).into_iter().flatten().flatten();
        files.filter_map(|entry| entry.metadata().ok()).map(|metadata| metadata.len()).sum::<u64>()
    };
    while present() < 30_000 {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    interrupt(&child);
    assert_eq!(RunOutput::from(child.wait_with_output().unwrap()).code, 130);
    hub.behavior.lock().unwrap().stall_after = None;
    hub.requests.lock().unwrap().clear();
    run(&sandbox, &hub, &["pull", "dev-gguf:Q4_K_S"]).fails(1, &["must be accepted"]);
    let again = run(&sandbox, &hub, &["pull", "dev-gguf:Q4_K_S", "--accept-license", "--json"]).ok();
    let pulled: serde_json::Value = serde_json::from_str(again.text()).unwrap();
    let rest = pulled["bytes"].as_u64().unwrap() - TRANSFORMER as u64 - 30_000;
    assert_eq!((&pulled["files"], pulled["fetched"].as_u64()), (&3.into(), Some(rest)));
    let requests = hub.requests.lock().unwrap();
    let fetched: Vec<_> = requests
        .iter()
        .filter(|r| r.path.contains("/resolve/"))
        .filter_map(|r| r.path.rsplit('/').next())
        .collect();
    assert_eq!(fetched, ["mistral_3_small_flux2_fp8.safetensors", "flux2-vae.safetensors"]);
}

#[test]
fn a_pulled_transformer_of_dev_uses_the_components_that_came_with_it() {
    const ENCODERS: &str = "split_files/text_encoders/mistral_3_small_flux2";
    let sandbox = Sandbox::with_dev();
    let model = sandbox.model().to_str().unwrap();
    let converted = |to: &str, how: &[&str]| {
        sandbox.kiln(&[&["convert", model, to], how].concat()).ok();
        served(fs::read(sandbox.path(to)).unwrap())
    };
    let encoder = converted("encoder.safetensors", &["--part", "text-encoder", "--names", "diffusers"]);
    let comfy = vec![
        (
            "split_files/diffusion_models/flux2_dev_fp8mixed.safetensors".into(),
            converted("dev.safetensors", &[]),
        ),
        (format!("{ENCODERS}_fp8.safetensors"), encoder.clone()),
        (format!("{ENCODERS}_bf16.safetensors"), encoder),
        ("split_files/vae/flux2-vae.safetensors".into(), converted("vae.safetensors", &["--part", "vae"])),
    ];
    let gguf = vec![("flux2-dev-Q4_K_S.gguf".into(), converted("dev.gguf", &[]))];
    let repos = vec![("Comfy-Org/flux2-dev".into(), comfy), ("city96/FLUX.2-dev-gguf".into(), gguf)];
    let hub = Hub::start_all(repos, HubBehavior::default());
    let pull = |name: &str| run(&sandbox, &hub, &["pull", name, "--accept-license"]).ok();
    let generate = |name: &str, to: &str| {
        let size = ["-W", "64", "-H", "64", "-s", "1", "-S", "4", "--dtype", "f32", "--device", "cpu"];
        sandbox.kiln(&[&["generate", "fox", "-m", name, "-o", to][..], &size].concat()).ok();
        sandbox.image(to)
    };
    let pulled = pull("dev-gguf:Q4_K_S");
    assert!(
        pulled.err.contains("use it with -m dev-gguf") && !pulled.err.contains("it has no"),
        "{}",
        pulled.err
    );
    let expected = generate(model, "folder.png");
    assert!(generate("dev-gguf:Q4_K_S", "gguf.png").pixels() == expected.pixels());

    // Of two text encoders, a name takes its own.
    let component = pull(&format!("Comfy-Org/flux2-dev:{ENCODERS}_bf16.safetensors"));
    assert!(component.err.contains("it is a text encoder"), "{}", component.err);
    pull("dev-fp8");
    assert!(generate("dev-fp8", "fp8.png").pixels() == expected.pixels());
    let list = sandbox.kiln(&["models"]).ok();
    let line = list.text().lines().find(|line| line.starts_with("dev-fp8")).unwrap().to_owned();
    assert!(!line.contains("no text encoder"), "{line}");
}
