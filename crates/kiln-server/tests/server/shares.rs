//! What clients share, and what one of them can't take from the others: places in the gallery and among plots, calls of
//! webhooks, turns.

use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kiln_image::{Format, RgbImage};
use kiln_server::{ApiKey, WebhookConfig};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::harness::{TestServer, base64};

fn open(folder: &Arc<TempDir>, keep: u32, generating: bool) -> TestServer {
    TestServer::open(
        Arc::clone(folder),
        |config| {
            config.api_keys = ApiKey::parse_file("bob key-bob\neve key-eve inputs=2K").unwrap();
            config.gallery.images = keep;
            config.limits.queue = 200;
            config.webhooks = Some(WebhookConfig::new("0123456789abcdef", true).unwrap());
        },
        generating,
    )
}

fn folder() -> Arc<TempDir> {
    Arc::new(TempDir::new().unwrap())
}

async fn count(server: &TestServer, name: &str, path: &str) -> usize {
    server.send_as(name, "GET", path, Value::Null).await.ok().json()["data"].as_array().unwrap().len()
}

/// An image file whose bytes can't be packed.
fn noise(seed: u32) -> String {
    let mut state = seed;
    let mut byte = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    let image = RgbImage::new(20, 20, (0..1200).map(|_| byte()).collect()).unwrap();
    base64(&kiln_image::encode(&image, Format::Png, None).unwrap())
}

#[tokio::test]
async fn many_images_of_one_client_push_out_none_of_another() {
    let folder = folder();
    let server = open(&folder, 100, true);
    for (name, n) in [("bob", 2), ("eve", 10)] {
        let job = json!({ "prompt": "a", "n": n, "size": "16x16", "steps": 1 });
        server.send_as(name, "POST", "/v1/images/generations", job).await.ok();
    }
    server.inner.close();
    drop(server);
    let server = open(&folder, 5, false);
    let left = (count(&server, "bob", "/v1/images").await, count(&server, "eve", "/v1/images").await);
    assert_eq!(left, (2, 3));
}

#[tokio::test]
async fn many_plots_of_one_client_hide_none_of_another() {
    let server = open(&folder(), 100, false);
    let plot = json!({ "request": { "prompt": "a" }, "x": { "field": "steps", "values": [1] } });
    server.send_as("bob", "POST", "/v1/plots", plot.clone()).await.ok();
    for _ in 0..50 {
        server.send_as("eve", "POST", "/v1/plots", plot.clone()).await.ok();
    }
    assert_eq!(count(&server, "bob", "/v1/plots").await, 1);
    assert_eq!(count(&server, "eve", "/v1/plots").await, 50);
}

#[tokio::test]
async fn the_images_of_one_request_must_fit_into_the_quota_together() {
    let server = open(&folder(), 100, false);
    let job = |images: &[String]| json!({ "prompt": "a", "references": images });
    server.send_as("eve", "POST", "/v1/jobs", job(&[noise(1)])).await.ok();
    server.send_as("eve", "DELETE", "/v1/queue", Value::Null).await.ok();
    // The second image would push out the first, and the job would fail when its turn comes.
    let both = server.send_as("eve", "POST", "/v1/jobs", job(&[noise(2), noise(3)])).await;
    both.expect_error(413, "inputs_full");
    server.send_as("bob", "POST", "/v1/jobs", job(&[noise(2), noise(3)])).await.ok();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_webhook_that_does_not_answer_keeps_only_its_own_client_waiting() {
    let (silent, prompt) =
        (TcpListener::bind("127.0.0.1:0").unwrap(), TcpListener::bind("127.0.0.1:0").unwrap());
    let server = open(&folder(), 100, true);
    let job = |listener: &TcpListener| {
        let url = format!("http://{}/", listener.local_addr().unwrap());
        json!({ "prompt": "a", "steps": 1, "webhook": url })
    };
    server.send_as("eve", "POST", "/v1/jobs", job(&silent)).await.ok();
    silent.accept().unwrap();
    server.send_as("bob", "POST", "/v1/jobs", job(&prompt)).await.ok();
    let started = Instant::now();
    prompt.set_nonblocking(true).unwrap();
    while prompt.accept().is_err() {
        // The silent one is given up after ten seconds.
        assert!(started.elapsed() < Duration::from_secs(5), "the webhook waits for that of another client");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn an_upscaled_image_counts_for_the_work_it_is() {
    let server = open(&folder(), 100, false);
    let large = base64(&crate::harness::png(512, 512));
    server.send_as("bob", "POST", "/v1/jobs", json!({ "init": large, "upscale": 4 })).await.ok();
    let small = json!({ "prompt": "a" });
    let id = server.send_as("bob", "POST", "/v1/jobs", small.clone()).await.ok().json()["id"].clone();
    for _ in 0..8 {
        server.send_as("eve", "POST", "/v1/jobs", small.clone()).await.ok();
    }
    let path = format!("/v1/jobs/{}", id.as_str().unwrap());
    let job = server.send_as("bob", "GET", &path, Value::Null).await.ok().json();
    assert_eq!(job["position"], 9, "four million pixels come before eight images of 64x64");
}
