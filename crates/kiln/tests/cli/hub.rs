//! `kiln pull`, `kiln models` and `kiln rm`, against a local hub.

#[path = "../../../kiln-hub/tests/server/mod.rs"]
pub mod server;

use std::fs;
use std::path::Path;

use server::{Hub, HubBehavior, HubFile};
use sha2::{Digest, Sha256};

use crate::sandbox::{RunOutput, Sandbox, interrupt};

const REPO: &str = "black-forest-labs/FLUX.2-klein-4B";

pub fn served(bytes: Vec<u8>) -> HubFile {
    let hash = kiln_base::hex(Sha256::digest(&bytes));
    HubFile { bytes, hash, large: true }
}

/// All files below a folder.
fn files(root: &Path, folder: &Path, out: &mut Vec<(String, HubFile)>) {
    for entry in fs::read_dir(folder).unwrap().flatten() {
        if entry.path().is_dir() {
            files(root, &entry.path(), out);
        } else {
            let path = entry.path().strip_prefix(root).unwrap().to_str().unwrap().replace('\\', "/");
            out.push((path, served(fs::read(entry.path()).unwrap())));
        }
    }
}

/// A hub that has the sandbox's model as klein 4B, for the commands of the documents.
#[cfg(all(unix, feature = "ember", feature = "serve"))]
pub fn klein_hub(sandbox: &Sandbox) -> Hub {
    let mut all = Vec::new();
    files(sandbox.model(), sandbox.model(), &mut all);
    Hub::start(REPO, all, HubBehavior::default())
}

pub fn run(sandbox: &Sandbox, hub: &Hub, args: &[&str]) -> RunOutput {
    sandbox.command(args).env("HF_ENDPOINT", hub.endpoint()).output().unwrap().into()
}

#[test]
fn a_model_is_pulled_listed_used_and_removed_by_its_name() {
    let sandbox = Sandbox::new();
    let mut all = Vec::new();
    files(sandbox.model(), sandbox.model(), &mut all);
    all.push(("flux-2-klein-4b.safetensors".into(), served(vec![0; 100])));
    let hub = Hub::start(
        REPO,
        all,
        HubBehavior { drop_after: vec![1000, 50_000], redirect: true, ..HubBehavior::default() },
    );
    let generate = [
        "generate",
        "fox",
        "-m",
        "klein-4b",
        "-W",
        "64",
        "-H",
        "64",
        "-s",
        "1",
        "-S",
        "4",
        "--max-tokens",
        "32",
    ];
    sandbox
        .kiln(&generate)
        .fails(1, &["`klein-4b` does not exist", "`kiln pull klein-4b` downloads it", "--yes"]);

    let ran = run(&sandbox, &hub, &["pull", "klein-4b"]).ok();
    assert!(ran.err.contains("/s), licence apache-2.0 in `"), "{}", ran.err);
    assert!(ran.err.contains("use it with -m klein-4b") && !ran.err.contains("flux-2-klein"), "{}", ran.err);
    let again = run(&sandbox, &hub, &["pull", "klein-4b", "--json"]).ok();
    let pulled: serde_json::Value = serde_json::from_str(again.text()).unwrap();
    assert_eq!((&pulled["fetched"], &pulled["repo"]), (&0.into(), &REPO.into()));

    let list = sandbox.kiln(&["models", "--json"]).ok();
    let list: serde_json::Value = serde_json::from_str(list.text()).unwrap();
    let model = list.as_array().unwrap().iter().find(|model| model["name"] == "klein-4b").unwrap();
    assert_eq!(model["bytes"], pulled["bytes"]);
    assert!(sandbox.kiln(&["models"]).ok().text().contains("klein-4b"));
    assert!(sandbox.kiln(&["info", "klein-4b"]).ok().text().contains("klein (distilled)"));

    sandbox.kiln(&[&generate[..], &["-o", "a.png"]].concat()).ok();
    sandbox.kiln(&["generate", "--from", "a.png", "-o", "b.png"]).ok();
    assert!(fs::read(sandbox.path("a.png")).unwrap() == fs::read(sandbox.path("b.png")).unwrap());

    sandbox.kiln(&["rm", "klein-4b"]).fails(2, &["would remove", "--yes"]);
    sandbox.kiln(&["rm", "klein-4b", "--yes"]).ok();
    sandbox.kiln(&["rm", "klein-4b", "--yes"]).fails(1, &["no model `klein-4b`", "kiln models"]);
    assert!(!sandbox.kiln(&["models"]).ok().text().contains("klein-4b"));
}

