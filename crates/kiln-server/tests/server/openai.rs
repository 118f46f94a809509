//! OpenAI's Images API, as its clients use it.

use axum::body::Body;
use axum::http::{Request, header};
use kiln_image::{GrayImage, RgbImage};
use serde_json::json;

use crate::harness::{TestServer, base64, decode, events, png};

#[tokio::test]
async fn images_are_returned_in_openais_format() {
    let server = TestServer::new();
    let body =
        json!({ "prompt": "a fox", "n": 2, "size": "48x32", "seed": 9, "user": "me", "quality": "high" });
    let answer = server.post("/v1/images/generations", body).await.ok().json();
    assert!(answer["created"].as_i64().unwrap() > 1_600_000_000);
    let data = answer["data"].as_array().unwrap();
    assert_eq!((data.len(), &answer["size"], &answer["output_format"]), (2, &json!("48x32"), &json!("png")));
    for (i, entry) in data.iter().enumerate() {
        let image = decode(&entry["b64_json"]);
        assert_eq!((image.width(), image.height()), (48, 32));
        assert_eq!(image.pixels()[..3], [9 + i as u8, i as u8, 7]);
    }
    let received = server.received.lock().unwrap();
    assert_eq!((&received[0].request.seed[..], received[0].request.n), (&[9][..], Some(2)));
}

#[tokio::test]
async fn files_have_the_requested_format_and_a_url() {
    let server = TestServer::new();
    for (format, head) in [("png", &b"\x89PNG"[..]), ("jpeg", b"\xff\xd8\xff"), ("webp", b"RIFF")] {
        let body = json!({ "prompt": "a fox", "response_format": "url", "output_format": format, "output_compression": 60 });
        let answer = server.post("/v1/images/generations", body).await.ok().json();
        assert!(answer["data"][0]["b64_json"].is_null());
        let url = answer["data"][0]["url"].as_str().unwrap();
        let file = server.get(url.strip_prefix("http://localhost").expect("an absolute URL")).await.ok();
        assert!(file.bytes.starts_with(head), "{format}");
        assert_eq!(file.headers[header::CONTENT_TYPE], format!("image/{format}"));
    }
}

/// A form as Python's client sends it.
pub fn form(parts: &[(&str, Option<&str>, &[u8])]) -> Request<Body> {
    let mut body = Vec::new();
    for (name, file, content) in parts {
        let file =
            file.map_or(String::new(), |file| format!("; filename=\"{file}\"\r\nContent-Type: image/png"));
        body.extend(format!("--XX\r\nContent-Disposition: form-data; name=\"{name}\"{file}\r\n\r\n").bytes());
        body.extend(*content);
        body.extend(b"\r\n");
    }
    body.extend(b"--XX--\r\n");
    let request = Request::post("/v1/images/edits").header(header::HOST, "localhost");
    request.header(header::CONTENT_TYPE, "multipart/form-data; boundary=XX").body(Body::from(body)).unwrap()
}

/// A mask whose left half is transparent.
fn transparent_mask(width: u32, height: u32) -> Vec<u8> {
    let mut mask = image::RgbaImage::new(width, height);
    mask.enumerate_pixels_mut()
        .for_each(|(x, _, pixel)| pixel.0 = [9, 9, 9, if x < width / 2 { 0 } else { 255 }]);
    let mut bytes = std::io::Cursor::new(Vec::new());
    mask.write_to(&mut bytes, image::ImageFormat::Png).unwrap();
    bytes.into_inner()
}

#[tokio::test]
async fn an_edit_accepts_a_form_with_images_and_a_transparent_mask() {
    let server = TestServer::new();
    let (first, second, mask) = (png(64, 48), png(32, 32), transparent_mask(64, 48));
    let request = form(&[
        ("prompt", None, b"a hat"),
        ("image[]", Some("a.png"), &first),
        ("image[]", Some("b.png"), &second),
        ("mask", Some("m.png"), &mask),
        ("n", None, b"1"),
        ("stream", None, b"False"),
        ("strength", None, b"0.9"),
    ]);
    let answer = server.send(request).await.ok().json();
    assert_eq!(decode(&answer["data"][0]["b64_json"]).width(), 64);
    let job = server.received.lock().unwrap()[0].clone();
    assert_eq!((job.references.len(), job.request.strength), (1, Some(0.9)));
    assert_eq!(std::fs::read(job.init.unwrap().path).unwrap(), first);
    assert_eq!(std::fs::read(&job.references[0].path).unwrap(), second);
    let mask = job.mask.unwrap();
    for image in [&*mask.image, &kiln_image::open(&mask.path).unwrap()] {
        let mask = GrayImage::from(image);
        assert_eq!((mask.row(0)[0], mask.row(0)[63]), (255, 0), "white areas are regenerated");
    }
    assert_eq!(server.metric("kiln_inputs_decoded_total").await, 3, "every image once");
}

