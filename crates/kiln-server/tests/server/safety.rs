//! Authentication, limits and malformed requests.

use axum::body::Body;
use axum::http::{Request, header};
use kiln_server::ApiKey;
use serde_json::json;

use crate::harness::{TestServer, base64, png, post};

#[tokio::test]
async fn without_the_key_only_public_routes_are_accessible() {
    let server = TestServer::with(|config| {
        config.api_keys = vec![ApiKey::single("s3cret")];
        config.wrong_key_delay = std::time::Duration::ZERO;
    });
    for open in ["/", "/page/main.js", "/healthz", "/openapi.json"] {
        server.get(open).await.ok();
    }
    let closed = [
        "/v1/models",
        "/v1/jobs",
        "/v1/images",
        "/v1/loras",
        "/v1/vaes",
        "/v1/about",
        "/metrics",
        "/sdapi/v1/options",
        "/sdapi/v1/progress",
    ];
    for path in closed {
        server.get(path).await.expect_error(401, "invalid_api_key");
    }
    server
        .post("/v1/images/generations", json!({ "prompt": "a" }))
        .await
        .expect_error(401, "invalid_api_key");
    server.post("/v1/session", json!({})).await.expect_error(401, "invalid_api_key");
    let with = |name: &str, value: &str| {
        let request = Request::get("/v1/models").header(header::HOST, "localhost").header(name, value);
        server.send(request.body(Body::empty()).unwrap())
    };
    with("authorization", "Bearer wrong").await.expect_error(401, "invalid_api_key");
    with("authorization", "Bearer s3cret").await.ok();

    let mut login = post("/v1/session", json!({}));
    login.headers_mut().insert(header::AUTHORIZATION, "Bearer s3cret".parse().unwrap());
    let cookie = server.send(login).await.ok().headers[header::SET_COOKIE].to_str().unwrap().to_owned();
    assert!(cookie.contains("HttpOnly") && cookie.contains("SameSite=Strict"), "{cookie}");
    with("cookie", cookie.split(';').next().unwrap()).await.ok();
}

#[tokio::test]
async fn cross_site_requests_and_foreign_hosts_are_rejected() {
    let server = TestServer::new();
    let mut foreign = post("/v1/jobs", json!({ "prompt": "a" }));
    foreign.headers_mut().insert(header::ORIGIN, "https://evil.example".parse().unwrap());
    let answer = server.send(foreign).await.expect_error(403, "foreign");
    assert!(answer.headers.get(header::ACCESS_CONTROL_ALLOW_ORIGIN).is_none());
    let named = Request::get("/v1/models").header(header::HOST, "evil.example").body(Body::empty()).unwrap();
    server.send(named).await.expect_error(403, "foreign");
    let both =
        Request::get("/v1/models").header(header::HOST, "localhost").header(header::HOST, "evil.example");
    server.send(both.body(Body::empty()).unwrap()).await.expect_error(400, "invalid_host");
}

#[tokio::test]
async fn large_requests_are_rejected_before_and_while_they_are_read() {
    let server = TestServer::with(|config| config.limits.body = 10_000);
    let long = json!({ "prompt": "a".repeat(20_000) });
    server.post("/v1/jobs", long.clone()).await.expect_error(413, "too_large");
    // Without a Content-Length header.
    let parts = long.to_string().into_bytes();
    let stream = futures_util::stream::iter(
        parts.chunks(1000).map(|c| Ok::<_, std::io::Error>(c.to_vec())).collect::<Vec<_>>(),
    );
    let request = Request::post("/v1/jobs")
        .header(header::HOST, "localhost")
        .header(header::CONTENT_TYPE, "application/json");
    server.send(request.body(Body::from_stream(stream)).unwrap()).await.expect_error(413, "too_large");
    server.post("/v1/jobs", json!({ "prompt": "a".repeat(8001) })).await.expect_error(400, "prompt_too_long");
}

#[tokio::test]
async fn images_with_too_many_pixels_are_rejected_before_they_are_decoded() {
    let server = TestServer::with(|config| config.limits.input_pixels = 10_000);
    let job = json!({ "prompt": "a", "references": [base64(&png(101, 100))] });
    server.post("/v1/jobs", job).await.expect_error(400, "image_too_large");
    // A header that claims a huge size.
    let mut bomb = png(16, 16);
    bomb[16..24].copy_from_slice(&[0, 0, 0x7f, 0xff, 0, 0, 0x7f, 0xff]);
    let answer = server.post("/v1/jobs", json!({ "prompt": "a", "references": [base64(&bomb)] })).await;
    assert_eq!(answer.status.as_u16(), 400);
}

