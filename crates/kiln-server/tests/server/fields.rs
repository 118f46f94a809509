//! All fields of a request have the same meaning in the jobs API, OpenAI's and A1111's.

use kiln_engine::{Request, Rng, ScheduleKind};
use serde_json::{Value, json};

use crate::harness::{TestServer, png};
use crate::openai::form;

fn settings() -> Value {
    json!({ "rng": "cuda", "schedule": "power", "rho": 1.5, "sigmas": [1.0, 0.5], "max_tokens": 64, "vae": "taef2",
        "text_layers": [8, 16, 24] })
}

fn with(mut fields: Value, more: Value) -> Value {
    fields.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    fields
}

#[track_caller]
fn assert_settings(request: &Request) {
    assert_eq!((request.rng, request.schedule), (Some(Rng::Cuda), Some(ScheduleKind::Power)));
    assert_eq!((request.rho, request.max_tokens), (Some(1.5), Some(64)));
    assert_eq!((&request.sigmas[..], &request.text_layers[..]), (&[1.0, 0.5][..], &[8, 16, 24][..]));
    assert_eq!(request.vae.as_ref().unwrap().path.to_str(), Some("taef2"));
}

#[tokio::test]
async fn the_jobs_api_accepts_and_shows_all_fields() {
    let server = TestServer::new();
    let id = server.submit(with(json!({ "prompt": "a fox" }), settings())).await;
    let job = server.wait(&id).await;
    for (name, value) in settings().as_object().unwrap() {
        assert_eq!(job["request"][name], *value);
    }
    assert_settings(&server.received.lock().unwrap()[0].request);
    assert_eq!(server.get("/v1/vaes").await.ok().json()["data"], json!(["taef2"]));
}

#[tokio::test]
async fn openais_api_accepts_them_beside_its_own_fields() {
    let server = TestServer::new();
    let body = json!({ "prompt": "a fox", "size": "32x48", "quality": "high", "seed": 3 });
    server.post("/v1/images/generations", with(body, settings())).await.ok();
    let request = server.received.lock().unwrap()[0].request.clone();
    assert_settings(&request);
    assert_eq!((request.width, request.height, &request.seed[..]), (Some(32), Some(48), &[3][..]));
    let both = json!({ "prompt": "a fox", "size": "32x48", "width": 32 });
    server.post("/v1/images/generations", both).await.expect_error(400, "invalid_request");
}

