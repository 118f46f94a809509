//! Upscaling over HTTP: what the generator receives, and what is refused.

use serde_json::json;

use crate::harness::{TestServer, base64, png};

#[tokio::test]
async fn a_gallery_image_is_upscaled_with_its_own_prompt() {
    let server = TestServer::new();
    let id = server.submit(json!({ "prompt": "a hat", "seed": 5 })).await;
    let image = server.wait(&id).await["images"][0]["id"].as_str().unwrap().to_owned();
    let id = server.submit(json!({ "init": format!("image:{image}"), "upscale": 2, "tile_size": 64 })).await;
    assert_eq!(server.wait(&id).await["status"], "done");
    let job = server.received.lock().unwrap().last().unwrap().clone();
    assert_eq!(
        (job.prompt(), job.request.upscale, job.init.as_ref().unwrap().image.width()),
        ("a hat", Some(2), 64)
    );
}

#[tokio::test]
async fn the_size_of_the_result_is_limited_and_told() {
    let server = TestServer::new();
    let about = server.get("/v1/about").await.ok().json();
    assert_eq!((&about["upscale"], &about["upscaled_pixels"]), (&json!([2, 4]), &json!(16 << 20)));
    let request = json!({ "prompt": "a", "init": base64(&png(2048, 1024)), "upscale": 4 });
    server.post("/v1/jobs", request).await.expect_error(400, "image_too_large");
}