#[test]
fn one_of_several_files_is_chosen_by_a_part_of_its_name() {
    let sandbox = Sandbox::new();
    let file = |name: &str, size: usize| (name.to_owned(), served(vec![1; size]));
    let hub = Hub::start(
        "someone/klein-GGUF",
        vec![file("k-Q4_0.gguf", 10), file("k-Q8_0.gguf", 20)],
        HubBehavior::default(),
    );
    let files = ["k-Q4_0.gguf (10 B)", "k-Q8_0.gguf (20 B)", "hint: "];
    run(&sandbox, &hub, &["pull", "someone/klein-GGUF"]).fails(1, &files);
    run(&sandbox, &hub, &["pull", "someone/klein-GGUF:Q5"]).fails(1, &files);
    run(&sandbox, &hub, &["pull", "someone/klein-GGUF:q4", "-q"]).ok();
    assert!(!sandbox.kiln(&["models"]).ok().text().contains("someone/"), "its name is of another family");
    assert!(sandbox.kiln(&["models", "--all"]).ok().text().contains("someone/klein-GGUF"));
    sandbox.kiln(&["rm", "someone/klein-GGUF:Q8", "-y"]).fails(1, &["no model"]);
    sandbox.kiln(&["rm", "someone/klein-GGUF:Q4", "-y"]).ok();
}

#[test]
fn a_pulled_transformer_takes_its_other_components_from_a_complete_model() {
    let sandbox = Sandbox::new();
    let transformer = sandbox.model().join("transformer").display().to_string();
    sandbox.kiln(&["convert", &transformer, "small.gguf"]).ok();
    let gguf = served(fs::read(sandbox.path("small.gguf")).unwrap());
    let alone =
        Hub::start("someone/FLUX.2-klein-GGUF", vec![("small.gguf".into(), gguf)], HubBehavior::default());
    let ran = run(&sandbox, &alone, &["pull", "someone/FLUX.2-klein-GGUF"]).ok();
    assert!(ran.err.contains("it has no text encoder and no autoencoder"), "{}", ran.err);
    let name = "someone/FLUX.2-klein-GGUF";
    let generate = |model: &str, to: &str| {
        let size = ["-W", "64", "-H", "64", "-s", "1", "-S", "4", "--max-tokens", "32", "--dtype", "f32"];
        sandbox.kiln(&[&["generate", "fox", "-m", model, "-o", to][..], &size].concat())
    };
    generate(name, "a.png").fails(1, &["there is no vae for", "small.gguf", "--vae"]);

    let mut all = Vec::new();
    files(sandbox.model(), sandbox.model(), &mut all);
    let complete = Hub::start(REPO, all, HubBehavior::default());
    run(&sandbox, &complete, &["pull", "klein-4b"]).ok();
    let ran = run(&sandbox, &alone, &["pull", "someone/FLUX.2-klein-GGUF"]).ok();
    assert!(!ran.err.contains("it has no"), "{}", ran.err);
    generate(name, "a.png").ok();
    generate("klein-4b", "b.png").ok();
    let pixels = |file: &str| kiln_image::from_bytes(file, &fs::read(sandbox.path(file)).unwrap()).unwrap();
    assert!(pixels("a.png") == pixels("b.png"));
    let info = sandbox.kiln(&["info", name]).ok();
    assert!(info.text().contains("models--black-forest-labs--FLUX.2-klein-4B"), "{}", info.text());
}

