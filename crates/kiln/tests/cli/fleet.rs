//! A gateway and two workers with Ember, on a real NATS server. Without one this says so and passes.

use std::io::{BufRead, BufReader};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use serde_json::json;

use crate::sandbox::{Sandbox, max_difference};
use crate::serve::{TestServer, script};

/// A process that ends with the test.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn nats_server() -> Option<PathBuf> {
    let named = std::env::var_os("KILN_TEST_NATS").map(PathBuf::from);
    let paths = std::env::var_os("PATH").unwrap_or_default();
    let mut files = std::env::split_paths(&paths).map(|folder| folder.join("nats-server"));
    named.or_else(|| files.find(|file| file.is_file()))
}

fn start_queue(sandbox: &Sandbox, program: &Path) -> (Process, String) {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut command =
        sandbox.command_of(program, &["-js", "-a", "127.0.0.1", "-p", &port.to_string(), "-sd", "queue"]);
    let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        std::thread::sleep(Duration::from_millis(10));
    }
    (Process(child), format!("nats://127.0.0.1:{port}"))
}

fn start_worker(sandbox: &Sandbox, url: &str) -> Process {
    let mut command = sandbox.command(&["worker", "--queue", url, "--ack-wait", "5"]);
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
    assert!(lines.any(|line| line.contains("worker ready")), "the worker ended");
    std::thread::spawn(move || lines.for_each(drop));
    Process(child)
}

#[test]
fn two_workers_generate_the_same_images_as_the_command_line_and_clients_see_no_difference() {
    let Some(program) = nats_server() else {
        println!("skipped: there is no nats-server; set KILN_TEST_NATS to one");
        return;
    };
    let sandbox = Sandbox::new();
    let (_queue, url) = start_queue(&sandbox, &program);
    let workers = [start_worker(&sandbox, &url), start_worker(&sandbox, &url)];
    let aliases = ["--model-alias", "gpt-image-1=ember", "--model-alias", "dall-e-3=ember"];
    let server = TestServer::start(&sandbox, &[&["--queue", &url, "--ack-wait", "5"], &aliases[..]].concat());
    let jobs = [3, 4].map(|seed| {
        let request = json!({ "prompt": "a red apple", "seed": seed, "width": 96, "height": 64, "steps": 2 });
        let (status, job) = server.call("POST", "/v1/jobs", Some(request));
        assert_eq!(status, 202, "{job}");
        job["id"].as_str().unwrap().to_owned()
    });
    for (id, seed) in jobs.iter().zip(["3", "4"]) {
        let job = server.until(&format!("/v1/jobs/{id}"), |_, job| job["finished"].is_number());
        assert_eq!(job["status"], "done", "{job}");
        sandbox.write("fleet.png", &server.bytes(&format!("/v1/images/{id}-0/file")));
        let options = ["-S", seed, "-W", "96", "-H", "64", "-s", "2", "-o", "alone.png"];
        sandbox.kiln(&[&["generate", "a red apple"], &options[..]].concat()).ok();
        assert_eq!(max_difference(&sandbox.image("fleet.png"), &sandbox.image("alone.png")), 0);
    }
    let listed = sandbox.kiln(&["workers", "--queue", &url, "--ack-wait", "5"]).ok();
    assert_eq!(listed.text().matches("  worker  ").count(), 2, "{}", listed.text());
    sandbox.kiln(&["queue", "--queue", &url, "list"]).ok();
    sandbox.kiln(&["queue", "--queue", &url, "show", "none"]).fails(1, &["no job `none`", "kiln queue list"]);
    script(&sandbox, "openai_client.py", "import openai, PIL", &server);
    script(&sandbox, "a1111_client.py", "import json", &server);
    drop(workers);
}

#[test]
fn a_queue_that_is_not_there_is_an_error() {
    let sandbox = Sandbox::new();
    let worker = ["worker", "--queue", "nats://127.0.0.1:1"];
    sandbox.kiln(&worker).fails(1, &["can't reach the queue at nats://127.0.0.1:1", "nats-server"]);
    sandbox.kiln(&["worker", "--queue", "queue:4222"]).fails(2, &["queue:4222", "nats://"]);
}

#[test]
fn a_worker_with_a_damaged_model_does_not_start() {
    let sandbox = Sandbox::with_model("klein");
    let file = "vae/diffusion_pytorch_model.safetensors";
    let bytes = std::fs::read(sandbox.model().join(file)).unwrap();
    sandbox.write_to_model(file, &bytes[..bytes.len() - 100]);
    let worker = ["worker", "--queue", "nats://127.0.0.1:1", "-m", sandbox.model().to_str().unwrap()];
    sandbox.kiln(&worker).fails(1, &[file, "bytes of data"]);
}
