//! The check of images: a refused image is nowhere, and everybody who waits for it learns why.
#![cfg(unix)]

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kiln_filters::ImageCheck;
use kiln_server::{Config, WebhookConfig};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::harness::{TestServer, events, post};
use crate::kills::ServerProcess;
use crate::submitting::receive;

/// Refuses prompts that begin with `bad`, crashes for `crash`, hangs for `hang`, and counts its calls in `calls`.
pub const SCRIPT: &str = r#"
cat > /dev/null
echo "$KILN_PROMPT" >> "$(dirname "$0")/calls"
case "$KILN_PROMPT" in
    bad*) echo "not $KILN_PROMPT"; exit 1;;
    crash*) echo "Traceback in /opt/secret" >&2; exit 7;;
    hang*) sleep 600;;
    wait*) sleep 1;;
esac
"#;

/// Writes the script into a folder and returns the option that names it.
pub fn option(folder: &Path) -> String {
    let path = folder.join("check.sh");
    std::fs::write(&path, SCRIPT).unwrap();
    format!("sh '{}'", path.display())
}

fn checked(option: &str) -> impl FnOnce(&mut Config) + use<> {
    let check = ImageCheck::new(option, Duration::from_secs(2)).unwrap();
    move |config| config.check = Some(check)
}

struct Checked {
    server: TestServer,
    script: TempDir,
}

fn start() -> Checked {
    let script = TempDir::new().unwrap();
    let server = TestServer::with(checked(&option(script.path())));
    Checked { server, script }
}

impl Checked {
    fn calls(&self) -> usize {
        std::fs::read_to_string(self.script.path().join("calls")).map_or(0, |text| text.lines().count())
    }

    /// Checks that nothing of an image is in the gallery or the data folder.
    async fn assert_empty(&self) {
        assert_eq!(self.server.get("/v1/images").await.ok().json()["data"], json!([]));
        assert_eq!(image_files(self.server.folder().path()), Vec::<String>::new());
    }
}

/// The image files below a folder.
fn image_files(folder: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let path = entry.path();
        if path.is_dir() {
            found.extend(image_files(&path));
        } else if std::fs::read(&path).is_ok_and(|bytes| kiln_image::from_bytes("file", &bytes).is_ok()) {
            found.push(path.display().to_string());
        }
    }
    found
}