#[test]
fn errors_have_hints() {
    let sandbox = Sandbox::new();
    let gate = Some(("good".to_owned(), 401, "GatedRepo"));
    let hub = Hub::start(
        REPO,
        vec![("a.gguf".into(), served(vec![1]))],
        HubBehavior { gate, ..HubBehavior::default() },
    );
    run(&sandbox, &hub, &["pull", "klein-4b"])
        .fails(1, &["gated", "HF_TOKEN", "while downloading `klein-4b`"]);
    let with = |token: &str| {
        sandbox
            .command(&["pull", "klein-4b"])
            .env("HF_ENDPOINT", hub.endpoint())
            .env("HF_TOKEN", token)
            .output()
            .unwrap()
    };
    let ran: RunOutput = with("secret-token").into();
    assert!(!ran.err.contains("secret-token"));
    ran.fails(1, &["terms", &hub.endpoint()]);
    RunOutput::from(with("good")).ok();
    run(&sandbox, &hub, &["pull", "klein-4c"]).fails(2, &["klein-4c", "known names: klein-4b"]);
    let offline = sandbox.command(&["pull", "klein-4b"]).env("HF_HUB_OFFLINE", "1").output().unwrap();
    RunOutput::from(offline).fails(1, &["HF_HUB_OFFLINE"]);
    sandbox.kiln(&["rm", "ember", "-y"]).fails(if cfg!(feature = "ember") { 2 } else { 1 }, &[]);
}

#[test]
fn models_in_the_models_folder_are_listed_and_removed() {
    let sandbox = Sandbox::new();
    let folder = sandbox.path("models");
    fs::create_dir_all(folder.join("fox")).unwrap();
    fs::write(folder.join("fox/model_index.json"), "{}").unwrap();
    fs::write(folder.join("hen.safetensors"), vec![0; 3000]).unwrap();
    fs::write(sandbox.path("precious"), "x").unwrap();
    let kiln =
        |args: &[&str]| RunOutput::from(sandbox.command(args).env("KILN_MODELS", &folder).output().unwrap());
    let text = kiln(&["models"]).ok();
    assert!(
        text.text().contains("hen") && text.text().contains("2.9 KiB") && text.text().contains("fox"),
        "{}",
        text.text()
    );
    for wrong in ["../precious", "precious", "..", "."] {
        kiln(&["rm", wrong, "-y"]).fails(1, &["no model"]);
    }
    kiln(&["rm", "hen", "-y"]).ok();
    kiln(&["rm", "fox", "-y"]).ok();
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
}

const QUICK: [&str; 9] = ["-W", "64", "-H", "64", "-s", "1", "-S", "4", "--max-tokens"];

/// `kiln COMMAND fox -m klein-4b`, small and quick.
fn quick_klein<'a>(command: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [&[command, "fox", "-m", "klein-4b"], &QUICK[..], &["32"], more].concat()
}

fn whole_model(sandbox: &Sandbox) -> Vec<(String, HubFile)> {
    let mut all = Vec::new();
    files(sandbox.model(), sandbox.model(), &mut all);
    all
}

