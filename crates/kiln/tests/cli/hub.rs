//! `kiln pull`, `kiln models` and `kiln rm`, against a hub on this machine.

#[path = "../../../kiln-hub/tests/server/mod.rs"]
mod server;

use std::fs;
use std::path::Path;

use server::{Hub, Manners, Served};
use sha2::{Digest, Sha256};

use crate::kit::{Kit, Ran};

const REPO: &str = "black-forest-labs/FLUX.2-klein-4B";

fn served(bytes: Vec<u8>) -> Served {
    let hash = Sha256::digest(&bytes).iter().map(|b| format!("{b:02x}")).collect();
    Served { bytes, hash, large: true }
}

/// All files below a folder.
fn files(root: &Path, folder: &Path, out: &mut Vec<(String, Served)>) {
    for entry in fs::read_dir(folder).unwrap().flatten() {
        match entry.path().is_dir() {
            true => files(root, &entry.path(), out),
            false => {
                let path = entry.path().strip_prefix(root).unwrap().to_str().unwrap().to_owned();
                out.push((path, served(fs::read(entry.path()).unwrap())));
            }
        }
    }
}

fn run(kit: &Kit, hub: &Hub, args: &[&str]) -> Ran {
    kit.command(args).env("HF_ENDPOINT", hub.endpoint()).output().unwrap().into()
}

