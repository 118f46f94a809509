//! Images that come with requests are decoded once.

use std::sync::Arc;

use serde_json::json;
use tempfile::TempDir;

use crate::kit::{Kit, base64, png};

#[tokio::test]
async fn an_image_that_comes_with_a_request_is_decoded_once() {
    let kit = Kit::new();
    let job = json!({
        "prompt": "a hat", "references": [base64(&png(32, 32)), base64(&png(48, 32))], "init": base64(&png(64, 64)),
        "mask": base64(&png(64, 32)),
    });
    let id = kit.submit(job.clone()).await;
    assert_eq!(kit.wait(&id).await["status"], "done");
    let seen = kit.seen.lock().unwrap()[0].clone();
    assert_eq!((seen.references[1].picture.width(), seen.init.unwrap().picture.width()), (48, 64));
    assert_eq!(kit.metric("kiln_inputs_decoded_total").await, 4);
    // Nothing is kept of a job that is planned.
    let id = kit.submit(job).await;
    kit.wait(&id).await;
    assert_eq!(kit.metric("kiln_inputs_decoded_total").await, 8);
}

#[tokio::test]
async fn an_image_that_several_waiting_jobs_name_is_decoded_once() {
    let kit = Kit::open(Arc::new(TempDir::new().unwrap()), |_| {}, false);
    let request = axum::http::Request::post("/v1/inputs").header("host", "localhost");
    let input = kit.send(request.body(png(32, 16).into()).unwrap()).await.ok().json();
    let mut ids = Vec::new();
    for seed in 0..3 {
        ids.push(kit.submit(json!({ "prompt": "a", "seed": seed, "references": [input["id"]] })).await);
    }
    kit.generate(1);
    for id in ids {
        assert_eq!(kit.wait(&id).await["status"], "done");
    }
    assert_eq!(kit.metric("kiln_inputs_decoded_total").await, 1);
}

#[tokio::test]
async fn after_a_restart_an_image_is_decoded_from_its_file() {
    let folder = Arc::new(TempDir::new().unwrap());
    let before = Kit::open(Arc::clone(&folder), |_| {}, false);
    let id = before.submit(json!({ "prompt": "a", "references": [base64(&png(32, 16))] })).await;
    drop(before);
    let after = Kit::open(folder, |_| {}, true);
    assert_eq!(after.wait(&id).await["status"], "done");
    assert_eq!(after.metric("kiln_inputs_decoded_total").await, 1);
    assert_eq!(after.seen.lock().unwrap()[0].references[0].picture.width(), 32);
}
