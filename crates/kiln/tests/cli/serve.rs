//! `kiln serve` with the built-in model, over a socket.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};

#[cfg(unix)]
use crate::sandbox::signal;
use crate::sandbox::{RunOutput, Sandbox, max_difference, pattern, png};

pub struct TestServer {
    pub child: Child,
    address: String,
}

impl Drop for TestServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl TestServer {
    pub fn start(sandbox: &Sandbox, more: &[&str]) -> TestServer {
        let mut command = sandbox.command(&[&["serve", "--port", "0", "--data", "served"], more].concat());
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
        let address = lines.find_map(|line| Some(line.split_once(" at http://")?.1.to_owned()));
        // Keep reading: a full pipe would block the server's log.
        std::thread::spawn(move || lines.for_each(drop));
        let server = TestServer { address: address.expect("the server ended"), child };
        server.until("/readyz", |status, _| status == 200);
        server
    }

    pub fn call(&self, method: &str, path: &str, body: Option<Value>) -> (u16, Value) {
        let (status, text) = self.fetch(method, path, body);
        (status, serde_json::from_str(&text).unwrap_or(Value::Null))
    }

    fn fetch(&self, method: &str, path: &str, body: Option<Value>) -> (u16, String) {
        let (status, body) = self.fetch_bytes(method, path, body);
        (status, String::from_utf8(body).unwrap())
    }

    /// The file at this path.
    pub fn bytes(&self, path: &str) -> Vec<u8> {
        let (status, bytes) = self.fetch_bytes("GET", path, None);
        assert_eq!(status, 200, "{path}");
        bytes
    }

    fn fetch_bytes(&self, method: &str, path: &str, body: Option<Value>) -> (u16, Vec<u8>) {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        let body = body.map_or(String::new(), |body| body.to_string());
        let length = body.len();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n\
             Content-Length: {length}\r\n\r\n{body}"
        )
        .unwrap();
        let mut response = Vec::new();
        stream.read_to_end(&mut response).unwrap();
        let head = response.windows(4).position(|end| end == b"\r\n\r\n").unwrap();
        let status = std::str::from_utf8(&response[9..12]).unwrap().parse().unwrap();
        (status, response[head + 4..].to_vec())
    }

    #[track_caller]
    pub fn until(&self, path: &str, there: impl Fn(u16, &Value) -> bool) -> Value {
        let start = Instant::now();
        loop {
            let (status, response) = self.call("GET", path, None);
            if there(status, &response) {
                return response;
            }
            assert!(start.elapsed() < Duration::from_secs(120), "{path}: {response}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

#[test]
fn the_server_generates_the_same_images_as_the_command_line() {
    let sandbox = Sandbox::new();
    sandbox
        .kiln(&["generate", "a red apple", "-S", "7", "-W", "128", "-H", "96", "-s", "2", "-o", "a.png"])
        .ok();
    // Two engines: which of them generates makes no difference.
    let server = TestServer::start(&sandbox, &["--device", "cpu,cpu"]);
    let body = json!({ "prompt": "a red apple", "seed": 7, "size": "128x96", "steps": 2 });
    let (status, response) = server.call("POST", "/v1/images/generations", Some(body));
    assert_eq!(status, 200, "{response}");
    let bytes = BASE64_STANDARD.decode(response["data"][0]["b64_json"].as_str().unwrap()).unwrap();
    sandbox.write("b.png", &bytes);
    assert_eq!(max_difference(&sandbox.image("a.png"), &sandbox.image("b.png")), 0);
    let recipe = kiln_image::read_recipe(&bytes).unwrap().unwrap();
    assert!(recipe.contains("\"seed\":7") && recipe.contains("\"model\":{\"path\":\"ember\""), "{recipe}");
    // An image with a reference and a mask, generated again from its own recipe.
    let image = format!("image:{}", response["data"][0]["id"].as_str().unwrap());
    let body = json!({ "prompt": "a hat", "images": [image, image], "strength": 0.7, "steps": 3, "seed": 3 });
    let (status, response) = server.call("POST", "/v1/images/edits", Some(body));
    assert_eq!(status, 200, "{response}");
    sandbox
        .write("c.png", &BASE64_STANDARD.decode(response["data"][0]["b64_json"].as_str().unwrap()).unwrap());
    // It names no folder of the server: the input images must lie beside it.
    let recipe = kiln_image::read_recipe(&std::fs::read(sandbox.path("c.png")).unwrap()).unwrap().unwrap();
    assert!(!recipe.contains("served") && !recipe.contains("\"/"), "{recipe}");
    for entry in std::fs::read_dir(sandbox.path("served/inputs")).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), sandbox.path(entry.file_name().to_str().unwrap())).unwrap();
    }
    sandbox.kiln(&["generate", "--from", "c.png", "-o", "d.png"]).ok();
    assert_eq!(max_difference(&sandbox.image("c.png"), &sandbox.image("d.png")), 0);
    // An invalid request is an error, and the server keeps running.
    let (status, response) = server.call(
        "POST",
        "/v1/images/generations",
        Some(json!({ "prompt": "a", "size": "16x16", "guidance": -1.0 })),
    );
    assert_eq!((status, &response["error"]["code"]), (400, &json!("invalid_value")));
}

