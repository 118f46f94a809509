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
    assert_eq!(info["infotexts"].as_array().unwrap().len(), 2);
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
    let images = answer["images"].as_array().unwrap();
    assert_eq!((images.len(), decode(&images[0]).width()), (1, 64), "the unfinished image");
    assert!(answer["info"].as_str().unwrap().contains("\"interrupted\":true"));
    assert_eq!(server.get("/v1/images").await.json()["data"], json!([]), "not in the gallery");
    assert_eq!(server.get("/sdapi/v1/progress").await.json()["state"]["job_count"], 0);
}

#[tokio::test]
async fn a_mask_is_inverted_on_request_and_may_be_painted_on_transparency() {
    let server = TestServer::new();
    // Left half white, right half black; or left half opaque, right half transparent.
    let png = |pixel: fn(bool) -> [u8; 4]| {
        let image = image::RgbaImage::from_fn(32, 16, |x, _| image::Rgba(pixel(x < 16)));
        let mut bytes = std::io::Cursor::new(Vec::new());
        image.write_to(&mut bytes, image::ImageFormat::Png).unwrap();
        base64(bytes.get_ref())
    };
    let opaque = png(|left| if left { [255; 4] } else { [0, 0, 0, 255] });
    let transparent = png(|left| if left { [0, 0, 0, 255] } else { [0; 4] });
    let cases = [
        (&opaque, json!(0), [255, 0]),
        (&opaque, json!(1), [0, 255]),
        (&opaque, json!(true), [0, 255]),
        (&transparent, json!(false), [255, 0]),
        (&transparent, json!(1), [0, 255]),
    ];
    for (mask, invert, expected) in cases {
        let body = json!({
            "prompt": "a", "init_images": [mask], "mask": mask, "inpainting_mask_invert": invert, "steps": 1,
        });
        server.post("/sdapi/v1/img2img", body).await.ok();
        let mask = server.received.lock().unwrap().pop().unwrap().mask.unwrap().image;
        let at = |x: usize| mask.pixels()[3 * x];
        assert_eq!([at(2), at(30)], expected, "{invert}");
    }
}
