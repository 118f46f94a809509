//! Strangers, forged messages, poisoned jobs and workers that lie: refused, and nothing is stored.

use std::time::Duration;

use async_nats::jetstream;
use kiln_server::fleet::{FleetConfig, QueueAdmin, open_gateway};
use serde_json::json;
use tempfile::TempDir;

use super::node::{Node, SleepingGenerator, ask};
use crate::harness::TestServer;
use crate::nats::{Nats, TestWorker, fleet};

#[test]
fn a_stranger_without_credentials_is_refused() {
    let Some(nats) = Nats::with(&["--user", "kiln", "--pass", "secret"]) else { return };
    let folder = TempDir::new().unwrap();
    let stranger = open_gateway(kiln_server::Config::new(folder.path()), fleet(&nats.url(), folder.path()));
    let message = stranger.err().unwrap().to_string();
    assert!(message.contains("authorization") && !message.contains("secret"), "{message}");
    let url = format!("nats://kiln:secret@127.0.0.1:{}", nats.port);
    open_gateway(kiln_server::Config::new(folder.path()), fleet(&url, folder.path())).unwrap();
}

#[test]
fn encryption_certificates_and_nkeys_protect_the_queue() {
    /// A key pair for this test.
    const SEED: &str = "SUAKCQOCTZ4KMCWBBU3EUCC4NMN74ABEICKKYNP5HI76TO5STCQNJHROS4";
    const PUBLIC: &str = "UAMJW4IULMIWIKPKJC4OXDYGE45JJFOYM4XWX3WFO22RPI5DOH4SFCEN";
    let folder = TempDir::new().unwrap();
    let tls = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/server/tls");
    let [certificate, key] = ["certificate.pem", "key.pem"].map(|name| tls.join(name));
    let server = folder.path().join("nats.conf");
    let text = format!(
        "tls {{ cert_file: {certificate:?}, key_file: {key:?} }}\nauthorization {{ users: [{{ nkey: {PUBLIC} }}] }}\n"
    );
    std::fs::write(&server, text).unwrap();
    let Some(nats) = Nats::with(&["-c", server.to_str().unwrap()]) else { return };
    let seed = folder.path().join("seed");
    std::fs::write(&seed, format!("{SEED}\n")).unwrap();
    let url = format!("tls://localhost:{}", nats.port);
    let trusted = FleetConfig {
        nkey: Some(seed.clone()),
        authority: Some(certificate.clone()),
        ..fleet(&url, folder.path())
    };
    let open =
        |fleet: FleetConfig| open_gateway(kiln_server::Config::new(folder.path().join("gateway")), fleet);
    let message = |fleet: FleetConfig| open(fleet).err().unwrap().to_string();
    let unknown = message(FleetConfig { authority: None, ..trusted.clone() });
    assert!(unknown.to_lowercase().contains("certificate"), "{unknown}");
    let stranger = message(FleetConfig { nkey: None, ..trusted.clone() });
    assert!(stranger.contains("authorization"), "{stranger}");
    std::fs::write(&seed, "not a seed").unwrap();
    let wrong = message(trusted.clone());
    assert!(!wrong.contains("not a seed"), "{wrong}");
    std::fs::write(&seed, SEED).unwrap();
    open(trusted).unwrap();
}

