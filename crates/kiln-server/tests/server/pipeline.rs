//! The next job is planned and generated while the one before is saved; each ends once, with its own images.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use kiln_engine::Request;
use kiln_server::{Generator, JobError, JobInputs, JobSink, Task};
use serde_json::json;
use tempfile::TempDir;

use crate::kit::{Kit, finished};

/// Generates in no time, and delivers images on a thread of its own, as an engine does.
struct Pipelined {
    log: Log,
    deliveries: Mutex<Option<Sender<Delivery>>>,
    delivering: Mutex<Option<std::thread::JoinHandle<()>>>,
    /// `generate` waits at a job of prompt `hold` until this is opened.
    hold: Gate,
    room: u32,
}

type Delivery = (Arc<Request>, Arc<dyn JobSink>);

/// What happened, in order.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<String>>>);

impl Log {
    fn add(&self, what: &str, request: &Request) {
        self.0.lock().unwrap().push(format!("{what} {}", request.prompts[0]));
    }

    fn has(&self, entry: &str) -> bool {
        self.0.lock().unwrap().iter().any(|known| known == entry)
    }

    fn place(&self, entry: &str) -> usize {
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

    fn pass(&self) {
        let open = self.0.1.wait_while(self.0.0.lock().unwrap(), |open| !*open);
        drop(open.unwrap());
    }
}

impl Pipelined {
    /// `deliver` is passed before each image of a job of prompt `late`.
    fn new(room: u32, hold: &Gate, deliver: &Gate) -> (Pipelined, Log) {
        let (deliveries, arriving): (Sender<Delivery>, Receiver<Delivery>) = channel();
        let (log, deliver) = (Log::default(), deliver.clone());
        let delivering = std::thread::spawn({
            let log = log.clone();
            move || {
                for (request, sink) in arriving {
                    if request.prompts[0] == "late" {
                        deliver.pass();
                    }
                    let cancelled = sink.cancelled().then(JobError::cancelled);
                    let result = cancelled.map_or_else(|| sink.image(finished(&request, 0, 32, 32)), Err);
                    log.add("delivered", &request);
                    sink.ended(result);
                }
            }
        });
        let generator = Pipelined {
            log: log.clone(),
            deliveries: Mutex::new(Some(deliveries)),
            delivering: Mutex::new(Some(delivering)),
            hold: hold.clone(),
            room,
        };
        (generator, log)
    }
}

impl Generator for Pipelined {
    type Plan = Arc<Request>;

    fn plan(&self, job: &JobInputs<'_>) -> Result<Arc<Request>, JobError> {
        self.log.add("planned", job.request());
        Ok(Arc::new(job.request().clone()))
    }

