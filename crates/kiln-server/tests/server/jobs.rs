//! The jobs API: submit, status, events, result, cancel.

use std::time::{Duration, Instant};

use kiln_server::ApiKey;
use serde_json::json;

use crate::harness::{TestServer, events, png};

#[tokio::test]
async fn submitting_returns_at_once_and_the_images_follow() {
    let server = TestServer::new();
    let answer =
        server.post("/v1/jobs", json!({ "prompt": "a fox", "n": 2, "loras": [{ "name": "ink" }] })).await;
    assert_eq!(answer.status.as_u16(), 202);
    let id = answer.json()["id"].as_str().unwrap().to_owned();
    let job = server.wait(&id).await;
    assert_eq!((&job["status"], job["images"].as_array().unwrap().len()), (&json!("done"), 2));
    assert!(job["started"].is_number() && job["finished"].as_i64() >= job["started"].as_i64());
    assert!(job["request"]["seed"].is_number(), "the seed is chosen at submission");
    let result = server.get(&format!("/v1/jobs/{id}/result")).await.ok().json();
    let file = server.get(result["images"][1]["url"].as_str().unwrap()).await.ok();
    assert_eq!(kiln_image::from_bytes("a", &file.bytes).unwrap().width(), 64);
    let list = server.get("/v1/jobs?limit=5").await.ok().json();
    assert_eq!(list["data"][0]["id"], *id);
}

