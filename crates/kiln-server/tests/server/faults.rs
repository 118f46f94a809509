//! A failure affects only its own job; the server keeps running.

use serde_json::json;

use crate::harness::TestServer;

#[tokio::test]
async fn a_panic_fails_only_its_job() {
    let server = TestServer::new();
    let id = server.submit(json!({ "prompt": "panic" })).await;
    let job = server.wait(&id).await;
    assert_eq!((&job["status"], &job["error"]["code"]), (&json!("failed"), &json!("panicked")));
    server.post("/v1/images/generations", json!({ "prompt": "panic" })).await.expect_error(500, "panicked");
    server.post("/v1/images/generations", json!({ "prompt": "a fox" })).await.ok();
    assert!(server.get("/metrics").await.ok().text().contains("kiln_panics_total 2\n"));
}

#[tokio::test]
async fn a_panic_while_planning_fails_only_its_job() {
    let server = TestServer::new();
    let before = server.submit(json!({ "prompt": "slow" })).await;
    let id = server.submit(json!({ "prompt": "panic in plan" })).await;
    let after = server.submit(json!({ "prompt": "a fox" })).await;
    let job = server.wait(&id).await;
    assert_eq!((&job["status"], &job["error"]["code"]), (&json!("failed"), &json!("panicked")));
    assert!(job["error"]["message"].as_str().unwrap().contains("on purpose"));
    for id in [before, after] {
        assert_eq!(server.wait(&id).await["status"], "done");
    }
    assert_eq!(server.metric("kiln_panics_total").await, 1);
}

#[tokio::test]
async fn a_job_that_the_generator_drops_fails() {
    let server = TestServer::new();
    let id = server.submit(json!({ "prompt": "silent" })).await;
    assert_eq!(server.wait(&id).await["error"]["code"], "generation_failed");
    let next = server.submit(json!({ "prompt": "a fox" })).await;
    assert_eq!(server.wait(&next).await["status"], "done");
}

#[tokio::test]
async fn an_unwritable_image_folder_fails_the_job_but_not_the_server() {
    let server = TestServer::new();
    let folder = server.folder().path().join("pictures");
    std::fs::remove_dir_all(&folder).unwrap();
    std::fs::write(&folder, b"in the way").unwrap();
    server.post("/v1/images/generations", json!({ "prompt": "a fox" })).await.expect_error(503, "storage");
    server.get("/healthz").await.ok();
    std::fs::remove_file(&folder).unwrap();
    std::fs::create_dir(&folder).unwrap();
    server.post("/v1/images/generations", json!({ "prompt": "a fox" })).await.ok();
}

#[tokio::test]
async fn a_job_that_takes_too_long_times_out() {
    let server = TestServer::with(|config| config.job_timeout = std::time::Duration::from_millis(500));
    let id = server.submit(json!({ "prompt": "slow", "steps": 100 })).await;
    assert_eq!(server.wait(&id).await["error"]["code"], "timeout");
    server.post("/v1/images/generations", json!({ "prompt": "a fox" })).await.ok();
}

#[tokio::test]
async fn a_missing_image_file_is_not_found() {
    let server = TestServer::new();
    let generated = server.post("/v1/images/generations", json!({ "prompt": "a fox" })).await.ok().json();
    let id = generated["data"][0]["id"].as_str().unwrap();
    std::fs::remove_file(server.folder().path().join(format!("pictures/{id}.png"))).unwrap();
    for path in ["file", "thumbnail"] {
        server.get(&format!("/v1/images/{id}/{path}")).await.expect_error(404, "not_found");
    }
}
