//! Pulling models with the files of other repositories that they need, and the licences that must be accepted.

mod server;

use std::path::Path;

use kiln_base::hex;
use kiln_hub::{HubSettings, ModelName, ModelPlan, Terms, plan_model, pull};
use server::{Hub, HubBehavior, HubFile};
use sha2::{Digest, Sha256};

fn file(text: &str) -> HubFile {
    HubFile { hash: hex(Sha256::digest(text)), bytes: text.into(), large: true }
}

fn settings(hub: &Hub, folder: &Path) -> HubSettings {
    HubSettings { endpoint: hub.endpoint(), cache: folder.join("hub"), ..HubSettings::default() }
}

#[test]
fn conditions_of_a_licence_are_known_or_stated() {
    let file = ("a.gguf".to_owned(), file("weights"));
    let terms = |repo: &str, change: (&str, &str)| {
        let hub = Hub::start(repo, vec![file.clone()], HubBehavior::default());
        let list = hub.list().replace(change.0, change.1);
        hub.behavior.lock().unwrap().list = Some(list);
        let dir = tempfile::tempdir().unwrap();
        let plan = plan_model(&settings(&hub, dir.path()), &ModelName::parse(repo).unwrap()).unwrap();
        plan.terms().first().map(|terms| (terms.licence.clone(), terms.url.clone()))
    };
    let license = r#""license":"apache-2.0""#;
    assert_eq!(terms("a/b", ("", "")), None);
    let known = terms("unsloth/FLUX.2-klein-9B-GGUF", ("", "")).unwrap();
    assert_eq!(known.0, "FLUX Non-Commercial License", "whatever the repository says");
    let stated = r#""license":"other","license_name":"x-non-commercial","license_link":"https://x.org/l""#;
    let link = ("x-non-commercial".to_owned(), "https://x.org/l".to_owned());
    assert_eq!(terms("a/b", (license, stated)), Some(link));
    let relative = r#""license":"cc-by-nc-4.0","license_link":"LICENSE.md""#;
    let (name, url) = terms("a/b", (license, relative)).unwrap();
    assert!(name == "cc-by-nc-4.0" && url.ends_with("/a/b"), "{url}");
    let gated = terms("a/b", (r#""siblings""#, r#""gated":"manual","siblings""#)).unwrap();
    assert_eq!(gated.0, "apache-2.0");
    assert_eq!(terms("a/b", (r#""siblings""#, r#""gated":false,"siblings""#)), None);
}

#[test]
fn a_transformer_is_pulled_with_the_files_that_complete_it() {
    const ENCODERS: &str = "split_files/text_encoders";
    let named = |path: String| (path.clone(), file(&path));
    let comfy = ["fp8", "fp4_mixed", "bf16"]
        .map(|kind| format!("{ENCODERS}/mistral_3_small_flux2_{kind}.safetensors"));
    let mut comfy: Vec<_> = comfy.into_iter().map(named).collect();
    comfy.push(named("split_files/vae/flux2-vae.safetensors".into()));
    comfy.push(named("split_files/diffusion_models/flux2_dev_fp8mixed.safetensors".into()));
    let gguf = ["Q4_K_S", "Q8_0"].map(|kind| named(format!("flux2-dev-{kind}.gguf"))).to_vec();
    let repos = vec![("Comfy-Org/flux2-dev".into(), comfy), ("city96/FLUX.2-dev-gguf".into(), gguf)];
    let hub = Hub::start_all(repos, HubBehavior::default());
    let files = |plan: &ModelPlan| -> Vec<String> {
        plan.all()
            .flat_map(|plan| &plan.files)
            .map(|file| file.path.rsplit('/').next().unwrap().into())
            .collect()
    };
    let dir = tempfile::tempdir().unwrap();
    let settings = settings(&hub, dir.path());
    let plan = |name: &str| plan_model(&settings, &ModelName::parse(name).unwrap()).unwrap();
    let (fp8, vae) = ("mistral_3_small_flux2_fp8.safetensors", "flux2-vae.safetensors");
    let q4 = plan("dev-gguf:q4_k_s");
    assert_eq!(files(&q4), ["flux2-dev-Q4_K_S.gguf", fp8, vae]);
    assert_eq!(files(&plan("dev-fp8")), ["flux2_dev_fp8mixed.safetensors", fp8, vae]);
    assert_eq!(files(&plan("dev-encoder")), [fp8, vae]);
    assert_eq!(q4.terms().len(), 1, "one licence, told once");

    // Another text encoder serves as well.
    let fp4 = ModelName::parse("Comfy-Org/flux2-dev:mistral_3_small_flux2_fp4_mixed.safetensors").unwrap();
    assert_eq!(files(&plan(&fp4.short())), ["mistral_3_small_flux2_fp4_mixed.safetensors"]);
    pull(&settings, &fp4, &mut |_| true).unwrap();
    let q4 = plan("dev-gguf:q4_k_s");
    assert_eq!(files(&q4), ["flux2-dev-Q4_K_S.gguf", vae]);
    let mut seen = Vec::new();
    let pulled = q4.run(&settings, &mut |progress| {
        seen.push((progress.index, progress.done));
        assert_eq!((progress.files, progress.total), (2, q4.bytes()));
        true
    });
    let pulled = pulled.unwrap();
    assert_eq!((pulled.files, pulled.bytes, pulled.downloaded), (2, q4.bytes(), q4.bytes()));
    assert!(seen.is_sorted() && seen.last() == Some(&(1, q4.bytes())), "{seen:?}");
    assert_eq!(plan("dev-gguf:Q4_K_S").terms(), [] as [&Terms; 0], "nothing is left to download");
}
