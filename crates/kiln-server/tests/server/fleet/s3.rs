//! Files in a bucket: the same jobs, a service that is away for a while, and files that belong to nothing.

use std::sync::Arc;
use std::time::Duration;

use kiln_server::Config;
use kiln_server::fleet::{FleetConfig, S3Config, open_gateway, open_worker};
use serde_json::json;
use tempfile::TempDir;

use super::node::SleepingGenerator;
use crate::fake_s3::{FakeS3, KEY};
use crate::harness::{TestCatalogue, TestServer, base64, png};
use crate::nats::{Nats, TestWorker, fleet};

fn bucket(s3: &FakeS3, prefix: &str, key: &str) -> S3Config {
    let settings = [
        ("AWS_ENDPOINT_URL", s3.url()),
        ("AWS_ACCESS_KEY_ID", key.to_owned()),
        ("AWS_SECRET_ACCESS_KEY", "secret".to_owned()),
    ];
    let settings = settings.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    S3Config { url: format!("s3://images{prefix}"), settings }
}

async fn wait_until_gone(s3: &FakeS3, name: &str) {
    for _ in 0..1000 {
        if !s3.names().iter().any(|other| other == name) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("{name} is not deleted");
}

#[tokio::test(flavor = "multi_thread")]
async fn inputs_and_images_are_objects_of_the_bucket() {
    let Some(nats) = Nats::start() else { return };
    let s3 = FakeS3::start().await;
    let folder = TempDir::new().unwrap();
    let config = FleetConfig { s3: Some(bucket(&s3, "/kiln", KEY)), ..fleet(&nats.url(), folder.path()) };
    // Left by a worker that is gone, and a file that is not Kiln's.
    let orphan = format!("kiln/image/{}.png", "ab".repeat(32));
    s3.insert_old(&orphan);
    s3.insert_old("kiln/image/holiday.png");
    s3.insert_old("other/image.png");
    let worker = TestWorker::with(config.clone(), folder.path());
    worker.generate(SleepingGenerator(Duration::from_millis(20)));
    let open = |name: &str| {
        let gateway = open_gateway(Config::new(folder.path().join(name)), config.clone());
        TestServer::of(gateway.unwrap())
    };
    let server = open("a");
    let reference = png(64, 64);
    let job = json!({ "prompt": "fine", "seed": 3, "references": [base64(&reference)] });
    let id = server.submit(job).await;
    assert_eq!(server.wait(&id).await["status"], "done");
    let file = format!("/v1/images/{id}-0/file");
    let image = server.get(&file).await.ok().bytes;
    wait_until_gone(&s3, &orphan).await;
    let names = s3.names();
    let stored = |kind: &str| names.iter().filter(|name| name.starts_with(kind)).count();
    assert_eq!((stored("kiln/image/"), stored("kiln/input/")), (2, 1), "{names:?}");
    assert!(names.contains(&"kiln/image/holiday.png".into()) && names.contains(&"other/image.png".into()));

    // A service that refuses for a while delays a job, and no more.
    s3.refuse_for(Duration::from_millis(1500));
    let late = server.submit(json!({ "prompt": "fine", "seed": 4 })).await;
    assert_eq!(server.wait(&late).await["status"], "done");

    // A new gateway has no copies. It refuses a file whose content was replaced, and fetches the right one.
    let stored = names.iter().find(|name| name.starts_with("kiln/image/") && !name.contains("holiday"));
    let stored = stored.unwrap().clone();
    s3.replace(&stored, b"lie");
    open("b").get(&file).await.expect_error(404, "not_found");
    s3.replace(&stored, &image);
    let other = open("c");
    assert_eq!(other.get(&file).await.ok().bytes, image);
    other.delete(&format!("/v1/images/{id}-0")).await.ok();
    wait_until_gone(&s3, &stored).await;
    worker.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn processes_that_would_lose_files_do_not_start() {
    let Some(nats) = Nats::start() else { return };
    let s3 = FakeS3::start().await;
    let folder = TempDir::new().unwrap();
    let plain = fleet(&nats.url(), folder.path());
    let with = |s3: S3Config| FleetConfig { s3: Some(s3), ..plain.clone() };
    let gateway =
        |name: &str, config: FleetConfig| open_gateway(Config::new(folder.path().join(name)), config);
    let stranger = gateway("stranger", with(bucket(&s3, "", "stranger"))).err().unwrap().to_string();
    assert!(stranger.contains("s3://images") && !stranger.contains("secret"), "{stranger}");
    let missing = S3Config { url: "s3://nowhere".into(), ..bucket(&s3, "", KEY) };
    let missing = gateway("missing", with(missing)).err().unwrap().to_string();
    assert!(missing.contains("s3://nowhere"), "{missing}");
    let first = gateway("first", with(bucket(&s3, "", KEY))).unwrap();
    let worker = Config::new(folder.path().join("worker"));
    let refused = open_worker(worker, plain.clone(), Arc::new(TestCatalogue)).err().unwrap().to_string();
    assert!(refused.contains("keeps its files in `s3://images`"), "{refused}");
    drop(first);
    // Another fleet would take the files of this one for its own that belong to nothing.
    let other = TempDir::new().unwrap();
    let other = FleetConfig { s3: Some(bucket(&s3, "", KEY)), ..fleet(&nats.url(), other.path()) };
    let refused = gateway("other", other.clone()).err().unwrap().to_string();
    assert!(refused.contains("another fleet"), "{refused}");
    gateway("third", FleetConfig { s3: Some(bucket(&s3, "/b", KEY)), prefix: "third".into(), ..other })
        .unwrap();
}
