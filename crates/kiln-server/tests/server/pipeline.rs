//! Jobs are planned and generated while the images of earlier ones are saved; each ends once, with its own images.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use kiln_engine::Request;
use kiln_image::RgbImage;
use kiln_server::{FinishedImage, Generator, JobError, JobInputs, JobSink, Task};
use serde_json::json;
use tempfile::TempDir;

use crate::harness::{TestServer, finished};

/// Generates instantly and delivers images on a thread of its own, as the engine does.
struct PipelinedGenerator {
    log: Log,
    deliveries: Mutex<Option<Sender<Delivery>>>,
    delivering: Mutex<Option<std::thread::JoinHandle<()>>>,
    /// `generate` waits here for a job with prompt `hold`.
    hold: Gate,
    batch_capacity: u32,
}

type Delivery = (Arc<Request>, Arc<dyn JobSink>);

/// The events so far, in order.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<String>>>);

impl Log {
    fn add(&self, what: &str, request: &Request) {
        self.0.lock().unwrap().push(format!("{what} {}", request.prompts[0]));
    }

    fn has(&self, entry: &str) -> bool {
        self.0.lock().unwrap().iter().any(|known| known == entry)
    }

    fn position(&self, entry: &str) -> usize {
        self.0.lock().unwrap().iter().position(|known| known == entry).unwrap()
    }

    async fn wait_for(&self, entry: &str) {
        for _ in 0..1000 {
            if self.has(entry) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        panic!("no `{entry}` in {:?}", self.0.lock().unwrap());
    }
}

#[derive(Clone, Default)]
struct Gate(Arc<(Mutex<bool>, Condvar)>);

impl Gate {
    fn open(&self) {
        *self.0.0.lock().unwrap() = true;
        self.0.1.notify_all();
    }

    /// Waits until the gate is open.
    fn pass(&self) {
        let open = self.0.1.wait_while(self.0.0.lock().unwrap(), |open| !*open);
        drop(open.unwrap());
    }
}

impl PipelinedGenerator {
    /// Images of jobs with prompt `late` are delivered once `deliver` is open.
    fn new(batch_capacity: u32, hold: &Gate, deliver: &Gate) -> (PipelinedGenerator, Log) {
        let (deliveries, arriving): (Sender<Delivery>, Receiver<Delivery>) = channel();
        let (log, deliver) = (Log::default(), deliver.clone());
        let delivering = std::thread::spawn({
            let log = log.clone();
            move || {
                for (request, sink) in arriving {
                    if request.prompts[0] == "late" {
                        deliver.pass();
                    }
                    let image = match request.prompts[0].as_str() {
                        "noise" => noise(&request),
                        _ => finished(&request, 0, 32, 32),
                    };
                    let cancelled = sink.cancelled().then(JobError::cancelled);
                    let result = cancelled.map_or_else(|| sink.image(image), Err);
                    log.add("delivered", &request);
                    sink.ended(result);
                }
            }
        });
        let generator = PipelinedGenerator {
            log: log.clone(),
            deliveries: Mutex::new(Some(deliveries)),
            delivering: Mutex::new(Some(delivering)),
            hold: hold.clone(),
            batch_capacity,
        };
        (generator, log)
    }
}

/// A large image of noise, which takes long to encode as a small PNG.
fn noise(request: &Request) -> FinishedImage {
    const SIDE: u32 = 1536;
    let mut state = 1u32;
    let pixels = (0..3 * SIDE * SIDE).map(|_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    });
    let image = RgbImage::new(SIDE, SIDE, pixels.collect()).unwrap();
    FinishedImage { image, ..finished(request, 0, 1, 1) }
}

impl Generator for PipelinedGenerator {
    type Plan = Arc<Request>;

    fn plan(&self, job: &JobInputs<'_>) -> Result<Arc<Request>, JobError> {
        self.log.add("planned", job.request());
        Ok(Arc::new(job.request().clone()))
    }

    fn batch_capacity(&self, _: &Arc<Request>) -> u32 {
        self.batch_capacity
    }

    fn generate(&self, tasks: Vec<Task<Arc<Request>>>) {
        let all = tasks.len() as u32;
        for Task { plan, sink } in tasks {
            sink.batch(1, all);
            self.log.add("generating", &plan);
            match plan.prompts[0].as_str() {
                "hold" => self.hold.pass(),
                "panic" => panic!("on purpose"),
                _ => {}
            }
            let deliveries = self.deliveries.lock().unwrap().clone().unwrap();
            self.log.add("generated", &plan);
            deliveries.send((plan, sink)).unwrap();
        }
    }

    fn finish(&self) {
        drop(self.deliveries.lock().unwrap().take());
        self.delivering.lock().unwrap().take().unwrap().join().unwrap();
    }
}

