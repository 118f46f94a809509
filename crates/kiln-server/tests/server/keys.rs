//! Several API keys: who sees what, quotas, wrong keys, sessions; and what the server tells about itself.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::http::{Request, header};
use kiln_engine::{Embedded, Payload};
use kiln_server::ApiKey;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::harness::{TestResponse, TestServer, png, post};

const KEYS: &str = "ada ada-key admin\nbob bob-key\neve eve-key jobs=2 inputs=2K";

fn open(folder: Arc<TempDir>, generating: bool) -> TestServer {
    TestServer::open(
        folder,
        |config| {
            config.api_keys = ApiKey::parse_file(KEYS).unwrap();
            config.wrong_key_delay = Duration::from_millis(20);
        },
        generating,
    )
}

fn server() -> TestServer {
    open(Arc::new(TempDir::new().unwrap()), true)
}

fn idle_server() -> TestServer {
    open(Arc::new(TempDir::new().unwrap()), false)
}

async fn call(server: &TestServer, key: &str, method: &str, path: &str, body: Option<Value>) -> TestResponse {
    let mut request = match body {
        Some(body) => post(path, body),
        None => Request::get(path).header(header::HOST, "localhost").body(Body::empty()).unwrap(),
    };
    *request.method_mut() = method.parse().unwrap();
    request.headers_mut().insert(header::AUTHORIZATION, format!("Bearer {key}").parse().unwrap());
    server.send(request).await
}

async fn submit(server: &TestServer, key: &str, job: Value) -> TestResponse {
    call(server, key, "POST", "/v1/jobs", Some(job)).await
}

async fn upload(server: &TestServer, key: &str, bytes: Vec<u8>) -> TestResponse {
    let request = Request::post("/v1/inputs").header(header::HOST, "localhost");
    let request = request.header(header::AUTHORIZATION, format!("Bearer {key}"));
    server.send(request.body(bytes.into()).unwrap()).await
}

#[tokio::test]
async fn a_key_sees_cancels_and_deletes_only_what_it_made() {
    let server = server();
    let generated =
        call(&server, "bob-key", "POST", "/v1/images/generations", Some(json!({ "prompt": "a fox" }))).await;
    let image = generated.ok().json()["data"][0]["id"].as_str().unwrap().to_owned();
    let job = image.split('-').next().unwrap().to_owned();
    let input = upload(&server, "bob-key", png(16, 16)).await.ok().json()["id"].as_str().unwrap().to_owned();
    let paths = [
        format!("/v1/jobs/{job}"),
        format!("/v1/jobs/{job}/result"),
        format!("/v1/jobs/{job}/events"),
        format!("/v1/images/{image}"),
        format!("/v1/images/{image}/file"),
        format!("/v1/images/{image}/thumbnail"),
        format!("/v1/images/{image}/recipe"),
        format!("/v1/inputs/{input}"),
    ];
    for path in &paths {
        call(&server, "eve-key", "GET", path, None).await.expect_error(404, "not_found");
        call(&server, "bob-key", "GET", path, None).await.ok();
        call(&server, "ada-key", "GET", path, None).await.ok();
    }
    for list in ["/v1/jobs", "/v1/images"] {
        let count = async |key| {
            call(&server, key, "GET", list, None).await.ok().json()["data"].as_array().unwrap().len()
        };
        assert_eq!((count("eve-key").await, count("bob-key").await, count("ada-key").await), (0, 1, 1));
    }
    for source in [format!("image:{image}"), input] {
        let job = json!({ "prompt": "a", "references": [source] });
        submit(&server, "eve-key", job).await.expect_error(404, "input_not_found");
    }
    call(&server, "eve-key", "DELETE", &paths[3], None).await.expect_error(404, "not_found");
    call(&server, "bob-key", "GET", &paths[3], None).await.ok();
    call(&server, "ada-key", "DELETE", &paths[3], None).await.ok();
    call(&server, "bob-key", "GET", "/metrics", None).await.expect_error(403, "admin_only");
    let about = call(&server, "bob-key", "GET", "/v1/about", None).await.ok().json();
    assert_eq!((&about["key"], &about["admin"]), (&json!("bob"), &json!(false)));
}

