//! Jobs that are alike and wait are generated at once; each has its own image and its own end.

use std::sync::Arc;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::kit::Kit;

/// Nothing is generated yet: all jobs wait.
fn waiting() -> Kit {
    Kit::open(Arc::new(TempDir::new().unwrap()), |_| {}, false)
}

async fn submit(kit: &Kit, jobs: &[Value]) -> Vec<String> {
    let mut ids = Vec::new();
    for job in jobs {
        ids.push(kit.submit(job.clone()).await);
    }
    ids
}

fn job(seed: u64) -> Value {
    json!({ "prompt": "a fox", "seed": seed })
}

/// Images that were begun in batches of so many.
async fn in_batches_of(kit: &Kit, size: u32) -> u64 {
    let text = kit.get("/metrics").await.ok().text().to_owned();
    let name = format!("kiln_batch_pictures_total{{size=\"{size}\"}} ");
    text.lines().find_map(|line| line.strip_prefix(&name)).map_or(0, |count| count.parse().unwrap())
}

#[tokio::test]
async fn jobs_that_are_alike_are_generated_at_once_and_each_gets_its_image() {
    let kit = waiting();
    let ids = submit(&kit, &[1, 2, 3, 4, 5].map(job)).await;
    kit.generate(4);
    for (i, id) in ids.iter().enumerate() {
        let job = kit.wait(id).await;
        assert_eq!((&job["status"], job["pictures"].as_array().unwrap().len()), (&json!("done"), 1));
        assert_eq!(job["pictures"][0]["seed"], (i + 1).to_string());
        let picture = job["pictures"][0]["id"].as_str().unwrap();
        let file = kit.get(&format!("/v1/pictures/{picture}/file")).await.ok().bytes;
        let picture = kiln_image::from_bytes("answer", &file).unwrap();
        assert_eq!(picture.pixels()[..3], [i as u8 + 1, 0, 7]);
    }
    assert_eq!((in_batches_of(&kit, 4).await, in_batches_of(&kit, 1).await), (4, 1));
}

#[tokio::test]
async fn jobs_that_differ_in_size_or_steps_or_kind_are_not_generated_at_once() {
    let kit = waiting();
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
        json!({ "prompt": "a", "seed": 1, "n": 4 }),
    ];
    let ids = submit(&kit, &[&[job(1)], &others[..]].concat()).await;
    kit.generate(4);
    for id in &ids {
        assert_eq!(kit.wait(id).await["status"], "done");
    }
    // The last one is a batch by itself.
    assert_eq!((in_batches_of(&kit, 1).await, in_batches_of(&kit, 4).await), (10, 4));
}

#[tokio::test]
async fn a_generator_without_room_gets_one_job_at_a_time() {
    let kit = waiting();
    let ids = submit(&kit, &[1, 2, 3].map(job)).await;
    kit.generate(1);
    for id in &ids {
        kit.wait(id).await;
    }
    assert_eq!(in_batches_of(&kit, 1).await, 3);
}

#[tokio::test]
async fn what_goes_wrong_with_one_is_not_the_others_error() {
    let kit = waiting();
    let with = |prompt: &str| json!({ "prompt": prompt, "seed": 1 });
    let ids = submit(&kit, &[with("a"), with("fail"), with("b"), with("refuse")]).await;
    kit.generate(4);
    let mut ends = Vec::new();
    for id in &ids {
        let job = kit.wait(id).await;
        ends.push((job["status"].clone(), job["error"]["code"].clone()));
    }
    let done = (json!("done"), Value::Null);
    let failed = |code: &str| (json!("failed"), json!(code));
    assert_eq!(ends, [done.clone(), failed("generation_failed"), done, failed("invalid_request")]);
    assert_eq!(in_batches_of(&kit, 4).await, 4);
}

#[tokio::test]
async fn after_a_panic_the_jobs_that_had_company_are_generated_alone() {
    let kit = waiting();
    let with = |prompt: &str| json!({ "prompt": prompt, "seed": 1 });
    let ids = submit(&kit, &[with("a"), with("panic"), with("b")]).await;
    kit.generate(4);
    let mut ends = Vec::new();
    for id in &ids {
        let job = kit.wait(id).await;
        ends.push((
            job["status"].clone(),
            job["error"]["code"].clone(),
            job["pictures"].as_array().unwrap().len(),
        ));
    }
    let done = (json!("done"), Value::Null, 1);
    assert_eq!(ends, [done.clone(), (json!("failed"), json!("panicked"), 0), done]);
    // Once with the others, once alone; the first was done before.
    let prompts: Vec<String> = kit.seen.lock().unwrap().iter().map(|s| s.prompt().to_owned()).collect();
    assert_eq!(prompts, ["a", "panic", "panic", "b"]);
    assert!(kit.get("/metrics").await.ok().text().contains("kiln_panics_total 2\n"));
}

#[tokio::test]
async fn one_of_several_can_be_cancelled() {
    let kit = waiting();
    // The second would take ten seconds.
    let long = |prompt: &str| json!({ "prompt": prompt, "seed": 1, "steps": 200 });
    let ids = submit(&kit, &[long("a"), long("slow"), long("b")]).await;
    kit.generate(4);
    while kit.get(&format!("/v1/jobs/{}", ids[1])).await.json()["status"] != "running" {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    kit.delete(&format!("/v1/jobs/{}", ids[1])).await.ok();
    assert_eq!(kit.wait(&ids[1]).await["status"], "cancelled");
    for id in [&ids[0], &ids[2]] {
        assert_eq!(kit.wait(id).await["status"], "done");
    }
}

#[tokio::test]
async fn a_job_that_ended_the_process_before_is_generated_without_company() {
    let folder = Arc::new(TempDir::new().unwrap());
    let before = Kit::open(Arc::clone(&folder), |_| {}, false);
    let ids = submit(&before, &[1, 2, 3].map(job)).await;
    drop(before);
    let db = rusqlite::Connection::open(folder.path().join("queue.sqlite")).unwrap();
    db.execute("UPDATE jobs SET state = 'running', attempts = 1 WHERE id = ?", [&ids[0]]).unwrap();
    let after = Kit::open(folder, |_| {}, false);
    after.generate(4);
    for id in &ids {
        assert_eq!(after.wait(id).await["status"], "done");
    }
    assert_eq!((in_batches_of(&after, 1).await, in_batches_of(&after, 2).await), (1, 2));
}
