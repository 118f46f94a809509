//! What the queue loses is made again from its records; what can't be stored is refused, and told, within seconds.

use std::net::TcpListener;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use async_nats::jetstream::{self, Context};
use futures_util::StreamExt;
use kiln_server::fleet::{FleetConfig, QueueAdmin, open_gateway};
use kiln_server::{Config, WebhookConfig};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::node::{Node, Proxy, SleepingGenerator, ask};
use crate::harness::TestServer;
use crate::nats::{Nats, TestWorker, fleet};
use crate::submitting::receive;

/// A fleet on a queue of its own.
struct Fleet {
    _nats: Nats,
    config: FleetConfig,
    folder: TempDir,
    server: TestServer,
    js: Context,
}

impl Fleet {
    async fn start() -> Option<Fleet> {
        let nats = Nats::start()?;
        let folder = TempDir::new().unwrap();
        let config =
            FleetConfig { ack_wait: Duration::from_millis(1000), ..fleet(&nats.url(), folder.path()) };
        let server = open_gateway(Config::new(folder.path().join("gateway")), config.clone()).unwrap();
        let js = jetstream::new(async_nats::connect(nats.url()).await.unwrap());
        Some(Fleet { _nats: nats, config, folder, server: TestServer::of(server), js })
    }

    /// A worker that announces its models; it generates once it is told to.
    fn worker(&self) -> TestWorker {
        TestWorker::with(self.config.clone(), self.folder.path())
    }

    fn name(&self, kind: &str) -> String {
        format!("{}_{kind}", self.config.prefix.to_uppercase())
    }

