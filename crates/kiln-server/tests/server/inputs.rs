//! Input images are decoded once.

use std::sync::Arc;

use serde_json::json;
use tempfile::TempDir;

use crate::harness::{TestServer, base64, png};

#[tokio::test]
async fn an_image_in_a_request_is_decoded_once() {
    let server = TestServer::new();
    let request = json!({
        "prompt": "a hat", "references": [base64(&png(32, 32)), base64(&png(48, 32))], "init": base64(&png(64, 64)),
        "mask": base64(&png(64, 32)),
    });
    let id = server.submit(request.clone()).await;
    assert_eq!(server.wait(&id).await["status"], "done");
    let job = server.received.lock().unwrap()[0].clone();
    assert_eq!((job.references[1].image.width(), job.init.unwrap().image.width()), (48, 64));
    assert_eq!(server.metric("kiln_inputs_decoded_total").await, 4);
    // The decoded images of a planned job are dropped.
    let id = server.submit(request).await;
    server.wait(&id).await;
    assert_eq!(server.metric("kiln_inputs_decoded_total").await, 8);
}

#[tokio::test]
async fn an_image_of_several_queued_jobs_is_decoded_once() {
    let server = TestServer::open(Arc::new(TempDir::new().unwrap()), |_| {}, false);
    let request = axum::http::Request::post("/v1/inputs").header("host", "localhost");
    let input = server.send(request.body(png(32, 16).into()).unwrap()).await.ok().json();
    let mut ids = Vec::new();
    for seed in 0..3 {
        ids.push(server.submit(json!({ "prompt": "a", "seed": seed, "references": [input["id"]] })).await);
    }
    server.generate(1);
    for id in ids {
        assert_eq!(server.wait(&id).await["status"], "done");
    }
    assert_eq!(server.metric("kiln_inputs_decoded_total").await, 1);
}

#[tokio::test]
async fn after_a_restart_an_image_is_decoded_from_its_file() {
    let folder = Arc::new(TempDir::new().unwrap());
    let before = TestServer::open(Arc::clone(&folder), |_| {}, false);
    let id = before.submit(json!({ "prompt": "a", "references": [base64(&png(32, 16))] })).await;
    drop(before);
    let after = TestServer::open(folder, |_| {}, true);
    assert_eq!(after.wait(&id).await["status"], "done");
    assert_eq!(after.metric("kiln_inputs_decoded_total").await, 1);
    assert_eq!(after.received.lock().unwrap()[0].references[0].image.width(), 32);
}