#[tokio::test(flavor = "multi_thread")]
async fn an_accepted_image_is_stored_as_without_a_check() {
    let checked = start();
    let id = checked.server.submit(json!({ "prompt": "a fox", "n": 2 })).await;
    let job = checked.server.wait(&id).await;
    assert_eq!((&job["status"], job["images"].as_array().unwrap().len()), (&json!("done"), 2));
    assert_eq!(checked.calls(), 2);
    assert_eq!(image_files(checked.server.folder().path()).len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_image_is_stored_nowhere() {
    let checked = start();
    let id = checked.server.submit(json!({ "prompt": "bad fox" })).await;
    let job = checked.server.wait(&id).await;
    assert_eq!((&job["status"], &job["error"]["code"]), (&json!("failed"), &json!("image_refused")));
    assert_eq!(job["error"]["message"], "the image was refused: not bad fox");
    assert_eq!(job["images"], json!([]));
    checked.assert_empty().await;
    let result = checked.server.get(&format!("/v1/jobs/{id}/result")).await;
    result.expect_error(409, "image_refused");
    let metrics = checked.server.get("/metrics").await.ok().text().to_owned();
    assert!(metrics.contains("kiln_images_refused_total{cause=\"check\"} 1\n"), "{metrics}");
    assert!(metrics.contains("kiln_errors_total{code=\"image_refused\"} 1\n"), "{metrics}");
    assert_eq!(checked.server.metric("kiln_images_total").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_check_that_crashes_or_hangs_refuses_and_tells_no_details() {
    let checked = start();
    for prompt in ["crash", "hang"] {
        let begin = Instant::now();
        let id = checked.server.submit(json!({ "prompt": prompt })).await;
        let job = checked.server.wait(&id).await;
        assert_eq!(job["error"]["code"], "image_refused", "{job}");
        assert_eq!(job["error"]["message"], "the image was refused: the check gave no valid answer");
        assert!(begin.elapsed() < Duration::from_secs(20));
    }
    checked.assert_empty().await;
    let metrics = checked.server.get("/metrics").await.ok().text().to_owned();
    assert!(metrics.contains("kiln_images_refused_total{cause=\"failure\"} 2\n"), "{metrics}");
}

#[tokio::test(flavor = "multi_thread")]
async fn each_image_of_a_job_is_checked_by_itself() {
    let checked = start();
    let id =
        checked.server.submit(json!({ "prompt": ["a fox", "bad fox", "a hen", "bad hen"], "seed": 5 })).await;
    let job = checked.server.wait(&id).await;
    assert_eq!(job["error"]["code"], "image_refused");
    let message = job["error"]["message"].as_str().unwrap();
    assert!(
        message.contains("2 of 4 images") && message.contains("number 2") && message.contains("not bad fox")
    );
    let seeds: Vec<&str> =
        job["images"].as_array().unwrap().iter().map(|image| image["seed"].as_str().unwrap()).collect();
    assert_eq!(seeds, ["5", "7"]);
    assert_eq!(image_files(checked.server.folder().path()).len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_api_answers_with_its_own_error() {
    let checked = start();
    let server = &checked.server;
    let openai = json!({ "prompt": "bad fox" });
    let answer = server.post("/v1/images/generations", openai).await;
    let answer = answer.expect_error(400, "content_policy_violation").json();
    assert_eq!(answer["error"]["type"], "invalid_request_error");
    assert_eq!(answer["error"]["message"], "the image was refused: not bad fox");
    let stream = json!({ "prompt": "bad fox", "stream": true, "partial_images": 2 });
    let text = server.post("/v1/images/generations", stream).await.ok().text().to_owned();
    let streamed = events(&text);
    assert_eq!(streamed.len(), 1, "{text}");
    assert_eq!(streamed[0].1["error"]["code"], "content_policy_violation");
    let a1111 = server.post("/sdapi/v1/txt2img", json!({ "prompt": "bad fox" })).await;
    let a1111 = a1111.expect_error(400, "image_refused").json();
    assert_eq!(a1111["detail"], "the image was refused: not bad fox");
    checked.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn there_are_no_previews() {
    let checked = start();
    let server = &checked.server;
    let id = server.submit(json!({ "prompt": "slow", "steps": 6 })).await;
    let text = server.get(&format!("/v1/jobs/{id}/events?previews=true")).await.ok().text().to_owned();
    let names: Vec<String> = events(&text).into_iter().map(|(name, _)| name).collect();
    assert!(names.contains(&"progress".to_owned()) && names.contains(&"image".to_owned()), "{names:?}");
    assert!(!names.contains(&"preview".to_owned()), "{names:?}");
    // An unfinished image is not returned by an interruption, either.
    let generating = server.post("/sdapi/v1/txt2img", json!({ "prompt": "slow", "steps": 150 }));
    let interrupting = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert!(server.get("/sdapi/v1/progress").await.ok().json()["current_image"].is_null());
        server.post("/sdapi/v1/interrupt", json!({})).await.ok();
    };
    let (answer, ()) = tokio::join!(generating, interrupting);
    let images = |answer: &Value| answer["images"].as_array().map_or(0, Vec::len);
    assert!(!answer.status.is_success() || images(&answer.json()) == 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn events_repeated_requests_and_plots_tell_the_refusal() {
    let checked = start();
    let server = &checked.server;
    let request = || {
        let mut request = post("/v1/jobs", json!({ "prompt": "bad fox" }));
        request.headers_mut().insert("idempotency-key", "one".parse().unwrap());
        request
    };
    let id = server.send(request()).await.ok().json()["id"].as_str().unwrap().to_owned();
    let text = server.get(&format!("/v1/jobs/{id}/events?previews=true")).await.ok().text().to_owned();
    assert!(text.contains("image_refused") && text.contains("not bad fox"), "{text}");
    assert!(!text.contains("event: image"), "{text}");
    server.wait(&id).await;
    let again = server.send(request()).await.ok().json();
    assert_eq!((again["id"].as_str(), &again["error"]["code"]), (Some(&id[..]), &json!("image_refused")));
    assert_eq!(checked.calls(), 1);
    let plot = json!({
        "request": { "prompt": "a" }, "x": { "field": "prompt", "values": ["a fox", "bad fox"] },
    });
    let rows = server.post("/v1/plots", plot).await.ok().json()["rows"].clone();
    let cell = |i: usize| rows[0][i]["id"].as_str().unwrap().to_owned();
    assert_eq!(server.wait(&cell(0)).await["status"], "done");
    assert_eq!(server.wait(&cell(1)).await["error"]["code"], "image_refused");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_webhook_tells_the_refusal_without_an_image() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let receiving = std::thread::spawn(move || {
        let call = || serde_json::from_str::<Value>(&receive(&listener, "200 OK").1).unwrap();
        [call(), call()]
    });
    let script = TempDir::new().unwrap();
    let change = checked(&option(script.path()));
    let server = TestServer::with(|config| {
        change(config);
        config.webhooks = Some(WebhookConfig::new("a secret of many characters", true).unwrap());
    });
    let refused = server.submit(json!({ "prompt": "bad fox", "webhook": url })).await;
    server.wait(&refused).await;
    server.submit(json!({ "prompt": ["a fox", "bad hen"], "seed": 5, "webhook": url })).await;
    let [whole, half] = receiving.join().unwrap();
    let (whole, half) = (&whole["data"], &half["data"]);
    assert_eq!((&whole["error"]["code"], &whole["images"]), (&json!("image_refused"), &json!([])));
    assert_eq!(half["error"]["code"], "image_refused");
    let images = half["images"].as_array().unwrap();
    assert_eq!((images.len(), &images[0]["prompt"]), (1, &json!("a fox")));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_is_cancelled_during_its_check() {
    let checked = start();
    let id = checked.server.submit(json!({ "prompt": "hang on" })).await;
    for _ in 0..500 {
        if checked.calls() == 1 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    checked.server.delete(&format!("/v1/jobs/{id}")).await.ok();
    assert_eq!(checked.server.wait(&id).await["status"], "cancelled");
    checked.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_left_of_an_image_when_the_server_is_killed_during_its_check() {
    let (folder, script) = (Arc::new(TempDir::new().unwrap()), TempDir::new().unwrap());
    let option = option(script.path());
    let calls =
        || std::fs::read_to_string(script.path().join("calls")).map_or(0, |text| text.lines().count());
    let process = ServerProcess::start_checked(folder.path(), &option);
    let id = process.submit(&json!({ "prompt": "wait fox", "steps": 1 })).unwrap();
    let begin = Instant::now();
    while calls() == 0 {
        assert!(begin.elapsed() < Duration::from_secs(20));
        std::thread::sleep(Duration::from_millis(5));
    }
    process.kill();
    assert_eq!(image_files(folder.path()), Vec::<String>::new());
    // The job runs again at the next start, and its image is checked again.
    let server = TestServer::open(folder, checked(&option), true);
    let job = server.wait(&id).await;
    assert_eq!((&job["status"], calls()), (&json!("done"), 2), "{job}");
}
