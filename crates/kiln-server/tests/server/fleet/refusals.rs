//! What a worker refuses is refused by the gateway in the same words: status, code and field.

use std::time::Duration;

use kiln_server::Config;
use kiln_server::fleet::{QueueAdmin, open_gateway};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::node::SleepingGenerator;
use crate::harness::TestServer;
use crate::nats::{Nats, TestWorker, fleet};

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_a_worker_refuses_is_a_bad_request_at_the_gateway() {
    let Some(nats) = Nats::start() else { return };
    let folder = TempDir::new().unwrap();
    let config = fleet(&nats.url(), folder.path());
    let worker = TestWorker::with_config(config.clone(), folder.path(), |config| config.limits.prompt = 8);
    worker.generate(SleepingGenerator(Duration::from_millis(1)));
    let gateway = open_gateway(Config::new(folder.path().join("gateway")), config.clone()).unwrap();
    let server = TestServer::of(gateway);
    let request = json!({ "prompt": "a fox in the snow" });
    let refused = server.post("/v1/images/generations", request.clone()).await;
    let error = refused.expect_error(400, "prompt_too_long").json();
    assert_eq!(error["error"]["param"], "prompt");
    let id = server.submit(request).await;
    let job = server.wait(&id).await;
    assert_eq!((&job["status"], &job["error"]["code"]), (&json!("failed"), &json!("prompt_too_long")));
    // For gateways that don't know the code.
    let admin = QueueAdmin::open(config).unwrap();
    let record: Value = serde_json::from_str(&admin.job(&id).unwrap().unwrap().json).unwrap();
    assert_eq!(record["error_kind"], "Value");
}