#[test]
fn previews_resemble_the_final_image() {
    let sandbox = Sandbox::new();
    let server = TestServer::start(&sandbox, &[]);
    let body = json!({ "prompt": "a red apple on a blue background", "seed": 7, "steps": 8, "size": "256x256", "stream": true, "partial_images": 3 });
    let mut stream = TcpStream::connect(&server.address).unwrap();
    let body = body.to_string();
    let length = body.len();
    write!(stream, "POST /v1/images/generations HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}").unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).unwrap();
    let images: Vec<_> = response
        .lines()
        .filter_map(|line| line.strip_prefix("data: "))
        .map(|data| {
            let event: Value = serde_json::from_str(data).unwrap();
            let bytes = BASE64_STANDARD.decode(event["b64_json"].as_str().unwrap()).unwrap();
            let image = kiln_image::from_bytes("event", &bytes).unwrap();
            kiln_image::resize(&image, 16, 16, kiln_image::Filter::Bicubic)
        })
        .collect();
    assert_eq!(images.len(), 4);
    let last = images[3].pixels();
    let difference = |image: &kiln_image::RgbImage| {
        let sum: u64 = image.pixels().iter().zip(last).map(|(a, b)| u64::from(a.abs_diff(*b))).sum();
        sum as f64 / last.len() as f64
    };
    let last_preview = difference(&images[2]);
    assert!(last_preview < 40.0, "the last preview is off by {last_preview} levels");
}

#[test]
fn queued_jobs_are_batched_and_give_the_same_images_as_the_command_line() {
    let sandbox = Sandbox::new();
    let server = TestServer::start(&sandbox, &[]);
    let submit = |request: Value| {
        let (_, job) = server.call("POST", "/v1/jobs", Some(request));
        format!("/v1/jobs/{}", job["id"].as_str().unwrap())
    };
    // Keeps the generator busy until it is deleted.
    let first = submit(json!({ "prompt": "a whale", "width": 512, "height": 512, "steps": 200 }));
    server.until(&first, |_, job| job["status"] == "running");
    let prompts = ["a red apple", "a green apple", "a blue car"];
    let request =
        |prompt: &str| json!({ "prompt": prompt, "seed": 5, "width": 128, "height": 96, "steps": 2 });
    let jobs = prompts.map(|prompt| submit(request(prompt)));
    server.call("DELETE", &first, None);
    for (job, prompt) in jobs.iter().zip(prompts) {
        let job = server.until(job, |_, job| job["finished"].is_number());
        assert_eq!(job["status"], "done", "{job}");
        let id = job["images"][0]["id"].as_str().unwrap();
        let served = sandbox.image(&format!("served/pictures/{id}.png"));
        let options = ["-S", "5", "-W", "128", "-H", "96", "-s", "2", "-o", "alone.png"];
        sandbox.kiln(&[&["generate", prompt], &options[..]].concat()).ok();
        assert_eq!(max_difference(&served, &sandbox.image("alone.png")), 0, "{prompt}");
    }
    let (_, metrics) = server.fetch("GET", "/metrics", None);
    assert!(metrics.contains("kiln_batch_images_total{size=\"3\"} 3\n"), "{metrics}");
}

