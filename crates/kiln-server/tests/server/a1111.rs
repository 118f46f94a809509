//! A1111's API, as its clients use it.

use std::time::Duration;

use serde_json::json;

use crate::harness::{TestServer, base64, decode, png};

#[tokio::test]
async fn images_are_returned_in_a1111s_format() {
    let server = TestServer::new();
    let body = json!({
        "prompt": "a fox <lora:ink:0.5>", "negative_prompt": "", "seed": -1, "steps": 3, "cfg_scale": 7.5, "width": 32, "height": 48,
        "batch_size": 2, "n_iter": 1, "sampler_name": "Euler a", "override_settings": { "sd_model_checkpoint": "large" },
        "send_images": true, "alwayson_scripts": {},
    });
    let answer = server.post("/sdapi/v1/txt2img", body).await.ok().json();
    let images = answer["images"].as_array().unwrap();
    assert_eq!((images.len(), decode(&images[0]).height()), (2, 48));
    let info: serde_json::Value = serde_json::from_str(answer["info"].as_str().unwrap()).unwrap();
    assert!(info["seed"].is_number() && info["all_seeds"].as_array().unwrap().len() == 2);
    let request = server.received.lock().unwrap()[0].request.clone();
    assert_eq!((request.prompts[0].as_str(), request.model.unwrap().to_str()), ("a fox", Some("large")));
    assert_eq!((request.loras[0].path.to_str(), request.loras[0].weight), (Some("ink"), 0.5));
    assert_eq!((request.steps, request.guidance), (Some(3), Some(7.5)));
}

#[tokio::test]
async fn an_image_is_edited_inside_a_mask() {
    let server = TestServer::new();
    let body = json!({
        "prompt": "a hat", "init_images": [base64(&png(64, 64))], "mask": base64(&png(64, 64)), "denoising_strength": 0.4,
        "inpaint_full_res": true, "inpaint_full_res_padding": 16,
    });
    server.post("/sdapi/v1/img2img", body).await.ok();
    let job = server.received.lock().unwrap()[0].clone();
    assert!(job.init.is_some() && job.mask.is_some());
    assert_eq!((job.request.strength, job.request.mask_padding), (Some(0.4), Some(16)));
    server.post("/sdapi/v1/img2img", json!({ "prompt": "a" })).await.expect_error(400, "invalid_request");
}

#[tokio::test(flavor = "multi_thread")]
async fn progress_is_reported_and_an_interrupted_job_returns_its_images() {
    let server = TestServer::new();
    let generating = server
        .post("/sdapi/v1/txt2img", json!({ "prompt": "slow", "steps": 150, "width": 64, "height": 64 }));
    let watching = async {
        for _ in 0..200 {
            let progress = server.get("/sdapi/v1/progress").await.ok().json();
            if progress["state"]["sampling_step"].as_u64() > Some(2) && progress["current_image"].is_string()
            {
                assert_eq!(progress["state"]["sampling_steps"], 150);
                assert_eq!(decode(&progress["current_image"]).width(), 8);
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        server.post("/sdapi/v1/interrupt", json!({})).await.ok();
    };
    let (answer, ()) = tokio::join!(generating, watching);
    let answer = answer.ok().json();
    assert!(answer["images"].as_array().unwrap().is_empty());
    assert!(answer["info"].as_str().unwrap().contains("\"interrupted\":true"));
    assert_eq!(server.get("/sdapi/v1/progress").await.json()["state"]["job_count"], 0);
}

#[tokio::test]
async fn lists_and_options_match_the_server() {
    let server = TestServer::new();
    assert_eq!(server.get("/sdapi/v1/sd-models").await.ok().json()[0]["model_name"], "small");
    assert_eq!(server.get("/sdapi/v1/loras").await.ok().json()[0]["name"], "ink");
    assert_eq!(server.get("/sdapi/v1/samplers").await.ok().json()[0]["name"], "Euler");
    assert_eq!(server.get("/sdapi/v1/options").await.ok().json()["sd_model_checkpoint"], "small");
    server.post("/sdapi/v1/options", json!({ "sd_model_checkpoint": "small", "other": 1 })).await.ok();
    let response = server.post("/sdapi/v1/options", json!({ "sd_model_checkpoint": "large" })).await;
    assert!(
        response.expect_error(400, "invalid_request").json()["detail"]
            .as_str()
            .unwrap()
            .contains("override_settings")
    );
}
