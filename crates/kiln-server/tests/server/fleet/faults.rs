//! Workers, gateways and the queue that die, stop and lose their network: no job is lost and none is done twice.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use kiln_server::fleet::{FleetConfig, QueueAdmin};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::node::{Node, Proxy, ask};
use crate::harness::{base64, png};
use crate::nats::Nats;

/// What happens to the fleet.
struct Chaos {
    jobs: usize,
    clients: usize,
    workers: usize,
    sleep_ms: u64,
    ack_wait_ms: u64,
    /// Events, each followed by a pause.
    events: Vec<&'static str>,
    pause: Duration,
    offline: Duration,
}

/// A job's id and end, or what happened instead.
type Ended = Result<(String, Value), String>;

/// A generator of numbers that needs no crate.
fn next(state: &mut u64) -> usize {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*state >> 33) as usize
}

/// Submits a job until a gateway accepts it, with one key, and waits for its end.
fn one_job(number: usize, ports: &[u16], deadline: Instant) -> Ended {
    let mut job = json!({ "prompt": format!("job {number}"), "seed": number });
    if number.is_multiple_of(5) {
        job["references"] = json!([base64(&png(8, 8 + number as u32 % 64))]);
    }
    let (body, mut turn) = (job.to_string(), number);
    let mut last = None;
    let id = loop {
        if Instant::now() > deadline {
            return Err(format!("job {number} was not accepted: {last:?}"));
        }
        turn += 1;
        let head = format!("POST /v1/jobs|idempotency-key: key-{number}");
        last = ask(ports[turn % ports.len()], &head, &body);
        match &last {
            Some((202, job)) => break job["id"].as_str().unwrap().to_owned(),
            Some((status @ (400 | 404 | 422), error)) => {
                return Err(format!("job {number}: {status} {error}"));
            }
            _ => std::thread::sleep(Duration::from_millis(100)),
        }
    };
    loop {
        if Instant::now() > deadline {
            return Err(format!("job {id} does not end: {last:?}"));
        }
        turn += 1;
        last = ask(ports[turn % ports.len()], &format!("GET /v1/jobs/{id}"), "");
        match &last {
            Some((200, job)) if !matches!(job["status"].as_str(), Some("queued" | "running")) => {
                return Ok((id, job.clone()));
            }
            _ => std::thread::sleep(Duration::from_millis(100)),
        }
    }
}

/// A folder without room: a file system of 16 KiB that is full or, where nobody may mount one, a file in its place.
struct FullDisk(Option<PathBuf>);

impl FullDisk {
    fn at(folder: &Path) -> FullDisk {
        std::fs::create_dir_all(folder).unwrap();
        let mount =
            Command::new("mount").args(["-t", "tmpfs", "-o", "size=16k", "tmpfs"]).arg(folder).output();
        if mount.is_ok_and(|output| output.status.success()) {
            let filled = std::fs::write(folder.join("large"), vec![1; 1 << 20]);
            assert_eq!(filled.unwrap_err().kind(), std::io::ErrorKind::StorageFull);
            return FullDisk(Some(folder.to_path_buf()));
        }
        println!("no file system can be mounted: a file takes the place of a full one");
        std::fs::remove_dir_all(folder).unwrap();
        std::fs::write(folder, "no room").unwrap();
        FullDisk(None)
    }
}

impl Drop for FullDisk {
    fn drop(&mut self) {
        if let Some(folder) = &self.0 {
            let _ = Command::new("umount").arg("-l").arg(folder).status();
        }
    }
}

fn run(chaos: &Chaos) {
    let Some(mut nats) = Nats::start() else { return };
    let proxy = Proxy::start(nats.port);
    let (url, folder) = (format!("nats://127.0.0.1:{}", proxy.port), TempDir::new().unwrap());
    let worker = |n: usize| {
        let folder = folder.path().join(format!("worker-{n}"));
        Node::start("worker", &url, &folder, chaos.sleep_ms, chaos.ack_wait_ms, 0)
    };
    let gateway = |n: usize, port| {
        Node::start("gateway", &url, &folder.path().join(format!("gateway-{n}")), 0, chaos.ack_wait_ms, port)
    };
    let mut workers: Vec<Node> = (0..chaos.workers).map(worker).collect();
    let mut gateways: Vec<Node> = (0..2).map(|n| gateway(n, 0)).collect();
    let ports: Vec<u16> = gateways.iter().map(|gateway| gateway.port).collect();
    let deadline = Instant::now() + Duration::from_secs(300);
    let (taken, results) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let mut full_disks = Vec::new();
    let started = Instant::now();
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..chaos.clients)
            .map(|_| {
                scope.spawn(|| {
                    loop {
                        let number = taken.fetch_add(1, SeqCst);
                        if number >= chaos.jobs {
                            return;
                        }
                        let result = one_job(number, &ports, deadline);
                        results.lock().unwrap().push((number, result));
                    }
                })
            })
            .collect();
        let (mut state, mut count) = (7, chaos.workers);
        for event in &chaos.events {
            std::thread::sleep(chaos.pause);
            if clients.iter().all(|client| client.is_finished()) {
                break;
            }
            println!("{:6.1} s  {event}", started.elapsed().as_secs_f64());
            let (w, g) = (next(&mut state) % workers.len(), next(&mut state) % gateways.len());
            match *event {
                "kill worker" => {
                    workers[w].kill();
                    workers[w] = worker(count);
                    count += 1;
                }
                "kill gateway" => {
                    gateways[g].kill();
                    gateways[g] = gateway(g, ports[g]);
                }
                "kill queue" => {
                    nats.kill();
                    std::thread::sleep(Duration::from_millis(300));
                    nats.restart();
                }
                "stop worker" => {
                    workers[w].signal("-STOP");
                    std::thread::sleep(Duration::from_millis(2 * chaos.ack_wait_ms));
                    workers[w].signal("-CONT");
                }
                "full disk" => full_disks.push(FullDisk::at(&workers[w].folder.join("inputs"))),
                "offline" => {
                    proxy.close();
                    std::thread::sleep(chaos.offline);
                    proxy.reopen();
                }
                other => panic!("{other}"),
            }
        }
        clients.into_iter().for_each(|client| client.join().unwrap());
    });
    check(chaos, results.into_inner().unwrap(), &ports, &nats);
    println!("{} jobs in {:.1} s", chaos.jobs, started.elapsed().as_secs_f64());
}

