//! Downloads of models, and what is known about LoRAs.

use std::time::Duration;

use serde_json::{Value, json};

use crate::harness::TestServer;

/// Waits until the download of a model has this status.
async fn wait(server: &TestServer, model: &str, status: &str) -> Value {
    for _ in 0..500 {
        let list = server.get("/v1/downloads").await.ok().json();
        let found =
            list["data"].as_array().unwrap().iter().find(|download| download["model"] == model).cloned();
        if let Some(found) = found.filter(|download| download["status"] == status) {
            return found;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("the download of {model} does not become {status}");
}

#[tokio::test]
async fn offered_models_are_downloaded_one_at_a_time_with_progress() {
    let server = TestServer::new();
    let list = server.get("/v1/downloads").await.ok().json();
    assert_eq!((&list["data"], &list["available"][0]["name"]), (&json!([]), &json!("tiny")));
    let start = async |model: &str| server.post("/v1/downloads", json!({ "model": model })).await;
    start("../etc").await.expect_error(404, "not_found");

    start("endless").await.ok();
    start("tiny").await.expect_error(409, "busy");
    let progress = async {
        loop {
            let running = wait(&server, "endless", "running").await;
            if running["total"] == 100 {
                break running;
            }
        }
    };
    assert_eq!(progress.await["bytes"], 1);
    server.delete("/v1/downloads/endless").await.ok();
    wait(&server, "endless", "cancelled").await;
    server.delete("/v1/downloads/endless").await.expect_error(404, "not_found");

    start("tiny").await.ok();
    assert_eq!(wait(&server, "tiny", "done").await["bytes"], 100);
    start("broken").await.ok();
    assert_eq!(wait(&server, "broken", "failed").await["error"], "the hub is gone");
}

#[tokio::test]
async fn a_licence_must_be_accepted_before_the_download() {
    let server = TestServer::new();
    let list = server.get("/v1/downloads").await.ok().json();
    let licensed = list["available"].as_array().unwrap().iter().find(|m| m["name"] == "licensed").unwrap();
    assert_eq!(licensed["licence"], json!({ "name": "Test License", "url": "https://example.org/l" }));
    assert_eq!(list["available"][0].get("licence"), None);
    for refused in [json!({ "model": "licensed" }), json!({ "model": "licensed", "accept_license": false })] {
        let error = server.post("/v1/downloads", refused).await;
        error.expect_error(403, "license_not_accepted");
    }
    assert_eq!(server.get("/v1/downloads").await.ok().json()["data"], json!([]));
    server.post("/v1/downloads", json!({ "model": "licensed", "accept_license": true })).await.ok();
    wait(&server, "licensed", "done").await;
}

#[tokio::test]
async fn loras_have_trigger_words_and_a_small_preview() {
    let server = TestServer::new();
    let lora = server.get("/v1/loras/details").await.ok().json()["data"][0].clone();
    assert_eq!((&lora["name"], &lora["triggers"]), (&json!("ink"), &json!(["inkwash"])));
    let preview = server.get(lora["preview"].as_str().unwrap()).await.ok();
    let preview = kiln_image::from_bytes("preview", &preview.bytes).unwrap();
    assert_eq!((preview.width(), preview.height()), (320, 320));
    server.get("/v1/loras/preview?name=../../etc/passwd").await.expect_error(404, "not_found");
}
