//! A server in an empty folder, requests to it, and its generator.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{HeaderMap, Request, StatusCode, header};
use kiln_engine::{FileRef, Phase, Progress, Request as JobRequest};
use kiln_image::{Format, Picture};
use kiln_server::{
    Catalogue, Config, Finished, Generator, InputImage, JobError, JobInputs, JobSink, ModelInfo, Server,
    Task, router,
};
use serde_json::Value;
use tempfile::TempDir;
use tower::ServiceExt;

pub struct Names;

impl Catalogue for Names {
    fn models(&self) -> Vec<ModelInfo> {
        let model = |name: &str, default| ModelInfo {
            name: name.into(),
            default,
            size: 64,
            sides: None,
            steps: 4,
            guidance: None,
            negative: false,
        };
        vec![model("small", true), model("large", false)]
    }

    fn loras(&self) -> Vec<String> {
        vec!["ink".into()]
    }

    fn vaes(&self) -> Vec<String> {
        vec!["taef2".into()]
    }
}

/// What the generator was given.
#[derive(Clone, Debug)]
pub struct Seen {
    pub request: JobRequest,
    pub references: Vec<InputImage>,
    pub init: Option<InputImage>,
    pub mask: Option<InputImage>,
}

impl Seen {
    pub fn prompt(&self) -> &str {
        &self.request.prompts[0]
    }
}

/// Makes images of one colour. `slow`, `panic`, `panic in plan`, `fail`, `silent` and `refuse` as the prompt say how it
/// goes. Images are handed over on the calling thread.
pub struct Quick {
    pub seen: Arc<Mutex<Vec<Seen>>>,
    /// Images that are generated at once.
    pub room: u32,
}

impl Generator for Quick {
    type Plan = Arc<Seen>;

    fn plan(&self, job: &JobInputs<'_>) -> Result<Arc<Seen>, JobError> {
        let request = job.request();
        assert_ne!(request.prompts[0], "panic in plan", "on purpose");
        let image = |file: &FileRef| job.image(file);
        Ok(Arc::new(Seen {
            request: request.clone(),
            references: request.references.iter().map(image).collect::<Result<_, _>>()?,
            init: request.init.as_ref().map(image).transpose()?,
            mask: request.mask.as_ref().map(image).transpose()?,
        }))
    }

    fn room(&self, _: &Arc<Seen>) -> u32 {
        self.room
    }

    fn generate(&self, tasks: Vec<Task<Arc<Seen>>>) {
        let images = |task: &Task<Arc<Seen>>| task.plan.request.image_count() as u32;
        let all = tasks.iter().map(images).sum();
        for task in tasks {
            task.sink.batch(images(&task), all);
            self.seen.lock().unwrap().push(Seen::clone(&task.plan));
            let result = make(&task.plan.request, &*task.sink);
            if task.plan.prompt() != "silent" {
                task.sink.ended(result);
            }
        }
    }

    fn finish(&self) {}
}

fn make(request: &JobRequest, sink: &dyn JobSink) -> Result<(), JobError> {
    match request.prompts[0].as_str() {
        "panic" => panic!("on purpose"),
        "fail" => return Err(JobError::server("generation_failed", "the GPU is on fire")),
        "refuse" => return Err(JobError::request("invalid_request", "not that")),
        _ => {}
    }
    let (width, height) = (request.width.unwrap_or(64), request.height.unwrap_or(64));
    let (pictures, steps) = (request.image_count() as u32, request.steps.unwrap_or(4));
    for picture in 0..pictures {
        for step in 0..steps {
            if sink.cancelled() {
                return Err(JobError::cancelled());
            }
            let fraction = (picture * steps + step) as f32 / (pictures * steps) as f32;
            sink.progress(Progress { phase: Phase::Steps, picture, pictures, step, steps, fraction });
            std::thread::sleep(Duration::from_millis(if request.prompts[0] == "slow" { 50 } else { 5 }));
            if sink.wants_preview() {
                let step = step + 1;
                sink.progress(Progress { phase: Phase::Steps, picture, pictures, step, steps, fraction });
                sink.preview(Picture::black(width / 8, height / 8));
            }
        }
        sink.image(finished(request, picture, width, height))?;
    }
    Ok(())
}