    fn room(&self, _: &Arc<Request>) -> u32 {
        self.room
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

fn waiting() -> Kit {
    Kit::open(Arc::new(TempDir::new().unwrap()), |_| {}, false)
}

fn open() -> Gate {
    let gate = Gate::default();
    gate.open();
    gate
}

/// Ends of jobs in this state.
async fn ends(kit: &Kit, state: &str) -> u64 {
    let text = kit.get("/metrics").await.ok().text().to_owned();
    let name = format!("kiln_jobs_total{{state=\"{state}\"}} ");
    text.lines().find_map(|line| line.strip_prefix(&name)).map_or(0, |count| count.parse().unwrap())
}

#[cfg(unix)]
#[tokio::test(flavor = "multi_thread")]
async fn jobs_are_generated_while_an_image_is_still_being_written() {
    let kit = waiting();
    let mut ids = Vec::new();
    for (seed, prompt) in ["one", "two", "three"].iter().enumerate() {
        ids.push(kit.submit(json!({ "prompt": prompt, "seed": seed + 1 })).await);
    }
    // A disk that takes its time: writing to a pipe waits for somebody who reads.
    let pipe = kit.folder().path().join(format!("pictures/{}-0.part", ids[0]));
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let (generator, log) = Pipelined::new(1, &open(), &open());
    let generating = kit.server.generate_with(generator).unwrap();
    log.wait_for("generated three").await;
    for id in &ids {
        assert_eq!(kit.get(&format!("/v1/jobs/{id}")).await.json()["status"], "running");
    }
    assert!(!log.has("delivered one"));
    assert_eq!(kit.metric("kiln_running").await, 3);
    let reading = std::thread::spawn(move || std::fs::read(pipe).unwrap());
    for (i, id) in ids.iter().enumerate() {
        let job = kit.wait(id).await;
        assert_eq!((&job["status"], job["pictures"].as_array().unwrap().len()), (&json!("done"), 1));
        assert_eq!(job["pictures"][0]["seed"], (i + 1).to_string());
    }
    let first = kiln_image::from_bytes("first", &reading.join().unwrap()).unwrap();
    assert_eq!(first.pixels()[..3], [1, 0, 7]);
    for (i, id) in ids.iter().enumerate().skip(1) {
        let file = kit.get(&format!("/v1/pictures/{id}-0/file")).await.ok().bytes;
        assert_eq!(kiln_image::from_bytes("file", &file).unwrap().pixels()[..3], [i as u8 + 1, 0, 7]);
    }
    assert_eq!((ends(&kit, "done").await, kit.metric("kiln_running").await), (3, 0));
    kit.server.close();
    generating.join().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn one_group_is_planned_while_another_is_generated_and_no_more() {
    let kit = waiting();
    let hold = Gate::default();
    let (generator, log) = Pipelined::new(1, &hold, &open());
    let mut ids = Vec::new();
    for prompt in ["hold", "next", "last"] {
        ids.push(kit.submit(json!({ "prompt": prompt })).await);
    }
    kit.server.generate_with(generator).unwrap();
    log.wait_for("generating hold").await;
    log.wait_for("planned next").await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(!log.has("planned last") && !log.has("generating next"));
    let status = kit.get(&format!("/v1/jobs/{}", ids[1])).await.json();
    assert_eq!((&status["status"], &status["position"]), (&json!("queued"), &json!(0)));
    assert_eq!(kit.get(&format!("/v1/jobs/{}", ids[2])).await.json()["position"], 1);
    hold.open();
    for id in &ids {
        assert_eq!(kit.wait(id).await["status"], "done");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_planned_job_is_cancelled_while_it_waits() {
    let kit = waiting();
    let hold = Gate::default();
    let (generator, log) = Pipelined::new(1, &hold, &open());
    let first = kit.submit(json!({ "prompt": "hold" })).await;
    let planned = kit.submit(json!({ "prompt": "planned" })).await;
    let last = kit.submit(json!({ "prompt": "last" })).await;
    kit.server.generate_with(generator).unwrap();
    log.wait_for("planned planned").await;
    kit.delete(&format!("/v1/jobs/{planned}")).await.ok();
    assert_eq!(kit.wait(&planned).await["status"], "cancelled");
    // The place is free for the next one.
    log.wait_for("planned last").await;
    assert_eq!(kit.get(&format!("/v1/jobs/{first}")).await.json()["status"], "running");
    hold.open();
    for id in [&first, &last] {
        assert_eq!(kit.wait(id).await["status"], "done");
    }
    assert!(!log.has("generating planned"));
    assert_eq!((ends(&kit, "done").await, ends(&kit, "cancelled").await), (2, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_is_cancelled_between_its_generation_and_its_delivery() {
    let kit = waiting();
    let deliver = Gate::default();
    let (generator, log) = Pipelined::new(1, &open(), &deliver);
    let late = kit.submit(json!({ "prompt": "late" })).await;
    kit.server.generate_with(generator).unwrap();
    log.wait_for("generated late").await;
    kit.delete(&format!("/v1/jobs/{late}")).await.ok();
    deliver.open();
    let job = kit.wait(&late).await;
    assert_eq!((&job["status"], job["pictures"].as_array().unwrap().len()), (&json!("cancelled"), 0));
    assert_eq!(ends(&kit, "cancelled").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_that_come_before_its_turn_join_a_planned_group() {
    let kit = waiting();
    let hold = Gate::default();
    let (generator, log) = Pipelined::new(4, &hold, &open());
    let mut ids = vec![kit.submit(json!({ "prompt": "hold", "width": 32 })).await];
    kit.server.generate_with(generator).unwrap();
    log.wait_for("generating hold").await;
    for prompt in ["one", "two", "three"] {
        ids.push(kit.submit(json!({ "prompt": prompt })).await);
        log.wait_for(&format!("planned {prompt}")).await;
    }
    hold.open();
    for id in &ids {
        assert_eq!(kit.wait(id).await["status"], "done");
    }
    let metrics = kit.get("/metrics").await.ok();
    assert!(metrics.text().contains("kiln_batch_pictures_total{size=\"3\"} 3\n"), "{}", metrics.text());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_arrives_of_an_attempt_that_panicked_is_not_taken() {
    let kit = waiting();
    let deliver = Gate::default();
    let (generator, log) = Pipelined::new(4, &open(), &deliver);
    let late = kit.submit(json!({ "prompt": "late", "seed": 4 })).await;
    let panic = kit.submit(json!({ "prompt": "panic" })).await;
    kit.server.generate_with(generator).unwrap();
    // The image of the first attempt waits to be delivered while the job is generated again.
    assert_eq!(kit.wait(&panic).await["error"]["code"], "panicked");
    deliver.open();
    let job = kit.wait(&late).await;
    assert_eq!((&job["status"], job["pictures"].as_array().unwrap().len()), (&json!("done"), 1));
    let generated = log.0.lock().unwrap().iter().filter(|entry| *entry == "generated late").count();
    assert_eq!((generated, ends(&kit, "done").await, ends(&kit, "failed").await), (2, 1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_planned_beside_a_job_that_ended_the_process_before() {
    let folder = Arc::new(TempDir::new().unwrap());
    let before = Kit::open(Arc::clone(&folder), |_| {}, false);
    let mut ids = Vec::new();
    for prompt in ["first", "suspect", "last"] {
        ids.push(before.submit(json!({ "prompt": prompt })).await);
    }
    drop(before);
    let db = rusqlite::Connection::open(folder.path().join("queue.sqlite")).unwrap();
    db.execute("UPDATE jobs SET state = 'running', attempts = 1 WHERE id = ?", [&ids[1]]).unwrap();
    let kit = Kit::open(folder, |_| {}, false);
    let (generator, log) = Pipelined::new(4, &open(), &open());
    kit.server.generate_with(generator).unwrap();
    for id in &ids {
        assert_eq!(kit.wait(id).await["status"], "done");
    }
    let place = |entry: &str| log.place(entry);
    let suspect = place("planned suspect")..place("delivered suspect");
    for other in ["planned first", "delivered first", "planned last", "delivered last"] {
        assert!(!suspect.contains(&place(other)), "{:?}", log.0.lock().unwrap());
    }
}