#[tokio::test]
async fn a_waiting_job_is_cancelled_by_its_own_key_or_an_admin() {
    let server = idle_server();
    let job = json!({ "prompt": "a fox" });
    for canceller in ["bob-key", "ada-key"] {
        let id = submit(&server, "bob-key", job.clone()).await.ok().json()["id"].as_str().unwrap().to_owned();
        let path = format!("/v1/jobs/{id}");
        call(&server, "eve-key", "DELETE", &path, None).await.expect_error(404, "not_found");
        call(&server, canceller, "DELETE", &path, None).await.ok();
    }
}

#[tokio::test]
async fn made_up_client_ids_get_no_more_of_the_queue() {
    let server = idle_server();
    let submit = async |n: u32| {
        let mut request = post("/v1/jobs", json!({ "prompt": "a" }));
        request.headers_mut().insert(header::AUTHORIZATION, "Bearer eve-key".parse().unwrap());
        request.headers_mut().insert("x-client-id", format!("client-{n}").parse().unwrap());
        server.send(request).await
    };
    submit(0).await.ok();
    submit(1).await.ok();
    submit(2).await.expect_error(429, "queue_full");
    self::submit(&server, "bob-key", json!({ "prompt": "a" })).await.ok();
}

#[tokio::test]
async fn a_key_submits_no_more_jobs_a_minute_than_it_may() {
    let server = TestServer::with(|config| {
        config.api_keys = ApiKey::parse_file("ada ada-key per-minute=2").unwrap();
    });
    for _ in 0..2 {
        submit(&server, "ada-key", json!({ "prompt": "a" })).await.ok();
    }
    let refused =
        submit(&server, "ada-key", json!({ "prompt": "a" })).await.expect_error(429, "rate_limited");
    let seconds: u64 = refused.headers["retry-after"].to_str().unwrap().parse().unwrap();
    assert!((1..=30).contains(&seconds), "{seconds}");
}