/// A server that does not generate yet: all jobs stay queued.
fn paused() -> TestServer {
    TestServer::open(Arc::new(TempDir::new().unwrap()), |_| {}, false)
}

fn open_gate() -> Gate {
    let gate = Gate::default();
    gate.open();
    gate
}

/// The number of jobs that ended in this state.
async fn ended_jobs(server: &TestServer, state: &str) -> u64 {
    let text = server.get("/metrics").await.ok().text().to_owned();
    let name = format!("kiln_jobs_total{{state=\"{state}\"}} ");
    text.lines().find_map(|line| line.strip_prefix(&name)).map_or(0, |count| count.parse().unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_are_generated_while_an_image_is_being_saved() {
    let server = paused();
    let mut ids = Vec::new();
    for (seed, prompt) in ["noise", "two", "three"].iter().enumerate() {
        ids.push(server.submit(json!({ "prompt": prompt, "seed": seed + 1, "png": "small" })).await);
    }
    let (generator, log) = PipelinedGenerator::new(1, &open_gate(), &open_gate());
    let generating = server.inner.generate_with(generator).unwrap();
    log.wait_for("generated three").await;
    for id in &ids {
        assert_eq!(server.get(&format!("/v1/jobs/{id}")).await.json()["status"], "running");
    }
    assert!(!log.has("delivered noise"));
    assert_eq!(server.metric("kiln_running").await, 3);
    for (i, id) in ids.iter().enumerate() {
        let job = server.wait(id).await;
        assert_eq!((&job["status"], job["images"].as_array().unwrap().len()), (&json!("done"), 1));
        assert_eq!(job["images"][0]["seed"], (i + 1).to_string());
    }
    for (i, id) in ids.iter().enumerate().skip(1) {
        let file = server.get(&format!("/v1/images/{id}-0/file")).await.ok().bytes;
        assert_eq!(kiln_image::from_bytes("file", &file).unwrap().pixels()[..3], [i as u8 + 1, 0, 7]);
    }
    assert_eq!((ended_jobs(&server, "done").await, server.metric("kiln_running").await), (3, 0));
    server.inner.close();
    generating.join().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn at_most_one_group_is_planned_ahead() {
    let server = paused();
    let hold = Gate::default();
    let (generator, log) = PipelinedGenerator::new(1, &hold, &open_gate());
    let mut ids = Vec::new();
    for prompt in ["hold", "next", "last"] {
        ids.push(server.submit(json!({ "prompt": prompt })).await);
    }
    server.inner.generate_with(generator).unwrap();
    log.wait_for("generating hold").await;
    log.wait_for("planned next").await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(!log.has("planned last") && !log.has("generating next"));
    let status = server.get(&format!("/v1/jobs/{}", ids[1])).await.json();
    assert_eq!((&status["status"], &status["position"]), (&json!("queued"), &json!(0)));
    assert_eq!(server.get(&format!("/v1/jobs/{}", ids[2])).await.json()["position"], 1);
    hold.open();
    for id in &ids {
        assert_eq!(server.wait(id).await["status"], "done");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_planned_job_can_be_cancelled() {
    let server = paused();
    let hold = Gate::default();
    let (generator, log) = PipelinedGenerator::new(1, &hold, &open_gate());
    let first = server.submit(json!({ "prompt": "hold" })).await;
    let planned = server.submit(json!({ "prompt": "planned" })).await;
    let last = server.submit(json!({ "prompt": "last" })).await;
    server.inner.generate_with(generator).unwrap();
    log.wait_for("planned planned").await;
    server.delete(&format!("/v1/jobs/{planned}")).await.ok();
    assert_eq!(server.wait(&planned).await["status"], "cancelled");
    // The next job is planned instead.
    log.wait_for("planned last").await;
    assert_eq!(server.get(&format!("/v1/jobs/{first}")).await.json()["status"], "running");
    hold.open();
    for id in [&first, &last] {
        assert_eq!(server.wait(id).await["status"], "done");
    }
    assert!(!log.has("generating planned"));
    assert_eq!((ended_jobs(&server, "done").await, ended_jobs(&server, "cancelled").await), (2, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_generated_job_can_be_cancelled_before_its_delivery() {
    let server = paused();
    let deliver = Gate::default();
    let (generator, log) = PipelinedGenerator::new(1, &open_gate(), &deliver);
    let late = server.submit(json!({ "prompt": "late" })).await;
    server.inner.generate_with(generator).unwrap();
    log.wait_for("generated late").await;
    server.delete(&format!("/v1/jobs/{late}")).await.ok();
    deliver.open();
    let job = server.wait(&late).await;
    assert_eq!((&job["status"], job["images"].as_array().unwrap().len()), (&json!("cancelled"), 0));
    assert_eq!(ended_jobs(&server, "cancelled").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn later_jobs_join_a_planned_group() {
    let server = paused();
    let hold = Gate::default();
    let (generator, log) = PipelinedGenerator::new(4, &hold, &open_gate());
    let mut ids = vec![server.submit(json!({ "prompt": "hold", "width": 32 })).await];
    server.inner.generate_with(generator).unwrap();
    log.wait_for("generating hold").await;
    for prompt in ["one", "two", "three"] {
        ids.push(server.submit(json!({ "prompt": prompt })).await);
        log.wait_for(&format!("planned {prompt}")).await;
    }
    hold.open();
    for id in &ids {
        assert_eq!(server.wait(id).await["status"], "done");
    }
    let metrics = server.get("/metrics").await.ok();
    assert!(metrics.text().contains("kiln_batch_images_total{size=\"3\"} 3\n"), "{}", metrics.text());
}

#[tokio::test(flavor = "multi_thread")]
async fn images_of_a_panicked_attempt_are_ignored() {
    let server = paused();
    let deliver = Gate::default();
    let (generator, log) = PipelinedGenerator::new(4, &open_gate(), &deliver);
    let late = server.submit(json!({ "prompt": "late", "seed": 4 })).await;
    let panic = server.submit(json!({ "prompt": "panic" })).await;
    server.inner.generate_with(generator).unwrap();
    // The first attempt's image is still undelivered when the job is generated again.
    assert_eq!(server.wait(&panic).await["error"]["code"], "panicked");
    deliver.open();
    let job = server.wait(&late).await;
    assert_eq!((&job["status"], job["images"].as_array().unwrap().len()), (&json!("done"), 1));
    let generated = log.0.lock().unwrap().iter().filter(|entry| *entry == "generated late").count();
    assert_eq!(
        (generated, ended_jobs(&server, "done").await, ended_jobs(&server, "failed").await),
        (2, 1, 1)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_during_which_the_process_died_runs_alone() {
    let folder = Arc::new(TempDir::new().unwrap());
    let before = TestServer::open(Arc::clone(&folder), |_| {}, false);
    let mut ids = Vec::new();
    for prompt in ["first", "suspect", "last"] {
        ids.push(before.submit(json!({ "prompt": prompt })).await);
    }
    drop(before);
    let db = rusqlite::Connection::open(folder.path().join("queue.sqlite")).unwrap();
    db.execute("UPDATE jobs SET state = 'running', attempts = 1 WHERE id = ?", [&ids[1]]).unwrap();
    let server = TestServer::open(folder, |_| {}, false);
    let (generator, log) = PipelinedGenerator::new(4, &open_gate(), &open_gate());
    server.inner.generate_with(generator).unwrap();
    for id in &ids {
        assert_eq!(server.wait(id).await["status"], "done");
    }
    let suspect = log.position("planned suspect")..log.position("delivered suspect");
    for other in ["planned first", "delivered first", "planned last", "delivered last"] {
        assert!(!suspect.contains(&log.position(other)), "{:?}", log.0.lock().unwrap());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_goes_to_the_first_idle_generator() {
    let server = paused();
    let (holds, deliver) = ([Gate::default(), Gate::default()], open_gate());
    let (generators, logs): (Vec<_>, Vec<_>) =
        holds.iter().map(|hold| PipelinedGenerator::new(1, hold, &deliver)).unzip();
    let mut ids = vec![server.submit(json!({ "prompt": "hold" })).await];
    let generating = server.inner.generate_with_all(generators).unwrap();
    while !logs.iter().any(|log| log.has("generating hold")) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let busy = logs.iter().position(|log| log.has("generating hold")).unwrap();
    for prompt in ["one", "two", "three"] {
        ids.push(server.submit(json!({ "prompt": prompt })).await);
    }
    for id in &ids[1..] {
        assert_eq!(server.wait(id).await["status"], "done");
    }
    for prompt in ["one", "two", "three"] {
        assert!(logs[1 - busy].has(&format!("generated {prompt}")));
    }
    // Both are busy: the next job waits for the first that is done.
    holds[1 - busy].0.0.lock().map(|mut open| *open = false).unwrap();
    ids.push(server.submit(json!({ "prompt": "hold" })).await);
    logs[1 - busy].wait_for("generating hold").await;
    ids.push(server.submit(json!({ "prompt": "last" })).await);
    holds[busy].open();
    logs[busy].wait_for("generated last").await;
    holds[1 - busy].open();
    for id in &ids {
        assert_eq!(server.wait(id).await["status"], "done");
    }
    server.inner.close();
    generating.join().unwrap();
}
