//! `kiln serve` with the model inside, over a socket.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};

use crate::kit::{Kit, Ran, levels};

struct Service {
    child: Child,
    address: String,
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Service {
    fn start(kit: &Kit, more: &[&str]) -> Service {
        let mut command = kit.command(&[&["serve", "--port", "0", "--data", "served"], more].concat());
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
        let address = lines.find_map(|line| Some(line.split_once(" at http://")?.1.to_owned()));
        // Read on, or the log would block the server.
        std::thread::spawn(move || lines.for_each(drop));
        let service = Service { address: address.expect("the server ended"), child };
        service.until("/readyz", |status, _| status == 200);
        service
    }

    fn call(&self, method: &str, path: &str, body: Option<Value>) -> (u16, Value) {
        let (status, text) = self.fetch(method, path, body);
        (status, serde_json::from_str(&text).unwrap_or(Value::Null))
    }

    fn fetch(&self, method: &str, path: &str, body: Option<Value>) -> (u16, String) {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        let body = body.map_or(String::new(), |body| body.to_string());
        let length = body.len();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n\
             Content-Length: {length}\r\n\r\n{body}"
        )
        .unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        let answer = String::from_utf8(answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head[9..12].parse().unwrap(), body.to_owned())
    }

    #[track_caller]
    fn until(&self, path: &str, there: impl Fn(u16, &Value) -> bool) -> Value {
        let began = Instant::now();
        loop {
            let (status, answer) = self.call("GET", path, None);
            if there(status, &answer) {
                return answer;
            }
            assert!(began.elapsed() < Duration::from_secs(120), "{path}: {answer}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

#[test]
fn the_service_paints_what_the_command_line_paints() {
    let kit = Kit::new();
    kit.kiln(&["generate", "a red apple", "-S", "7", "-W", "128", "-H", "96", "-s", "2", "-o", "a.png"]).ok();
    let service = Service::start(&kit, &[]);
    let body = json!({ "prompt": "a red apple", "seed": 7, "size": "128x96", "steps": 2 });
    let (status, answer) = service.call("POST", "/v1/images/generations", Some(body));
    assert_eq!(status, 200, "{answer}");
    let bytes = BASE64_STANDARD.decode(answer["data"][0]["b64_json"].as_str().unwrap()).unwrap();
    kit.write("b.png", &bytes);
    assert_eq!(levels(&kit.picture("a.png"), &kit.picture("b.png")), 0);
    let recipe = kiln_image::read_recipe(&bytes).unwrap().unwrap();
    assert!(recipe.contains("\"seed\":7") && recipe.contains("\"model\":{\"path\":\"ember\""), "{recipe}");
    // A picture with a reference and a mask, painted again from its own recipe.
    let picture = format!("picture:{}", answer["data"][0]["picture"].as_str().unwrap());
    let body =
        json!({ "prompt": "a hat", "images": [picture, picture], "strength": 0.7, "steps": 3, "seed": 3 });
    let (status, answer) = service.call("POST", "/v1/images/edits", Some(body));
    assert_eq!(status, 200, "{answer}");
    kit.write("c.png", &BASE64_STANDARD.decode(answer["data"][0]["b64_json"].as_str().unwrap()).unwrap());
    kit.kiln(&["generate", "--from", "c.png", "-o", "d.png"]).ok();
    assert_eq!(levels(&kit.picture("c.png"), &kit.picture("d.png")), 0);
    // What can't be is refused, and the server goes on.
    let (status, answer) = service.call(
        "POST",
        "/v1/images/generations",
        Some(json!({ "prompt": "a", "size": "16x16", "guidance": -1.0 })),
    );
    assert_eq!((status, &answer["error"]["code"]), (400, &json!("invalid_value")));
}

#[test]
fn previews_look_like_the_picture_they_become() {
    let kit = Kit::new();
    let service = Service::start(&kit, &[]);
    let body = json!({ "prompt": "a red apple on a blue background", "seed": 7, "steps": 8, "size": "256x256", "stream": true, "partial_images": 3 });
    let mut stream = TcpStream::connect(&service.address).unwrap();
    let body = body.to_string();
    let length = body.len();
    write!(stream, "POST /v1/images/generations HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let pictures: Vec<_> = answer
        .lines()
        .filter_map(|line| line.strip_prefix("data: "))
        .map(|data| {
            let event: Value = serde_json::from_str(data).unwrap();
            let bytes = BASE64_STANDARD.decode(event["b64_json"].as_str().unwrap()).unwrap();
            let picture = kiln_image::from_bytes("event", &bytes).unwrap();
            kiln_image::resize(&picture, 16, 16, kiln_image::Filter::Bicubic)
        })
        .collect();
    assert_eq!(pictures.len(), 4);
    let last = pictures[3].pixels();
    let off = |picture: &kiln_image::Picture| {
        let sum: u64 = picture.pixels().iter().zip(last).map(|(a, b)| u64::from(a.abs_diff(*b))).sum();
        sum as f64 / last.len() as f64
    };
    assert!(off(&pictures[2]) < 40.0, "the last preview is off by {} levels", off(&pictures[2]));
}

#[test]
fn orders_that_waited_together_are_painted_at_once_as_the_command_line_paints_them_alone() {
    let kit = Kit::new();
    let service = Service::start(&kit, &[]);
    let submit = |order: Value| {
        let (_, job) = service.call("POST", "/v1/jobs", Some(order));
        format!("/v1/jobs/{}", job["id"].as_str().unwrap())
    };
    // Nothing is taken while this one is painted, and it is painted until it is told to stop.
    let first = submit(json!({ "prompt": "a whale", "width": 512, "height": 512, "steps": 200 }));
    service.until(&first, |_, job| job["status"] == "running");
    let prompts = ["a red apple", "a green apple", "a blue car"];
    let order = |prompt: &str| json!({ "prompt": prompt, "seed": 5, "width": 128, "height": 96, "steps": 2 });
    let jobs = prompts.map(|prompt| submit(order(prompt)));
    service.call("DELETE", &first, None);
    for (job, prompt) in jobs.iter().zip(prompts) {
        let job = service.until(job, |_, job| job["finished"].is_number());
        assert_eq!(job["status"], "done", "{job}");
        let id = job["pictures"][0]["id"].as_str().unwrap();
        let served = kit.picture(&format!("served/pictures/{id}.png"));
        let options = ["-S", "5", "-W", "128", "-H", "96", "-s", "2", "-o", "alone.png"];
        kit.kiln(&[&["generate", prompt], &options[..]].concat()).ok();
        assert_eq!(levels(&served, &kit.picture("alone.png")), 0, "{prompt}");
    }
    let (_, metrics) = service.fetch("GET", "/metrics", None);
    assert!(metrics.contains("kiln_batch_pictures_total{size=\"3\"} 3\n"), "{metrics}");
}

#[test]
fn a_killed_server_paints_what_it_promised_when_it_is_back() {
    let kit = Kit::new();
    let mut service = Service::start(&kit, &[]);
    let order =
        |seed: u32| json!({ "prompt": "a whale", "seed": seed, "width": 128, "height": 128, "steps": 30 });
    let jobs: Vec<String> = (0..3)
        .map(|seed| service.call("POST", "/v1/jobs", Some(order(seed))).1["id"].as_str().unwrap().to_owned())
        .collect();
    service.until(&format!("/v1/jobs/{}", jobs[0]), |_, job| {
        job["progress"]["step"].as_u64() > Some(2) || job["status"] == "done"
    });
    service.child.kill().unwrap();
    service.child.wait().unwrap();
    drop(service);
    let service = Service::start(&kit, &[]);
    for (seed, id) in jobs.iter().enumerate() {
        let job = service.until(&format!("/v1/jobs/{id}"), |_, job| job["finished"].is_number());
        assert_eq!((&job["status"], &job["pictures"][0]["seed"]), (&json!("done"), &json!(seed.to_string())));
    }
    let (_, gallery) = service.call("GET", "/v1/pictures", None);
    assert_eq!(gallery["data"].as_array().unwrap().len(), 3, "none is lost, none is doubled");
}

#[cfg(unix)]
#[test]
fn a_server_that_is_told_to_stop_ends_in_order() {
    let kit = Kit::new();
    let mut service = Service::start(&kit, &["--grace", "0"]);
    let (_, job) = service.call("POST", "/v1/jobs", Some(json!({ "prompt": "a whale", "steps": 200 })));
    let path = format!("/v1/jobs/{}", job["id"].as_str().unwrap());
    service.until(&path, |_, job| job["status"] == "running");
    assert!(
        Command::new("kill").args(["-TERM", &service.child.id().to_string()]).status().unwrap().success()
    );
    let asked = Instant::now();
    assert_eq!(service.child.wait().unwrap().code(), Some(0));
    assert!(asked.elapsed() < Duration::from_secs(30));
    let service = Service::start(&kit, &[]);
    let job = service.call("GET", &path, None).1;
    assert!(job["status"] == "running" || job["status"] == "queued", "{job}");
    service.call("DELETE", &path, None);
}

#[test]
fn others_are_let_in_with_a_key_only() {
    let kit = Kit::new();
    kit.kiln(&["serve", "--host", "0.0.0.0", "--port", "0"]).refused(2, &["API key", "--api-key"]);
    kit.kiln(&["serve", "--api-key", "", "--port", "0"]).refused(2, &["empty"]);
    kit.kiln(&["serve", "-m", "no-such-model", "--port", "0"]).refused(1, &["no-such-model"]);
}

/// Runs a client's script; says so where Python or its packages are missing.
fn script(kit: &Kit, name: &str, needs: &str, service: &Service) {
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
        .arg(format!("http://{}", service.address))
        .current_dir(kit.path(""));
    let ran = Ran::from(command.output().unwrap()).ok();
    assert!(ran.text().contains("all well"), "{}", ran.text());
}

#[test]
fn clients_of_others_work_unchanged() {
    let kit = Kit::new();
    let service = Service::start(&kit, &[]);
    script(&kit, "openai_client.py", "import openai, PIL", &service);
    script(&kit, "a1111_client.py", "import json", &service);
}
