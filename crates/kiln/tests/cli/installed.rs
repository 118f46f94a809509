//! The program on a machine: `kiln` alone, `kiln update`, `kiln uninstall`, `kiln doctor --report`.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;

use serde_json::Value;

use crate::sandbox::{RunOutput, Sandbox};

#[test]
fn the_program_alone_says_what_to_do_next() {
    let sandbox = Sandbox::new();
    let ran = sandbox.kiln(&[]).ok();
    for part in [env!("CARGO_PKG_VERSION"), "kiln pull klein-4b", "kiln doctor", "kiln --help"] {
        assert!(ran.text().contains(part), "`{part}` is missing in:\n{}", ran.text());
    }
    assert!(ran.text().lines().count() <= 16, "{}", ran.text());
    sandbox.fill_models_folder();
    let ran = sandbox.kiln(&[]).ok();
    assert!(ran.text().contains("-m klein\n") && !ran.text().contains("kiln pull"), "{}", ran.text());
    sandbox.write("config.toml", b"model = \"mine\"");
    assert!(sandbox.kiln(&[]).ok().text().contains("with mine, your default model"));
}

/// Answers one request with a status and a text, and returns the answer of `kiln update --check` and the request.
fn update(args: &[&str], status: &str, text: &str) -> (RunOutput, String) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}/releases/", listener.local_addr().unwrap());
    let answer = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n\r\n{text}", text.len());
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut request = [0; 4096];
        let length = stream.read(&mut request).unwrap();
        stream.write_all(answer.as_bytes()).unwrap();
        String::from_utf8_lossy(&request[..length]).into_owned()
    });
    let sandbox = Sandbox::new();
    let mut command = sandbox.command(&[&["update", "--check"], args].concat());
    command.env("KILN_RELEASES", address).env("NO_PROXY", "*");
    let ran = command.output().unwrap().into();
    (ran, server.join().unwrap())
}

#[test]
fn update_tells_of_a_newer_release() {
    let (ran, request) = update(&[], "200 OK", "900.1.0\n");
    assert!(request.starts_with("GET /releases/latest/download/VERSION "), "{request}");
    let text = ran.ok().text().to_owned();
    assert!(text.contains("Kiln 900.1.0 is available") && text.contains("/tag/v900.1.0"), "{text}");
    assert!(text.contains("update with "), "{text}");
    let (ran, _) = update(&["--json"], "200 OK", "900.1.0");
    let json: Value = serde_json::from_str(ran.ok().text()).unwrap();
    assert_eq!((&json["newer"], &json["latest"]), (&Value::Bool(true), &"900.1.0".into()));
    let (ran, _) = update(&[], "200 OK", "0.0.1");
    assert!(ran.ok().text().contains("is up to date"));
}

#[test]
fn update_without_an_answer_is_an_error() {
    update(&[], "404 Not Found", "").0.fails(1, &["there is no release at", "KILN_RELEASES"]);
    update(&[], "500 Oh", "").0.fails(1, &["answered with status 500"]);
    update(&[], "200 OK", "<html>").0.fails(1, &["did not answer with a version"]);
    let sandbox = Sandbox::new();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut offline = sandbox.command(&["update", "--check"]);
    offline.env("KILN_RELEASES", format!("http://127.0.0.1:{port}")).env("NO_PROXY", "*");
    RunOutput::from(offline.output().unwrap()).fails(1, &["can't reach", "check the connection"]);
    sandbox.kiln(&["update"]).fails(2, &["does not update itself", "--check"]);
}

#[test]
fn uninstall_lists_what_is_there_and_deletes_nothing() {
    let sandbox = Sandbox::new();
    let models = sandbox.fill_models_folder();
    fs::create_dir(sandbox.path("images")).unwrap();
    let images = sandbox.path("images");
    let setting = format!("output_folder = '{}'", images.display());
    sandbox.write("config.toml", setting.as_bytes());
    fs::write(sandbox.cache().join("text"), b"cached").unwrap();
    let foreign = sandbox.path("foreign");
    fs::create_dir(&foreign).unwrap();
    let mut command = sandbox.command(&["uninstall", "--json"]);
    // Windows and macOS take these folders from elsewhere, where others may have put files.
    command.env("KILN_MODELS", &foreign);
    let ran = RunOutput::from(command.output().unwrap()).ok();
    let items: Vec<Value> = serde_json::from_str(ran.text()).unwrap();
    let find = |path: &std::path::Path| items.iter().find(|item| item["path"] == path.to_str().unwrap());
    let settings = find(&sandbox.path("config.toml")).unwrap();
    assert_eq!(settings["bytes"], setting.len());
    assert!(settings["delete"].as_str().unwrap().contains("config.toml"));
    let cache = find(sandbox.cache()).unwrap();
    assert!(cache["holds"].as_str().unwrap().contains("cache") && cache["bytes"] == 6, "{cache}");
    assert_eq!(find(&foreign).unwrap().get("delete"), None);
    assert_eq!(find(&images).unwrap().get("delete"), None);
    let program = items.last().unwrap();
    assert!(program["path"].as_str().unwrap().contains("kiln"), "{program}");
    if cfg!(target_os = "linux") {
        let data = find(&sandbox.path("data/kiln")).unwrap();
        assert!(
            data["bytes"].as_u64().unwrap() > 10_000 && data["delete"].as_str().unwrap().contains("rm -r")
        );
    }
    let text = sandbox.kiln(&["uninstall"]).ok().text().to_owned();
    assert!(
        text.contains("deletes none") && text.contains(&format!("config.toml ({} B)", setting.len())),
        "{text}"
    );
    assert!(models.exists() && sandbox.path("config.toml").exists() && sandbox.cache().join("text").exists());
}

#[test]
fn a_report_has_machine_settings_and_models_but_no_secret() {
    let sandbox = Sandbox::new();
    sandbox.fill_models_folder();
    sandbox.write("config.toml", b"threads = 3\n[serve]\napi_key = \"a-secret-of-mine\"\n");
    let mut command = sandbox.command(&["doctor", "--report"]);
    command.env("HF_TOKEN", "another-secret");
    let ran = RunOutput::from(command.output().unwrap()).ok();
    assert!(ran.err.contains("kiln-report.txt"), "{}", ran.err);
    let report = fs::read_to_string(sandbox.path("kiln-report.txt")).unwrap();
    let present =
        [env!("CARGO_PKG_VERSION"), "threads  3", "api-key", "HF_TOKEN", "klein", "transformer", "cpu"];
    for part in present {
        assert!(report.contains(part), "`{part}` is missing in:\n{report}");
    }
    assert!(!report.contains("secret"), "{report}");
    let printed = sandbox.kiln(&["doctor", "--report", "-", "--json"]).ok();
    let json: Value = serde_json::from_str(printed.text()).unwrap();
    assert_eq!(json["settings"]["threads"], "3");
    sandbox.kiln(&["doctor", "--report", "none/report.txt"]).fails(1, &["can't write", "--report"]);
}