#[tokio::test]
async fn openais_forms_accept_them_as_text() {
    let server = TestServer::new();
    let file = png(32, 32);
    let parts: [(&str, Option<&str>, &[u8]); 14] = [
        ("prompt", None, b"123"),
        ("image", Some("a.png"), &file),
        ("rng", None, b"cuda"),
        ("schedule", None, b"power"),
        ("rho", None, b"1.5"),
        ("sigmas", None, b"1, 0.5"),
        ("text_layers", None, b"8,16,24"),
        ("max_tokens", None, b"64"),
        ("vae", None, b"taef2"),
        ("seed", None, b"18446744073709551615"),
        ("loras", None, br#"[{"name": "ink", "weight": 0.5}]"#),
        ("negative_prompt", None, b"rain, [snow]"),
        ("model", None, b"large"),
        ("stream", None, b"False"),
    ];
    server.send(form(&parts)).await.ok();
    let request = server.received.lock().unwrap()[0].request.clone();
    assert_settings(&request);
    assert_eq!((&request.prompts[..], &request.seed[..]), (&["123".to_owned()][..], &[u64::MAX][..]));
    assert_eq!((request.loras[0].weight, request.negative_prompts), (0.5, vec!["rain, [snow]".to_owned()]));

    let parts: [(&str, Option<&str>, &[u8]); 7] = [
        ("prompt", None, b"a"),
        ("prompt", None, b"b"),
        ("sigmas[]", None, b"1"),
        ("sigmas[]", None, b"0.5"),
        ("seed", None, b"[11, 12]"),
        ("image", Some("a.png"), &file),
        ("references[]", None, b"input:nope"),
    ];
    // The form is valid; only its reference does not exist.
    server.send(form(&parts)).await.expect_error(404, "input_not_found");
    server.send(form(&parts[..6])).await.ok();
    let request = server.received.lock().unwrap()[1].request.clone();
    assert_eq!((&request.prompts[..], &request.seed[..]), (&["a".to_owned(), "b".into()][..], &[11, 12][..]));
    assert_eq!(request.sigmas, [1.0, 0.5]);
}

#[tokio::test]
async fn a1111s_api_accepts_them_in_override_settings() {
    let server = TestServer::new();
    let settings = with(settings(), json!({ "sd_model_checkpoint": "large", "CLIP_stop_at_last_layers": 2 }));
    let body = json!({ "prompt": "a fox", "seed": 7, "override_settings": settings });
    server.post("/sdapi/v1/txt2img", body).await.ok();
    let request = server.received.lock().unwrap()[0].request.clone();
    assert_settings(&request);
    assert_eq!((request.model.unwrap().to_str(), &request.seed[..]), (Some("large"), &[7][..]));
    let wrong = json!({ "prompt": "a", "override_settings": { "sigmas": "many" } });
    let response = server.post("/sdapi/v1/txt2img", wrong).await.expect_error(400, "invalid_request");
    assert!(response.json()["detail"].as_str().unwrap().contains("sigmas"));
}

#[tokio::test]
async fn every_prompt_of_a_list_gets_its_images_and_they_are_searched_by_it() {
    let server = TestServer::new();
    let job = json!({
        "prompt": ["a fox", "a hen"], "negative_prompt": ["rain", "snow"], "n": 2, "seed": [11, 12, 13, 14],
    });
    let id = server.submit(job.clone()).await;
    let done = server.wait(&id).await;
    let images = done["images"].as_array().unwrap();
    let prompts: Vec<&str> = images.iter().map(|image| image["prompt"].as_str().unwrap()).collect();
    assert_eq!(prompts, ["a fox", "a fox", "a hen", "a hen"]);
    let seeds: Vec<&str> = images.iter().map(|image| image["seed"].as_str().unwrap()).collect();
    assert_eq!(seeds, ["11", "12", "13", "14"]);
    assert_eq!(done["request"]["prompt"], job["prompt"]);
    assert_eq!(done["request"]["negative_prompt"], job["negative_prompt"]);
    let found = server.get("/v1/images?search=hen").await.ok().json();
    assert_eq!(found["data"].as_array().unwrap().len(), 2);
    let one = json!({ "prompt": ["a fox", "a hen"], "seed": 5 });
    let data = server.post("/v1/images/generations", one).await.ok().json();
    let seeds: Vec<&str> =
        data["data"].as_array().unwrap().iter().map(|d| d["seed"].as_str().unwrap()).collect();
    assert_eq!(seeds, ["5", "6"]);
}

#[tokio::test]
async fn errors_name_the_field() {
    let server = TestServer::new();
    let wrong = [
        (json!({ "rng": "dice" }), 400, "invalid_request", "rng"),
        (json!({ "schedule": "flat" }), 400, "invalid_request", "schedule"),
        (json!({ "sigmas": 1 }), 400, "invalid_request", "sigmas"),
        (json!({ "sigmas": [1, 2] }), 400, "invalid_value", "sigmas"),
        (json!({ "rho": 2 }), 400, "invalid_value", "rho"),
        (json!({ "rho": -1, "schedule": "power" }), 400, "invalid_value", "rho"),
        (json!({ "max_tokens": 100_000 }), 400, "invalid_value", "max_tokens"),
        (json!({ "guidance": 1e99 }), 400, "invalid_request", "the number 1e99 is out of range"),
        (
            json!({ "loras": [{ "name": "ink", "weight": 1e99 }] }),
            400,
            "invalid_request",
            "1e99 is out of range",
        ),
        (json!({ "dora_rule": "a1111" }), 400, "invalid_request", "dora_rule"),
        (json!({ "seed": [1, 2, 3], "n": 2 }), 400, "invalid_value", "seed"),
        (json!({ "seed": -2 }), 400, "invalid_request", "seed"),
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
            let response = server.post(path, body).await.expect_error(*status, code);
            assert!(response.json()["detail"].as_str().unwrap().contains(name), "{}", response.text());
        }
    }
    assert!(server.received.lock().unwrap().is_empty());
}
