//! Every field of a request means the same through jobs, OpenAI's API and A1111's.

use kiln_engine::{Request, Rng, ScheduleKind};
use serde_json::{Value, json};

use crate::kit::{Kit, png};
use crate::openai::form;

fn knobs() -> Value {
    json!({ "rng": "cuda", "schedule": "power", "rho": 1.5, "sigmas": [1.0, 0.5], "max_tokens": 64, "vae": "taef2" })
}

fn with(mut fields: Value, more: Value) -> Value {
    fields.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    fields
}

#[track_caller]
fn assert_knobs(request: &Request) {
    assert_eq!((request.rng, request.schedule), (Some(Rng::Cuda), Some(ScheduleKind::Power)));
    assert_eq!((request.rho, request.max_tokens), (Some(1.5), Some(64)));
    assert_eq!(request.sigmas, [1.0, 0.5]);
    assert_eq!(request.vae.as_ref().unwrap().path.to_str(), Some("taef2"));
}

#[tokio::test]
async fn jobs_take_them_and_show_them_again() {
    let kit = Kit::new();
    let id = kit.submit(with(json!({ "prompt": "a fox" }), knobs())).await;
    let job = kit.wait(&id).await;
    for (name, value) in knobs().as_object().unwrap() {
        assert_eq!(job["order"][name], *value);
    }
    assert_knobs(&kit.seen.lock().unwrap()[0].request);
    assert_eq!(kit.get("/v1/vaes").await.ok().json()["data"], json!(["taef2"]));
}

#[tokio::test]
async fn openais_api_takes_them_beside_its_own_fields() {
    let kit = Kit::new();
    let body = json!({ "prompt": "a fox", "size": "32x48", "quality": "high", "seed": 3 });
    kit.post("/v1/images/generations", with(body, knobs())).await.ok();
    let request = kit.seen.lock().unwrap()[0].request.clone();
    assert_knobs(&request);
    assert_eq!((request.width, request.height, &request.seed[..]), (Some(32), Some(48), &[3][..]));
    let both = json!({ "prompt": "a fox", "size": "32x48", "width": 32 });
    kit.post("/v1/images/generations", both).await.refused(400, "invalid_request");
}

