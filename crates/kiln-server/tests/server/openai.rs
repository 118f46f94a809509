//! OpenAI's Images API, as its clients call it.

use axum::body::Body;
use axum::http::{Request, header};
use kiln_image::{GrayPicture, Picture};
use serde_json::json;

use crate::kit::{Kit, base64, decode, events, png};

#[tokio::test]
async fn images_come_back_in_openais_shape() {
    let kit = Kit::new();
    let body =
        json!({ "prompt": "a fox", "n": 2, "size": "48x32", "seed": 9, "user": "me", "quality": "high" });
    let answer = kit.post("/v1/images/generations", body).await.ok().json();
    assert!(answer["created"].as_i64().unwrap() > 1_600_000_000);
    let data = answer["data"].as_array().unwrap();
    assert_eq!((data.len(), &answer["size"], &answer["output_format"]), (2, &json!("48x32"), &json!("png")));
    for (i, entry) in data.iter().enumerate() {
        let picture = decode(&entry["b64_json"]);
        assert_eq!((picture.width(), picture.height()), (48, 32));
        assert_eq!(picture.pixels()[..3], [9, i as u8, 7]);
    }
    let seen = kit.seen.lock().unwrap();
    assert_eq!((&seen[0].request.seed[..], seen[0].request.n), (&[9][..], Some(2)));
}