#[tokio::test]
async fn an_unknown_job_is_not_found() {
    let server = TestServer::new();
    for path in
        ["/v1/jobs/nope", "/v1/jobs/nope/result", "/v1/jobs/nope/events", "/v1/jobs/..%2F..%2Fqueue.sqlite"]
    {
        server.get(path).await.expect_error(404, "not_found");
    }
    server.delete("/v1/jobs/nope").await.expect_error(404, "not_found");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_running_job_is_cancelled_within_a_step_and_a_queued_one_at_once() {
    let server = TestServer::new();
    let running = server.submit(json!({ "prompt": "slow", "steps": 200 })).await;
    let waiting = server.submit(json!({ "prompt": "a fox" })).await;
    while server.get(&format!("/v1/jobs/{running}")).await.json()["status"] != "running" {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(server.get(&format!("/v1/jobs/{waiting}")).await.json()["position"], 0);
    server.get(&format!("/v1/jobs/{waiting}/result")).await.expect_error(409, "not_done");
    let last = server.submit(json!({ "prompt": "a fox" })).await;
    assert_eq!(server.get(&format!("/v1/jobs/{last}")).await.json()["position"], 1);
    server.delete(&format!("/v1/jobs/{last}")).await.ok();
    assert_eq!(server.get(&format!("/v1/jobs/{last}")).await.json()["status"], "cancelled");
    // This one is already planned.
    server.delete(&format!("/v1/jobs/{waiting}")).await.ok();
    assert_eq!(server.wait(&waiting).await["status"], "cancelled");
    assert_eq!(server.get(&format!("/v1/jobs/{running}")).await.json()["status"], "running");
    let cancelled = Instant::now();
    server.delete(&format!("/v1/jobs/{running}")).await.ok();
    assert_eq!(server.wait(&running).await["status"], "cancelled");
    assert!(cancelled.elapsed() < Duration::from_secs(2), "two hundred steps would take ten seconds");
    server.delete(&format!("/v1/jobs/{running}")).await.expect_error(409, "at_its_end");
    server.get(&format!("/v1/jobs/{running}/result")).await.expect_error(409, "cancelled");
}

#[tokio::test(flavor = "multi_thread")]
async fn events_report_progress_previews_and_the_end() {
    let server = TestServer::new();
    let id = server.submit(json!({ "prompt": "slow", "steps": 4 })).await;
    let stream = server.get(&format!("/v1/jobs/{id}/events?previews=true")).await.ok();
    let events = events(stream.text());
    let count = |name: &str| events.iter().filter(|(n, _)| n == name).count();
    assert!(count("progress") >= 2 && count("preview") >= 1, "{}", stream.text());
    let preview = events.iter().find(|(name, _)| name == "preview").unwrap();
    assert!(preview.1["image"].as_str().unwrap().starts_with("data:image/jpeg;base64,"));
    let (name, last) = events.last().unwrap();
    assert_eq!((name.as_str(), &last["status"]), ("end", &json!("done")));
    let again = server.get(&format!("/v1/jobs/{id}/events")).await.ok();
    assert_eq!(crate::harness::events(again.text()).len(), 1, "a finished job sends only its end");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_queue_is_bounded_and_errors_say_when_to_retry() {
    let server = TestServer::with(|config| {
        config.limits.queue = 4;
        config.api_keys = ApiKey::parse_file("a key-a admin\nb key-b\nc key-c").unwrap();
    });
    let with_key = |mut request: axum::http::Request<axum::body::Body>, client: &str| {
        request.headers_mut().insert("authorization", format!("Bearer key-{client}").parse().unwrap());
        server.send(request)
    };
    let ask = |client| {
        with_key(crate::harness::post("/v1/jobs", json!({ "prompt": "slow", "steps": 100 })), client)
    };
    let metrics = || {
        let request = axum::http::Request::get("/metrics").header("host", "localhost");
        with_key(request.body(axum::body::Body::empty()).unwrap(), "a")
    };
    // The running job counts, too.
    for i in 0..3 {
        ask("a").await.ok();
        while i == 0 && !metrics().await.text().contains("kiln_running 1\n") {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    let own = ask("a").await.expect_error(429, "queue_full");
    assert!(own.headers["retry-after"].to_str().unwrap().parse::<u64>().unwrap() >= 1);
    for _ in 0..2 {
        ask("b").await.ok();
    }
    ask("c").await.expect_error(429, "queue_full");
    let metrics = metrics().await.ok();
    assert!(metrics.text().contains("kiln_queue_refused_total 2\n"), "{}", metrics.text());
    server.inner.close();
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_with_the_same_model_and_size_run_in_a_row() {
    let server = TestServer::open(std::sync::Arc::new(tempfile::TempDir::new().unwrap()), |_| {}, false);
    let mut ids = Vec::new();
    for model in ["large", "small", "large", "small"] {
        ids.push(server.submit(json!({ "prompt": model, "model": model })).await);
    }
    server.generate(1);
    for id in &ids {
        server.wait(id).await;
    }
    let order: Vec<String> =
        server.received.lock().unwrap().iter().map(|job| job.prompt().to_owned()).collect();
    assert_eq!(order, ["large", "large", "small", "small"]);
}

#[tokio::test]
async fn uploaded_and_generated_images_can_be_references() {
    let server = TestServer::new();
    let bytes = png(32, 16);
    let request = axum::http::Request::post("/v1/inputs").header("host", "localhost");
    let input = server.send(request.body(bytes.clone().into()).unwrap()).await.ok().json();
    assert_eq!((&input["width"], &input["height"]), (&json!(32), &json!(16)));
    let generated = server.post("/v1/images/generations", json!({ "prompt": "a fox" })).await.ok().json();
    let references = json!([input["id"], format!("image:{}", generated["data"][0]["id"].as_str().unwrap())]);
    let id = server.submit(json!({ "prompt": "both", "references": references })).await;
    assert_eq!(server.wait(&id).await["status"], "done");
    let job = server.received.lock().unwrap()[1].clone();
    assert_eq!(std::fs::read(&job.references[0].path).unwrap(), bytes);
    assert_eq!(input["id"], format!("input:{}", job.references[0].sha256));
    assert_eq!(job.references[1].image.width(), 64);
    server.get(&format!("/v1/inputs/{}", input["id"].as_str().unwrap())).await.ok();
    for wrong in ["input:00", "input:../queue.sqlite", "image:nope", "input:"] {
        server
            .post("/v1/jobs", json!({ "prompt": "a", "references": [wrong] }))
            .await
            .expect_error(404, "input_not_found");
    }
}

#[tokio::test]
async fn notes_stay_with_an_ended_job() {
    let server = TestServer::new();
    let id = server.submit(json!({ "prompt": "note", "seed": -1 })).await;
    let job = server.wait(&id).await;
    assert_eq!((&job["status"], &job["notes"]), (&json!("done"), &json!(["adjusted"])));
    assert!(job["request"]["seed"].is_u64(), "-1 is a random seed");
}

#[tokio::test(flavor = "multi_thread")]
async fn large_waiting_jobs_mean_a_later_retry() {
    let server = TestServer::with(|config| config.limits.queue = 4);
    // A measure of what work costs.
    let first = server.submit(json!({ "prompt": "a fox" })).await;
    server.wait(&first).await;
    let ask = |client: usize| {
        let job = json!({ "prompt": "slow", "steps": 200, "width": 1024, "height": 1024 });
        let mut request = crate::harness::post("/v1/jobs", job);
        request.headers_mut().insert("x-client-id", client.to_string().parse().unwrap());
        server.send(request)
    };
    let refused = loop {
        let received = server.received.lock().unwrap().len();
        let response = ask(received).await;
        if !response.status.is_success() {
            break response;
        }
    };
    let refused = refused.expect_error(429, "queue_full");
    let seconds: u64 = refused.headers["retry-after"].to_str().unwrap().parse().unwrap();
    assert!(seconds > 60, "209 units of work each, 20 ms for 0.016 of them: {seconds}");
    server.inner.close();
}
