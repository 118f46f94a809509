//! What gateways do besides answering: files that belong to nothing, webhooks of gateways that are gone.

use std::net::TcpListener;
use std::time::Duration;

use async_nats::jetstream;
use kiln_server::fleet::{FleetConfig, open_gateway};
use kiln_server::{Config, WebhookConfig};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::node::SleepingGenerator;
use crate::harness::TestServer;
use crate::nats::{Nats, TestWorker, fleet};
use crate::submitting::receive;

#[tokio::test(flavor = "multi_thread")]
async fn old_files_that_belong_to_nothing_are_deleted() {
    let Some(nats) = Nats::start() else { return };
    let folder = TempDir::new().unwrap();
    let config = fleet(&nats.url(), folder.path());
    let worker = TestWorker::with(config.clone(), folder.path());
    worker.generate(SleepingGenerator(Duration::from_millis(1)));
    let open = |name: &str, config: FleetConfig| {
        TestServer::of(open_gateway(Config::new(folder.path().join(name)), config).unwrap())
    };
    let first = open("first", config.clone());
    let id = first.submit(json!({ "prompt": "fine" })).await;
    first.wait(&id).await;
    // As a worker that was killed leaves it.
    let js = jetstream::new(async_nats::connect(nats.url()).await.unwrap());
    let files = js.get_object_store(format!("{}_FILES", config.prefix.to_uppercase())).await.unwrap();
    let orphan = format!("image/{}.png", "ab".repeat(32));
    files.put(orphan.as_str(), &mut &b"orphan"[..]).await.unwrap();
    worker.drain().await;
    tokio::time::sleep(Duration::from_millis(60)).await;
    let second = open("second", FleetConfig { orphan_age: Duration::from_millis(50), ..config });
    while files.info(orphan.as_str()).await.is_ok_and(|info| !info.deleted) {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(!second.get(&format!("/v1/images/{id}-0/file")).await.ok().bytes.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn another_gateway_calls_the_webhook_of_one_that_is_gone() {
    let Some(nats) = Nats::start() else { return };
    let folder = TempDir::new().unwrap();
    let worker = TestWorker::open(&nats.url(), folder.path());
    let gateway = |name: &str| {
        let webhooks = Some(WebhookConfig::new("0123456789abcdef", true).unwrap());
        let config = Config { webhooks, ..Config::new(folder.path().join(name)) };
        TestServer::of(open_gateway(config, fleet(&nats.url(), folder.path())).unwrap())
    };
    let (a, b) = (gateway("a"), gateway("b"));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let id = a.submit(json!({ "prompt": "fine", "webhook": url })).await;
    b.wait_for(&id).await;
    drop(a);
    worker.generate(SleepingGenerator(Duration::from_millis(1)));
    let (_, body) = receive(&listener, "200 OK");
    let job = &serde_json::from_str::<Value>(&body).unwrap()["data"];
    assert_eq!((job["id"].as_str(), job["status"].as_str()), (Some(id.as_str()), Some("done")), "{body}");
}