/// An image whose colour tells its seed and number.
pub fn finished(request: &JobRequest, index: u32, width: u32, height: u32) -> Finished {
    let seed = *request.seed.get(index as usize).unwrap_or(&request.seed[0]);
    let pixels = (0..width * height).flat_map(|_| [seed as u8, index as u8, 7]).collect();
    Finished {
        index,
        picture: Picture::new(width, height, pixels).unwrap(),
        seed: Some(seed),
        recipe: format!(r#"{{"prompt":"{}"}}"#, request.prompts[0]),
    }
}

pub struct Kit {
    pub server: Server,
    pub seen: Arc<Mutex<Vec<Seen>>>,
    router: Router,
    folder: Arc<TempDir>,
}

pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub bytes: Vec<u8>,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.bytes)
            .unwrap_or_else(|e| panic!("{e} in {:?}", String::from_utf8_lossy(&self.bytes)))
    }

    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.bytes).unwrap()
    }

    #[track_caller]
    pub fn ok(self) -> Answer {
        assert!(self.status.is_success(), "{}: {}", self.status, String::from_utf8_lossy(&self.bytes));
        self
    }

    #[track_caller]
    pub fn refused(self, status: u16, code: &str) -> Answer {
        assert_eq!(self.status.as_u16(), status, "{}", String::from_utf8_lossy(&self.bytes));
        let error = &self.json()["error"];
        assert_eq!(error["code"], code, "{error}");
        assert!(error["message"].as_str().is_some_and(|m| !m.is_empty()) && error["type"].is_string());
        self
    }
}

pub fn config(folder: &Path) -> Config {
    Config { grace: Duration::from_millis(200), patience: Duration::from_millis(400), ..Config::new(folder) }
}

impl Kit {
    pub fn new() -> Kit {
        Kit::with(|_| {})
    }

    pub fn with(change: impl FnOnce(&mut Config)) -> Kit {
        Kit::open(Arc::new(TempDir::new().unwrap()), change, true)
    }

    /// `generating`, or with jobs that only wait.
    pub fn open(folder: Arc<TempDir>, change: impl FnOnce(&mut Config), generating: bool) -> Kit {
        let mut config = config(folder.path());
        change(&mut config);
        let server = Server::open(config, Box::new(Names)).unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        if generating {
            server.generate_with(Quick { seen: Arc::clone(&seen), room: 1 }).unwrap();
        }
        Kit { router: router(server.clone()), server, seen, folder }
    }

    /// Begins to generate what waits, so many images at once.
    pub fn generate(&self, room: u32) {
        let quick = Quick { seen: Arc::clone(&self.seen), room };
        self.server.generate_with(quick).unwrap();
    }

    /// The value of a metric without labels.
    pub async fn metric(&self, name: &str) -> u64 {
        let text = self.get("/metrics").await.ok().text().to_owned();
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value.unwrap_or_else(|| panic!("no {name} in {text}")).parse().unwrap()
    }

    pub fn folder(&self) -> Arc<TempDir> {
        Arc::clone(&self.folder)
    }

    pub async fn send(&self, request: Request<Body>) -> Answer {
        let response = self.router.clone().oneshot(request).await.unwrap();
        let (parts, body) = response.into_parts();
        let bytes = to_bytes(body, usize::MAX).await.unwrap().to_vec();
        Answer { status: parts.status, headers: parts.headers, bytes }
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.send(Request::get(path).header(header::HOST, "localhost").body(Body::empty()).unwrap()).await
    }

    pub async fn delete(&self, path: &str) -> Answer {
        self.send(Request::delete(path).header(header::HOST, "localhost").body(Body::empty()).unwrap()).await
    }

    pub async fn post(&self, path: &str, body: Value) -> Answer {
        self.send(post(path, body)).await
    }

    /// Asks for a job until it has ended.
    pub async fn wait(&self, id: &str) -> Value {
        for _ in 0..500 {
            let job = self.get(&format!("/v1/jobs/{id}")).await.ok().json();
            if !matches!(job["status"].as_str(), Some("queued" | "running")) {
                return job;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("the job {id} does not end");
    }

    pub async fn submit(&self, job: Value) -> String {
        self.post("/v1/jobs", job).await.ok().json()["id"].as_str().unwrap().to_owned()
    }
}

pub fn post(path: &str, body: Value) -> Request<Body> {
    let request = Request::post(path)
        .header(header::HOST, "localhost")
        .header(header::CONTENT_TYPE, "application/json");
    request.body(Body::from(body.to_string())).unwrap()
}

/// A plain image's file.
pub fn png(width: u32, height: u32) -> Vec<u8> {
    kiln_image::encode(&Picture::black(width, height), Format::Png, None).unwrap()
}

pub fn base64(bytes: &[u8]) -> String {
    use base64::Engine as _;
    base64::prelude::BASE64_STANDARD.encode(bytes)
}

pub fn decode(text: &Value) -> Picture {
    use base64::Engine as _;
    let bytes = base64::prelude::BASE64_STANDARD.decode(text.as_str().unwrap()).unwrap();
    kiln_image::from_bytes("answer", &bytes).unwrap()
}

/// Events of a stream: name and data.
pub fn events(text: &str) -> Vec<(String, Value)> {
    let event = |block: &str| {
        let field = |name: &str| block.lines().find_map(|line| line.strip_prefix(name)).map(str::to_owned);
        Some((field("event: ")?, serde_json::from_str(&field("data: ")?).unwrap()))
    };
    text.split("\n\n").filter_map(event).collect()
}
