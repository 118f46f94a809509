//! A model that can't be loaded on a worker: not announced there, and its jobs run elsewhere.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kiln_engine::Request;
use kiln_server::fleet::{NodeRecord, QueueAdmin, open_gateway};
use kiln_server::{Config, ErrorCode, Generator, JobError, JobInputs, Task};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::node::SleepingGenerator;
use crate::harness::TestServer;
use crate::nats::{Nats, TestWorker, fleet};

/// Can't load its model: at startup, or with the first job.
struct BrokenGenerator {
    at_startup: bool,
}

fn truncated() -> JobError {
    JobError::new(ErrorCode::ModelFailed, "the file is truncated")
}

impl Generator for BrokenGenerator {
    type Plan = Arc<Request>;

    fn warm_up(&self) -> Result<(), JobError> {
        if self.at_startup { Err(truncated()) } else { Ok(()) }
    }

    fn plan(&self, job: &JobInputs<'_>) -> Result<Arc<Request>, JobError> {
        Ok(Arc::new(job.request().clone()))
    }

    fn generate(&self, tasks: Vec<Task<Arc<Request>>>) {
        tasks.into_iter().for_each(|task| task.sink.ended(Err(truncated())));
    }

    fn finish(&self) {}
}

/// Waits until some worker says that it can't load the model.
fn unusable(admin: &QueueAdmin) -> NodeRecord {
    let started = Instant::now();
    loop {
        let mut nodes = admin.nodes().into_iter();
        if let Some(node) = nodes.find(|node| !node.unusable.is_empty()) {
            return node;
        }
        assert!(started.elapsed() < Duration::from_secs(20), "no worker says what it can't load");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_of_a_model_that_a_worker_cant_load_run_on_another_and_are_not_blamed() {
    let Some(nats) = Nats::start() else { return };
    for at_startup in [false, true] {
        let folder = TempDir::new().unwrap();
        let config = fleet(&nats.url(), folder.path());
        let broken = TestWorker::with(config.clone(), folder.path());
        let gateway = open_gateway(Config::new(folder.path().join("gateway")), config.clone()).unwrap();
        let server = TestServer::of(gateway);
        broken.generate(BrokenGenerator { at_startup });
        let admin = QueueAdmin::open(config.clone()).unwrap();
        if at_startup {
            unusable(&admin);
        }
        let mut ids = Vec::new();
        for seed in 0..4 {
            ids.push(server.submit(json!({ "prompt": "fine", "seed": seed })).await);
        }
        let node = unusable(&admin);
        assert_eq!(node.unusable, [("small".to_owned(), "the file is truncated".to_owned())]);
        assert!(node.models.iter().all(|model| model.info.name == "large"), "{:?}", node.models);
        // They wait for a worker that can.
        tokio::time::sleep(Duration::from_millis(1500)).await;
        for id in &ids {
            assert_eq!(server.get(&format!("/v1/jobs/{id}")).await.json()["status"], "queued");
        }
        let healthy = TestWorker::with(config, folder.path());
        healthy.generate(SleepingGenerator(Duration::from_millis(4)));
        for id in &ids {
            assert_eq!(server.wait(id).await["status"], "done");
            let record: Value = serde_json::from_str(&admin.job(id).unwrap().unwrap().json).unwrap();
            assert_eq!((&record["failures"], &record["kills"]), (&json!(0), &json!(0)), "{record}");
        }
        drop((broken, healthy));
    }
}
