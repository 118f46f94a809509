//! How a fleet scales: throughput, latency, long queues, many clients. Run by hand, on a quiet machine:
//! `cargo test --workspace --test server -- --ignored --nocapture fleet::load`

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use kiln_server::fleet::{FleetConfig, QueueAdmin};
use serde_json::Value;
use tempfile::TempDir;

use super::node::{Node, ask};
use crate::nats::Nats;

struct Fleet {
    nats: Nats,
    _workers: Vec<Node>,
    gateways: Vec<Node>,
    _folder: TempDir,
}

fn fleet(workers: usize, gateways: usize, sleep_ms: u64) -> Option<Fleet> {
    let nats = Nats::start()?;
    let folder = TempDir::new().unwrap();
    let start = |role: &str, n: usize| {
        Node::start(role, &nats.url(), &folder.path().join(format!("{role}-{n}")), sleep_ms, 30_000, 0)
    };
    // One worker announces the models, even if it is to do nothing.
    let workers = (0..workers).map(|n| start("worker", n)).collect();
    let gateways = (0..gateways).map(|n| start("gateway", n)).collect();
    Some(Fleet { _workers: workers, gateways, _folder: folder, nats })
}

fn submit(port: u16, prompt: &str, seed: usize) -> String {
    let (status, job) =
        ask(port, "POST /v1/jobs", &format!(r#"{{"prompt":"{prompt}","seed":{seed}}}"#)).unwrap();
    assert_eq!(status, 202, "{job}");
    job["id"].as_str().unwrap().to_owned()
}

fn job(port: u16, id: &str) -> Value {
    ask(port, &format!("GET /v1/jobs/{id}"), "").unwrap().1
}

fn wait(port: u16, id: &str) -> Value {
    loop {
        let job = job(port, id);
        if job["finished"].is_number() {
            return job;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn percentile(mut times: Vec<Duration>, share: f64) -> f64 {
    times.sort();
    times[((times.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e3
}

/// How many jobs each worker did, and its longest pause between two of them.
fn shares(fleet: &Fleet, ids: &[String]) -> String {
    let admin = QueueAdmin::open(FleetConfig::new(vec![fleet.nats.url()])).unwrap();
    let mut workers: BTreeMap<String, Vec<(i64, i64)>> = BTreeMap::new();
    for id in ids {
        let job: Value = serde_json::from_str(&admin.job(id).unwrap().unwrap().json).unwrap();
        let time = |name: &str| job[name].as_i64().unwrap();
        let times = (time("started"), time("finished"));
        workers.entry(job["worker"].as_str().unwrap().to_owned()).or_default().push(times);
    }
    let share = |times: &mut Vec<(i64, i64)>| {
        times.sort_unstable();
        // A job counts as started when it is claimed, before the one ahead of it has ended.
        let pause = times.windows(2).map(|pair| pair[1].1 - pair[0].1).max().unwrap_or(0);
        format!("{} jobs, {pause} ms at most between two ends", times.len())
    };
    workers.values_mut().map(share).collect::<Vec<_>>().join("; ")
}

#[test]
#[ignore = "takes a minute"]
fn workers_add_up() {
    const SLEEP_MS: u64 = 250;
    let mut alone = 0.0;
    for workers in [1, 2, 4, 8] {
        let Some(fleet) = fleet(workers, 1, SLEEP_MS) else { return };
        let port = fleet.gateways[0].port;
        // All are there and have done something.
        let warm: Vec<String> = (0..workers).map(|n| submit(port, "warm", n)).collect();
        warm.iter().for_each(|id| drop(wait(port, id)));
        let jobs = 24 * workers;
        let ids: Vec<String> = (0..jobs).map(|n| submit(port, "a", n)).collect();
        let ended: Vec<Value> = ids.iter().map(|id| wait(port, id)).collect();
        let first = ended.iter().map(|job| job["started"].as_i64().unwrap()).min().unwrap();
        let last = ended.iter().map(|job| job["finished"].as_i64().unwrap()).max().unwrap();
        let rate = jobs as f64 / (last - first) as f64 * 1000.0;
        if workers == 1 {
            alone = rate;
        }
        let linear = rate / (alone * workers as f64);
        println!("{workers} workers: {rate:.2} jobs/s, {linear:.3} of linear; {}", shares(&fleet, &ids));
        assert!(linear >= 0.95, "{linear}");
    }
}

#[test]
#[ignore = "takes a minute"]
fn the_fleet_adds_little_latency() {
    let Some(fleet) = fleet(1, 1, 0) else { return };
    // The same work without a fleet: an embedded server in this process.
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let alone = TempDir::new().unwrap();
    let config = kiln_server::Config::new(alone.path());
    let server = kiln_server::Server::open(config, Arc::new(crate::harness::TestCatalogue)).unwrap();
    server.generate_with(super::node::SleepingGenerator(Duration::ZERO)).unwrap();
    let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
    let ports = [fleet.gateways[0].port, listener.local_addr().unwrap().port()];
    runtime.spawn(kiln_server::serve(server, listener, std::future::pending()));
    let mut times = [Vec::new(), Vec::new()];
    // In turns: the machine is not equally fast all the time.
    for seed in 1..=60 {
        let body = format!(r#"{{"prompt":"noise","seed":{seed},"size":"1024x1024"}}"#);
        for (port, times) in ports.into_iter().zip(&mut times) {
            let started = Instant::now();
            let (status, answer) = ask(port, "POST /v1/images/generations", &body).unwrap();
            times.push(started.elapsed());
            assert_eq!(status, 200, "{answer}");
            if seed == 1 {
                println!("a file of {} bytes", answer["data"][0]["b64_json"].as_str().unwrap().len() * 3 / 4);
            }
        }
    }
    let [fleet, alone] = times.map(|times| percentile(times, 0.5));
    println!("median {fleet:.1} ms in a fleet, {alone:.1} ms alone: {:.1} ms more", fleet - alone);
    runtime.shutdown_background();
}

#[test]
#[ignore = "takes a minute"]
fn a_long_queue_costs_no_more_a_submission() {
    let Some(fleet) = fleet(1, 1, 3_600_000) else { return };
    let port = fleet.gateways[0].port;
    let timed = |count: usize| {
        let times = (0..count).map(|n| {
            let started = Instant::now();
            submit(port, "a", n);
            started.elapsed()
        });
        percentile(times.collect(), 0.5)
    };
    timed(10);
    let short = timed(50);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| (0..1250).for_each(|n| drop(submit(port, "fill", n))));
        }
    });
    let long = timed(50);
    println!("a submission takes {short:.2} ms with 10 jobs queued, {long:.2} ms with 10,000");
}

#[test]
#[ignore = "takes a minute"]
fn many_clients_are_served_for_a_minute() {
    let Some(fleet) = fleet(3, 2, 20) else { return };
    let ports: Vec<u16> = fleet.gateways.iter().map(|gateway| gateway.port).collect();
    let (stop, done) = (AtomicBool::new(false), AtomicUsize::new(0));
    let mut probes = Vec::new();
    std::thread::scope(|scope| {
        for client in 0..64 {
            let (ports, stop, done) = (&ports, &stop, &done);
            scope.spawn(move || {
                let mut n = client;
                while !stop.load(SeqCst) {
                    let id = submit(ports[n % 2], "a", n);
                    n += 1;
                    // Through the other gateway, which may hear of it a moment later.
                    let ended = loop {
                        let job = job(ports[n % 2], &id);
                        if job["finished"].is_number() {
                            break job;
                        }
                        // Every question is a connection, and the machine has few ports for them.
                        std::thread::sleep(Duration::from_millis(300));
                    };
                    assert_eq!(ended["status"], "done", "{ended}");
                    done.fetch_add(1, SeqCst);
                }
            });
        }
        let started = Instant::now();
        while started.elapsed() < Duration::from_secs(60) {
            let asked = Instant::now();
            assert_eq!(ask(ports[probes.len() % 2], "GET /healthz", "").unwrap().0, 200);
            probes.push(asked.elapsed());
            std::thread::sleep(Duration::from_millis(20));
        }
        stop.store(true, SeqCst);
    });
    let p99 = percentile(probes, 0.99);
    println!("{} jobs in 60 s, none lost; /healthz p99 {p99:.1} ms", done.load(SeqCst));
}
