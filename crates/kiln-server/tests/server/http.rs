//! What HTTP itself promises: hosts, validators, parts of files, compression, limits of lists.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::{Request, Version, header};
use serde_json::json;

use crate::harness::{TestResponse, TestServer, base64, png};

/// A request with these headers.
async fn get(server: &TestServer, uri: &str, headers: &[(header::HeaderName, &str)]) -> TestResponse {
    let mut request = Request::get(uri);
    for (name, value) in headers {
        request = request.header(name, *value);
    }
    server.send(request.body(Body::empty()).unwrap()).await
}

async fn get_here(server: &TestServer, uri: &str, name: header::HeaderName, value: &str) -> TestResponse {
    get(server, uri, &[(header::HOST, "localhost"), (name, value)]).await
}

#[tokio::test]
async fn a_request_names_one_host_and_it_is_this_servers() {
    let server = TestServer::with(|config| config.hosts = vec!["kiln.home".into()]);
    let host = |value: &'static str| [(header::HOST, value)];
    for (uri, headers) in [
        ("/v1/about", &host("localhost")[..]),
        ("/v1/about", &host("LOCALHOST:7860")),
        ("/v1/about", &host("Kiln.Home")),
        ("http://localhost:7860/v1/about", &[]),
        ("http://localhost:7860/v1/about", &host("LocalHost:7860")),
    ] {
        let answer = get(&server, uri, headers).await;
        assert!(answer.status.is_success(), "{uri} {headers:?}: {}", answer.text());
    }
    for (uri, headers) in [
        ("/v1/about", &[][..]),
        ("/healthz", &[]),
        ("/", &[]),
        ("http://evil.example/v1/about", &host("localhost")),
        ("http://localhost/v1/about", &host("evil.example")),
        ("http://localhost:1/v1/about", &host("localhost:2")),
    ] {
        get(&server, uri, headers).await.expect_error(400, "invalid_host");
    }
    for (uri, headers) in [("http://evil.example/v1/about", &[][..]), ("/v1/about", &host("evil.example"))] {
        get(&server, uri, headers).await.expect_error(403, "foreign");
    }
    // HTTP/1.0 has no hosts; probes of load balancers still use it.
    for (path, status) in [("/healthz", 200), ("/v1/about", 400)] {
        let mut request = Request::get(path).body(Body::empty()).unwrap();
        *request.version_mut() = Version::HTTP_10;
        assert_eq!(server.send(request).await.status.as_u16(), status, "{path}");
    }
}

#[tokio::test]
async fn files_of_the_page_are_compressed_and_validated() {
    let server = TestServer::new();
    for path in ["/", "/page/style.css", "/page/main.js", "/openapi.json"] {
        let plain = server.get(path).await.ok();
        let packed = get_here(&server, path, header::ACCEPT_ENCODING, "br, gzip").await.ok();
        assert_eq!(packed.headers[header::CONTENT_ENCODING], "gzip", "{path}");
        assert!(packed.bytes.len() * 2 < plain.bytes.len(), "{path}");
        assert_eq!(packed.headers[header::CONTENT_TYPE], plain.headers[header::CONTENT_TYPE]);
        assert!(!plain.headers.contains_key(header::CONTENT_ENCODING));
        for answer in [&plain, &packed] {
            assert_eq!(answer.headers[header::VARY], "accept-encoding");
        }
        // What a browser gets is the same either way.
        assert_eq!(kiln_pack::gunzip(&packed.bytes), plain.bytes);
        let (etag, other) = (&plain.headers[header::ETAG], &packed.headers[header::ETAG]);
        assert_ne!(etag, other, "{path}");
        let again = get_here(&server, path, header::IF_NONE_MATCH, etag.to_str().unwrap()).await;
        assert_eq!((again.status.as_u16(), again.bytes.len()), (304, 0), "{path}");
        assert_eq!(again.headers[header::CACHE_CONTROL], plain.headers[header::CACHE_CONTROL]);
        let changed = get_here(&server, path, header::IF_NONE_MATCH, "\"other\"").await;
        assert_eq!(changed.status.as_u16(), 200);
    }
    // An icon is compressed already.
    let icon = get_here(&server, "/page/icon-192.png", header::ACCEPT_ENCODING, "gzip").await.ok();
    assert!(!icon.headers.contains_key(header::CONTENT_ENCODING));
}