#[test]
fn a_killed_server_resumes_its_jobs_at_the_next_start() {
    let sandbox = Sandbox::new();
    let mut server = TestServer::start(&sandbox, &[]);
    let request =
        |seed: u32| json!({ "prompt": "a whale", "seed": seed, "width": 128, "height": 128, "steps": 12 });
    let jobs: Vec<String> = (0..3)
        .map(|seed| server.call("POST", "/v1/jobs", Some(request(seed))).1["id"].as_str().unwrap().to_owned())
        .collect();
    server.until(&format!("/v1/jobs/{}", jobs[0]), |_, job| {
        job["progress"]["step"].as_u64() > Some(2) || job["status"] == "done"
    });
    server.child.kill().unwrap();
    server.child.wait().unwrap();
    drop(server);
    let server = TestServer::start(&sandbox, &[]);
    for (seed, id) in jobs.iter().enumerate() {
        let job = server.until(&format!("/v1/jobs/{id}"), |_, job| job["finished"].is_number());
        assert_eq!((&job["status"], &job["images"][0]["seed"]), (&json!("done"), &json!(seed.to_string())));
    }
    let (_, gallery) = server.call("GET", "/v1/images", None);
    assert_eq!(gallery["data"].as_array().unwrap().len(), 3, "every job has exactly one image");
}

#[test]
fn a_signal_stops_the_server_and_the_job_resumes() {
    let sandbox = Sandbox::new();
    let mut server = TestServer::start(&sandbox, &["--grace", "0", "--linger", "0"]);
    let (_, job) = server.call("POST", "/v1/jobs", Some(json!({ "prompt": "a whale", "steps": 200 })));
    let path = format!("/v1/jobs/{}", job["id"].as_str().unwrap());
    server.until(&path, |_, job| job["status"] == "running");
    #[cfg(unix)]
    signal(&server.child, "-TERM");
    #[cfg(windows)]
    crate::sandbox::interrupt(&server.child);
    let stopped = Instant::now();
    assert_eq!(server.child.wait().unwrap().code(), Some(0));
    assert!(stopped.elapsed() < Duration::from_secs(30));
    let server = TestServer::start(&sandbox, &[]);
    let job = server.call("GET", &path, None).1;
    assert!(job["status"] == "running" || job["status"] == "queued", "{job}");
    server.call("DELETE", &path, None);
}

#[test]
fn sides_that_a_request_leaves_out_are_within_the_limits_too() {
    let sandbox = Sandbox::new();
    let server = TestServer::start(&sandbox, &["--max-side", "256", "--max-pixels", "16384"]);
    let tall = BASE64_STANDARD.encode(png(&pattern(64, 256)));
    let ask = |request: Value| server.call("POST", "/v1/images/generations", Some(request));
    // The image gives the height: 1024.
    for source in ["init", "references"] {
        let mut request = json!({ "prompt": "a pear", "width": 256, "steps": 1 });
        request[source] = if source == "init" { json!(tall) } else { json!([tall]) };
        let (status, answer) = ask(request);
        assert_eq!(status, 400, "{answer}");
        assert!(
            answer["detail"].as_str().unwrap().contains("is too large: the limit is 16384 pixels"),
            "{answer}"
        );
    }
    let (status, answer) = ask(json!({ "prompt": "a pear", "width": 64, "height": 128, "steps": 1 }));
    assert_eq!((status, &answer["size"]), (200, &json!("64x128")));
}

