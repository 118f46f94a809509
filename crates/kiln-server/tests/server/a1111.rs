//! A1111's endpoints, as its clients call them.

use std::time::Duration;

use serde_json::json;

use crate::kit::{Kit, base64, decode, png};

#[tokio::test]
async fn images_come_back_in_a1111s_shape() {
    let kit = Kit::new();
    let body = json!({
        "prompt": "a fox <lora:ink:0.5>", "negative_prompt": "", "seed": -1, "steps": 3, "cfg_scale": 7.5, "width": 32, "height": 48,
        "batch_size": 2, "n_iter": 1, "sampler_name": "Euler a", "override_settings": { "sd_model_checkpoint": "large" },
        "send_images": true, "alwayson_scripts": {},
    });
    let answer = kit.post("/sdapi/v1/txt2img", body).await.ok().json();
    let images = answer["images"].as_array().unwrap();
    assert_eq!((images.len(), decode(&images[0]).height()), (2, 48));
    let info: serde_json::Value = serde_json::from_str(answer["info"].as_str().unwrap()).unwrap();
    assert!(info["seed"].is_number() && info["all_seeds"].as_array().unwrap().len() == 2);
    let seen = kit.seen.lock().unwrap()[0].request.clone();
    assert_eq!((seen.prompts[0].as_str(), seen.model.unwrap().to_str()), ("a fox", Some("large")));
    assert_eq!((seen.loras[0].path.to_str(), seen.loras[0].weight), (Some("ink"), 0.5));
    assert_eq!((seen.steps, seen.guidance), (Some(3), Some(7.5)));
}

#[tokio::test]
async fn an_image_is_changed_inside_a_mask() {
    let kit = Kit::new();
    let body = json!({
        "prompt": "a hat", "init_images": [base64(&png(64, 64))], "mask": base64(&png(64, 64)), "denoising_strength": 0.4,
        "inpaint_full_res": true, "inpaint_full_res_padding": 16,
    });
    kit.post("/sdapi/v1/img2img", body).await.ok();
    let seen = kit.seen.lock().unwrap()[0].clone();
    assert!(seen.init.is_some() && seen.mask.is_some());
    assert_eq!((seen.request.strength, seen.request.mask_padding), (Some(0.4), Some(16)));
    kit.post("/sdapi/v1/img2img", json!({ "prompt": "a" })).await.refused(400, "invalid_request");
}

#[tokio::test(flavor = "multi_thread")]
async fn progress_is_told_and_an_interruption_answers_with_what_there_is() {
    let kit = Kit::new();
    let generating =
        kit.post("/sdapi/v1/txt2img", json!({ "prompt": "slow", "steps": 150, "width": 64, "height": 64 }));
    let watching = async {
        for _ in 0..200 {
            let progress = kit.get("/sdapi/v1/progress").await.ok().json();
            if progress["state"]["sampling_step"].as_u64() > Some(2) && progress["current_image"].is_string()
            {
                assert_eq!(progress["state"]["sampling_steps"], 150);
                assert_eq!(decode(&progress["current_image"]).width(), 8);
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        kit.post("/sdapi/v1/interrupt", json!({})).await.ok();
    };
    let (answer, ()) = tokio::join!(generating, watching);
    let answer = answer.ok().json();
    assert!(answer["images"].as_array().unwrap().is_empty());
    assert!(answer["info"].as_str().unwrap().contains("\"interrupted\":true"));
    assert_eq!(kit.get("/sdapi/v1/progress").await.json()["state"]["job_count"], 0);
}

#[tokio::test]
async fn lists_and_options_are_those_of_the_server() {
    let kit = Kit::new();
    assert_eq!(kit.get("/sdapi/v1/sd-models").await.ok().json()[0]["model_name"], "small");
    assert_eq!(kit.get("/sdapi/v1/loras").await.ok().json()[0]["name"], "ink");
    assert_eq!(kit.get("/sdapi/v1/samplers").await.ok().json()[0]["name"], "Euler");
    assert_eq!(kit.get("/sdapi/v1/options").await.ok().json()["sd_model_checkpoint"], "small");
    kit.post("/sdapi/v1/options", json!({ "sd_model_checkpoint": "small", "other": 1 })).await.ok();
    let refused = kit.post("/sdapi/v1/options", json!({ "sd_model_checkpoint": "large" })).await;
    assert!(
        refused.refused(400, "invalid_request").json()["detail"]
            .as_str()
            .unwrap()
            .contains("override_settings")
    );
}
