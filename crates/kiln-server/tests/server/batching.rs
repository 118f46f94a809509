//! Similar queued jobs are generated in one batch; each gets its own images and result.

use std::sync::Arc;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::harness::TestServer;

/// A server that does not generate yet: all jobs stay queued.
fn paused() -> TestServer {
    TestServer::open(Arc::new(TempDir::new().unwrap()), |_| {}, false)
}

async fn submit(server: &TestServer, jobs: &[Value]) -> Vec<String> {
    let mut ids = Vec::new();
    for job in jobs {
        ids.push(server.submit(job.clone()).await);
    }
    ids
}

fn job(seed: u64) -> Value {
    json!({ "prompt": "a fox", "seed": seed })
}

/// The number of images that were started in batches of this size.
async fn in_batches_of(server: &TestServer, size: u32) -> u64 {
    let text = server.get("/metrics").await.ok().text().to_owned();
    let name = format!("kiln_batch_images_total{{size=\"{size}\"}} ");
    text.lines().find_map(|line| line.strip_prefix(&name)).map_or(0, |count| count.parse().unwrap())
}

#[tokio::test]
async fn similar_jobs_are_generated_in_one_batch_and_each_gets_its_image() {
    let server = paused();
    let ids = submit(&server, &[1, 2, 3, 4, 5].map(job)).await;
    server.generate(4);
    for (i, id) in ids.iter().enumerate() {
        let job = server.wait(id).await;
        assert_eq!((&job["status"], job["images"].as_array().unwrap().len()), (&json!("done"), 1));
        assert_eq!(job["images"][0]["seed"], (i + 1).to_string());
        let id = job["images"][0]["id"].as_str().unwrap();
        let file = server.get(&format!("/v1/images/{id}/file")).await.ok().bytes;
        let image = kiln_image::from_bytes("response", &file).unwrap();
        assert_eq!(image.pixels()[..3], [i as u8 + 1, 0, 7]);
    }
    assert_eq!((in_batches_of(&server, 4).await, in_batches_of(&server, 1).await), (4, 1));
}

#[tokio::test]
async fn jobs_with_different_settings_are_not_batched() {
    let server = paused();
    let others = [
        json!({ "prompt": "a", "seed": 1, "width": 32 }),
        json!({ "prompt": "a", "seed": 1, "steps": 2 }),
        json!({ "prompt": "a", "seed": 1, "guidance": 2.0 }),
        json!({ "prompt": "a", "seed": 1, "sigmas": [1.0, 0.75, 0.5, 0.25] }),
        json!({ "prompt": "a", "seed": 1, "schedule": "power" }),
        json!({ "prompt": "a", "seed": 1, "max_tokens": 32 }),
        json!({ "prompt": "a", "seed": 1, "vae": "taef2" }),
        json!({ "prompt": "a", "seed": 1, "model": "large" }),
        json!({ "prompt": "a", "seed": 1, "loras": [{ "name": "ink" }] }),
        json!({ "prompt": "a", "seed": 1, "cache": 0.1 }),
        json!({ "prompt": "a", "seed": 1, "cache": 0.2 }),
        json!({ "prompt": "a", "seed": 1, "n": 4 }),
    ];
    let ids = submit(&server, &[&[job(1)], &others[..]].concat()).await;
    server.generate(4);
    for id in &ids {
        assert_eq!(server.wait(id).await["status"], "done");
    }
    // The last one is a batch of its own.
    assert_eq!((in_batches_of(&server, 1).await, in_batches_of(&server, 4).await), (12, 4));
}

#[tokio::test]
async fn a_generator_without_batching_gets_one_job_at_a_time() {
    let server = paused();
    let ids = submit(&server, &[1, 2, 3].map(job)).await;
    server.generate(1);
    for id in &ids {
        server.wait(id).await;
    }
    assert_eq!(in_batches_of(&server, 1).await, 3);
}

#[tokio::test]
async fn an_error_affects_only_its_own_job_of_a_batch() {
    let server = paused();
    let with = |prompt: &str| json!({ "prompt": prompt, "seed": 1 });
    let ids = submit(&server, &[with("a"), with("fail"), with("b"), with("refuse")]).await;
    server.generate(4);
    let mut ends = Vec::new();
    for id in &ids {
        let job = server.wait(id).await;
        ends.push((job["status"].clone(), job["error"]["code"].clone()));
    }
    let done = (json!("done"), Value::Null);
    let failed = |code: &str| (json!("failed"), json!(code));
    assert_eq!(ends, [done.clone(), failed("generation_failed"), done, failed("invalid_request")]);
    assert_eq!(in_batches_of(&server, 4).await, 4);
}

#[tokio::test]
async fn after_a_panic_the_jobs_of_a_batch_are_generated_one_by_one() {
    let server = paused();
    let with = |prompt: &str| json!({ "prompt": prompt, "seed": 1 });
    let ids = submit(&server, &[with("a"), with("panic"), with("b")]).await;
    server.generate(4);
    let mut ends = Vec::new();
    for id in &ids {
        let job = server.wait(id).await;
        ends.push((
            job["status"].clone(),
            job["error"]["code"].clone(),
            job["images"].as_array().unwrap().len(),
        ));
    }
    let done = (json!("done"), Value::Null, 1);
    assert_eq!(ends, [done.clone(), (json!("failed"), json!("panicked"), 0), done]);
    // The second ran in the batch and alone; the first was already done.
    let prompts: Vec<String> =
        server.received.lock().unwrap().iter().map(|s| s.prompt().to_owned()).collect();
    assert_eq!(prompts, ["a", "panic", "panic", "b"]);
    assert!(server.get("/metrics").await.ok().text().contains("kiln_panics_total 2\n"));
}

#[tokio::test]
async fn one_job_of_a_batch_can_be_cancelled() {
    let server = paused();
    // The second would take ten seconds.
    let long = |prompt: &str| json!({ "prompt": prompt, "seed": 1, "steps": 200 });
    let ids = submit(&server, &[long("a"), long("slow"), long("b")]).await;
    server.generate(4);
    while server.get(&format!("/v1/jobs/{}", ids[1])).await.json()["status"] != "running" {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    server.delete(&format!("/v1/jobs/{}", ids[1])).await.ok();
    assert_eq!(server.wait(&ids[1]).await["status"], "cancelled");
    for id in [&ids[0], &ids[2]] {
        assert_eq!(server.wait(id).await["status"], "done");
    }
}

#[tokio::test]
async fn a_job_during_which_the_process_died_is_not_batched() {
    let folder = Arc::new(TempDir::new().unwrap());
    let before = TestServer::open(Arc::clone(&folder), |_| {}, false);
    let ids = submit(&before, &[1, 2, 3].map(job)).await;
    drop(before);
    let db = rusqlite::Connection::open(folder.path().join("queue.sqlite")).unwrap();
    db.execute("UPDATE jobs SET state = 'running', attempts = 1 WHERE id = ?", [&ids[0]]).unwrap();
    let after = TestServer::open(folder, |_| {}, false);
    after.generate(4);
    for id in &ids {
        assert_eq!(after.wait(id).await["status"], "done");
    }
    assert_eq!((in_batches_of(&after, 1).await, in_batches_of(&after, 2).await), (1, 2));
}