#[cfg(unix)]
#[test]
fn probes_see_that_the_server_is_stopping_before_it_stops_listening() {
    let sandbox = Sandbox::new();
    let mut server = TestServer::start(&sandbox, &["--linger", "1"]);
    signal(&server.child, "-HUP");
    assert_eq!(server.call("GET", "/healthz", None).0, 200, "SIGHUP reloads");
    signal(&server.child, "-TERM");
    server.until("/readyz", |status, response| status == 503 && response["status"] == "stopping");
    let (status, response) = server.call("POST", "/v1/jobs", Some(json!({ "prompt": "a whale" })));
    assert_eq!((status, &response["error"]["code"]), (503, &json!("shutting_down")));
    assert_eq!(server.child.wait().unwrap().code(), Some(0));
}

/// The program with a browser that writes down what it opens.
fn with_browser(sandbox: &Sandbox, args: &[&str]) -> Command {
    let browser = if cfg!(windows) {
        sandbox.write("browser.bat", b"@echo %1 > opened.txt\r\n")
    } else {
        sandbox.write("browser.sh", b"#!/bin/sh\necho \"$1\" > opened.txt\n")
    };
    #[cfg(unix)]
    fs::set_permissions(sandbox.path(&browser), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let mut command = sandbox.command(&[&["serve", "--data", "served", "--open"], args].concat());
    command.env("BROWSER", sandbox.path(&browser)).stderr(Stdio::piped());
    command
}

/// What the browser was told to open.
fn opened(sandbox: &Sandbox) -> String {
    let start = Instant::now();
    loop {
        let text = fs::read_to_string(sandbox.path("opened.txt")).unwrap_or_default();
        if !text.trim().is_empty() {
            return text.trim().to_owned();
        }
        assert!(start.elapsed() < Duration::from_secs(60), "nothing was opened");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn the_page_is_opened_in_the_browser() {
    let sandbox = Sandbox::new();
    // Other programs have the default port, too: the next free one is taken.
    let _taken = std::net::TcpListener::bind("127.0.0.1:7860");
    let mut child = with_browser(&sandbox, &[]).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    let url = lines.find_map(|line| Some(line.split_once(" at ")?.1.to_owned())).expect("the server ended");
    let shown = opened(&sandbox);
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(shown, format!("{url}/"));
    assert!(url.starts_with("http://127.0.0.1:786") && !url.ends_with(":7860"), "{url}");
}

#[test]
fn a_second_start_opens_the_page_of_the_first() {
    let sandbox = Sandbox::new();
    let server = TestServer::start(&sandbox, &[]);
    let port = server.address.rsplit_once(':').unwrap().1;
    let ran = RunOutput::from(with_browser(&sandbox, &["--port", port]).output().unwrap()).ok();
    assert!(ran.err.contains("kiln runs already"), "{}", ran.err);
    assert_eq!(opened(&sandbox), format!("http://{}/", server.address));
    // Another program has the port.
    let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = other.local_addr().unwrap().port().to_string();
    let ran = with_browser(&sandbox, &["--port", &port]).output().unwrap();
    RunOutput::from(ran).fails(1, &["can't listen", "--port"]);
}

#[test]
fn a_second_server_leaves_the_first_ones_queue_alone() {
    let sandbox = Sandbox::new();
    let server = TestServer::start(&sandbox, &[]);
    let (_, job) = server.call("POST", "/v1/jobs", Some(json!({ "prompt": "a whale", "steps": 200 })));
    let path = format!("/v1/jobs/{}", job["id"].as_str().unwrap());
    server.until(&path, |_, job| job["status"] == "running");
    sandbox
        .kiln(&["serve", "--port", "0", "--data", "served"])
        .fails(1, &["another server is using it", "--data"]);
    // A port in use is found before the data folder is opened.
    let port = server.address.rsplit_once(':').unwrap().1;
    sandbox.kiln(&["serve", "--port", port, "--data", "served"]).fails(1, &["can't listen", "--port"]);
    assert_eq!(server.call("GET", &path, None).1["status"], "running");
    server.call("DELETE", &path, None);
}

#[test]
fn the_json_log_is_json_from_its_first_line_and_links_requests_with_jobs() {
    let sandbox = Sandbox::new();
    let mut command = sandbox.command(&["serve", "--port", "0", "--data", "served", "--json"]);
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(|line| {
        let line = line.unwrap();
        serde_json::from_str::<Value>(&line).unwrap_or_else(|error| panic!("{error}: {line}"))
    });
    let first = lines.next().unwrap();
    let address = first["url"].as_str().unwrap().strip_prefix("http://").unwrap().to_owned();
    assert_eq!(first["message"], "listening");
    let server = TestServer { child, address };
    let body = json!({ "prompt": "a whale", "steps": 1, "width": 64, "height": 64 });
    let (_, job) = server.call("POST", "/v1/jobs", Some(body));
    let queued = lines.find(|line| line["message"] == "job queued").unwrap();
    assert_eq!(queued["job"], job["id"]);
    let request = queued["span"]["request"].as_str().unwrap();
    let mut requests = lines.filter(|line| line["message"] == "request" && line["path"] == "/v1/jobs");
    assert_eq!(requests.next().unwrap()["request"], request);
}

#[test]
fn listening_on_all_interfaces_requires_a_key() {
    let sandbox = Sandbox::new();
    sandbox.kiln(&["serve", "--host", "0.0.0.0", "--port", "0"]).fails(2, &["API key", "--api-key"]);
    let proxied = ["serve", "--trusted-proxy", "10.0.0.1", "--port", "0"];
    sandbox.kiln(&proxied).fails(2, &["a proxy in front", "--api-key"]);
    let short = ["serve", "--host", "0.0.0.0", "--port", "0", "--api-key", "fifteen-letters"];
    sandbox.kiln(&short).fails(2, &["fewer than 16 characters", "openssl rand"]);
    sandbox.write("keys", b"ada 0123456789abcdef\nbob");
    let file = ["serve", "--api-key-file", "keys", "--port", "0"];
    sandbox.kiln(&file).fails(1, &["`keys`", "line 2: expected a name and a key"]);
    sandbox.kiln(&["serve", "--api-key-file", "none", "--port", "0"]).fails(1, &["`none`"]);
    sandbox.kiln(&["serve", "--tls-cert", "c.pem", "--port", "0"]).fails(2, &["--tls-key"]);
    sandbox.write("c.pem", b"no certificate");
    let tls = ["serve", "--tls-cert", "c.pem", "--tls-key", "c.pem", "--port", "0"];
    sandbox.kiln(&tls).fails(1, &["certificate", "`c.pem`", "PEM"]);
    sandbox.kiln(&["serve", "--api-key", "", "--port", "0"]).fails(2, &["empty"]);
    sandbox.kiln(&["serve", "--model-alias", "a=no-such", "--port", "0"]).fails(2, &["no-such", "ember"]);
    sandbox.kiln(&["serve", "--webhook-secret", "short", "--port", "0"]).fails(2, &["at least 16"]);
    sandbox.kiln(&["serve", "-m", "no-such-model", "--port", "0"]).fails(1, &["no-such-model"]);
}

#[test]
fn options_of_the_server_come_from_a_file() {
    let sandbox = Sandbox::new();
    let text = "[serve]\nmax_steps = 3\nmax_side = 512\nmax_pixels = \"4096\"\nno_recipe = true\n";
    sandbox.write("kiln.toml", text.as_bytes());
    let server = TestServer::start(&sandbox, &["--config", "kiln.toml", "--max-side", "640"]);
    let about = server.call("GET", "/v1/about", None).1;
    assert_eq!((&about["steps"], &about["pixels"]), (&json!(3), &json!(4096)));
    assert_eq!(about["side"], 640, "the command line comes first");
    let body = json!({ "prompt": "a", "size": "64x64", "steps": 1 });
    let image = server.call("POST", "/v1/images/generations", Some(body)).1;
    let bytes = BASE64_STANDARD.decode(image["data"][0]["b64_json"].as_str().unwrap()).unwrap();
    assert!(kiln_image::read_recipe(&bytes).unwrap().is_none());
    sandbox.write("bad.toml", b"[serve]\nprot = 1");
    let bad = sandbox.kiln(&["serve", "--config", "bad.toml"]);
    bad.fails(1, &["bad.toml`", "`serve.prot`", "`port`"]);
    sandbox.kiln(&["serve", "--config", "none.toml"]).fails(1, &["none.toml`", "--config"]);
}

/// Runs a Python client script, or skips it if Python or its packages are missing.
pub fn script(sandbox: &Sandbox, name: &str, needs: &str, server: &TestServer) {
    let python = std::env::var("KILN_TEST_PYTHON").unwrap_or_else(|_| "python3".into());
    let has = Command::new(&python).args(["-c", needs]).stderr(Stdio::null()).status();
    if !has.is_ok_and(|status| status.success()) {
        eprintln!("{name}: skipped, it needs Python and `{needs}`");
        return;
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/server-tests").join(name);
    let mut command = Command::new(python);
    command
        .arg(path.canonicalize().unwrap())
        .arg(format!("http://{}", server.address))
        .current_dir(sandbox.path(""));
    let ran = RunOutput::from(command.output().unwrap()).ok();
    assert!(ran.text().contains("passed"), "{}", ran.text());
}

#[test]
fn third_party_clients_work() {
    let sandbox = Sandbox::new();
    let aliases = ["--model-alias", "gpt-image-1=ember", "--model-alias", "dall-e-3=ember"];
    let server = TestServer::start(&sandbox, &aliases);
    script(&sandbox, "openai_client.py", "import openai, PIL", &server);
    script(&sandbox, "litellm_client.py", "import litellm, PIL", &server);
    script(&sandbox, "langchain_client.py", "import langchain_community, openai, PIL", &server);
    script(&sandbox, "a1111_client.py", "import json", &server);
    script(&sandbox, "webuiapi_client.py", "import webuiapi", &server);
    script(&sandbox, "openapi_client.py", "import openapi_python_client, openapi_spec_validator", &server);
}

#[test]
fn files_of_the_models_folder_are_listed_and_used() {
    let sandbox = Sandbox::new();
    sandbox.fill_models_folder();
    let server = TestServer::start(&sandbox, &[]);
    let (_, list) = server.call("GET", "/v1/models", None);
    let names: Vec<&str> =
        list["data"].as_array().unwrap().iter().map(|m| m["id"].as_str().unwrap()).collect();
    assert_eq!(names, ["ember", "klein"], "a transformer alone can't read prompts");
    let body = json!({ "model": "klein", "prompt": "fox", "size": "64x64", "steps": 1, "max_tokens": 32 });
    let (status, response) = server.call("POST", "/v1/images/generations", Some(body));
    assert_eq!(status, 200, "{response}");
}

#[test]
fn several_models_stay_loaded_within_the_memory_for_models() {
    let sandbox = Sandbox::new();
    sandbox.fill_models_folder();
    sandbox.kiln(&["serve", "--preload", "klein", "--port", "0"]).fails(2, &["--model-memory"]);
    let server = TestServer::start(&sandbox, &["--model-memory", "1G", "--preload", "klein"]);
    let (_, metrics) = server.fetch("GET", "/metrics", None);
    for model in ["ember", "klein"] {
        let loaded = format!("kiln_model_loaded{{model=\"{model}\",device=\"cpu\",");
        assert!(metrics.contains(&loaded), "{metrics}");
    }
    assert!(metrics.contains("kiln_build_info{version="), "{metrics}");
}
