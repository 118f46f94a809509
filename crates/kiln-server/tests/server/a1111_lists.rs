//! A1111's options and lists, and the requests that other programs send, as they send them.

use axum::body::Body;
use axum::http::{Request, header};
use serde_json::{Value, json};

use crate::harness::{TestServer, base64, decode};

async fn options(server: &TestServer) -> Value {
    server.get("/sdapi/v1/options").await.ok().json()
}

#[tokio::test]
async fn options_choose_the_model_and_autoencoder_of_later_requests() {
    let server = TestServer::new();
    assert_eq!(options(&server).await["sd_model_checkpoint"], "small");
    let set = json!({ "sd_model_checkpoint": "large.safetensors [0123abcdef]", "sd_vae": "taef2.safetensors", "other": 1 });
    server.post("/sdapi/v1/options", set).await.ok();
    let current = options(&server).await;
    assert_eq!((&current["sd_model_checkpoint"], &current["sd_vae"]), (&json!("large"), &json!("taef2")));
    server.post("/sdapi/v1/txt2img", json!({ "prompt": "a", "steps": 1, "scheduler": "power" })).await.ok();
    let overriding = json!({ "sd_model_checkpoint": "small", "sd_vae": "Automatic" });
    server
        .post("/sdapi/v1/txt2img", json!({ "prompt": "a", "steps": 1, "override_settings": overriding }))
        .await
        .ok();
    let received = server.received.lock().unwrap().clone();
    let of = |i: usize| {
        let request = &received[i].request;
        let vae = request.vae.as_ref().map(|vae| vae.path.to_str().unwrap().to_owned());
        (request.model.as_ref().unwrap().to_str().unwrap().to_owned(), vae)
    };
    assert_eq!(of(0), ("large".into(), Some("taef2".into())));
    assert_eq!(of(1), ("small".into(), None));
    assert_eq!(received[0].request.schedule, Some(kiln_engine::ScheduleKind::Power));
    server
        .post("/sdapi/v1/options", json!({ "sd_model_checkpoint": "nothing" }))
        .await
        .expect_error(404, "model_not_found");
    assert_eq!(options(&server).await["sd_model_checkpoint"], "large");
}

#[tokio::test]
async fn the_lists_have_a1111s_fields() {
    let server = TestServer::new();
    let lists = [
        ("samplers", "name"),
        ("schedulers", "label"),
        ("upscalers", "name"),
        ("sd-models", "title"),
        ("sd-vae", "model_name"),
        ("loras", "alias"),
    ];
    for (list, field) in lists {
        let list = server.get(&format!("/sdapi/v1/{list}")).await.ok().json();
        assert!(list[0][field].is_string(), "{list}");
    }
    assert_eq!(server.get("/sdapi/v1/latent-upscale-modes").await.ok().json(), json!([]));
    assert_eq!(server.get("/sdapi/v1/cmd-flags").await.ok().json()["api"], true);
    assert!(server.get("/sdapi/v1/scripts").await.ok().json()["txt2img"].is_array());
    for refresh in ["refresh-checkpoints", "refresh-loras", "refresh-vae", "skip"] {
        server.post(&format!("/sdapi/v1/{refresh}"), json!({})).await.ok();
    }
}

#[tokio::test]
async fn an_image_describes_itself() {
    let server = TestServer::new();
    let image = kiln_image::RgbImage::black(16, 16);
    let text = "a fox\nNegative prompt: rain\nSteps: 4, Sampler: Euler, Seed: 7";
    let format = kiln_image::Format::Png.into();
    let file = kiln_image::encode_with_metadata(
        &image,
        format,
        &kiln_image::Metadata { parameters: Some(text), ..Default::default() },
    )
    .unwrap();
    let info = server.post("/sdapi/v1/png-info", json!({ "image": base64(&file) })).await.ok().json();
    assert_eq!(info["info"], text);
    assert_eq!((&info["parameters"]["Seed"], &info["items"]["parameters"]), (&json!("7"), &json!(text)));
    let plain =
        server.post("/sdapi/v1/png-info", json!({ "image": base64(&crate::harness::png(8, 8)) })).await;
    assert_eq!(plain.ok().json()["info"], "");
    server
        .post("/sdapi/v1/png-info", json!({ "image": "bm90aGluZw==" }))
        .await
        .expect_error(400, "invalid_image");
}

/// A request as another program sends it.
async fn replay(server: &TestServer, recorded: &Value) -> crate::harness::TestResponse {
    let mut request = Request::builder()
        .method(recorded["method"].as_str().unwrap())
        .uri(recorded["path"].as_str().unwrap())
        .header(header::HOST, "localhost");
    for (name, value) in recorded["headers"].as_object().unwrap() {
        request = request.header(name, value.as_str().unwrap());
    }
    let body = recorded.get("body").map_or_else(Body::empty, |body| Body::from(body.to_string()));
    server.send(request.body(body).unwrap()).await
}

#[tokio::test]
async fn recorded_requests_of_other_programs_are_answered() {
    let files = [
        ("SillyTavern", include_str!("../data/sillytavern.json")),
        ("Open WebUI", include_str!("../data/open_webui.json")),
    ];
    for (program, text) in files {
        let server = TestServer::with(|config| {
            config.api_keys = vec![kiln_server::ApiKey::single("s3cret")];
            config.model_aliases = vec![("gpt-image-1".into(), "large".into())];
        });
        let recorded: Vec<Value> = serde_json::from_str(text).unwrap();
        for request in &recorded {
            let response = replay(&server, request).await;
            assert!(response.status.is_success(), "{program}: {request}\n{}", response.text());
            let json = response.json();
            for pointer in request["expect"].as_array().unwrap() {
                let found = json.pointer(pointer.as_str().unwrap());
                assert!(found.is_some_and(|found| !found.is_null()), "{program}: no {pointer} in {json}");
            }
            if let Some(image) = json.pointer("/images/0") {
                assert!(decode(image).width() > 0);
            }
        }
    }
}