#[tokio::test]
async fn files_come_in_the_format_that_is_asked_for_and_by_address() {
    let kit = Kit::new();
    for (format, head) in [("png", &b"\x89PNG"[..]), ("jpeg", b"\xff\xd8\xff"), ("webp", b"RIFF")] {
        let body = json!({ "prompt": "a fox", "response_format": "url", "output_format": format, "output_compression": 60 });
        let answer = kit.post("/v1/images/generations", body).await.ok().json();
        assert!(answer["data"][0]["b64_json"].is_null());
        let file = kit.get(answer["data"][0]["url"].as_str().unwrap()).await.ok();
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

/// A mask that is see-through in its left half.
fn see_through(width: u32, height: u32) -> Vec<u8> {
    let mut picture = image::RgbaImage::new(width, height);
    picture
        .enumerate_pixels_mut()
        .for_each(|(x, _, pixel)| pixel.0 = [9, 9, 9, if x < width / 2 { 0 } else { 255 }]);
    let mut bytes = std::io::Cursor::new(Vec::new());
    picture.write_to(&mut bytes, image::ImageFormat::Png).unwrap();
    bytes.into_inner()
}

#[tokio::test]
async fn an_edit_takes_a_form_with_images_and_a_see_through_mask() {
    let kit = Kit::new();
    let (first, second, mask) = (png(64, 48), png(32, 32), see_through(64, 48));
    let request = form(&[
        ("prompt", None, b"a hat"),
        ("image[]", Some("a.png"), &first),
        ("image[]", Some("b.png"), &second),
        ("mask", Some("m.png"), &mask),
        ("n", None, b"1"),
        ("stream", None, b"False"),
        ("strength", None, b"0.9"),
    ]);
    let answer = kit.send(request).await.ok().json();
    assert_eq!(decode(&answer["data"][0]["b64_json"]).width(), 64);
    let seen = kit.seen.lock().unwrap()[0].clone();
    assert_eq!((seen.references.len(), seen.request.strength), (1, Some(0.9)));
    assert_eq!(std::fs::read(seen.init.unwrap().path).unwrap(), first);
    assert_eq!(std::fs::read(&seen.references[0].path).unwrap(), second);
    let mask = seen.mask.unwrap();
    for picture in [&*mask.picture, &kiln_image::open(&mask.path).unwrap()] {
        let mask = GrayPicture::from(picture);
        assert_eq!((mask.row(0)[0], mask.row(0)[63]), (255, 0), "white is what is regenerated");
    }
    assert_eq!(kit.metric("kiln_inputs_decoded_total").await, 3, "each image once");
}

#[tokio::test]
async fn an_edit_takes_json_and_without_a_mask_images_are_references() {
    let kit = Kit::new();
    let url = format!("data:image/png;base64,{}", base64(&png(32, 32)));
    let body = json!({ "prompt": "a hat", "images": [{ "image_url": url }, base64(&png(16, 16))] });
    kit.post("/v1/images/edits", body).await.ok();
    let seen = kit.seen.lock().unwrap()[0].clone();
    assert_eq!((seen.references.len(), seen.init.is_some(), seen.mask.is_some()), (2, false, false));
    let mask = format!("data:image/png;base64,{}", base64(&see_through(32, 32)));
    let body = json!({ "prompt": "a hat", "image": url, "mask": { "image_url": mask } });
    kit.post("/v1/images/edits", body).await.ok();
    let mask = GrayPicture::from(&*kit.seen.lock().unwrap()[1].mask.as_ref().unwrap().picture);
    assert_eq!((mask.row(0)[0], mask.row(0)[31]), (255, 0), "white is what is regenerated");
}

#[tokio::test]
async fn a_stream_shows_previews_and_ends_with_the_image() {
    let kit = Kit::new();
    // Slow, so that no preview is overtaken by the next one.
    let body = json!({ "prompt": "slow", "steps": 6, "stream": true, "partial_images": 2, "size": "64x64" });
    let answer = kit.post("/v1/images/generations", body).await.ok();
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
async fn a_stream_that_fails_says_so() {
    let kit = Kit::new();
    let answer = kit.post("/v1/images/generations", json!({ "prompt": "fail", "stream": true })).await.ok();
    let events = events(answer.text());
    assert_eq!(events[0].0, "error");
    assert_eq!(events[0].1["error"]["message"], "the GPU is on fire");
}

#[tokio::test]
async fn models_are_listed_in_openais_shape() {
    let answer = Kit::new().get("/v1/models").await.ok().json();
    assert_eq!((&answer["object"], &answer["data"][0]["id"]), (&json!("list"), &json!("small")));
    assert_eq!(answer["data"][0]["object"], "model");
}

#[tokio::test]
async fn what_makes_no_sense_is_refused_in_openais_shape() {
    let kit = Kit::new();
    let wrong = [
        (json!({}), 400, "invalid_request"),
        (json!({ "prompt": 7 }), 400, "invalid_request"),
        (json!({ "prompt": "a", "size": "big" }), 400, "invalid_request"),
        (json!({ "prompt": "a", "size": "99999x16" }), 400, "invalid_value"),
        (json!({ "prompt": "a", "n": 11 }), 400, "invalid_value"),
        (json!({ "prompt": "a", "partial_images": 4 }), 400, "invalid_request"),
        (json!({ "prompt": "a", "wings": 2 }), 400, "invalid_request"),
        (json!({ "prompt": "a", "model": "../secret" }), 404, "model_not_found"),
        (json!({ "prompt": "a", "loras": [{ "name": "nope" }] }), 404, "lora_not_found"),
        (json!({ "prompt": "a", "references": ["https://example.org/a.png"] }), 400, "invalid_picture"),
        (json!({ "prompt": "a", "references": ["not base64!"] }), 400, "invalid_picture"),
        (json!({ "prompt": "a", "references": [base64(b"not a picture")] }), 400, "invalid_picture"),
        (json!({ "prompt": "refuse" }), 400, "invalid_request"),
        (json!({ "prompt": "fail" }), 500, "generation_failed"),
    ];
    for (body, status, code) in wrong {
        kit.post("/v1/images/generations", body).await.refused(status, code);
    }
    kit.post("/v1/images/edits", json!({ "prompt": "a" })).await.refused(400, "invalid_request");
    let text = Request::post("/v1/images/generations")
        .header(header::HOST, "localhost")
        .body(Body::from("{}"))
        .unwrap();
    kit.send(text).await.refused(415, "media_type");
}

#[tokio::test]
async fn hostile_forms_are_refused() {
    let kit = Kit::new();
    let picture = png(32, 32);
    kit.send(form(&[("prompt", None, b"a"), ("image", Some("a"), b"not a picture")]))
        .await
        .refused(400, "invalid_picture");
    kit.send(form(&[("prompt", None, b"\xff\xfe"), ("image", Some("a"), &picture)]))
        .await
        .refused(400, "invalid_request");
    kit.send(form(&[("prompt", None, b"a"), ("n", None, b"many"), ("image", Some("a"), &picture)]))
        .await
        .refused(400, "invalid_request");
    kit.send(form(&[("prompt", None, b"a"), ("../../etc/passwd", Some("../x"), &picture)]))
        .await
        .refused(400, "invalid_request");
    let many: Vec<_> = (0..11).map(|_| ("image[]", Some("a.png"), &picture[..])).collect();
    kit.send(form(&[&[("prompt", None, &b"a"[..])], &many[..]].concat()))
        .await
        .refused(400, "invalid_request");
    for broken in ["--XX\r\nContent-Disposition: form-data; name=\"prompt\"\r\n\r\nno end", "", "--YY--"] {
        let request = Request::post("/v1/images/edits").header(header::HOST, "localhost");
        let request = request.header(header::CONTENT_TYPE, "multipart/form-data; boundary=XX");
        kit.send(request.body(Body::from(broken)).unwrap()).await.refused(400, "invalid_request");
    }
    assert!(kit.seen.lock().unwrap().is_empty(), "nothing of it was generated");
    assert_eq!(Picture::black(32, 32), kiln_image::from_bytes("a", &picture).unwrap());
}
