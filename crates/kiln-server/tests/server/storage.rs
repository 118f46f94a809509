//! The data folder: one server at a time, damaged and locked databases, a folder that is full or gone.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::http::Request;
use kiln_server::{Server, StoreError};
use rusqlite::Connection;
use serde_json::json;
use tempfile::TempDir;

use crate::harness::{TestCatalogue, TestServer, config, png, post};

fn database(folder: &TempDir) -> Connection {
    Connection::open(folder.path().join("queue.sqlite")).unwrap()
}

fn open_error(folder: &TempDir) -> StoreError {
    Server::open(config(folder.path()), Arc::new(TestCatalogue)).err().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_can_be_fetched_as_soon_as_it_is_announced() {
    let server = TestServer::new();
    let id = server.submit(json!({ "prompt": "slow", "steps": 4, "n": 3, "seed": 5 })).await;
    let announced = loop {
        let job = server.get(&format!("/v1/jobs/{id}")).await.ok().json();
        if let Some(image) = job["images"].get(0) {
            assert_eq!(job["status"], "running");
            break image.clone();
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    };
    server.get(announced["url"].as_str().unwrap()).await.ok();
    server.get(announced["thumbnail"].as_str().unwrap()).await.ok();
    let job = server.wait(&id).await;
    let seeds: Vec<_> = job["images"].as_array().unwrap().iter().map(|p| p["seed"].clone()).collect();
    assert_eq!(seeds, ["5", "6", "7"], "every image has its own seed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn the_same_image_can_be_sent_many_times_at_once() {
    let server = TestServer::new();
    for round in 0..4 {
        let bytes = png(64, 64 + round);
        let upload = || {
            let request = Request::post("/v1/inputs").header("host", "localhost");
            server.send(request.body(Body::from(bytes.clone())).unwrap())
        };
        for response in futures_util::future::join_all((0..16).map(|_| upload())).await {
            response.ok();
        }
    }
}

#[tokio::test]
async fn a_second_server_on_the_same_folder_is_refused() {
    let server = TestServer::open(Arc::new(TempDir::new().unwrap()), |_| {}, false);
    let id = server.submit(json!({ "prompt": "a fox" })).await;
    let folder = server.folder();
    database(&folder).execute("UPDATE jobs SET state = 'running', attempts = 1", []).unwrap();
    assert!(matches!(open_error(&folder), StoreError::InUse));
    let state: String =
        database(&folder).query_row("SELECT state FROM jobs WHERE id = ?", [&id], |row| row.get(0)).unwrap();
    assert_eq!(state, "running", "the queue is untouched");
    drop(server);
    TestServer::open(folder, |_| {}, false);
}

#[test]
fn a_database_of_a_newer_version_is_refused_and_left_alone() {
    let folder = TempDir::new().unwrap();
    database(&folder).pragma_update(None, "user_version", 99).unwrap();
    assert!(matches!(open_error(&folder), StoreError::Newer { found: 99, .. }));
    let version: u32 = database(&folder).query_row("PRAGMA user_version", [], |row| row.get(0)).unwrap();
    assert_eq!(version, 99);
}

#[tokio::test]
async fn an_unreadable_job_fails_and_the_others_are_generated() {
    let folder = Arc::new(TempDir::new().unwrap());
    let before = TestServer::open(Arc::clone(&folder), |_| {}, false);
    let mut ids = Vec::new();
    for prompt in ["torn", "blob", "whole"] {
        ids.push(before.submit(json!({ "prompt": prompt })).await);
    }
    drop(before);
    let db = database(&folder);
    db.execute("UPDATE jobs SET request = '{\"prompt\": ' WHERE id = ?", [&ids[0]]).unwrap();
    db.execute("UPDATE jobs SET request = x'00ff' WHERE id = ?", [&ids[1]]).unwrap();
    let after = TestServer::open(folder, |_| {}, true);
    for id in &ids[..2] {
        let job = after.wait(id).await;
        assert_eq!((&job["status"], &job["error"]["code"]), (&json!("failed"), &json!("unreadable_job")));
    }
    assert_eq!(after.wait(&ids[2]).await["status"], "done");
    assert_eq!(after.received.lock().unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_locked_database_delays_writes_alone_and_not_for_long() {
    let server = TestServer::open(Arc::new(TempDir::new().unwrap()), |_| {}, false);
    let id = server.submit(json!({ "prompt": "a fox" })).await;
    let db = database(&server.folder());
    db.execute_batch("BEGIN IMMEDIATE").unwrap();
    let started = Instant::now();
    let writes = async {
        let jobs = (0..4).map(|_| server.post("/v1/jobs", json!({ "prompt": "a fox" })));
        for response in futures_util::future::join_all(jobs).await {
            response.expect_error(503, "storage");
        }
        assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
    };
    let reads = async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        for path in ["/healthz", "/v1/jobs", "/v1/images", "/metrics", "/v1/about"] {
            server.get(path).await.ok();
        }
        server.delete(&format!("/v1/jobs/{id}")).await.ok();
        assert_eq!(server.get(&format!("/v1/jobs/{id}")).await.json()["status"], "cancelled");
        assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
    };
    tokio::join!(writes, reads);
    db.execute_batch("ROLLBACK").unwrap();
    server.post("/v1/jobs", json!({ "prompt": "a fox" })).await.ok();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_end_that_cannot_be_recorded_is_shown_and_recorded_later() {
    let server = TestServer::new();
    let folder = server.folder();
    let db = database(&folder);
    db.execute_batch(
        "CREATE TRIGGER full BEFORE UPDATE ON jobs WHEN NEW.state = 'done'
         BEGIN SELECT RAISE(ABORT, 'database or disk is full'); END",
    )
    .unwrap();
    let id = server.submit(json!({ "prompt": "a fox" })).await;
    let job = server.wait(&id).await;
    assert_eq!((&job["status"], job["images"].as_array().unwrap().len()), (&json!("done"), 1));
    assert_eq!(server.get("/v1/jobs").await.json()["data"][0]["status"], "done");
    let stored = || db.query_row("SELECT state FROM jobs", [], |row| row.get::<_, String>(0)).unwrap();
    assert_eq!(stored(), "running");
    db.execute_batch("DROP TRIGGER full").unwrap();
    while stored() != "done" {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Windows removes no folder whose files are open.
#[cfg(unix)]
#[tokio::test]
async fn a_server_without_its_data_folder_is_not_ready() {
    let server = TestServer::new();
    std::fs::remove_dir_all(server.folder().path()).unwrap();
    let status = loop {
        let response = server.get("/readyz").await;
        if response.json()["status"] != "starting" {
            break response;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    };
    assert_eq!((status.status.as_u16(), &status.json()["status"]), (503, &json!("storage")));
    assert!(!status.text().contains(server.folder().path().to_str().unwrap()), "{}", status.text());
    server.get("/healthz").await.ok();
}

#[tokio::test]
async fn addresses_of_people_are_not_stored_as_clients() {
    let server = TestServer::open(Arc::new(TempDir::new().unwrap()), |_| {}, false);
    let mut request = post("/v1/jobs", json!({ "prompt": "a fox" }));
    request.headers_mut().insert("x-client-id", "ada@example.org".parse().unwrap());
    server.send(request).await.ok();
    let waiting = server.post("/v1/images/generations", json!({ "prompt": "a", "user": "bob@example.org" }));
    let _ = tokio::time::timeout(Duration::from_millis(100), waiting).await;
    let db = database(&server.folder());
    let mut query = db.prepare("SELECT client FROM jobs").unwrap();
    let clients: Vec<String> = query.query_map([], |row| row.get(0)).unwrap().map(Result::unwrap).collect();
    assert!(clients.len() == 2 && clients.iter().all(|client| !client.contains('@')), "{clients:?}");
}
