//! What is promised outlives the process.

use std::sync::Arc;
use std::time::Duration;

use rusqlite::Connection;
use serde_json::json;
use tempfile::TempDir;

use crate::kit::{Kit, base64, png};

#[tokio::test]
async fn orders_that_waited_are_painted_after_a_restart() {
    let folder = Arc::new(TempDir::new().unwrap());
    let before = Kit::open(Arc::clone(&folder), |_| {}, false);
    let mut ids = Vec::new();
    for seed in 0..3 {
        let order = json!({ "prompt": "a fox", "seed": seed, "references": [base64(&png(32, 32))] });
        ids.push(before.submit(order).await);
    }
    drop(before);
    let after = Kit::open(folder, |_| {}, true);
    for (seed, id) in ids.iter().enumerate() {
        let job = after.wait(id).await;
        assert_eq!(job["status"], "done");
        assert_eq!(job["pictures"].as_array().unwrap().len(), 1);
        assert_eq!(job["pictures"][0]["seed"], seed.to_string());
    }
    assert_eq!(after.seen.lock().unwrap().len(), 3);
}

/// As if the process had ended while it painted.
fn was_running(folder: &TempDir, id: &str, attempts: u32) {
    let db = Connection::open(folder.path().join("queue.sqlite")).unwrap();
    let changed =
        db.execute("UPDATE jobs SET state = 'running', attempts = ? WHERE id = ?", (attempts, id)).unwrap();
    assert_eq!(changed, 1);
}

#[tokio::test]
async fn an_order_that_was_painted_is_painted_again_but_not_for_ever() {
    let folder = Arc::new(TempDir::new().unwrap());
    let before = Kit::open(Arc::clone(&folder), |_| {}, false);
    let (once, twice) =
        (before.submit(json!({ "prompt": "a" })).await, before.submit(json!({ "prompt": "b" })).await);
    drop(before);
    was_running(&folder, &once, 1);
    was_running(&folder, &twice, 2);
    let after = Kit::open(folder, |_| {}, true);
    assert_eq!(after.wait(&once).await["status"], "done");
    let job = after.wait(&twice).await;
    assert_eq!((&job["status"], &job["error"]["code"]), (&json!("failed"), &json!("interrupted")));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_order_that_somebody_waited_for_is_failed_after_a_restart() {
    let folder = Arc::new(TempDir::new().unwrap());
    let before = Kit::open(Arc::clone(&folder), |_| {}, false);
    let request = before.post("/v1/images/generations", json!({ "prompt": "a" }));
    // Nobody paints: the client waits until the process is gone. Its job is looked up before it gives up.
    let (_, id) = tokio::join!(tokio::time::timeout(Duration::from_millis(300), request), async {
        tokio::time::sleep(Duration::from_millis(150)).await;
        before.get("/v1/jobs").await.json()["data"][0]["id"].as_str().unwrap().to_owned()
    });
    // The client went away before the process did.
    assert_eq!(before.get(&format!("/v1/jobs/{id}")).await.json()["status"], "cancelled");
    drop(before);
    was_running(&folder, &id, 1);
    let after = Kit::open(folder, |_| {}, true);
    assert_eq!(after.wait(&id).await["error"]["code"], "interrupted");
    assert!(after.seen.lock().unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_stops_puts_back_what_it_can_not_finish() {
    let folder = Arc::new(TempDir::new().unwrap());
    let before = Kit::open(Arc::clone(&folder), |_| {}, true);
    let id = before.submit(json!({ "prompt": "slow", "steps": 8 })).await;
    while before.get(&format!("/v1/jobs/{id}")).await.json()["status"] != "running" {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    // Grace is 200 ms; the order takes 400.
    kiln_server::serve(before.server.clone(), listener, std::future::ready(())).await;
    before.post("/v1/jobs", json!({ "prompt": "a" })).await.refused(503, "shutting_down");
    while before.get(&format!("/v1/jobs/{id}")).await.json()["status"] == "running" {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    drop(before);
    let after = Kit::open(folder, |_| {}, true);
    let job = after.wait(&id).await;
    assert_eq!((&job["status"], job["pictures"].as_array().unwrap().len()), (&json!("done"), 1));
}
