//! Jobs: at once an id, then status, events, result, cancel.

use std::time::{Duration, Instant};

use serde_json::json;

use crate::kit::{Kit, events, png};

#[tokio::test]
async fn a_job_answers_at_once_and_its_images_follow() {
    let kit = Kit::new();
    let answer =
        kit.post("/v1/jobs", json!({ "prompt": "a fox", "n": 2, "loras": [{ "name": "ink" }] })).await;
    assert_eq!(answer.status.as_u16(), 202);
    let id = answer.json()["id"].as_str().unwrap().to_owned();
    let job = kit.wait(&id).await;
    assert_eq!((&job["status"], job["pictures"].as_array().unwrap().len()), (&json!("done"), 2));
    assert!(job["started"].is_number() && job["finished"].as_i64() >= job["started"].as_i64());
    assert!(job["order"]["seed"].is_number(), "the seed is chosen when the job comes");
    let result = kit.get(&format!("/v1/jobs/{id}/result")).await.ok().json();
    let file = kit.get(result["pictures"][1]["url"].as_str().unwrap()).await.ok();
    assert_eq!(kiln_image::from_bytes("a", &file.bytes).unwrap().width(), 64);
    let list = kit.get("/v1/jobs?limit=5").await.ok().json();
    assert_eq!(list["data"][0]["id"], *id);
}

#[tokio::test]
async fn an_unknown_job_is_not_found() {
    let kit = Kit::new();
    for path in
        ["/v1/jobs/nope", "/v1/jobs/nope/result", "/v1/jobs/nope/events", "/v1/jobs/..%2F..%2Fqueue.sqlite"]
    {
        kit.get(path).await.refused(404, "not_found");
    }
    kit.delete("/v1/jobs/nope").await.refused(404, "not_found");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_is_cancelled_within_a_step_and_in_the_queue_at_once() {
    let kit = Kit::new();
    let running = kit.submit(json!({ "prompt": "slow", "steps": 200 })).await;
    let waiting = kit.submit(json!({ "prompt": "a fox" })).await;
    while kit.get(&format!("/v1/jobs/{running}")).await.json()["status"] != "running" {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(kit.get(&format!("/v1/jobs/{waiting}")).await.json()["position"], 0);
    kit.get(&format!("/v1/jobs/{waiting}/result")).await.refused(409, "not_done");
    let last = kit.submit(json!({ "prompt": "a fox" })).await;
    assert_eq!(kit.get(&format!("/v1/jobs/{last}")).await.json()["position"], 1);
    kit.delete(&format!("/v1/jobs/{last}")).await.ok();
    assert_eq!(kit.get(&format!("/v1/jobs/{last}")).await.json()["status"], "cancelled");
    // This one is planned already.
    kit.delete(&format!("/v1/jobs/{waiting}")).await.ok();
    assert_eq!(kit.wait(&waiting).await["status"], "cancelled");
    assert_eq!(kit.get(&format!("/v1/jobs/{running}")).await.json()["status"], "running");
    let asked = Instant::now();
    kit.delete(&format!("/v1/jobs/{running}")).await.ok();
    assert_eq!(kit.wait(&running).await["status"], "cancelled");
    assert!(asked.elapsed() < Duration::from_secs(2), "two hundred steps would take ten seconds");
    kit.delete(&format!("/v1/jobs/{running}")).await.refused(409, "at_its_end");
    kit.get(&format!("/v1/jobs/{running}/result")).await.refused(409, "cancelled");
}

#[tokio::test(flavor = "multi_thread")]
async fn events_tell_of_progress_previews_and_the_end() {
    let kit = Kit::new();
    let id = kit.submit(json!({ "prompt": "slow", "steps": 4 })).await;
    let stream = kit.get(&format!("/v1/jobs/{id}/events?previews=true")).await.ok();
    let events = events(stream.text());
    let of = |name: &str| events.iter().filter(|(n, _)| n == name).count();
    assert!(of("progress") >= 2 && of("preview") >= 1, "{}", stream.text());
    let preview = events.iter().find(|(name, _)| name == "preview").unwrap();
    assert!(preview.1["image"].as_str().unwrap().starts_with("data:image/jpeg;base64,"));
    let (name, last) = events.last().unwrap();
    assert_eq!((name.as_str(), &last["status"]), ("end", &json!("done")));
    let again = kit.get(&format!("/v1/jobs/{id}/events")).await.ok();
    assert_eq!(crate::kit::events(again.text()).len(), 1, "a finished job has its end to tell");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_queue_is_bounded_and_says_when_to_try_again() {
    let kit = Kit::with(|config| config.limits.queue = 4);
    let ask = |client: &'static str| {
        let mut request = crate::kit::post("/v1/jobs", json!({ "prompt": "slow", "steps": 100 }));
        request.headers_mut().insert("x-client-id", client.parse().unwrap());
        kit.send(request)
    };
    // One is generated and counts, too.
    for i in 0..3 {
        ask("a").await.ok();
        while i == 0 && !kit.get("/metrics").await.text().contains("kiln_running 1\n") {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    let own = ask("a").await.refused(429, "queue_full");
    assert!(own.headers["retry-after"].to_str().unwrap().parse::<u64>().unwrap() >= 1);
    for _ in 0..2 {
        ask("b").await.ok();
    }
    ask("c").await.refused(429, "queue_full");
    let metrics = kit.get("/metrics").await.ok();
    assert!(metrics.text().contains("kiln_queue_refused_total 2\n"), "{}", metrics.text());
    kit.server.close();
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_that_share_a_model_and_size_run_together() {
    let kit = Kit::open(std::sync::Arc::new(tempfile::TempDir::new().unwrap()), |_| {}, false);
    let mut ids = Vec::new();
    for model in ["large", "small", "large", "small"] {
        ids.push(kit.submit(json!({ "prompt": model, "model": model })).await);
    }
    kit.generate(1);
    for id in &ids {
        kit.wait(id).await;
    }
    let order: Vec<String> = kit.seen.lock().unwrap().iter().map(|seen| seen.prompt().to_owned()).collect();
    assert_eq!(order, ["large", "large", "small", "small"]);
}

#[tokio::test]
async fn an_image_that_was_sent_or_made_can_be_named() {
    let kit = Kit::new();
    let bytes = png(32, 16);
    let request = axum::http::Request::post("/v1/inputs").header("host", "localhost");
    let input = kit.send(request.body(bytes.clone().into()).unwrap()).await.ok().json();
    assert_eq!((&input["width"], &input["height"]), (&json!(32), &json!(16)));
    let made = kit.post("/v1/images/generations", json!({ "prompt": "a fox" })).await.ok().json();
    let references =
        json!([input["id"], format!("picture:{}", made["data"][0]["picture"].as_str().unwrap())]);
    let id = kit.submit(json!({ "prompt": "both", "references": references })).await;
    assert_eq!(kit.wait(&id).await["status"], "done");
    let seen = kit.seen.lock().unwrap()[1].clone();
    assert_eq!(std::fs::read(&seen.references[0].path).unwrap(), bytes);
    assert_eq!(input["id"], format!("input:{}", seen.references[0].sha256));
    assert_eq!(seen.references[1].picture.width(), 64);
    kit.get(&format!("/v1/inputs/{}", input["id"].as_str().unwrap())).await.ok();
    for wrong in ["input:00", "input:../queue.sqlite", "picture:nope", "input:"] {
        kit.post("/v1/jobs", json!({ "prompt": "a", "references": [wrong] }))
            .await
            .refused(404, "input_not_found");
    }
}
