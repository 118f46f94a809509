//! No job is stuck: not one that is returned, none whose model is loaded elsewhere, none that is submitted twice at once.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use kiln_engine::Request;
use kiln_server::fleet::{FleetConfig, QueueAdmin, open_gateway};
use kiln_server::{Config, ErrorCode, Generator, JobError, JobInputs, LoadedModel, Task};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::node::SleepingGenerator;
use crate::harness::{TestServer, finished, post};
use crate::nats::{Nats, TestWorker, fleet};

/// Fails with every job twice.
#[derive(Clone, Default)]
struct FailingTwice {
    tries: Arc<Mutex<HashMap<u64, u32>>>,
}

impl Generator for FailingTwice {
    type Plan = Arc<Request>;

    fn plan(&self, job: &JobInputs<'_>) -> Result<Arc<Request>, JobError> {
        Ok(Arc::new(job.request().clone()))
    }

    fn generate(&self, tasks: Vec<Task<Arc<Request>>>) {
        for Task { plan, sink } in tasks {
            let mut tries = self.tries.lock().unwrap();
            let tries = tries.entry(plan.seed[0]).or_default();
            *tries += 1;
            let failed = Err(JobError::new(ErrorCode::GenerationFailed, "not yet"));
            sink.ended(if *tries < 3 { failed } else { sink.image(finished(&plan, 0, 64, 64)) });
        }
    }

    fn finish(&self) {}
}

