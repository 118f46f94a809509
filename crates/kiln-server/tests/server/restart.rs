//! Jobs and images survive a restart.

use std::sync::Arc;
use std::time::Duration;

use rusqlite::Connection;
use serde_json::json;
use tempfile::TempDir;

use crate::harness::{TestServer, base64, png};

#[tokio::test]
async fn queued_jobs_are_generated_after_a_restart() {
    let folder = Arc::new(TempDir::new().unwrap());
    let before = TestServer::open(Arc::clone(&folder), |_| {}, false);
    let mut ids = Vec::new();
    for seed in 0..3 {
        let job = json!({ "prompt": "a fox", "seed": seed, "references": [base64(&png(32, 32))] });
        ids.push(before.submit(job).await);
    }
    drop(before);
    let after = TestServer::open(folder, |_| {}, true);
    for (seed, id) in ids.iter().enumerate() {
        let job = after.wait(id).await;
        assert_eq!(job["status"], "done");
        assert_eq!(job["images"].as_array().unwrap().len(), 1);
        assert_eq!(job["images"][0]["seed"], seed.to_string());
    }
    assert_eq!(after.received.lock().unwrap().len(), 3);
}

/// Marks a job as if the process had died while running it.
fn mark_as_running(folder: &TempDir, id: &str, attempts: u32) {
    let db = Connection::open(folder.path().join("queue.sqlite")).unwrap();
    let changed =
        db.execute("UPDATE jobs SET state = 'running', attempts = ? WHERE id = ?", (attempts, id)).unwrap();
    assert_eq!(changed, 1);
}

