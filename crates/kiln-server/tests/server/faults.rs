//! What goes wrong in one order is that order's, and the server lives on.

use serde_json::json;

use crate::kit::Kit;

#[tokio::test]
async fn a_panic_is_the_error_of_its_order() {
    let kit = Kit::new();
    let id = kit.submit(json!({ "prompt": "panic" })).await;
    let job = kit.wait(&id).await;
    assert_eq!((&job["status"], &job["error"]["code"]), (&json!("failed"), &json!("panicked")));
    kit.post("/v1/images/generations", json!({ "prompt": "panic" })).await.refused(500, "panicked");
    kit.post("/v1/images/generations", json!({ "prompt": "a fox" })).await.ok();
    assert!(kit.get("/metrics").await.ok().text().contains("kiln_panics_total 2\n"));
}

#[tokio::test]
async fn a_folder_that_takes_no_pictures_fails_the_order_and_not_the_server() {
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
async fn an_order_that_takes_too_long_is_ended() {
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
