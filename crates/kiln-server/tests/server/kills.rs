//! `kill -9` at random moments, a hundred times: no job that was accepted is lost or done twice.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use kiln_filters::ImageCheck;
use kiln_server::{Config, Server};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::TcpListener;

use crate::harness::{TestCatalogue, TestGenerator, TestServer, base64, config, png};
use crate::socket;

const ROUNDS: u64 = 100;
const FOLDER_VARIABLE: &str = "KILN_KILL_TEST_FOLDER";

const CHECK_VARIABLE: &str = "KILN_KILL_TEST_CHECK";

/// A server in a process of its own.
pub struct ServerProcess {
    child: Child,
    port: u16,
}

impl ServerProcess {
    fn start(folder: &Path) -> ServerProcess {
        ServerProcess::start_checked(folder, "")
    }

    /// Starts a server that checks its images; an empty option is no check.
    pub fn start_checked(folder: &Path, check: &str) -> ServerProcess {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "kills::server_to_kill", "--nocapture"])
            .env(FOLDER_VARIABLE, folder)
            .env(CHECK_VARIABLE, check)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let port = lines.map_while(Result::ok).find_map(|line| line.strip_prefix("port ")?.parse().ok());
        ServerProcess { port: port.expect("the server did not start"), child }
    }

    /// Submits a job; returns its id if it was accepted.
    #[cfg(unix)]
    pub fn submit(&self, job: &Value) -> Option<String> {
        submit(self.port, job)
    }

    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// Submits a job to the server at this port. Returns its id if the server accepted it.
fn submit(port: u16, job: &Value) -> Option<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.write_all(socket::request("/v1/jobs", &job.to_string()).as_bytes()).ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    assert!(head.starts_with("HTTP/1.1 202"), "{answer}");
    Some(serde_json::from_str::<Value>(body).ok()?["id"].as_str()?.to_owned())
}

/// Not a test: the process that the test below kills.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "started by another test"]
async fn server_to_kill() {
    let Some(folder) = std::env::var_os(FOLDER_VARIABLE) else { return };
    let check = std::env::var(CHECK_VARIABLE).ok().filter(|check| !check.is_empty());
    let check = check.map(|check| ImageCheck::new(&check, Duration::from_secs(5)).unwrap());
    let config = Config { check, ..config(Path::new(&folder)) };
    let server = Server::open(config, Arc::new(TestCatalogue)).unwrap();
    server.generate_with(TestGenerator { received: Arc::default(), batch_capacity: 1 }).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    // The line of the test harness has no end yet.
    println!("\nport {}", listener.local_addr().unwrap().port());
    kiln_server::serve(server, listener, std::future::pending()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_survive_a_hundred_kills() {
    let folder = Arc::new(TempDir::new().unwrap());
    let mut accepted = Vec::new();
    for round in 0..ROUNDS {
        let server = ServerProcess::start(folder.path());
        let seed = 10 * round;
        let reference = base64(&png(8, 8 + round as u32));
        let job = json!({ "prompt": "a fox", "seed": seed, "n": 2, "steps": 1, "references": [reference] });
        let port = server.port;
        let submitting = std::thread::spawn(move || submit(port, &job));
        // Every third server is killed while it accepts the job, the others while they generate it.
        while round % 3 != 0 && !submitting.is_finished() {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_millis(round * 7 % 31));
        server.kill();
        accepted.extend(submitting.join().unwrap().map(|id| (id, seed)));
    }
    assert!(accepted.len() >= ROUNDS as usize / 2, "{} jobs were accepted", accepted.len());
    let server = TestServer::open(folder, |_| {}, true);
    let mut done = 0;
    for (id, seed) in &accepted {
        let job = server.wait(id).await;
        if job["status"] == "done" {
            done += 1;
            let seeds: Vec<&str> =
                job["images"].as_array().unwrap().iter().map(|p| p["seed"].as_str().unwrap()).collect();
            assert_eq!(seeds, [seed.to_string(), (seed + 1).to_string()], "{job}");
        } else {
            assert_eq!(job["error"]["code"], "interrupted", "{job}");
        }
    }
    // How many are killed twice depends on the machine.
    assert!(done >= accepted.len() / 2, "{done} of {} jobs were done", accepted.len());
    every_image_is_whole(&server).await;
}

/// No image of the gallery is there twice, and every file can be read.
async fn every_image_is_whole(server: &TestServer) {
    let images = server.get("/v1/images?limit=200").await.ok().json()["data"].take();
    let mut seeds = Vec::new();
    for image in images.as_array().unwrap() {
        let file = server.get(&format!("/v1/images/{}/file", image["id"].as_str().unwrap())).await.ok();
        assert!(kiln_image::from_bytes("image", &file.bytes).is_ok());
        seeds.push(image["seed"].as_str().unwrap());
    }
    let count = seeds.len();
    seeds.sort();
    seeds.dedup();
    assert_eq!(seeds.len(), count, "an image was made twice");
}