#[tokio::test]
async fn an_interrupted_job_is_retried_a_limited_number_of_times() {
    let folder = Arc::new(TempDir::new().unwrap());
    let before = TestServer::open(Arc::clone(&folder), |_| {}, false);
    let (once, twice) =
        (before.submit(json!({ "prompt": "a" })).await, before.submit(json!({ "prompt": "b" })).await);
    drop(before);
    mark_as_running(&folder, &once, 1);
    mark_as_running(&folder, &twice, 2);
    let after = TestServer::open(folder, |_| {}, true);
    assert_eq!(after.wait(&once).await["status"], "done");
    let job = after.wait(&twice).await;
    assert_eq!((&job["status"], &job["error"]["code"]), (&json!("failed"), &json!("interrupted")));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_with_an_attached_client_fails_after_a_restart() {
    let folder = Arc::new(TempDir::new().unwrap());
    let before = TestServer::open(Arc::clone(&folder), |_| {}, false);
    let request = before.post("/v1/images/generations", json!({ "prompt": "a" }));
    // Nothing is generated. The job is looked up before the client gives up.
    let (_, id) = tokio::join!(tokio::time::timeout(Duration::from_millis(300), request), async {
        tokio::time::sleep(Duration::from_millis(150)).await;
        before.get("/v1/jobs").await.json()["data"][0]["id"].as_str().unwrap().to_owned()
    });
    // The client disconnected before the restart.
    assert_eq!(before.get(&format!("/v1/jobs/{id}")).await.json()["status"], "cancelled");
    drop(before);
    mark_as_running(&folder, &id, 1);
    let after = TestServer::open(folder, |_| {}, true);
    assert_eq!(after.wait(&id).await["error"]["code"], "interrupted");
    assert!(after.received.lock().unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_that_exceed_the_grace_period_return_to_the_queue() {
    let folder = Arc::new(TempDir::new().unwrap());
    let before = TestServer::open(Arc::clone(&folder), |_| {}, true);
    let id = before.submit(json!({ "prompt": "slow", "steps": 8 })).await;
    while before.get(&format!("/v1/jobs/{id}")).await.json()["status"] != "running" {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    // The grace period is 200 ms; the job takes 400 ms.
    kiln_server::serve(before.inner.clone(), listener, std::future::ready(())).await;
    before.post("/v1/jobs", json!({ "prompt": "a" })).await.expect_error(503, "shutting_down");
    while before.get(&format!("/v1/jobs/{id}")).await.json()["status"] == "running" {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    drop(before);
    let after = TestServer::open(folder, |_| {}, true);
    let job = after.wait(&id).await;
    assert_eq!((&job["status"], job["images"].as_array().unwrap().len()), (&json!("done"), 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_is_planned_at_shutdown_resumes_at_the_next_start() {
    let folder = Arc::new(TempDir::new().unwrap());
    let before = TestServer::open(Arc::clone(&folder), |config| config.grace = Duration::from_secs(10), true);
    let running = before.submit(json!({ "prompt": "slow", "steps": 8 })).await;
    while before.get(&format!("/v1/jobs/{running}")).await.json()["status"] != "running" {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let planned = before.submit(json!({ "prompt": "planned", "seed": 5 })).await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    kiln_server::serve(before.inner.clone(), listener, std::future::ready(())).await;
    assert_eq!(before.wait(&running).await["status"], "done");
    assert_eq!(before.get(&format!("/v1/jobs/{planned}")).await.json()["status"], "queued");
    assert_eq!(before.received.lock().unwrap().len(), 1);
    drop(before);
    let after = TestServer::open(folder, |_| {}, true);
    let job = after.wait(&planned).await;
    assert_eq!((&job["status"], &job["images"][0]["seed"]), (&json!("done"), &json!("5")));
}

#[tokio::test]
async fn jobs_in_databases_of_earlier_versions_are_read() {
    let folder = Arc::new(TempDir::new().unwrap());
    let before = TestServer::open(Arc::clone(&folder), |_| {}, false);
    let id = before.submit(json!({ "prompt": "new" })).await;
    drop(before);
    let stored = json!({
        "prompt": "a fox", "negative_prompt": "rain", "model": "large", "n": 2, "seed": u64::MAX, "guidance": 2.5,
        "loras": [{ "name": "ink", "weight": 0.5 }], "output_format": "jpeg", "png": "fast",
    });
    let db = Connection::open(folder.path().join("queue.sqlite")).unwrap();
    db.execute("UPDATE jobs SET request = ? WHERE id = ?", (stored.to_string(), &id)).unwrap();
    let after = TestServer::open(folder, |_| {}, true);
    let job = after.wait(&id).await;
    assert_eq!((&job["status"], job["images"].as_array().unwrap().len()), (&json!("done"), 2));
    assert_eq!(job["request"], stored, "the request is shown as stored");
    let request = after.received.lock().unwrap()[0].request.clone();
    assert_eq!((request.seed, request.loras[0].weight), (vec![u64::MAX], 0.5));
    assert_eq!(request.negative_prompts, ["rain"]);
}

#[tokio::test]
async fn the_data_folder_of_an_earlier_version_is_continued() {
    let folder = Arc::new(TempDir::new().unwrap());
    let db = Connection::open(folder.path().join("queue.sqlite")).unwrap();
    db.execute_batch(include_str!("../data/earlier/queue.sql")).unwrap();
    drop(db);
    let server = TestServer::open(folder, |_| {}, true);
    let done = server.wait("39e188df2d1812fc2677ac91").await;
    assert_eq!((&done["status"], &done["request"]["prompt"]), (&json!("done"), &json!("an apple")));
    let image = &done["images"][0];
    assert_eq!(
        (&image["seed"], &image["bytes"], &image["favourite"]),
        (&json!("7"), &json!(2485), &json!(true))
    );
    let cancelled = server.wait("07162e5e9a05255df5885bc0").await;
    assert_eq!((&cancelled["status"], &cancelled["priority"]), (&json!("cancelled"), &json!("low")));
    for (id, prompt, images) in [
        ("eeed18888b1bf66f89bb5881", json!("long"), 1),
        ("6c5502d83d3d2f289ff085ed", json!(["a fox", "a hen"]), 2),
    ] {
        let job = server.wait(id).await;
        assert_eq!((&job["status"], &job["request"]["prompt"]), (&json!("done"), &prompt));
        assert_eq!(job["images"].as_array().unwrap().len(), images);
    }
}