#[test]
fn yes_downloads_a_model_that_is_not_there() {
    let sandbox = Sandbox::new();
    let hub = Hub::start(REPO, whole_model(&sandbox), HubBehavior::default());
    run(&sandbox, &hub, &["generate", "fox", "-m", "owner/repo", "--yes"])
        .fails(1, &["kiln pull owner/repo"]);
    assert!(
        hub.requests.lock().unwrap().is_empty(),
        "a text that may be a path is not looked for on the hub"
    );
    let ran = run(&sandbox, &hub, &quick_klein("run", &["--yes", "-o", "a.png"])).ok();
    let offer = format!("(licence apache-2.0) from {}/{REPO} to `", hub.endpoint());
    assert!(ran.err.contains("downloading ") && ran.err.contains(&offer), "{}", ran.err);
    let ran = run(&sandbox, &hub, &quick_klein("run", &["--yes", "-o", "b.png"])).ok();
    assert!(!ran.err.contains("downloading"), "{}", ran.err);
    assert!(sandbox.kiln(&["list"]).ok().text().contains("klein-4b"));
    assert!(sandbox.kiln(&["show", "klein-4b"]).ok().text().contains("klein (distilled)"));
    sandbox.kiln(&["rm", "klein-4b", "-y"]).ok();
    let json = run(&sandbox, &hub, &quick_klein("generate", &["--yes", "--json", "-o", "c.png"])).ok();
    assert!(json.err.is_empty() && json.events().len() > 2, "{}", json.err);
    let offline =
        sandbox.command(&["generate", "fox", "-m", "klein-9b", "--yes"]).env("HF_HUB_OFFLINE", "1").output();
    RunOutput::from(offline.unwrap()).fails(1, &["HF_HUB_OFFLINE"]);
}

/// Runs the program on a terminal of `script`, which types the answer. Returns what the terminal shows.
#[cfg(target_os = "linux")]
fn on_terminal(sandbox: &Sandbox, hub: &Hub, args: &[&str], answer: &str) -> Option<(i32, String)> {
    use std::io::Write;
    let command = format!("{} {}", env!("CARGO_BIN_EXE_kiln"), args.join(" "));
    let mut script = sandbox.command_of(Path::new("script"), &["-qec", &command, "/dev/null"]);
    script.env("HF_ENDPOINT", hub.endpoint()).stdin(std::process::Stdio::piped());
    let mut child = script.stdout(std::process::Stdio::piped()).spawn().ok()?;
    child.stdin.take().unwrap().write_all(answer.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    Some((output.status.code().unwrap(), String::from_utf8_lossy(&output.stdout).into_owned()))
}

#[cfg(target_os = "linux")]
#[test]
fn on_a_terminal_a_model_that_is_not_there_is_offered() {
    let sandbox = Sandbox::new();
    let hub = Hub::start(REPO, whole_model(&sandbox), HubBehavior::default());
    let args = quick_klein("generate", &["-o", "a.png"]);
    let Some((code, shown)) = on_terminal(&sandbox, &hub, &args, "n\n") else {
        return eprintln!("skipped: there is no `script`");
    };
    assert_eq!(code, 130, "{shown}");
    let question = "`klein-4b` is not on this machine; download ";
    assert!(
        shown.contains(question) && shown.contains("licence apache-2.0") && shown.contains("[y/N]"),
        "{shown}"
    );
    assert!(!sandbox.path("data/hf/hub").exists(), "nothing is downloaded");
    let (code, shown) = on_terminal(&sandbox, &hub, &args, "y\n").unwrap();
    assert_eq!(code, 0, "{shown}");
    assert!(sandbox.path("a.png").is_file());
    // Without a model, its transformer is not taken for it, and the rest is offered.
    sandbox.kiln(&["rm", "klein-4b", "-y"]).ok();
    run(&sandbox, &hub, &["pull", "klein-4b:transformer/*"]).ok();
    let (code, shown) = on_terminal(&sandbox, &hub, &args, "n\n").unwrap();
    assert!(code == 130 && shown.contains("download the other "), "{shown}");
}

#[test]
fn what_was_pulled_by_pattern_is_listed_and_removed() {
    let sandbox = Sandbox::new();
    let hub = Hub::start(REPO, whole_model(&sandbox), HubBehavior::default());
    run(&sandbox, &hub, &["pull", "klein-4b:vae/*"]).ok();
    let listed = || -> Vec<(String, u64, String)> {
        let list = sandbox.kiln(&["models", "--json"]).ok();
        let list: Vec<serde_json::Value> = serde_json::from_str(list.text()).unwrap();
        let pulled = list.iter().filter(|model| model["name"].as_str().unwrap().starts_with("klein"));
        let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
        pulled
            .map(|model| (text(&model["name"]), model["bytes"].as_u64().unwrap(), text(&model["note"])))
            .collect()
    };
    let vae = "klein-4b:vae/diffusion_pytorch_model.safetensors";
    let bytes = fs::metadata(sandbox.model().join("vae/diffusion_pytorch_model.safetensors")).unwrap().len();
    let found = listed();
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].0 == vae && found[0].1 > bytes && found[0].2 == "a VAE", "{found:?}");
    assert!(sandbox.kiln(&["models"]).ok().text().lines().last().unwrap().starts_with("total"));
    sandbox.kiln(&["info", vae]).ok();
    run(&sandbox, &hub, &["pull", "klein-4b"]).ok();
    assert_eq!(listed().iter().map(|model| model.0.as_str()).collect::<Vec<_>>(), ["klein-4b"]);
    sandbox
        .kiln(&["rm", "klein-4b:vae/*"])
        .fails(2, &["would remove", "diffusion_pytorch_model.safetensors`", "--yes"]);
    sandbox.kiln(&["rm", "klein-4b", "-y"]).ok();
    run(&sandbox, &hub, &["pull", "klein-4b:vae/*"]).ok();
    sandbox.kiln(&["rm", "klein-4b:vae/*", "-y"]).ok();
    assert!(listed().is_empty());
    assert_eq!(fs::read_dir(sandbox.path("data/hf/hub")).unwrap().count(), 0, "nothing is left in the cache");
}

