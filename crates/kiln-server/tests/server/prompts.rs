//! Rewriting prompts.

use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use base64::Engine;
use serde_json::json;

use crate::harness::{REWRITING_STOPPED, TestServer, png};

#[tokio::test]
async fn a_prompt_is_rewritten_with_the_images_before_its_eyes() {
    let server = TestServer::new();
    let rewrite = async |body| server.post("/v1/prompts/upsample", body).await;
    let answer = rewrite(json!({ "prompt": "a cat" })).await.ok().json();
    let expected =
        json!({ "prompt": "a cat in detail (0.15, seed 0, images [])", "original_prompt": "a cat" });
    assert_eq!(answer, expected);
    let image = base64::prelude::BASE64_STANDARD.encode(png(96, 64));
    let body =
        json!({ "prompt": "a cat", "references": [image], "temperature": 0.5, "seed": 7, "model": "large" });
    let answer = rewrite(body).await.ok().json();
    assert_eq!(answer["prompt"], "a cat in detail (0.5, seed 7, images [96])");
}

#[tokio::test]
async fn prompts_that_cant_be_rewritten_are_refused() {
    let server = TestServer::new();
    let rewrite = async |body| server.post("/v1/prompts/upsample", body).await;
    rewrite(json!({ "prompt": "busy" })).await.expect_error(503, "busy");
    rewrite(json!({ "prompt": " " })).await.expect_error(400, "invalid_value");
    rewrite(json!({ "prompt": "a", "temperature": 0 })).await.expect_error(400, "invalid_value");
    rewrite(json!({ "prompt": "a", "temperature": 9 })).await.expect_error(400, "invalid_value");
    rewrite(json!({ "prompt": "a", "model": "none" })).await.expect_error(404, "model_not_found");
    rewrite(json!({ "prompt": "a", "references": ["input:none"] }))
        .await
        .expect_error(404, "input_not_found");
    rewrite(json!({ "prompt": "a", "steps": 1 })).await.expect_error(400, "invalid_request");
}

#[tokio::test]
async fn a_client_that_hangs_up_stops_the_rewriting() {
    let server = TestServer::new();
    let answer = server.post("/v1/prompts/upsample", json!({ "prompt": "endless" }));
    assert!(tokio::time::timeout(Duration::from_millis(100), answer).await.is_err());
    for _ in 0..500 {
        if REWRITING_STOPPED.load(SeqCst) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("the prompt is still being rewritten");
}

#[tokio::test]
async fn models_tell_whether_their_prompts_can_be_rewritten() {
    let server = TestServer::new();
    let models = server.get("/v1/models").await.ok().json();
    let of = |name: &str| {
        let mut all = models["data"].as_array().unwrap().iter();
        all.find(|model| model["id"] == name).unwrap()["kiln"]["rewrites"].clone()
    };
    assert_eq!((of("small"), of("large")), (json!(true), json!(false)));
}

#[tokio::test]
async fn a_job_keeps_the_original_prompt() {
    let server = TestServer::new();
    let body = json!({ "prompt": "a detailed cat", "original_prompt": "a cat" });
    let job = server.post("/v1/jobs", body).await.ok().json();
    assert_eq!(job["request"]["original_prompt"], "a cat");
    let two = json!({ "prompt": "a cat", "original_prompt": ["a", "b"] });
    server.post("/v1/jobs", two).await.expect_error(400, "invalid_value");
}