    async fn submit(&self, count: usize) -> Vec<String> {
        // On a busy machine a worker's announcement takes a moment to reach the gateway.
        let started = Instant::now();
        while self.server.get("/v1/models").await.json()["data"].as_array().is_none_or(Vec::is_empty) {
            assert!(started.elapsed() < Duration::from_secs(10), "no worker has announced a model");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let mut ids = Vec::new();
        for number in 0..count {
            ids.push(self.server.submit(json!({ "prompt": "fine", "seed": number })).await);
        }
        ids
    }

    /// Waits until these jobs are done.
    async fn wait(&self, ids: &[String]) {
        let started = Instant::now();
        for id in ids {
            while self.server.get(&format!("/v1/jobs/{id}")).await.json()["status"] != "done" {
                let admin = QueueAdmin::open(self.config.clone()).unwrap();
                let job = || admin.job(id).unwrap().map(|job| job.json);
                assert!(started.elapsed() < Duration::from_secs(20), "the job {id} is stuck: {:?}", job());
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

fn quick() -> SleepingGenerator {
    SleepingGenerator(Duration::from_millis(4))
}

#[tokio::test(flavor = "multi_thread")]
async fn tickets_that_vanish_are_published_again() {
    let Some(fleet) = Fleet::start().await else { return };
    let worker = fleet.worker();
    let ids = fleet.submit(3).await;
    let stream = fleet.js.get_stream(fleet.name("JOBS")).await.unwrap();
    while stream.get_info().await.unwrap().state.messages < 3 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    stream.purge().await.unwrap();
    worker.generate(quick());
    fleet.wait(&ids).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_that_its_worker_does_not_know_of_is_undone() {
    let Some(fleet) = Fleet::start().await else { return };
    let worker = fleet.worker();
    let ids = fleet.submit(1).await;
    // As after a claim whose answer was lost: the record names the worker, and the ticket is gone, too.
    let records = fleet.js.get_key_value(fleet.name("STATE")).await.unwrap();
    let read = async |key: String| records.get(key).await.unwrap();
    let mut node = None;
    let mut keys = records.keys().await.unwrap();
    while let Some(key) = keys.next().await {
        let key = key.unwrap();
        let Some(id) = key.strip_prefix("node.").map(str::to_owned) else { continue };
        let record = read(key).await.map(|value| serde_json::from_slice::<Value>(&value).unwrap());
        if record.is_some_and(|record| record["worker"] == true) {
            node = Some(id);
        }
    }
    let key = format!("job.{}", ids[0]);
    let mut job: Value = serde_json::from_slice(&read(key.clone()).await.unwrap()).unwrap();
    assert_eq!(job["state"], "queued");
    (job["state"], job["worker"]) = ("running".into(), node.expect("the worker has announced itself").into());
    records.put(key, job.to_string().into()).await.unwrap();
    fleet.js.get_stream(fleet.name("JOBS")).await.unwrap().purge().await.unwrap();
    worker.generate(quick());
    fleet.wait(&ids).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_stream_or_consumer_is_created_again_and_every_job_runs() {
    let Some(fleet) = Fleet::start().await else { return };
    let worker = fleet.worker();
    // Records that name the first tickets of the stream: those of the next one have the same numbers.
    let ids = fleet.submit(5).await;
    worker.generate(quick());
    fleet.wait(&ids).await;
    let busy = fleet.submit(3).await;
    fleet.js.delete_stream(fleet.name("JOBS")).await.unwrap();
    fleet.wait(&busy).await;
    let ids = fleet.submit(8).await;
    fleet.wait(&ids).await;
    let stream = fleet.js.get_stream(fleet.name("JOBS")).await.unwrap();
    stream.delete_consumer("small").await.unwrap();
    let ids = fleet.submit(3).await;
    fleet.wait(&ids).await;
    // What was published once too often is removed.
    let admin = QueueAdmin::open(fleet.config.clone()).unwrap();
    let started = Instant::now();
    while admin.tickets().unwrap() > 0 {
        assert!(started.elapsed() < Duration::from_secs(10), "{} tickets are left", admin.tickets().unwrap());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_bucket_is_told_and_a_new_one_is_used() {
    let Some(fleet) = Fleet::start().await else { return };
    let worker = fleet.worker();
    worker.generate(quick());
    let ids = fleet.submit(2).await;
    fleet.wait(&ids).await;
    fleet.js.delete_key_value(fleet.name("STATE")).await.unwrap();
    let started = Instant::now();
    loop {
        let ready = fleet.server.get("/readyz").await;
        if ready.status == 503 && ready.text().contains("is gone") {
            break;
        }
        assert!(started.elapsed() < Duration::from_secs(5), "{}", ready.text());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let refused = fleet.server.post("/v1/jobs", json!({ "prompt": "a" })).await;
    assert_eq!(refused.status, 503, "{}", refused.text());
    // A process that starts creates it; the others notice.
    let second = fleet.worker();
    second.generate(quick());
    let started = Instant::now();
    loop {
        let answer = fleet.server.post("/v1/jobs", json!({ "prompt": "a" })).await;
        if answer.status == 202 {
            let id = answer.json()["id"].as_str().unwrap().to_owned();
            break fleet.wait(&[id]).await;
        }
        assert!(started.elapsed() < Duration::from_secs(15), "{}", answer.text());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// The record of the job is written late: until then no worker may know of the job.
#[tokio::test(flavor = "multi_thread")]
async fn a_webhook_is_called_although_a_worker_is_faster_than_the_gateway() {
    let Some(nats) = Nats::start() else { return };
    let folder = TempDir::new().unwrap();
    let config = fleet(&nats.url(), folder.path());
    let proxy = Proxy::delaying(nats.port, Some(("_STATE.job.", Duration::from_millis(600))));
    let slow = FleetConfig { servers: vec![format!("nats://127.0.0.1:{}", proxy.port)], ..config.clone() };
    let worker = TestWorker::with(config, folder.path());
    worker.generate(quick());
    let webhooks = Some(WebhookConfig::new("0123456789abcdef", true).unwrap());
    let gateway = Config { webhooks, ..Config::new(folder.path().join("gateway")) };
    let server = TestServer::of(open_gateway(gateway, slow).unwrap());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let mut request = crate::harness::post("/v1/jobs", json!({ "prompt": "fine", "webhook": url }));
    request.headers_mut().insert("idempotency-key", "key".parse().unwrap());
    let id = server.send(request).await.ok().json()["id"].as_str().unwrap().to_owned();
    let (sender, called) = std::sync::mpsc::channel();
    std::thread::spawn(move || sender.send(receive(&listener, "200 OK").1));
    assert_eq!(server.wait(&id).await["status"], "done");
    let body = called.recv_timeout(Duration::from_secs(10)).expect("the webhook was not called");
    assert_eq!(serde_json::from_str::<Value>(&body).unwrap()["data"]["id"], id.as_str());
}

/// Until the first request is stored, a repeated one is not promised anything.
#[tokio::test(flavor = "multi_thread")]
async fn a_repeated_request_is_accepted_only_if_the_first_one_is() {
    let Some(mut nats) = Nats::start() else { return };
    let folder = TempDir::new().unwrap();
    let config = fleet(&nats.url(), folder.path());
    let worker = TestWorker::with(config.clone(), folder.path());
    worker.generate(quick());
    let server = TestServer::of(open_gateway(Config::new(folder.path().join("gateway")), config).unwrap());
    server.wait(&server.submit(json!({ "prompt": "fine" })).await).await;
    let request = || {
        let mut request = crate::harness::post("/v1/jobs", json!({ "prompt": "fine", "seed": 1 }));
        request.headers_mut().insert("idempotency-key", "key".parse().unwrap());
        server.send(request)
    };
    nats.kill();
    let (first, second) = tokio::join!(request(), request());
    let status = (first.status.as_u16(), second.status.as_u16());
    assert_eq!(status, (503, 503), "{:?} {:?}", first.json(), second.json());
    nats.restart();
    let started = Instant::now();
    let id = loop {
        let (first, second) = tokio::join!(request(), request());
        if first.status.is_success() && second.status.is_success() {
            assert_eq!(first.json()["id"], second.json()["id"]);
            break first.ok().json()["id"].as_str().unwrap().to_owned();
        }
        assert!(started.elapsed() < Duration::from_secs(30), "{:?}", first.json());
    };
    assert_eq!(server.wait(&id).await["status"], "done");
}

/// A small file system.
struct SmallDisk<'a>(&'a Path);

impl SmallDisk<'_> {
    fn mount(folder: &Path) -> Option<SmallDisk<'_>> {
        std::fs::create_dir_all(folder).unwrap();
        let mount =
            Command::new("mount").args(["-t", "tmpfs", "-o", "size=32m", "tmpfs"]).arg(folder).output();
        let mounted = mount.is_ok_and(|output| output.status.success());
        if !mounted {
            println!("skipped: no file system can be mounted");
        }
        mounted.then_some(SmallDisk(folder))
    }

    fn fill(&self) {
        use std::io::Write;

        let mut file = std::fs::File::create(self.0.join("filling")).unwrap();
        while file.write_all(&[1; 4096]).is_ok() {}
    }

    fn free(&self) {
        std::fs::remove_file(self.0.join("filling")).unwrap();
    }
}

impl Drop for SmallDisk<'_> {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0).status();
    }
}

#[test]
fn a_full_disk_under_the_queue_is_told_within_seconds_and_a_restart_mends_the_fleet() {
    let folder = TempDir::new().unwrap();
    let disk_folder = folder.path().join("disk");
    let Some(disk) = SmallDisk::mount(&disk_folder) else { return };
    let Some(mut nats) = Nats::with(&["-sd", disk_folder.to_str().unwrap()]) else { return };
    let worker = Node::start("worker", &nats.url(), &folder.path().join("worker"), 10, 1000, 0);
    let gateway = Node::start("gateway", &nats.url(), &folder.path().join("gateway"), 0, 1000, 0);
    let submit = || ask(gateway.port, "POST /v1/jobs", r#"{ "prompt": "fine" }"#).unwrap();
    let ready = || ask(gateway.port, "GET /readyz", "").unwrap();
    let ends = |id: &Value| {
        let path = format!("GET /v1/jobs/{}", id.as_str().unwrap());
        let started = Instant::now();
        while ask(gateway.port, &path, "").unwrap().1["status"] != "done" {
            assert!(started.elapsed() < Duration::from_secs(20), "a job does not end");
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    ends(&submit().1["id"]);
    disk.fill();
    let filled = Instant::now();
    while ready().0 != 503 {
        assert!(filled.elapsed() < Duration::from_secs(5), "/readyz says {:?}", ready());
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(ready().1["message"].as_str().unwrap().contains("disk"), "{:?}", ready());
    let started = Instant::now();
    let refused = submit();
    assert_eq!(refused.0, 503, "{refused:?}");
    assert!(started.elapsed() < Duration::from_secs(5), "refused after {:?}", started.elapsed());
    // nats-server does not write again before it is restarted.
    disk.free();
    nats.kill();
    nats.restart();
    let started = Instant::now();
    let accepted = loop {
        let answer = submit();
        if answer.0 == 202 {
            break answer.1;
        }
        assert!(started.elapsed() < Duration::from_secs(20), "{answer:?}");
        std::thread::sleep(Duration::from_millis(100));
    };
    ends(&accepted["id"]);
    assert_eq!(ready().0, 200, "{:?}", ready());
    drop(worker);
}

#[test]
fn frozen_workers_come_back_and_no_job_is_blamed() {
    let Some(nats) = Nats::start() else { return };
    let folder = TempDir::new().unwrap();
    let worker =
        |n: u32| Node::start("worker", &nats.url(), &folder.path().join(format!("worker-{n}")), 400, 800, 0);
    let workers = [worker(0), worker(1)];
    let gateway = Node::start("gateway", &nats.url(), &folder.path().join("gateway"), 0, 800, 0);
    let submit = |n: u32| {
        let (status, job) =
            ask(gateway.port, "POST /v1/jobs", &json!({ "prompt": "a", "seed": n }).to_string()).unwrap();
        assert_eq!(status, 202, "{job}");
        job["id"].as_str().unwrap().to_owned()
    };
    let ids: Vec<String> = (0..14).map(submit).collect();
    for worker in workers.iter().cycle().take(4) {
        std::thread::sleep(Duration::from_millis(300));
        worker.signal("-STOP");
        std::thread::sleep(Duration::from_millis(1700));
        worker.signal("-CONT");
    }
    let deadline = Instant::now() + Duration::from_secs(60);
    for id in &ids {
        loop {
            let job = ask(gateway.port, &format!("GET /v1/jobs/{id}"), "").unwrap().1;
            match job["status"].as_str() {
                Some("done") => break,
                Some("queued" | "running") => {}
                _ => panic!("{job}"),
            }
            assert!(Instant::now() < deadline, "{job}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
    // What a worker drops that comes back too late is what another one has stored.
    for id in ids {
        let (status, _) = ask(gateway.port, &format!("GET /v1/images/{id}-0/file"), "").unwrap();
        assert_eq!(status, 200, "the file of job {id} is gone");
    }
}