#[tokio::test]
async fn an_edit_accepts_json_and_without_a_mask_images_are_references() {
    let server = TestServer::new();
    let url = format!("data:image/png;base64,{}", base64(&png(32, 32)));
    let body = json!({ "prompt": "a hat", "images": [{ "image_url": url }, base64(&png(16, 16))] });
    server.post("/v1/images/edits", body).await.ok();
    let job = server.received.lock().unwrap()[0].clone();
    assert_eq!((job.references.len(), job.init.is_some(), job.mask.is_some()), (2, false, false));
    let mask = format!("data:image/png;base64,{}", base64(&transparent_mask(32, 32)));
    let body = json!({ "prompt": "a hat", "image": url, "mask": { "image_url": mask } });
    server.post("/v1/images/edits", body).await.ok();
    let mask = GrayImage::from(&*server.received.lock().unwrap()[1].mask.as_ref().unwrap().image);
    assert_eq!((mask.row(0)[0], mask.row(0)[31]), (255, 0), "white areas are regenerated");
}

#[tokio::test]
async fn a_stream_sends_previews_and_ends_with_the_image() {
    let server = TestServer::new();
    // Slow, so that no preview is skipped.
    let body = json!({ "prompt": "slow", "steps": 6, "stream": true, "partial_images": 2, "size": "64x64" });
    let answer = server.post("/v1/images/generations", body).await.ok();
    assert_eq!(answer.headers[header::CONTENT_TYPE], "text/event-stream");
    let events = events(answer.text());
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    let partial = "image_generation.partial_image";
    assert_eq!(names, [partial, partial, "image_generation.completed"]);
    for (i, (name, data)) in events.iter().enumerate() {
        assert_eq!(data["type"], *name);
        assert_eq!(decode(&data["b64_json"]).width(), 64);
        assert!(i == 2 || data["partial_image_index"] == i);
    }
    assert!(events[2].1["usage"]["total_tokens"].is_number());
}

#[tokio::test]
async fn a_failed_job_sends_an_error_event() {
    let server = TestServer::new();
    let answer =
        server.post("/v1/images/generations", json!({ "prompt": "fail", "stream": true })).await.ok();
    let events = events(answer.text());
    assert_eq!(events[0].0, "error");
    assert_eq!(events[0].1["error"]["message"], "the GPU is on fire");
}

#[tokio::test]
async fn models_are_listed_in_openais_format() {
    let answer = TestServer::new().get("/v1/models").await.ok().json();
    assert_eq!((&answer["object"], &answer["data"][0]["id"]), (&json!("list"), &json!("small")));
    assert_eq!(answer["data"][0]["object"], "model");
}

#[tokio::test]
async fn invalid_requests_get_errors_in_openais_format() {
    let server = TestServer::new();
    let wrong = [
        (json!({}), 400, "invalid_value"),
        (json!({ "prompt": 7 }), 400, "invalid_request"),
        (json!({ "prompt": "a", "size": "big" }), 400, "invalid_request"),
        (json!({ "prompt": "a", "size": "99999x16" }), 400, "invalid_value"),
        (json!({ "prompt": "a", "n": 11 }), 400, "invalid_value"),
        (json!({ "prompt": "a", "partial_images": 4 }), 400, "invalid_request"),
        (json!({ "prompt": "a", "wings": 2 }), 400, "invalid_request"),
        (json!({ "prompt": "a", "model": "../secret" }), 404, "model_not_found"),
        (json!({ "prompt": "a", "loras": [{ "name": "nope" }] }), 404, "lora_not_found"),
        (json!({ "prompt": "a", "references": ["https://example.org/a.png"] }), 400, "invalid_image"),
        (json!({ "prompt": "a", "references": ["not base64!"] }), 400, "invalid_image"),
        (json!({ "prompt": "a", "references": [base64(b"not an image")] }), 400, "invalid_image"),
        (json!({ "prompt": "refuse" }), 400, "invalid_request"),
        (json!({ "prompt": "fail" }), 500, "generation_failed"),
    ];
    for (body, status, code) in wrong {
        server.post("/v1/images/generations", body).await.expect_error(status, code);
    }
    server.post("/v1/images/edits", json!({ "prompt": "a" })).await.expect_error(400, "invalid_request");
    let text = Request::post("/v1/images/generations")
        .header(header::HOST, "localhost")
        .body(Body::from("{}"))
        .unwrap();
    server.send(text).await.expect_error(415, "media_type");
}

