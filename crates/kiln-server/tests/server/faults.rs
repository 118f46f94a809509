//! What goes wrong in one job is that job's, and the server lives on.

use serde_json::json;

use crate::kit::Kit;

#[tokio::test]
async fn a_panic_is_the_error_of_its_job() {
    let kit = Kit::new();
    let id = kit.submit(json!({ "prompt": "panic" })).await;
    let job = kit.wait(&id).await;
    assert_eq!((&job["status"], &job["error"]["code"]), (&json!("failed"), &json!("panicked")));
    kit.post("/v1/images/generations", json!({ "prompt": "panic" })).await.refused(500, "panicked");
    kit.post("/v1/images/generations", json!({ "prompt": "a fox" })).await.ok();
    assert!(kit.get("/metrics").await.ok().text().contains("kiln_panics_total 2\n"));
}

#[tokio::test]
async fn a_panic_while_planning_is_the_error_of_its_job() {
    let kit = Kit::new();
    let before = kit.submit(json!({ "prompt": "slow" })).await;
    let id = kit.submit(json!({ "prompt": "panic in plan" })).await;
    let after = kit.submit(json!({ "prompt": "a fox" })).await;
    let job = kit.wait(&id).await;
    assert_eq!((&job["status"], &job["error"]["code"]), (&json!("failed"), &json!("panicked")));
    assert!(job["error"]["message"].as_str().unwrap().contains("on purpose"));
    for id in [before, after] {
        assert_eq!(kit.wait(&id).await["status"], "done");
    }
    assert_eq!(kit.metric("kiln_panics_total").await, 1);
}

#[tokio::test]
async fn a_generator_that_forgets_a_job_fails_it() {
    let kit = Kit::new();
    let id = kit.submit(json!({ "prompt": "silent" })).await;
    assert_eq!(kit.wait(&id).await["error"]["code"], "generation_failed");
    let next = kit.submit(json!({ "prompt": "a fox" })).await;
    assert_eq!(kit.wait(&next).await["status"], "done");
}

#[tokio::test]
async fn a_folder_that_takes_no_images_fails_the_job_and_not_the_server() {
    let kit = Kit::new();
    let pictures = kit.folder().path().join("pictures");
    std::fs::remove_dir_all(&pictures).unwrap();
    std::fs::write(&pictures, b"in the way").unwrap();
    kit.post("/v1/images/generations", json!({ "prompt": "a fox" })).await.refused(503, "storage");
    kit.get("/healthz").await.ok();
    std::fs::remove_file(&pictures).unwrap();
    std::fs::create_dir(&pictures).unwrap();
    kit.post("/v1/images/generations", json!({ "prompt": "a fox" })).await.ok();
}

#[tokio::test]
async fn a_job_that_takes_too_long_is_ended() {
    let kit = Kit::with(|config| config.longest = std::time::Duration::from_millis(100));
    let id = kit.submit(json!({ "prompt": "slow", "steps": 100 })).await;
    assert_eq!(kit.wait(&id).await["error"]["code"], "timeout");
    kit.post("/v1/images/generations", json!({ "prompt": "a fox" })).await.ok();
}

#[tokio::test]
async fn a_file_that_is_gone_is_not_found() {
    let kit = Kit::new();
    let made = kit.post("/v1/images/generations", json!({ "prompt": "a fox" })).await.ok().json();
    let id = made["data"][0]["picture"].as_str().unwrap();
    std::fs::remove_file(kit.folder().path().join(format!("pictures/{id}.png"))).unwrap();
    for path in ["file", "thumbnail"] {
        kit.get(&format!("/v1/pictures/{id}/{path}")).await.refused(404, "not_found");
    }
}