#[test]
fn a_model_is_pulled_listed_used_and_removed_by_its_name() {
    let kit = Kit::new();
    let mut all = Vec::new();
    files(kit.model(), kit.model(), &mut all);
    all.push(("flux-2-klein-4b.safetensors".into(), served(vec![0; 100])));
    let hub = Hub::start(
        REPO,
        all,
        Manners { drop_after: vec![1000, 50_000], redirect: true, ..Manners::default() },
    );
    let paint = [
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
    kit.kiln(&paint).refused(1, &["`klein-4b` does not exist", "kiln pull klein-4b"]);

    let ran = run(&kit, &hub, &["pull", "klein-4b"]).ok();
    assert!(ran.err.contains("use it with -m klein-4b") && !ran.err.contains("flux-2-klein"), "{}", ran.err);
    let again = run(&kit, &hub, &["pull", "klein-4b", "--json"]).ok();
    let told: serde_json::Value = serde_json::from_str(again.text()).unwrap();
    assert_eq!((&told["fetched"], &told["repo"]), (&0.into(), &REPO.into()));

    let listed = kit.kiln(&["models", "--json"]).ok();
    let listed: serde_json::Value = serde_json::from_str(listed.text()).unwrap();
    let row = listed.as_array().unwrap().iter().find(|row| row["name"] == "klein-4b").unwrap();
    assert_eq!(row["bytes"], told["bytes"]);
    assert!(kit.kiln(&["models"]).ok().text().contains("klein-4b"));
    assert!(kit.kiln(&["info", "klein-4b"]).ok().text().contains("klein (distilled)"));

    kit.kiln(&[&paint[..], &["-o", "a.png"]].concat()).ok();
    kit.kiln(&["generate", "--from", "a.png", "-o", "b.png"]).ok();
    assert!(fs::read(kit.path("a.png")).unwrap() == fs::read(kit.path("b.png")).unwrap());

    kit.kiln(&["rm", "klein-4b"]).refused(2, &["would remove", "--yes"]);
    kit.kiln(&["rm", "klein-4b", "--yes"]).ok();
    kit.kiln(&["rm", "klein-4b", "--yes"]).refused(1, &["no model `klein-4b`", "kiln models"]);
    assert!(!kit.kiln(&["models"]).ok().text().contains("klein-4b"));
}

#[test]
fn one_of_several_files_is_chosen_by_a_part_of_its_name() {
    let kit = Kit::new();
    let file = |name: &str, size: usize| (name.to_owned(), served(vec![1; size]));
    let hub = Hub::start(
        "someone/klein-GGUF",
        vec![file("k-Q4_0.gguf", 10), file("k-Q8_0.gguf", 20)],
        Manners::default(),
    );
    let listed = ["k-Q4_0.gguf (10 B)", "k-Q8_0.gguf (20 B)", "hint: "];
    run(&kit, &hub, &["pull", "someone/klein-GGUF"]).refused(1, &listed);
    run(&kit, &hub, &["pull", "someone/klein-GGUF:Q5"]).refused(1, &listed);
    run(&kit, &hub, &["pull", "someone/klein-GGUF:q4", "-q"]).ok();
    assert!(!kit.kiln(&["models"]).ok().text().contains("someone/"), "of another family, by its name");
    assert!(kit.kiln(&["models", "--all"]).ok().text().contains("someone/klein-GGUF"));
    kit.kiln(&["rm", "someone/klein-GGUF:Q8", "-y"]).refused(1, &["no model"]);
    kit.kiln(&["rm", "someone/klein-GGUF:Q4", "-y"]).ok();
}

#[test]
fn a_transformer_that_was_pulled_alone_takes_its_other_parts_from_a_whole_model() {
    let kit = Kit::new();
    let transformer = kit.model().join("transformer").display().to_string();
    kit.kiln(&["convert", &transformer, "small.gguf"]).ok();
    let gguf = served(fs::read(kit.path("small.gguf")).unwrap());
    let alone =
        Hub::start("someone/FLUX.2-klein-GGUF", vec![("small.gguf".into(), gguf)], Manners::default());
    let ran = run(&kit, &alone, &["pull", "someone/FLUX.2-klein-GGUF"]).ok();
    assert!(ran.err.contains("it has no text encoder and no autoencoder"), "{}", ran.err);
    let name = "someone/FLUX.2-klein-GGUF";
    let paint = |model: &str, to: &str| {
        let size = ["-W", "64", "-H", "64", "-s", "1", "-S", "4", "--max-tokens", "32", "--dtype", "f32"];
        kit.kiln(&[&["generate", "fox", "-m", model, "-o", to][..], &size].concat())
    };
    paint(name, "a.png").refused(1, &["there is no vae for", "small.gguf", "--vae FILE"]);

    let mut all = Vec::new();
    files(kit.model(), kit.model(), &mut all);
    let whole = Hub::start(REPO, all, Manners::default());
    run(&kit, &whole, &["pull", "klein-4b"]).ok();
    let ran = run(&kit, &alone, &["pull", "someone/FLUX.2-klein-GGUF"]).ok();
    assert!(!ran.err.contains("it has no"), "{}", ran.err);
    paint(name, "a.png").ok();
    paint("klein-4b", "b.png").ok();
    let pixels = |file: &str| kiln_image::from_bytes(file, &fs::read(kit.path(file)).unwrap()).unwrap();
    assert!(pixels("a.png") == pixels("b.png"));
    let told = kit.kiln(&["info", name]).ok();
    assert!(told.text().contains("models--black-forest-labs--FLUX.2-klein-4B"), "{}", told.text());
}

#[test]
fn what_goes_wrong_is_said_with_what_to_do() {
    let kit = Kit::new();
    let gate = Some(("good".to_owned(), 401, "GatedRepo"));
    let hub =
        Hub::start(REPO, vec![("a.gguf".into(), served(vec![1]))], Manners { gate, ..Manners::default() });
    run(&kit, &hub, &["pull", "klein-4b"]).refused(1, &["gated", "HF_TOKEN", "while fetching `klein-4b`"]);
    let with = |token: &str| {
        kit.command(&["pull", "klein-4b"])
            .env("HF_ENDPOINT", hub.endpoint())
            .env("HF_TOKEN", token)
            .output()
            .unwrap()
    };
    let refused: Ran = with("secret-token").into();
    assert!(!refused.err.contains("secret-token"));
    refused.refused(1, &["terms", &hub.endpoint()]);
    Ran::from(with("good")).ok();
    run(&kit, &hub, &["pull", "klein-4c"]).refused(2, &["klein-4c", "known names: klein-4b"]);
    let offline = kit.command(&["pull", "klein-4b"]).env("HF_HUB_OFFLINE", "1").output().unwrap();
    Ran::from(offline).refused(1, &["HF_HUB_OFFLINE"]);
    kit.kiln(&["rm", "ember", "-y"]).refused(if cfg!(feature = "ember") { 2 } else { 1 }, &[]);
}

#[test]
fn models_of_the_models_folder_are_listed_and_removed() {
    let kit = Kit::new();
    let folder = kit.path("models");
    fs::create_dir_all(folder.join("fox")).unwrap();
    fs::write(folder.join("fox/model_index.json"), "{}").unwrap();
    fs::write(folder.join("hen.safetensors"), vec![0; 3000]).unwrap();
    fs::write(kit.path("precious"), "x").unwrap();
    let kiln = |args: &[&str]| Ran::from(kit.command(args).env("KILN_MODELS", &folder).output().unwrap());
    let text = kiln(&["models"]).ok();
    assert!(
        text.text().contains("hen") && text.text().contains("2.9 KiB") && text.text().contains("fox"),
        "{}",
        text.text()
    );
    for wrong in ["../precious", "precious", "..", "."] {
        kiln(&["rm", wrong, "-y"]).refused(1, &["no model"]);
    }
    kiln(&["rm", "hen", "-y"]).ok();
    kiln(&["rm", "fox", "-y"]).ok();
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
}