#[tokio::test]
async fn openais_forms_take_them_as_text() {
    let kit = Kit::new();
    let picture = png(32, 32);
    let parts: [(&str, Option<&str>, &[u8]); 13] = [
        ("prompt", None, b"123"),
        ("image", Some("a.png"), &picture),
        ("rng", None, b"cuda"),
        ("schedule", None, b"power"),
        ("rho", None, b"1.5"),
        ("sigmas", None, b"1, 0.5"),
        ("max_tokens", None, b"64"),
        ("vae", None, b"taef2"),
        ("seed", None, b"18446744073709551615"),
        ("loras", None, br#"[{"name": "ink", "weight": 0.5}]"#),
        ("negative_prompt", None, b"rain, [snow]"),
        ("model", None, b"large"),
        ("stream", None, b"False"),
    ];
    kit.send(form(&parts)).await.ok();
    let request = kit.seen.lock().unwrap()[0].request.clone();
    assert_knobs(&request);
    assert_eq!((&request.prompts[..], &request.seed[..]), (&["123".to_owned()][..], &[u64::MAX][..]));
    assert_eq!((request.loras[0].weight, request.negative_prompts), (0.5, vec!["rain, [snow]".to_owned()]));

    let parts: [(&str, Option<&str>, &[u8]); 7] = [
        ("prompt", None, b"a"),
        ("prompt", None, b"b"),
        ("sigmas[]", None, b"1"),
        ("sigmas[]", None, b"0.5"),
        ("seed", None, b"[11, 12]"),
        ("image", Some("a.png"), &picture),
        ("references[]", None, b"input:nope"),
    ];
    // The form was understood: only its reference is not there.
    kit.send(form(&parts)).await.refused(404, "input_not_found");
    kit.send(form(&parts[..6])).await.ok();
    let request = kit.seen.lock().unwrap()[1].request.clone();
    assert_eq!((&request.prompts[..], &request.seed[..]), (&["a".to_owned(), "b".into()][..], &[11, 12][..]));
    assert_eq!(request.sigmas, [1.0, 0.5]);
}

#[tokio::test]
async fn a1111s_api_takes_them_in_its_settings() {
    let kit = Kit::new();
    let settings = with(knobs(), json!({ "sd_model_checkpoint": "large", "CLIP_stop_at_last_layers": 2 }));
    let body = json!({ "prompt": "a fox", "seed": 7, "override_settings": settings });
    kit.post("/sdapi/v1/txt2img", body).await.ok();
    let request = kit.seen.lock().unwrap()[0].request.clone();
    assert_knobs(&request);
    assert_eq!((request.model.unwrap().to_str(), &request.seed[..]), (Some("large"), &[7][..]));
    let wrong = json!({ "prompt": "a", "override_settings": { "sigmas": "many" } });
    let refused = kit.post("/sdapi/v1/txt2img", wrong).await.refused(400, "invalid_request");
    assert!(refused.json()["detail"].as_str().unwrap().contains("sigmas"));
}

#[tokio::test]
async fn several_prompts_make_an_image_each_and_are_found_by_their_own() {
    let kit = Kit::new();
    let job = json!({
        "prompt": ["a fox", "a hen"], "negative_prompt": ["rain", "snow"], "n": 2, "seed": [11, 12, 13, 14],
    });
    let id = kit.submit(job.clone()).await;
    let done = kit.wait(&id).await;
    let images = done["pictures"].as_array().unwrap();
    let prompts: Vec<&str> = images.iter().map(|image| image["prompt"].as_str().unwrap()).collect();
    assert_eq!(prompts, ["a fox", "a fox", "a hen", "a hen"]);
    let seeds: Vec<&str> = images.iter().map(|image| image["seed"].as_str().unwrap()).collect();
    assert_eq!(seeds, ["11", "12", "13", "14"]);
    assert_eq!(done["order"]["prompt"], job["prompt"]);
    assert_eq!(done["order"]["negative_prompt"], job["negative_prompt"]);
    let found = kit.get("/v1/pictures?search=hen").await.ok().json();
    assert_eq!(found["data"].as_array().unwrap().len(), 2);
    let one = json!({ "prompt": ["a fox", "a hen"], "seed": 5 });
    let data = kit.post("/v1/images/generations", one).await.ok().json();
    assert_eq!(data["data"].as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn what_is_refused_is_named() {
    let kit = Kit::new();
    let wrong = [
        (json!({ "rng": "dice" }), 400, "invalid_request", "rng"),
        (json!({ "schedule": "flat" }), 400, "invalid_request", "schedule"),
        (json!({ "sigmas": 1 }), 400, "invalid_request", "sigmas"),
        (json!({ "sigmas": [1, 2] }), 400, "invalid_value", "sigmas"),
        (json!({ "rho": 2 }), 400, "invalid_value", "rho"),
        (json!({ "rho": -1, "schedule": "power" }), 400, "invalid_value", "rho"),
        (json!({ "max_tokens": 100_000 }), 400, "invalid_value", "max_tokens"),
        (json!({ "seed": [1, 2, 3], "n": 2 }), 400, "invalid_value", "seed"),
        (json!({ "seed": -1 }), 400, "invalid_request", "seed"),
        (json!({ "negative_prompt": ["a", "b"] }), 400, "invalid_value", "negative_prompt"),
        (json!({ "embeds": "/etc/passwd" }), 400, "invalid_value", "embeds"),
        (json!({ "noise": "/etc/passwd" }), 400, "invalid_value", "noise"),
        (json!({ "lora_partial": true }), 400, "invalid_value", "lora_partial"),
        (json!({ "vae": "../taef2" }), 404, "vae_not_found", "../taef2"),
        (json!({ "wings": 2 }), 400, "invalid_request", "wings"),
    ];
    for path in ["/v1/jobs", "/v1/images/generations"] {
        for (fields, status, code, name) in &wrong {
            let body = with(json!({ "prompt": "a fox" }), fields.clone());
            let refused = kit.post(path, body).await.refused(*status, code);
            assert!(refused.json()["detail"].as_str().unwrap().contains(name), "{}", refused.text());
        }
    }
    assert!(kit.seen.lock().unwrap().is_empty());
}