#[tokio::test]
async fn stored_inputs_have_a_quota_and_unfinished_jobs_keep_theirs() {
    let server = idle_server();
    // Different images of the same size; at most three fit.
    let bytes = |n: u8| {
        let mut bytes = png(16, 16);
        bytes.resize(600, n);
        bytes
    };
    let id = |answer: TestResponse| answer.ok().json()["id"].as_str().unwrap().to_owned();
    let first = id(upload(&server, "eve-key", bytes(1)).await);
    submit(&server, "eve-key", json!({ "prompt": "a", "references": [first] })).await.ok();
    let second = id(upload(&server, "eve-key", bytes(2)).await);
    let third = id(upload(&server, "eve-key", bytes(3)).await);
    let fourth = id(upload(&server, "eve-key", bytes(4)).await);
    let status = async |input: &str| {
        call(&server, "eve-key", "GET", &format!("/v1/inputs/{input}"), None).await.status.as_u16()
    };
    assert_eq!([status(&first).await, status(&second).await], [200, 404], "the first one's job waits");
    assert_eq!([status(&third).await, status(&fourth).await], [200, 200]);
    let mut large = png(16, 16);
    large.resize(3000, 0);
    upload(&server, "eve-key", large.clone()).await.expect_error(413, "inputs_full");
    upload(&server, "bob-key", large).await.ok();
    // A file that two keys uploaded stays as long as one of them keeps it.
    assert_eq!(id(upload(&server, "bob-key", bytes(3)).await), third);
    for n in 5..8 {
        upload(&server, "eve-key", bytes(n)).await.ok();
    }
    assert_eq!(status(&third).await, 404);
    call(&server, "bob-key", "GET", &format!("/v1/inputs/{third}"), None).await.ok();
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_keys_are_answered_late_and_few_at_a_time() {
    let server = Arc::new(server());
    let started = Instant::now();
    for _ in 0..2 {
        call(&server, "wrong", "GET", "/v1/models", None).await.expect_error(401, "invalid_api_key");
    }
    assert!(started.elapsed() >= Duration::from_millis(60), "{:?}", started.elapsed());
    let mut tries = tokio::task::JoinSet::new();
    for n in 0..12 {
        let server = Arc::clone(&server);
        let key = format!("guess-{n}");
        tries.spawn(async move { call(&server, &key, "GET", "/v1/models", None).await.status.as_u16() });
    }
    let statuses = tries.join_all().await;
    let delayed = statuses.iter().filter(|status| **status == 401).count();
    // How many get their turn while others wait depends on the machine.
    assert!(delayed >= 1 && statuses.contains(&429), "{statuses:?}");
    // The right key is never delayed, and a missing one is no try.
    let started = Instant::now();
    call(&server, "bob-key", "GET", "/v1/models", None).await.ok();
    server.get("/v1/models").await.expect_error(401, "invalid_api_key");
    assert!(started.elapsed() < Duration::from_millis(400));
}

#[tokio::test]
async fn a_session_lives_through_a_restart_and_ends_with_a_logout() {
    let folder = Arc::new(TempDir::new().unwrap());
    let before = open(Arc::clone(&folder), false);
    let login = call(&before, "bob-key", "POST", "/v1/session", Some(json!({}))).await.ok();
    let cookie = login.headers[header::SET_COOKIE].to_str().unwrap().to_owned();
    assert!(cookie.contains("Max-Age=2592000") && !cookie.contains("Secure"), "{cookie}");
    let cookie = cookie.split(';').next().unwrap().to_owned();
    drop(before);
    let after = open(folder, false);
    let send = async |method: &str, path: &str| {
        let request = Request::builder().method(method).uri(path).header(header::HOST, "localhost");
        after.send(request.header(header::COOKIE, &cookie).body(Body::empty()).unwrap()).await
    };
    assert_eq!(send("GET", "/v1/about").await.ok().json()["key"], "bob");
    let renewed = send("POST", "/v1/session").await.ok();
    assert!(!renewed.headers.contains_key(header::SET_COOKIE), "a session would outlive its own end");
    let logout = send("DELETE", "/v1/session").await.ok();
    assert!(logout.headers[header::SET_COOKIE].to_str().unwrap().contains("Max-Age=0"));
    send("GET", "/v1/about").await.expect_error(401, "invalid_api_key");
}

#[tokio::test]
async fn recipes_are_left_out_of_files_on_request() {
    for embed in [true, false] {
        let server = TestServer::with(|config| config.embedded.recipe = embed);
        let generated = server.post("/v1/images/generations", json!({ "prompt": "a fox" })).await.ok().json();
        let url = format!("/v1/images/{}", generated["data"][0]["id"].as_str().unwrap());
        let file = server.get(&format!("{url}/file")).await.ok();
        assert_eq!(kiln_image::read_recipe(&file.bytes).unwrap().is_some(), embed);
        assert_eq!(String::from_utf8_lossy(&file.bytes).contains("a fox"), embed);
        assert_eq!(server.get(&format!("{url}/recipe")).await.ok().json()["prompt"], "a fox");
    }
}

#[tokio::test]
async fn files_are_marked_as_the_operator_says_whatever_the_job() {
    let label = r#"{"Label":"1","ContentProducer":"a & b"}"#;
    for (ai_mark, aigc_label) in [(true, None), (false, None), (true, Some(label.to_owned()))] {
        let watermark = (!ai_mark).then_some(Payload::KILN);
        let server = TestServer::with(|config| {
            let aigc_label = aigc_label.clone();
            config.embedded = Embedded { recipe: false, ai_mark, aigc_label, watermark, credentials: None };
        });
        let about = server.get("/v1/about").await.ok().json();
        assert_eq!(about["watermark"].as_str(), watermark.map(|_| "4b494c4e"));
        assert_eq!(
            (&about["ai_mark"], about["aigc_label"].as_str()),
            (&json!(ai_mark), aigc_label.as_deref())
        );
        for format in ["png", "jpeg", "webp"] {
            let body = json!({ "prompt": "a fox", "output_format": format });
            let generated = server.post("/v1/images/generations", body).await.ok().json();
            let url = format!("/v1/images/{}/file", generated["data"][0]["id"].as_str().unwrap());
            let file = server.get(&url).await.ok().bytes;
            let mark = kiln_image::read_ai_mark(&file).unwrap();
            let source = mark.as_ref().map(|mark| &mark.source[..]);
            assert_eq!(source, ai_mark.then_some("trainedAlgorithmicMedia"), "{format}");
            let text = String::from_utf8_lossy(&file);
            assert_eq!(text.contains(r#"{"Label":"1","ContentProducer":"a &amp; b"}"#), aigc_label.is_some());
            assert!(!text.contains("a fox"));
        }
        let body = json!({ "prompt": "a fox", "ai_mark": false });
        server.post("/v1/jobs", body).await.expect_error(400, "invalid_request");
    }
}

#[tokio::test]
async fn errors_name_no_folder_of_the_server() {
    for in_the_way in [true, false] {
        let server = TestServer::new();
        let images = server.folder().path().join("pictures");
        std::fs::remove_dir_all(&images).unwrap();
        if in_the_way {
            std::fs::write(&images, "").unwrap();
        }
        let job = server.submit(json!({ "prompt": "a fox" })).await;
        let job = server.wait(&job).await;
        let message = job["error"]["message"].as_str().unwrap();
        let folder = server.folder().path().display().to_string();
        assert!(message.contains(".png`") && !message.contains(&folder), "{message}");
    }
}

#[cfg(unix)]
#[tokio::test]
async fn the_data_folder_and_its_files_are_private() {
    use std::os::unix::fs::PermissionsExt;

    let folder = Arc::new(TempDir::new().unwrap());
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let server = TestServer::open(Arc::clone(&folder), |_| {}, true);
    let reference = crate::harness::base64(&png(16, 16));
    let job = server.submit(json!({ "prompt": "a", "references": [reference] })).await;
    let job = server.wait(&job).await;
    server.get(job["images"][0]["thumbnail"].as_str().unwrap()).await.ok();
    let mut folders = vec![folder.path().to_owned()];
    let mut files = 0;
    while let Some(path) = folders.pop() {
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700, "{path:?}");
        for entry in std::fs::read_dir(path).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                let mode = std::fs::metadata(&path).unwrap().permissions().mode() & 0o777;
                assert_eq!(mode, 0o600, "{path:?}");
                files += 1;
            }
        }
    }
    assert!(files >= 4, "database, input, image and thumbnail");
}