#[tokio::test]
async fn deep_and_invalid_json_is_rejected() {
    let server = TestServer::new();
    for body in [
        "[".repeat(100_000),
        "{\"prompt\":".repeat(5000),
        "nul".into(),
        "\"\\ud800\"".into(),
        "{\"prompt\":\"a\",\"seed\":-2}".into(),
        "{\"prompt\":\"a\",\"steps\":1e99}".into(),
        "{\"prompt\":\"a\",\"guidance\":NaN}".into(),
    ] {
        let request = Request::post("/v1/jobs")
            .header(header::HOST, "localhost")
            .header(header::CONTENT_TYPE, "application/json");
        server.send(request.body(Body::from(body)).unwrap()).await.expect_error(400, "invalid_request");
    }
}

#[tokio::test]
async fn responses_have_a_request_id_and_security_headers() {
    let answer = TestServer::new().get("/").await.ok();
    assert_eq!(answer.headers["x-request-id"].len(), 16);
    assert_eq!(answer.headers[header::X_CONTENT_TYPE_OPTIONS], "nosniff");
    assert_eq!(answer.headers["cross-origin-resource-policy"], "same-origin");
    let policy = answer.headers[header::CONTENT_SECURITY_POLICY].to_str().unwrap();
    assert!(policy.contains("default-src 'none'") && policy.contains("frame-ancestors 'none'"), "{policy}");
}

/// `KILN_WRITE_OPENAPI=1 cargo test -p kiln-server openapi_json` updates the file.
#[tokio::test]
async fn openapi_json_is_up_to_date() {
    let server = TestServer::new();
    let generated = format!("{}\n", serde_json::to_string(&kiln_server::openapi()).unwrap());
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/openapi.json");
    if std::env::var_os("KILN_WRITE_OPENAPI").is_some() {
        std::fs::write(file, &generated).unwrap();
    }
    assert!(
        std::fs::read_to_string(file).unwrap() == generated,
        "openapi.json is out of date: update it with KILN_WRITE_OPENAPI=1"
    );
    let api = server.get("/openapi.json").await.ok().json();
    let operations =
        || api["paths"].as_object().unwrap().values().flat_map(|item| item.as_object().unwrap().values());
    let mut ids: Vec<&str> = operations().map(|o| o["operationId"].as_str().unwrap()).collect();
    let count = ids.len();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), count, "every operation has its own id");
    for response in operations().flat_map(|o| o["responses"].as_object().unwrap().values()) {
        assert!(!response["description"].as_str().unwrap().is_empty());
    }
    assert_eq!(api["components"]["securitySchemes"]["bearer"]["scheme"], "bearer");
    assert!(api["openapi"].as_str().unwrap().starts_with("3."));
    let paths = [
        "/v1/images/generations",
        "/v1/images/edits",
        "/v1/jobs/{id}/events",
        "/sdapi/v1/txt2img",
        "/metrics",
    ];
    for path in paths {
        assert!(api["paths"][path].is_object(), "{path}");
    }
    assert!(api["components"]["schemas"]["Request"]["properties"]["prompt"].is_object());
    for field in ["size", "prompt", "sigmas", "references"] {
        let openai = &api["components"]["schemas"]["ImagesRequest"]["properties"];
        assert!(openai[field].is_object(), "{field}");
    }
    server.get("/nowhere").await.expect_error(404, "not_found");
    server.delete("/v1/models").await.expect_error(405, "method");
}

#[tokio::test]
async fn wrong_paths_and_queries_are_errors_in_json() {
    let server = TestServer::new();
    for path in [
        "/v1/jobs?limit=many",
        "/v1/jobs/%FF",
        "/v1/jobs/%FF/events",
        "/v1/images?limit=-1",
        "/v1/images/%C3%28/file",
        "/v1/inputs/%FF",
        "/sdapi/v1/progress?skip_current_image=maybe",
    ] {
        server.get(path).await.expect_error(400, "invalid_request");
    }
}

#[tokio::test]
async fn head_is_allowed_where_get_is() {
    let server = TestServer::with(|config| config.api_keys = vec![kiln_server::ApiKey::single("s3cret")]);
    let head = |path: &str, key: &str| {
        let request = Request::head(path).header(header::HOST, "localhost");
        server.send(request.header(header::AUTHORIZATION, key).body(Body::empty()).unwrap())
    };
    for path in ["/", "/healthz", "/openapi.json"] {
        assert!(head(path, "").await.ok().bytes.is_empty());
    }
    head("/v1/models", "Bearer s3cret").await.ok();
    assert_eq!(head("/v1/models", "").await.status.as_u16(), 401);
}