#[tokio::test]
async fn images_have_validators_and_are_sent_in_parts() {
    let server = TestServer::new();
    let job = server.submit(json!({ "prompt": "a fox", "width": 64, "height": 64 })).await;
    server.wait(&job).await;
    let image = server.get("/v1/images").await.ok().json()["data"][0].clone();
    let request = Request::post("/v1/inputs").header(header::HOST, "localhost");
    let input = server.send(request.body(png(40, 40).into()).unwrap()).await.ok().json()["id"].clone();
    for path in [
        image["url"].as_str().unwrap(),
        image["thumbnail"].as_str().unwrap(),
        &format!("/v1/inputs/{}", input.as_str().unwrap()),
        "/v1/loras/preview?name=ink",
    ] {
        let whole = server.get(path).await.ok();
        assert_eq!(whole.headers[header::ACCEPT_RANGES], "bytes", "{path}");
        let cached = whole.headers[header::CACHE_CONTROL].to_str().unwrap();
        assert!(cached.starts_with("private, "), "{path}: {cached}");
        let etag = whole.headers[header::ETAG].to_str().unwrap();
        let part = get_here(&server, path, header::RANGE, "bytes=4-9").await;
        assert_eq!((part.status.as_u16(), &part.bytes[..]), (206, &whole.bytes[4..10]), "{path}");
        let length = whole.bytes.len();
        assert_eq!(part.headers[header::CONTENT_RANGE], format!("bytes 4-9/{length}"));
        assert_eq!(part.headers[header::CONTENT_LENGTH], "6");
        let rest = get_here(&server, path, header::RANGE, "bytes=-5").await;
        assert_eq!(rest.bytes, whole.bytes[length - 5..]);
        let outside = get_here(&server, path, header::RANGE, "bytes=99999999-").await;
        let outside = outside.expect_error(416, "range");
        assert_eq!(outside.headers[header::CONTENT_RANGE], format!("bytes */{length}"));
        assert_eq!(get_here(&server, path, header::IF_NONE_MATCH, etag).await.status.as_u16(), 304, "{path}");
        let headers =
            [(header::HOST, "localhost"), (header::RANGE, "bytes=0-0"), (header::IF_RANGE, "\"other\"")];
        assert_eq!(get(&server, path, &headers).await.bytes, whole.bytes, "{path}");
    }
}

#[tokio::test]
async fn a_list_has_the_length_that_was_asked_for_or_none() {
    let server = TestServer::new();
    for (path, most) in [("/v1/images", 200), ("/v1/jobs", 1000)] {
        for good in [1, most] {
            server.get(&format!("{path}?limit={good}")).await.ok();
        }
        for bad in ["0", "-1", &(most + 1).to_string(), "4294967297"] {
            let refused =
                server.get(&format!("{path}?limit={bad}")).await.expect_error(400, "invalid_request");
            let text = refused.json()["error"].to_string();
            assert!(
                text.contains(&format!("between 1 and {most}, found {bad}")) && text.contains("\"limit\""),
                "{text}"
            );
        }
        for bad in ["", "x", "1e9", "99999999999999999999"] {
            server.get(&format!("{path}?limit={bad}")).await.expect_error(400, "invalid_request");
        }
    }
}

#[tokio::test]
async fn a1111s_fields_that_would_change_the_image_are_refused_by_name() {
    let server = TestServer::new();
    let image = base64(&png(16, 16));
    for (field, off, on) in [
        ("enable_hr", json!(false), json!(true)),
        ("restore_faces", json!(false), json!(true)),
        ("tiling", json!(null), json!(true)),
        ("styles", json!([]), json!(["photo"])),
        ("script_name", json!(""), json!("X/Y/Z plot")),
        (
            "alwayson_scripts",
            json!({ "controlnet": { "args": [{ "enabled": false }] } }),
            json!({ "controlnet": { "args": [{ "enabled": true }] } }),
        ),
        ("refiner_checkpoint", json!("None"), json!("xl-refiner")),
        ("subseed_strength", json!(0), json!(0.5)),
        ("seed_resize_from_w", json!(-1), json!(512)),
        ("seed_resize_from_h", json!(0), json!(512)),
        ("s_churn", json!(0.0), json!(1.5)),
        ("infotext", json!(""), json!("a fox\nSteps: 4")),
    ] {
        for (path, mut body) in [
            ("txt2img", json!({ "prompt": "a", "width": 64, "height": 64 })),
            ("img2img", json!({ "prompt": "a", "init_images": [image], "denoising_strength": 0.5 })),
        ] {
            let path = format!("/sdapi/v1/{path}");
            body[field] = on.clone();
            let refused = server.post(&path, body.clone()).await.expect_error(400, "invalid_request");
            assert_eq!(refused.json()["error"]["param"], field);
            assert!(refused.text().contains("not offered"), "{}", refused.text());
            body[field] = off.clone();
            server.post(&path, body).await.ok();
        }
    }
}

#[tokio::test]
async fn a_relative_data_folder_is_not_told_to_clients() {
    // Relative to the folder of the package, where tests run.
    let parent = tempfile::Builder::new().prefix("told-").tempdir_in(".").unwrap();
    let name = parent.path().file_name().unwrap().to_str().unwrap().to_owned();
    let server = kiln_server::Server::open(
        kiln_server::Config::new(format!("{name}/data")),
        Arc::new(crate::harness::TestCatalogue),
    );
    let server = TestServer::of(server.unwrap());
    server.generate(1);
    std::fs::remove_dir_all(parent.path().join("data/inputs")).unwrap();
    std::fs::write(parent.path().join("data/inputs"), "in the way").unwrap();
    let request = Request::post("/v1/inputs").header(header::HOST, "localhost");
    let refused = server.send(request.body(png(8, 8).into()).unwrap()).await.expect_error(503, "storage");
    assert!(!refused.text().contains(&name) && !refused.text().contains("data/"), "{}", refused.text());
    drop(server);
    // Windows deletes no file that a thread of the server has still open.
    for _ in 0..500 {
        if std::fs::remove_dir_all(parent.path()).is_ok() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    if cfg!(unix) {
        panic!("the folder {name} stays");
    }
}