#[test]
fn a_poisoned_job_kills_two_workers_and_no_third() {
    let Some(nats) = Nats::start() else { return };
    let folder = TempDir::new().unwrap();
    let worker =
        |n: u32| Node::start("worker", &nats.url(), &folder.path().join(format!("worker-{n}")), 20, 1000, 0);
    let workers = [worker(0), worker(1), worker(2)];
    let gateway = Node::start("gateway", &nats.url(), &folder.path().join("gateway"), 0, 1000, 0);
    let (_, job) = ask(gateway.port, "POST /v1/jobs", r#"{ "prompt": "poison" }"#).unwrap();
    let path = format!("GET /v1/jobs/{}", job["id"].as_str().unwrap());
    let mut job = json!(null);
    for _ in 0..200 {
        job = ask(gateway.port, &path, "").unwrap().1;
        if job["status"] == "failed" {
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(job["error"]["code"], "interrupted", "{job}");
    // The third one goes on.
    let (_, other) = ask(gateway.port, "POST /v1/jobs", r#"{ "prompt": "fine" }"#).unwrap();
    let path = format!("GET /v1/jobs/{}", other["id"].as_str().unwrap());
    while ask(gateway.port, &path, "").unwrap().1["status"] != "done" {
        std::thread::sleep(Duration::from_millis(10));
    }
    let admin = QueueAdmin::open(FleetConfig::new(vec![nats.url()])).unwrap();
    let dead = admin.dead().unwrap();
    assert_eq!((dead.len(), dead[0].error.as_ref().unwrap().0.as_str()), (1, "interrupted"));
    assert!(!admin.retry("none").unwrap() && admin.retry(&dead[0].id).unwrap());
    assert!(admin.dead().unwrap().is_empty());
    assert_eq!(admin.purge(None).unwrap(), 1);
    drop(workers);
}

#[tokio::test(flavor = "multi_thread")]
async fn forged_tickets_records_and_images_are_refused() {
    let Some(nats) = Nats::start() else { return };
    let folder = TempDir::new().unwrap();
    let config = fleet(&nats.url(), folder.path());
    let worker = TestWorker::open(&nats.url(), folder.path());
    worker.generate(SleepingGenerator(Duration::from_millis(20)));
    let gateway =
        open_gateway(kiln_server::Config::new(folder.path().join("gateway")), config.clone()).unwrap();
    let server = TestServer::of(gateway);
    let client = async_nats::connect(nats.url()).await.unwrap();
    let js = jetstream::new(client);
    let subject = format!("{}.jobs.small", config.prefix);
    // Not a ticket at all, a job that no gateway would accept, and one that is too large.
    js.publish(subject.clone(), "not a ticket".into()).await.unwrap().await.unwrap();
    let forged = json!({
        "id": "forged", "client": "x", "attached": false, "api": "jobs", "model": "small", "cost": 1.0,
        "state": "queued", "created": 0, "gateway": "x", "request": { "prompt": "a", "width": 100_000, "seed": 1 },
    });
    // A ticket alone makes no job; a forged record is refused by the worker that claims it.
    js.publish(subject.clone(), forged.to_string().into()).await.unwrap().await.unwrap();
    let config_name = config.prefix.to_uppercase();
    while QueueAdmin::open(config.clone()).unwrap().tickets().unwrap() > 0 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    server.get("/v1/jobs/forged").await.expect_error(404, "not_found");
    let state = js.get_key_value(format!("{config_name}_STATE")).await.unwrap();
    state.put("job.forged", forged.to_string().into()).await.unwrap();
    js.publish(subject.clone(), forged.to_string().into()).await.unwrap().await.unwrap();
    let large = vec![b' '; 900 << 10];
    assert!(js.publish(subject, large.into()).await.unwrap().await.is_err());
    server.wait_for("forged").await;
    let job = server.wait("forged").await;
    assert_eq!((&job["status"], &job["error"]["code"]), (&json!("failed"), &json!("invalid_value")));
    // A record that can't be read, an image of a number that its job did not ask for, and one whose file is another.
    state.put("job.broken", "{".into()).await.unwrap();
    let id = server.submit(json!({ "prompt": "fine", "seed": 3 })).await;
    let job = server.wait(&id).await;
    let image = |number: u32, file: &str| {
        let id = format!("{id}-{number}");
        json!({
            "id": id, "job": id.split('-').next(), "number": number, "created": 1, "width": 1, "height": 1, "seed": "3",
            "file": file, "bytes": 3, "prompt": "fine", "model": "small", "recipe": "{}", "worker": "x", "ticket": 1,
        })
        .to_string()
    };
    let lie = "ab".repeat(32) + ".png";
    state.put(format!("image.{id}-7"), image(7, &lie).into()).await.unwrap();
    let files = js.get_object_store(format!("{}_FILES", config.prefix.to_uppercase())).await.unwrap();
    files.put(format!("image/{lie}").as_str(), &mut &b"lie"[..]).await.unwrap();
    state.put(format!("image.{id}-0"), image(0, &lie).into()).await.unwrap();
    let after = server.submit(json!({ "prompt": "fine" })).await;
    server.wait(&after).await;
    server.get(&format!("/v1/images/{id}-7")).await.expect_error(404, "not_found");
    server.get(&format!("/v1/images/{id}-0/file")).await.expect_error(404, "not_found");
    assert_eq!(job["status"], "done");
    worker.drain().await;
    assert_eq!(QueueAdmin::open(config).unwrap().tickets().unwrap(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn two_gateways_serve_the_same_jobs_and_a_drained_worker_returns_its_job() {
    let Some(nats) = Nats::start() else { return };
    let folder = TempDir::new().unwrap();
    let config = fleet(&nats.url(), folder.path());
    let worker = TestWorker::open(&nats.url(), folder.path());
    worker.generate(SleepingGenerator(Duration::from_millis(4000)));
    let gateway = |name: &str| {
        let config = kiln_server::Config::new(folder.path().join(name));
        TestServer::of(open_gateway(config, fleet(&nats.url(), folder.path())).unwrap())
    };
    let (a, b) = (gateway("a"), gateway("b"));
    let id = a.submit(json!({ "prompt": "long" })).await;
    let path = format!("/v1/jobs/{id}");
    while b.get(&path).await.json()["status"] != "running" {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    // Drained while it runs: another worker takes the job, and it counts as the first try.
    worker.drain().await;
    assert_eq!(b.get(&path).await.json()["status"], "queued");
    let second = TestWorker::with(config, folder.path());
    second.generate(SleepingGenerator(Duration::from_millis(100)));
    assert_eq!(b.wait(&id).await["status"], "done");
    for server in [&a, &b] {
        let image = format!("/v1/images/{id}-0/file");
        assert!(!server.get(&image).await.ok().bytes.is_empty());
    }
    // Cancelled through the other gateway.
    let slow = a.submit(json!({ "prompt": "long", "n": 1 })).await;
    b.wait_for(&slow).await;
    b.delete(&format!("/v1/jobs/{slow}")).await;
    assert!(matches!(a.wait(&slow).await["status"].as_str(), Some("cancelled" | "done")));
    assert!(a.get("/metrics").await.ok().text().contains("kiln_workers "));
}