#[test]
fn files_of_every_kind_in_the_models_folder_are_listed_used_and_removed() {
    let sandbox = Sandbox::new();
    let models = sandbox.fill_models_folder();
    fs::write(models.join("odd.safetensors"), [0; 100]).unwrap();
    let list = sandbox.kiln(&["list"]).ok();
    let line =
        |name: &str| list.text().lines().find(|line| line.starts_with(name)).unwrap_or_default().to_owned();
    assert!(line("klein ").ends_with("klein.toml"), "{}", list.text());
    assert!(line("small ").contains("no text encoder and no autoencoder"), "{}", list.text());
    assert!(line("odd ").contains("not a model: see `kiln info odd`"), "{}", list.text());
    sandbox.kiln(&[&["generate", "fox", "-m", "klein", "-o", "a.png"], &QUICK[..], &["32"]].concat()).ok();
    for name in ["klein", "small", "odd"] {
        sandbox.kiln(&["rm", name, "-y"]).ok();
    }
    assert_eq!(fs::read_dir(&models).unwrap().count(), 1);
}

#[test]
fn a_mirror_is_used_and_a_bad_address_named() {
    let sandbox = Sandbox::new();
    let behavior = HubBehavior { prefix: "/mirror/hf", redirect: true, ..HubBehavior::default() };
    let hub = Hub::start(REPO, whole_model(&sandbox), behavior);
    let mut pull = sandbox.command(&["pull", "klein-4b"]);
    RunOutput::from(pull.env("HF_ENDPOINT", hub.endpoint() + "/").output().unwrap()).ok();
    for bad in ["hf-mirror.com", "ftp://host", "https://"] {
        let ran = sandbox.command(&["pull", "klein-4b"]).env("HF_ENDPOINT", bad).output().unwrap();
        RunOutput::from(ran).fails(2, &["HF_ENDPOINT is `", "such as https://"]);
    }
}

