//! `kiln config`, what the settings do, and `kiln man`.

use std::fs;

use serde_json::Value;

use crate::sandbox::{RunOutput, Sandbox};

/// A sandbox whose settings name its model.
fn with_model() -> Sandbox {
    let sandbox = Sandbox::new();
    let model = sandbox.model().to_str().unwrap().to_owned();
    sandbox.kiln(&["config", "set", "model", &model]).ok();
    sandbox
}

fn generate(sandbox: &Sandbox, more: &[&str]) -> RunOutput {
    let quick = ["generate", "fox", "-W", "64", "-H", "64", "-s", "1", "-S", "4", "--max-tokens", "32"];
    sandbox.kiln(&[&quick[..], more].concat())
}

#[test]
fn settings_are_set_shown_and_unset() {
    let sandbox = Sandbox::new();
    let file = sandbox.path("config.toml");
    let get = |key: &str| sandbox.kiln(&["config", "get", key]).ok().text().trim_end().to_owned();
    assert_eq!(sandbox.kiln(&["config", "path"]).ok().text().trim_end(), file.to_str().unwrap());
    assert_eq!(get("dtype"), "auto");
    assert!(!file.exists(), "reading writes nothing");
    sandbox.kiln(&["config", "set", "dtype", "f32"]).ok();
    sandbox.kiln(&["config", "set", "vram-limit", "6G"]).ok();
    assert_eq!((get("dtype"), get("vram_limit")), ("f32".into(), "6G".into()));
    let json = sandbox.kiln(&["config", "list", "--json"]).ok();
    let json: Value = serde_json::from_str(json.text()).unwrap();
    assert_eq!((&json["dtype"]["value"], &json["dtype"]["source"]), (&"f32".into(), &"file".into()));
    assert_eq!(json["device"]["source"], "default");
    let list = sandbox.command(&["config"]).env("KILN_MODEL", "fox").output().unwrap();
    let list = RunOutput::from(list).ok();
    let line = |key: &str| list.text().lines().find(|line| line.starts_with(key)).unwrap().to_owned();
    assert!(line("model ").contains("fox") && line("model ").contains("KILN_MODEL"), "{}", list.text());
    let doctor = sandbox.kiln(&["doctor"]).ok();
    assert!(doctor.text().contains("config.toml (sets dtype, vram_limit)"), "{}", doctor.text());
    sandbox.kiln(&["config", "unset", "dtype"]).ok();
    assert_eq!(get("dtype"), "auto");
    assert_eq!(fs::read_to_string(&file).unwrap(), "vram_limit = \"6G\"\n");
    // A folder that exists is stored with its full path.
    fs::create_dir(sandbox.path("images")).unwrap();
    sandbox.kiln(&["config", "set", "output_folder", "./images"]).ok();
    assert_eq!(
        fs::canonicalize(get("output_folder")).unwrap(),
        fs::canonicalize(sandbox.path("images")).unwrap()
    );
}

#[test]
fn wrong_settings_are_errors_that_name_file_and_key() {
    let sandbox = Sandbox::new();
    sandbox.kiln(&["config", "set", "modle", "x"]).fails(2, &["`modle`", "did you mean `model`?"]);
    sandbox.kiln(&["config", "get", "seed"]).fails(2, &["`seed`", "known settings: model, "]);
    sandbox.kiln(&["config", "set", "dtype", "f64"]).fails(2, &["`f64`", "`dtype`", "bf16"]);
    sandbox.kiln(&["config", "set", "output_folder", "images"]).fails(2, &["`output_folder`", "absolute"]);
    for (text, words) in [
        ("modle = 'x'", ["`modle`", "did you mean `model`?"]),
        ("device = 'gpu'", ["`device` is `gpu`", "cuda:N"]),
        ("model 5", ["line 1", "hint: "]),
    ] {
        sandbox.write("config.toml", text.as_bytes());
        for command in [&["models"][..], &["generate", "fox"], &["config"]] {
            sandbox.kiln(command).fails(1, &["config.toml`", words[0], words[1]]);
        }
    }
    sandbox.kiln(&["completions", "bash"]).ok();
    sandbox.kiln(&["config", "path"]).ok();
}

