//! Clients that try to stop the server: slow bodies, images that are small files and large in memory, idle connections,
//! made-up methods, requests that multiply, guessed keys. Whatever they do, `/healthz` answers at once and jobs of others run.

use std::io::Cursor;
use std::time::{Duration, Instant};

use axum::http::{Request, header};
use http_body_util::BodyExt;
use image::{DynamicImage, ImageFormat};
use kiln_server::ApiKey;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::harness::TestServer;
use crate::socket::{answer, request, start};

/// How long a health check or a small request may take during an attack. Without the defences it takes at least 5 s.
const PROMPT: Duration = Duration::from_secs(3);

async fn get(address: std::net::SocketAddr, path: &str) -> String {
    let fetched = tokio::time::timeout(PROMPT, async {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let head = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        answer(&mut stream).await
    });
    fetched.await.unwrap_or_else(|_| panic!("{path} takes too long"))
}

/// A PNG of RGBA with 16 bits each.
fn deep_png(side: u32) -> Vec<u8> {
    let mut file = Cursor::new(Vec::new());
    DynamicImage::new_rgba16(side, side).write_to(&mut file, ImageFormat::Png).unwrap();
    file.into_inner()
}

async fn upload(server: &TestServer, bytes: Vec<u8>) -> crate::harness::TestResponse {
    let request = Request::post("/v1/inputs").header("host", "localhost");
    server.send(request.body(bytes.into()).unwrap()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_that_drip_take_no_memory_from_others_and_are_ended() {
    let server = TestServer::new();
    let address = start(&server).await;
    let head = "POST /v1/inputs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 67108864\r\n\r\n";
    let mut drips = Vec::new();
    for _ in 0..8 {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(head.as_bytes()).await.unwrap();
        drips.push(tokio::spawn(async move {
            let (mut read, mut write) = stream.into_split();
            let dripping = tokio::spawn(async move {
                while write.write_all(b"x").await.is_ok() {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            });
            let mut answer = vec![0; 12];
            let answered = read.read_exact(&mut answer).await;
            dripping.abort();
            answered.map(|_| String::from_utf8(answer).unwrap())
        }));
    }
    assert!(get(address, "/healthz").await.starts_with("HTTP/1.1 200 "));
    let mut stream = TcpStream::connect(address).await.unwrap();
    let body = json!({ "prompt": "a fox", "size": "64x64" }).to_string();
    stream.write_all(request("/v1/images/generations", &body).as_bytes()).await.unwrap();
    let generated =
        tokio::time::timeout(PROMPT, answer(&mut stream)).await.expect("the job waits for the drips");
    assert!(generated.starts_with("HTTP/1.1 200 "), "{generated}");
    // A byte now and then does not keep a connection: the least speed counts.
    for drip in drips {
        let answer = tokio::time::timeout(PROMPT, drip).await.expect("a drip goes on").unwrap();
        assert_eq!(answer.unwrap(), "HTTP/1.1 408");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn images_are_decoded_within_a_memory_limit_each_and_all_at_once() {
    let memory = kiln_image::decoding_bytes("image", &[&deep_png(256)[..], &[0]].concat()).unwrap();
    let server = TestServer::with(|config| {
        config.limits.decoding = memory;
        config.limits.all_decoding = 2 * memory;
    });
    let server = std::sync::Arc::new(server);
    let mut uploads = tokio::task::JoinSet::new();
    for n in 0..20 {
        // Different files: the cache must not help.
        let mut bytes = deep_png(256);
        bytes.extend([n]);
        let server = std::sync::Arc::clone(&server);
        uploads.spawn(async move { upload(&server, bytes).await });
    }
    for answer in uploads.join_all().await {
        answer.ok();
    }
    let peak = server.metric("kiln_decoding_peak_bytes").await;
    assert!((memory..=2 * memory).contains(&peak), "{peak} bytes at one time");
    upload(&server, deep_png(260)).await.expect_error(400, "image_too_large");
}

#[tokio::test]
async fn a_small_file_of_large_pixels_is_refused_before_it_is_decoded() {
    let server = TestServer::new();
    let mut file = Vec::new();
    let mut encoder = png::Encoder::new(&mut file, 8192, 8192);
    encoder.set_color(png::ColorType::Rgba);
    encoder.set_depth(png::BitDepth::Sixteen);
    let mut writer = encoder.write_header().unwrap();
    writer.write_chunk(png::chunk::IDAT, &[0x78, 0x9c]).unwrap();
    drop(writer);
    let answer = upload(&server, file).await.expect_error(400, "image_too_large");
    assert!(answer.text().contains("8192x8192"), "{}", answer.text());
    assert_eq!(server.metric("kiln_decoding_peak_bytes").await, 0);
}

#[tokio::test]
async fn the_input_images_of_a_job_have_a_limit_together() {
    let server = TestServer::with(|config| config.limits.job_pixels = 2000);
    let reference = |side| crate::harness::base64(&crate::harness::png(side, 30));
    let job = |references: Vec<String>| json!({ "prompt": "a", "references": references });
    let few = job(vec![reference(30), reference(31)]);
    server.post("/v1/jobs", few).await.ok();
    let many = job(vec![reference(30), reference(31), reference(32)]);
    server.post("/v1/jobs", many).await.expect_error(400, "image_too_large");
}

#[tokio::test]
async fn made_up_methods_share_one_label() {
    let server = TestServer::new();
    for n in 0..50 {
        let request = Request::builder().method(format!("BREW{n}").as_str()).uri("/healthz");
        server.send(request.header("host", "localhost").body("".into()).unwrap()).await;
    }
    let metrics = server.get("/metrics").await.ok();
    let labels: Vec<&str> =
        metrics.text().lines().filter(|line| line.starts_with("kiln_http_requests_total{")).collect();
    assert!(labels.len() == 1 && labels[0].contains("method=\"other\""), "{labels:?}");
    assert!(labels[0].ends_with(" 50"), "{labels:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_connections_make_room_for_others() {
    let server = TestServer::with(|config| config.limits.connections = 24);
    let address = start(&server).await;
    let mut idle = Vec::new();
    for n in 0..64 {
        let mut stream = TcpStream::connect(address).await.unwrap();
        if n % 2 == 0 {
            stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: ").await.unwrap();
        }
        idle.push(stream);
    }
    for path in ["/healthz", "/v1/models", "/healthz", "/v1/jobs"] {
        assert!(get(address, path).await.starts_with("HTTP/1.1 200 "), "{path}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn health_is_answered_when_every_connection_is_busy() {
    let server = TestServer::with(|config| config.limits.connections = 4);
    let address = start(&server).await;
    let mut busy = Vec::new();
    for _ in 0..4 {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let body = json!({ "prompt": "slow", "steps": 200 }).to_string();
        stream.write_all(request("/v1/images/generations", &body).as_bytes()).await.unwrap();
        busy.push(stream);
    }
    let started = Instant::now();
    while server.get("/v1/jobs").await.json()["data"].as_array().unwrap().len() < 4 {
        assert!(started.elapsed() < PROMPT, "the requests don't arrive");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(get(address, "/healthz").await.starts_with("HTTP/1.1 200 "));
    assert!(get(address, "/v1/models").await.starts_with("HTTP/1.1 503 "));
    drop(busy);
    while !get(address, "/v1/models").await.starts_with("HTTP/1.1 200 ") {
        assert!(started.elapsed() < 3 * PROMPT, "the places stay taken");
    }
}

#[tokio::test]
async fn wildcards_are_checked_before_they_multiply() {
    let server = TestServer::new();
    let submit = async |job| server.post("/v1/jobs?wildcards=true", job).await;
    // Each of the images would get a prompt of its own.
    let answer = submit(json!({ "prompt": "{a|b}", "n": 100_000 })).await.expect_error(400, "invalid_value");
    assert!(answer.text().contains("\\\"n\\\" must be between"), "{}", answer.text());
    submit(json!({ "prompt": "{".repeat(9000) })).await.expect_error(400, "prompt_too_long");
    submit(json!({ "prompt": "{".repeat(8000) })).await.ok();
}

#[tokio::test]
async fn a_form_has_no_more_values_than_json() {
    let server = TestServer::new();
    let text = "1,".repeat(100_001);
    let form = format!("--b\r\nContent-Disposition: form-data; name=\"x\"\r\n\r\n{text}1\r\n--b--\r\n");
    let request = Request::post("/v1/images/edits").header(header::HOST, "localhost");
    let request = request.header(header::CONTENT_TYPE, "multipart/form-data; boundary=b");
    let answer = server.send(request.body(form.into()).unwrap()).await.expect_error(400, "invalid_request");
    assert!(answer.text().contains("more than 100000 values"), "{}", answer.text());
}

#[tokio::test]
async fn a_file_is_read_as_its_client_takes_it() {
    let server = TestServer::new();
    let mut file = Cursor::new(Vec::new());
    DynamicImage::new_rgb8(500, 400).write_to(&mut file, ImageFormat::Bmp).unwrap();
    let file = file.into_inner();
    let uploaded = upload(&server, file.clone()).await.ok();
    let path = uploaded.headers[header::LOCATION].to_str().unwrap().to_owned();
    let get = || Request::get(&path).header(header::HOST, "localhost").body("".into()).unwrap();
    let mut response = server.respond(get()).await;
    assert_eq!(response.headers()[header::CONTENT_LENGTH], file.len().to_string());
    let first = response.body_mut().frame().await.unwrap().unwrap().into_data().unwrap();
    assert!(first.len() <= 64 << 10, "{} bytes for a client that reads nothing", first.len());
    assert_eq!(server.send(get()).await.bytes, file);
}

#[tokio::test]
async fn what_a_response_repeats_is_short() {
    let server = TestServer::new();
    let long = "a".repeat(300 << 10);
    let request = json!({ "prompt": "a", "override_settings": { "x": long } });
    server.post("/sdapi/v1/txt2img", request).await.expect_error(400, "invalid_request");
    let order: Vec<String> = (0..65).map(|n| n.to_string()).collect();
    let mut reorder = crate::harness::post("/v1/queue", json!({ "order": order }));
    *reorder.method_mut() = axum::http::Method::PUT;
    server.send(reorder).await.expect_error(400, "invalid_request");
}

#[tokio::test]
async fn a_search_has_a_length_limit() {
    let server = TestServer::new();
    let search = async |bytes: usize| server.get(&format!("/v1/images?search={}", "a".repeat(bytes))).await;
    search(257).await.expect_error(400, "invalid_request");
    search(256).await.ok();
}

#[tokio::test(flavor = "multi_thread")]
async fn hanging_up_gives_no_more_tries_of_a_key() {
    let server = TestServer::with(|config| {
        config.api_keys = vec![ApiKey::single("the-right-key")];
        config.wrong_key_delay = Duration::from_secs(60);
    });
    let address = start(&server).await;
    let started = Instant::now();
    // A right key is answered at once: who hears nothing knows that a key is wrong, and tries the next one.
    let attempt = async |key: &str| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let head =
            format!("GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut status = [0; 12];
        let read = tokio::time::timeout(Duration::from_millis(150), stream.read_exact(&mut status)).await;
        read.map(|read| read.map(|_| String::from_utf8_lossy(&status).into_owned()).unwrap_or_default())
    };
    while attempt("a-wrong-key").await.is_err() {
        assert!(started.elapsed() < 3 * PROMPT, "every key is compared");
    }
    assert_eq!(attempt("the-right-key").await.unwrap(), "HTTP/1.1 429");
    assert!(get(address, "/healthz").await.starts_with("HTTP/1.1 200 "));
}