#[test]
fn the_first_word_of_several_is_the_model_as_with_ollama() {
    let sandbox = Sandbox::new();
    sandbox.fill_models_folder();
    let quick = ["-W", "16", "-H", "16", "-s", "1", "--max-tokens", "16"];
    let run = |args: &[&str]| sandbox.kiln(&[&["run"], args, &quick].concat());
    let ran = run(&["klein", "an owl", "-o", "a.png"]).ok();
    assert!(ran.err.contains("note: `klein` is taken as the model, as with -m"), "{}", ran.err);
    assert!(sandbox.path("a.png").is_file(), "one image, of the prompt alone");
    let recipe = sandbox.kiln(&["info", "--json", "a.png"]).ok();
    let recipe: serde_json::Value = serde_json::from_str(recipe.text()).unwrap();
    assert_eq!(
        (&recipe["recipe"]["model"]["path"], &recipe["recipe"]["prompt"]),
        (&"klein".into(), &"an owl".into())
    );
    // Also with the prompt from elsewhere, and by path.
    run(&["klein", "-p", "an owl", "-o", "b.png"]).ok();
    let file = sandbox.model().to_str().unwrap();
    assert!(run(&[file, "an owl", "-o", "c.png"]).ok().err.contains("is taken as the model"));
    assert!(sandbox.path("b.png").is_file() && sandbox.path("c.png").is_file());
    // A model that is not there is never drawn.
    run(&["klein-4b", "an owl"]).fails(1, &["`klein-4b` does not exist", "hint: `kiln pull klein-4b`"]);
    run(&["klein-4b"]).fails(2, &["no prompt for the model `klein-4b`", "hint: ", "kiln run klein-4b"]);
    // With -m, and after -p, it is a prompt.
    let ran = run(&["klein-4b", "fox", "-m", "klein", "-o", "d.png"]).ok();
    assert!(!ran.err.contains("taken as") && sandbox.path("d-2.png").is_file(), "{}", ran.err);
    run(&["-p", "klein-4b", "-p", "fox", "-m", "klein", "-o", "e.png"]).ok();
    // A word that is also a model's name is a prompt when it is alone; a typo is pointed out.
    let mut command = sandbox.command(&[&["run", "ember", "-o", "f.png"], &quick[..]].concat());
    let ran = RunOutput::from(command.env("KILN_MODEL", "klein").output().unwrap()).ok();
    assert!(ran.err.contains("note: `ember` is taken as a prompt"), "{}", ran.err);
    let mut command = sandbox.command(&[&["run", "klien-4b", "fox", "-o", "g.png"], &quick[..]].concat());
    let ran = RunOutput::from(command.env("KILN_MODEL", "klein").output().unwrap()).ok();
    assert!(ran.err.contains("did you mean the model klein-4b?"), "{}", ran.err);
}

#[test]
fn the_first_ctrl_c_ends_a_stalled_download_and_the_next_resumes_it() {
    use std::process::Stdio;
    let sandbox = Sandbox::new();
    let behavior = HubBehavior { stall_after: Some(30_000), ..HubBehavior::default() };
    let hub = Hub::start("someone/klein", vec![("a.gguf".into(), served(vec![7; 50_000]))], behavior);
    let mut pull = sandbox.command(&["pull", "someone/klein"]);
    let child = pull.env("HF_ENDPOINT", hub.endpoint()).stderr(Stdio::piped()).spawn().unwrap();
    let partial = || {
        let blobs = sandbox.path("data/hf/hub/models--someone--klein/blobs");
        let files = fs::read_dir(blobs).into_iter().flatten().flatten();
        files.filter_map(|entry| entry.metadata().ok()).map(|metadata| metadata.len()).sum::<u64>()
    };
    while partial() < 30_000 {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    interrupt(&child);
    let ran: RunOutput = child.wait_with_output().unwrap().into();
    assert_eq!(ran.code, 130, "{}", ran.err);
    assert!(ran.err.ends_with("cancelled\n"), "{}", ran.err);
    hub.behavior.lock().unwrap().stall_after = None;
    let again = run(&sandbox, &hub, &["pull", "someone/klein", "--json"]).ok();
    let pulled: serde_json::Value = serde_json::from_str(again.text()).unwrap();
    assert_eq!(pulled["fetched"], 20_000);
}