#[cfg(unix)]
#[test]
fn a_folder_with_files_of_others_keeps_its_permissions() {
    use std::os::unix::fs::PermissionsExt;

    let folder = Arc::new(TempDir::new().unwrap());
    std::fs::write(folder.path().join("other"), "").unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let server = TestServer::open(Arc::clone(&folder), |_| {}, false);
    let mode = |path: &str| std::fs::metadata(folder.path().join(path)).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(""), 0o755, "`--data /tmp` must not lock others out of /tmp");
    for private in ["pictures", "inputs", "texts"] {
        assert_eq!(mode(private), 0o700, "{private}");
    }
    assert_eq!(mode("queue.sqlite"), 0o600);
    drop(server);
}

#[tokio::test]
async fn only_admins_download_models() {
    let server = idle_server();
    let offered = async |key: &str| {
        let list = call(&server, key, "GET", "/v1/downloads", None).await.ok().json();
        list["available"].as_array().unwrap().len()
    };
    assert!(offered("ada-key").await > 0);
    assert_eq!(offered("bob-key").await, 0);
    let start =
        async |key: &str| call(&server, key, "POST", "/v1/downloads", Some(json!({ "model": "tiny" }))).await;
    start("bob-key").await.expect_error(403, "admin_only");
    start("ada-key").await.ok();
}
