//! Files that a fleet's workers sign and watermark: a gateway has neither key nor options for it.

use std::sync::Arc;
use std::time::Duration;

use kiln_base::unix_seconds;
use kiln_engine::{Payload, read_watermark};
use kiln_image::read_manifest_store;
use kiln_server::Config;
use kiln_server::fleet::open_gateway;
use serde_json::json;
use tempfile::TempDir;

use super::node::SleepingGenerator;
use crate::harness::{TestServer, base64, png};
use crate::nats::{Nats, TestWorker, fleet};
use crate::sign::signer;

#[tokio::test(flavor = "multi_thread")]
async fn workers_sign_what_they_write_and_leave_jobs_to_others_when_they_cant() {
    let Some(nats) = Nats::start() else { return };
    let folder = TempDir::new().unwrap();
    let config = fleet(&nats.url(), folder.path());
    let gateway = open_gateway(Config::new(folder.path().join("gateway")), config.clone()).unwrap();
    let server = TestServer::of(gateway);
    let expiring = signer(unix_seconds() + 1);
    let worker = |credentials| {
        TestWorker::with_config(config.clone(), folder.path(), |config| {
            config.embedded.credentials = Some(credentials);
            config.embedded.watermark = Some(Payload::KILN);
        })
    };
    let expired = worker(Arc::clone(&expiring));
    while expiring.signer.check().is_ok() {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    expired.generate(SleepingGenerator(Duration::from_millis(4)));
    let healthy = worker(signer(unix_seconds() + 3600));
    healthy.generate(SleepingGenerator(Duration::from_millis(4)));
    // Of `noise`, because a black image holds no watermark.
    for references in [json!([]), json!([base64(&png(16, 16))])] {
        let count = references.as_array().unwrap().len();
        let id = server.submit(json!({ "prompt": "noise", "references": references })).await;
        let job = server.wait(&id).await;
        assert_eq!(job["status"], "done", "{job}");
        let file = server.get(job["images"][0]["url"].as_str().unwrap()).await.ok().bytes;
        let store = read_manifest_store(&file).unwrap().expect("the file is signed");
        let text = String::from_utf8_lossy(&store);
        assert!(text.contains("Ada") && text.contains("c2pa.watermarked.unbound"));
        assert_eq!(text.matches("inputTo").count(), count);
        let image = kiln_image::from_bytes("image", &file).unwrap();
        assert!(read_watermark(&image).unwrap().expect("a watermark").is(Payload::KILN));
    }
    drop((expired, healthy));
}