#[tokio::test]
async fn malformed_forms_are_rejected() {
    let server = TestServer::new();
    let file = png(32, 32);
    server
        .send(form(&[("prompt", None, b"a"), ("image", Some("a"), b"not an image")]))
        .await
        .expect_error(400, "invalid_image");
    server
        .send(form(&[("prompt", None, b"\xff\xfe"), ("image", Some("a"), &file)]))
        .await
        .expect_error(400, "invalid_request");
    server
        .send(form(&[("prompt", None, b"a"), ("n", None, b"many"), ("image", Some("a"), &file)]))
        .await
        .expect_error(400, "invalid_request");
    server
        .send(form(&[("prompt", None, b"a"), ("../../etc/passwd", Some("../x"), &file)]))
        .await
        .expect_error(400, "invalid_request");
    let many: Vec<_> = (0..11).map(|_| ("image[]", Some("a.png"), &file[..])).collect();
    server
        .send(form(&[&[("prompt", None, &b"a"[..])], &many[..]].concat()))
        .await
        .expect_error(400, "invalid_request");
    for broken in ["--XX\r\nContent-Disposition: form-data; name=\"prompt\"\r\n\r\nno end", "", "--YY--"] {
        let request = Request::post("/v1/images/edits").header(header::HOST, "localhost");
        let request = request.header(header::CONTENT_TYPE, "multipart/form-data; boundary=XX");
        server.send(request.body(Body::from(broken)).unwrap()).await.expect_error(400, "invalid_request");
    }
    assert!(server.received.lock().unwrap().is_empty(), "nothing was generated");
    assert_eq!(RgbImage::black(32, 32), kiln_image::from_bytes("a", &file).unwrap());
}

#[tokio::test]
async fn models_are_found_by_name_and_by_alias() {
    let server =
        TestServer::with(|config| config.model_aliases = vec![("gpt-image-1".into(), "large".into())]);
    let names: Vec<String> = server.get("/v1/models").await.ok().json()["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|model| model["id"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(names, ["small", "large", "gpt-image-1"]);
    let model = server.get("/v1/models/gpt-image-1").await.ok().json();
    assert_eq!((&model["id"], &model["kiln"]["name"]), (&json!("gpt-image-1"), &json!("large")));
    server.get("/v1/models/nothing").await.expect_error(404, "model_not_found");
    server.post("/v1/images/generations", json!({ "prompt": "a", "model": "gpt-image-1" })).await.ok();
    let received = server.received.lock().unwrap()[0].request.clone();
    assert_eq!(received.model.unwrap().to_str(), Some("large"));
}

#[tokio::test]
async fn errors_name_the_field() {
    let server = TestServer::new();
    let cases = [
        (json!({ "prompt": "a", "size": "17" }), "size"),
        (json!({ "prompt": "a", "n": 99 }), "n"),
        (json!({ "prompt": "a", "model": "nothing" }), "model"),
        (json!({ "prompt": "a", "steps": "many" }), "steps"),
        (json!({ "prompt": "a", "widht": 64 }), "widht"),
        (json!({}), "prompt"),
    ];
    for (body, param) in cases {
        let error = server.post("/v1/images/generations", body).await.json()["error"].clone();
        assert_eq!(error["param"], param, "{error}");
    }
    let refused = server.post("/v1/images/variations", json!({})).await.expect_error(400, "not_supported");
    assert!(refused.text().contains("/v1/images/edits"));
}