fn gateway(fleet: &FleetConfig, folder: &Path, change: impl FnOnce(&mut Config)) -> TestServer {
    let mut config = Config::new(tempfile::tempdir_in(folder).unwrap().keep());
    change(&mut config);
    TestServer::of(open_gateway(config, fleet.clone()).unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_job_is_tried_again_at_once_and_never_forgotten() {
    const JOBS: u64 = 60;
    let Some(nats) = Nats::start() else { return };
    let folder = TempDir::new().unwrap();
    // A ticket that is not returned would be delivered again after this time.
    let config = FleetConfig { ack_wait: Duration::from_secs(60), ..fleet(&nats.url(), folder.path()) };
    let server = gateway(&config, folder.path(), |config| config.limits.queue = 1000);
    let worker = TestWorker::with(config, folder.path());
    let generator = FailingTwice::default();
    worker.generate(generator.clone());
    let mut ids = Vec::new();
    for seed in 0..JOBS {
        ids.push(server.submit(json!({ "prompt": "fine", "seed": seed })).await);
    }
    let started = Instant::now();
    for id in &ids {
        loop {
            let job = server.get(&format!("/v1/jobs/{id}")).await.ok().json();
            if job["status"] == "done" {
                break;
            }
            assert!(started.elapsed() < Duration::from_secs(30), "{job}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
    assert!(generator.tries.lock().unwrap().values().all(|tries| *tries == 3));
    drop(worker);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_worker_of_several_models_takes_jobs_at_once() {
    let Some(nats) = Nats::start() else { return };
    let folder = TempDir::new().unwrap();
    // It looks for tickets that it does not know of four times a second.
    let config = fleet(&nats.url(), folder.path());
    let server = gateway(&config, folder.path(), |_| ());
    let worker = TestWorker::with(config, folder.path());
    worker.generate(SleepingGenerator(Duration::from_millis(4)));
    let mut waited = Duration::ZERO;
    for seed in 0..8 {
        tokio::time::sleep(Duration::from_millis(270)).await;
        let model = if seed % 2 == 0 { "small" } else { "large" };
        let started = Instant::now();
        let id = server.submit(json!({ "prompt": "fine", "seed": seed, "model": model })).await;
        assert_eq!(server.wait(&id).await["status"], "done");
        waited += started.elapsed();
    }
    println!("waited {waited:?}");
    assert!(waited < Duration::from_secs(4), "eight jobs took {waited:?}");
    drop(worker);
}

/// Has the model `small` loaded, and fails with every job.
struct Failing;

impl Generator for Failing {
    type Plan = ();

    fn loaded(&self) -> Vec<LoadedModel> {
        vec![LoadedModel {
            name: "small".into(),
            device: "cpu".into(),
            backend: "none".into(),
            dtype: "f32".into(),
            load_seconds: 2.0,
            free_memory: None,
        }]
    }

    fn plan(&self, _: &JobInputs<'_>) -> Result<(), JobError> {
        Ok(())
    }

    fn generate(&self, tasks: Vec<Task<()>>) {
        let failed = || JobError::new(ErrorCode::GenerationFailed, "never");
        tasks.into_iter().for_each(|task| task.sink.ended(Err(failed())));
    }

    fn finish(&self) {}
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_failed_where_its_model_is_loaded_runs_where_it_has_to_be_loaded() {
    let Some(nats) = Nats::start() else { return };
    let folder = TempDir::new().unwrap();
    let config = fleet(&nats.url(), folder.path());
    let server = gateway(&config, folder.path(), |_| ());
    let other = TestWorker::with(config.clone(), folder.path());
    other.generate(SleepingGenerator(Duration::from_millis(4)));
    // Now it stays with this model while another worker has the first one loaded.
    let id = server.submit(json!({ "prompt": "fine", "model": "large" })).await;
    assert_eq!(server.wait(&id).await["status"], "done");
    let failing = TestWorker::with(config.clone(), folder.path());
    failing.generate(Failing);
    let admin = QueueAdmin::open(config).unwrap();
    let until = Instant::now() + Duration::from_secs(20);
    while admin.nodes().iter().all(|node| node.loaded.is_empty()) {
        assert!(Instant::now() < until, "no worker announces its loaded model");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    // So does the other worker, after a few more announcements.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let id = server.submit(json!({ "prompt": "fine", "model": "small" })).await;
    let job = server.wait(&id).await;
    assert_eq!(job["status"], "done", "{job}");
    let record: Value = serde_json::from_str(&admin.job(&id).unwrap().unwrap().json).unwrap();
    assert_eq!(record["failures"], 1, "{record}");
    drop((other, failing));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_stops_returns_what_it_has_not_begun_at_once() {
    let Some(nats) = Nats::start() else { return };
    let folder = TempDir::new().unwrap();
    let config = FleetConfig { ack_wait: Duration::from_secs(60), ..fleet(&nats.url(), folder.path()) };
    let server = gateway(&config, folder.path(), |_| ());
    let slow = TestWorker::with_config(config.clone(), folder.path(), |config| {
        config.grace = Duration::from_secs(60);
    });
    let admin = QueueAdmin::open(config.clone()).unwrap();
    let mut ids = Vec::new();
    for seed in 0..3 {
        ids.push(server.submit(json!({ "prompt": "fine", "seed": seed })).await);
    }
    slow.generate(SleepingGenerator(Duration::from_secs(12)));
    let claimed = || admin.jobs().iter().filter(|job| job.worker.is_some()).count();
    let until = Instant::now() + Duration::from_secs(8);
    while claimed() < 2 {
        assert!(Instant::now() < until, "no job is claimed ahead");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let draining = tokio::spawn(slow.drain());
    let quick = TestWorker::with(config, folder.path());
    quick.generate(SleepingGenerator(Duration::from_millis(4)));
    while admin.jobs().len() > 1 {
        assert!(!draining.is_finished(), "they waited for the job that ran");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    draining.await.unwrap();
    for id in &ids {
        assert_eq!(server.wait(id).await["status"], "done");
    }
    drop(quick);
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_that_are_being_submitted_count_once_and_must_fit_the_queue() {
    let Some(nats) = Nats::start() else { return };
    let folder = TempDir::new().unwrap();
    let config = fleet(&nats.url(), folder.path());
    let worker = TestWorker::with(config.clone(), folder.path());
    let server = gateway(&config, folder.path(), |config| {
        (config.limits.queue, config.limits.prompt, config.limits.body) = (15, 20_000, 4 << 20);
    });
    // A client may have half of the queue, and one job more.
    let all = (0..8).map(|seed| server.post("/v1/jobs", json!({ "prompt": "fine", "seed": seed })));
    let statuses: Vec<u16> = join_all(all).await.iter().map(|response| response.status.as_u16()).collect();
    assert_eq!(statuses, [202; 8]);
    server.delete("/v1/queue").await.ok();
    // Every character is six in JSON.
    let prompts = vec!["\u{1}".repeat(19_000); 10];
    let refused = server.post("/v1/jobs", json!({ "prompt": prompts })).await;
    assert!(refused.expect_error(413, "too_large").text().contains("the queue takes requests of up to"));
    drop(worker);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_reaches_two_gateways_at_once_is_one_job_that_both_can_cancel() {
    let Some(nats) = Nats::start() else { return };
    let folder = TempDir::new().unwrap();
    let config = fleet(&nats.url(), folder.path());
    let worker = TestWorker::with(config.clone(), folder.path());
    let servers = [0, 1].map(|_| gateway(&config, folder.path(), |_| ()));
    for round in 0..12 {
        let submit = || {
            let mut request = post("/v1/jobs", json!({ "prompt": "fine" }));
            let key = format!("round-{round}").parse().unwrap();
            request.headers_mut().insert("idempotency-key", key);
            request
        };
        let (first, second) = tokio::join!(servers[0].send(submit()), servers[1].send(submit()));
        let ids =
            [first.ok(), second.ok()].map(|response| response.json()["id"].as_str().unwrap().to_owned());
        assert_eq!(ids[0], ids[1]);
        servers[round % 2].delete(&format!("/v1/jobs/{}", ids[0])).await.ok();
    }
    drop(worker);
}