fn check(chaos: &Chaos, results: Vec<(usize, Ended)>, ports: &[u16], nats: &Nats) {
    assert_eq!(results.len(), chaos.jobs);
    let lost: Vec<_> = results.iter().filter_map(|(_, result)| result.as_ref().err()).collect();
    assert!(lost.is_empty(), "{} lost: {:?}", lost.len(), &lost[..lost.len().min(5)]);
    let (mut ids, mut made, mut failed) = (HashSet::new(), 0, Vec::new());
    for (number, result) in &results {
        let (id, job) = result.as_ref().unwrap();
        assert!(ids.insert(id.clone()), "{id} was given twice");
        if job["status"] == "done" {
            made += 1;
            let images = job["images"].as_array().unwrap();
            assert_eq!(images.len(), 1, "{job}");
            assert_eq!(images[0]["seed"], number.to_string(), "{job}");
            let file = format!("GET /v1/images/{}", images[0]["id"].as_str().unwrap());
            assert_eq!(ask(ports[number % ports.len()], &file, "").map(|(status, _)| status), Some(200));
        } else {
            assert!(job["error"]["code"].is_string(), "{job}");
            failed.push(job["error"]["code"].clone());
        }
    }
    // The gallery has each of them once.
    let (mut images, mut before) = (HashSet::new(), String::new());
    loop {
        let page = ask(ports[0], &format!("GET /v1/images?limit=200{before}"), "").unwrap().1;
        for image in page["data"].as_array().unwrap() {
            assert!(images.insert(image["id"].as_str().unwrap().to_owned()));
            before = format!("&before={}", image["id"].as_str().unwrap());
        }
        if page["more"] != true {
            break;
        }
    }
    assert!(images.len() >= made, "{} images of {made} jobs", images.len());
    let strange = images.iter().find(|image| !image.strip_suffix("-0").is_some_and(|id| ids.contains(id)));
    assert!(strange.is_none(), "{strange:?} belongs to no job");
    let config = FleetConfig {
        ack_wait: Duration::from_millis(chaos.ack_wait_ms),
        ..FleetConfig::new(vec![nats.url()])
    };
    let admin = QueueAdmin::open(config).unwrap();
    let emptied = Instant::now();
    while admin.tickets().unwrap() > 0 && emptied.elapsed() < Duration::from_secs(30) {
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!((admin.jobs().len(), admin.tickets().unwrap()), (0, 0), "the queue is not empty");
    println!("{made} done, {} failed {failed:?}, {} dead letters", failed.len(), admin.dead().unwrap().len());
}

#[test]
fn a_killed_worker_and_a_killed_queue_lose_nothing() {
    run(&Chaos {
        jobs: 40,
        clients: 8,
        workers: 2,
        sleep_ms: 60,
        ack_wait_ms: 1000,
        events: vec!["kill worker", "kill queue"],
        pause: Duration::from_millis(400),
        offline: Duration::ZERO,
    });
}

/// `cargo test --release --workspace --test server -- --ignored --nocapture fleet::faults`
#[test]
#[ignore = "takes minutes"]
fn six_hundred_jobs_survive_everything() {
    let round = ["kill worker", "kill gateway", "kill worker", "kill queue", "stop worker", "kill worker"];
    let mut events = round.to_vec();
    events.extend(["full disk", "kill gateway", "offline"]);
    events.extend(round.repeat(8));
    run(&Chaos {
        jobs: 600,
        clients: 16,
        workers: 3,
        sleep_ms: 250,
        ack_wait_ms: 4000,
        events,
        pause: Duration::from_millis(1500),
        offline: Duration::from_secs(20),
    });
}