#[test]
fn hints_about_the_settings_file_lead_out_of_it() {
    let sandbox = Sandbox::new();
    sandbox.kiln(&["config", "set", "nope", "1"]).fails(2, &["`nope`", "hint: known settings: model, "]);
    // Nothing but an editor helps against a syntax error.
    sandbox.write("config.toml", b"model = [");
    for command in [&["models"][..], &["config", "set", "model", "ember"], &["config", "unset", "model"]] {
        sandbox.kiln(command).fails(1, &["config.toml` is invalid", "hint: correct the file with an editor"]);
    }
    // Each wrong setting is repaired by the command that its hint names, whatever else is wrong.
    sandbox.write("config.toml", b"threads = 0\ndevice = 'gpu'\nmodle = 'x'\n[serve]\nport = 'many'\n");
    for command in ["set threads 2", "unset device", "unset modle", "set serve.port 8080", "unset threads"]
        .map(|text| text.split(' '))
    {
        sandbox.kiln(&["config"]).fails(1, &["config.toml`", "hint: ", "kiln config unset"]);
        sandbox.kiln(&["config"].into_iter().chain(command).collect::<Vec<_>>()).ok();
        if sandbox.kiln(&["config"]).code == 0 {
            break;
        }
    }
    assert!(sandbox.kiln(&["config"]).ok().text().contains("8080"));
    sandbox.kiln(&["config", "set", "serve.port", "many"]).fails(2, &["'many' for '--port", "hint: "]);
    let mut command = sandbox.command(&["models"]);
    let (device, problem) =
        if cfg!(windows) { ("NUL", "for a device") } else { ("/dev/zero", "not a regular file") };
    let ran = RunOutput::from(command.env("KILN_CONFIG", device).output().unwrap());
    ran.fails(1, &[device, problem, "hint: "]);
}

#[test]
fn options_come_before_the_environment_and_that_before_the_file() {
    let sandbox = with_model();
    let out = sandbox.path("out/images");
    sandbox.kiln(&["config", "set", "output_folder", out.to_str().unwrap()]).ok();
    sandbox.kiln(&["config", "set", "dtype", "bf16"]).ok();
    let started = |ran: RunOutput| ran.ok().events()[0].clone();
    let event = started(generate(&sandbox, &["--json"]));
    assert_eq!(
        (&event["model"], &event["dtype"]),
        (&sandbox.model().to_str().unwrap().into(), &"bf16".into())
    );
    assert!(out.join("fox-4.png").is_file(), "the image goes to the output folder, which is created");
    assert_eq!(started(generate(&sandbox, &["--json", "--dtype", "f32", "-o", "a.png"]))["dtype"], "f32");
    assert!(sandbox.path("a.png").is_file());
    // A recipe is what was asked for, too.
    let again = sandbox.kiln(&["generate", "--from", "a.png", "-o", "b.png", "--json"]);
    assert_eq!(started(again)["dtype"], "f32");
    let mut other = sandbox.command(&["generate", "fox"]);
    RunOutput::from(other.env("KILN_MODEL", "elsewhere").output().unwrap())
        .fails(1, &["`elsewhere`", "KILN_MODEL"]);
    generate(&sandbox, &["-m", "nowhere"]).fails(1, &["`nowhere`"]);
    sandbox.kiln(&["config", "set", "model", "nowhere"]).ok();
    generate(&sandbox, &[]).fails(1, &["`nowhere`", "`model` in `", "config.toml`"]);
    sandbox.kiln(&["config", "set", "model", sandbox.model().to_str().unwrap()]).ok();
    sandbox.write("blocked", b"");
    sandbox.kiln(&["config", "set", "output_folder", sandbox.path("blocked/x").to_str().unwrap()]).ok();
    generate(&sandbox, &[]).fails(1, &["blocked/x`", "kiln config set output_folder"]);
}

#[test]
fn the_models_folder_can_be_set() {
    let sandbox = Sandbox::new();
    fs::create_dir(sandbox.path("mine")).unwrap();
    fs::write(sandbox.path("mine/hen.safetensors"), vec![0; 3000]).unwrap();
    sandbox.kiln(&["config", "set", "models-folder", "./mine"]).ok();
    assert!(sandbox.kiln(&["list"]).ok().text().contains("hen"));
    let other = sandbox.command(&["list"]).env("KILN_MODELS", sandbox.path("other")).output().unwrap();
    assert!(!RunOutput::from(other).ok().text().contains("hen"));
}

#[test]
fn there_is_a_manual_page_for_every_command() {
    let sandbox = Sandbox::new();
    sandbox.kiln(&["man", "share/man1"]).ok();
    let page = |name: &str| fs::read_to_string(sandbox.path("share/man1").join(name)).unwrap();
    assert!(page("kiln.1").contains("kiln") && page("kiln-generate.1").contains("guidance"));
    for name in
        ["pull", "models", "rm", "convert", "quantize", "info", "doctor", "bench", "config", "config-set"]
    {
        assert!(page(&format!("kiln-{name}.1")).contains(".TH"), "{name}");
    }
    assert!(!sandbox.path("share/man1/kiln-help.1").exists() && !page("kiln.1").contains("kiln-help"));
    sandbox.write("file", b"");
    sandbox.kiln(&["man", "file"]).fails(1, &["manual pages", "`file`"]);
}
