//! A test server in an empty folder, helpers to send requests to it, and its generator.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{HeaderMap, Request, StatusCode, header};
use kiln_engine::{FileRef, Phase, Progress, Request as JobRequest, StepCounts};
use kiln_image::{Format, RgbImage};
use kiln_server::{
    Catalogue, Config, DownloadLicence, DownloadableModel, ErrorCode, FinishedImage, Generator, InputImage,
    JobError, JobInputs, JobSink, LoraInfo, ModelInfo, Server, StoreError, Task, router,
};
use serde_json::Value;
use tempfile::TempDir;
use tower::ServiceExt;

/// Whether the rewriting of the prompt `endless` was stopped.
pub static REWRITING_STOPPED: AtomicBool = AtomicBool::new(false);

pub struct TestCatalogue;

impl Catalogue for TestCatalogue {
    fn models(&self) -> Vec<ModelInfo> {
        let model = |name: &str, default| ModelInfo {
            name: name.into(),
            default,
            size: 64,
            unit: 16,
            sides: None,
            steps: 4,
            guidance: None,
            negative: false,
            rewrites: default,
        };
        vec![model("small", true), model("large", false)]
    }

    fn loras(&self) -> Vec<String> {
        vec!["ink".into()]
    }

    fn vaes(&self) -> Vec<String> {
        vec!["taef2".into()]
    }

    fn lora_details(&self) -> Vec<LoraInfo> {
        vec![LoraInfo { name: "ink".into(), triggers: vec!["inkwash".into()], has_preview: true }]
    }

    fn lora_preview(&self, name: &str) -> Option<Vec<u8>> {
        (name == "ink").then(|| include_bytes!("../../page/icon-512.png").to_vec())
    }

    fn downloadable(&self) -> Vec<DownloadableModel> {
        let licence = DownloadLicence { name: "Test License".into(), url: "https://example.org/l".into() };
        let model = |name: &str| DownloadableModel {
            name: name.into(),
            source: "hub".into(),
            installed: false,
            licence: (name == "licensed").then(|| licence.clone()),
        };
        ["tiny", "endless", "broken", "licensed"].map(model).to_vec()
    }

    fn download(&self, name: &str, on_progress: &mut dyn FnMut(u64, u64) -> bool) -> Result<(), JobError> {
        match name {
            "endless" => {
                while on_progress(1, 100) {
                    std::thread::sleep(Duration::from_millis(2));
                }
                Err(JobError::cancelled())
            }
            "broken" => Err(JobError::new(ErrorCode::DownloadFailed, "the hub is gone")),
            _ => {
                on_progress(100, 100);
                Ok(())
            }
        }
    }

    fn rewrite_prompt(
        &self,
        job: &JobInputs<'_>,
        temperature: f32,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<String, JobError> {
        let request = job.request();
        let widths = request.references.iter().map(|file| Ok(job.image(file)?.image.width().to_string()));
        let widths = widths.collect::<Result<Vec<_>, JobError>>()?.join(", ");
        match request.prompts[0].as_str() {
            "busy" => Err(JobError::new(ErrorCode::Busy, "another prompt is being rewritten")),
            "endless" => {
                while !cancelled() {
                    std::thread::sleep(Duration::from_millis(2));
                }
                REWRITING_STOPPED.store(true, SeqCst);
                Err(JobError::cancelled())
            }
            prompt => {
                Ok(format!("{prompt} in detail ({temperature}, seed {}, images [{widths}])", request.seed[0]))
            }
        }
    }
}

/// A job as the generator received it.
#[derive(Clone, Debug)]
pub struct ReceivedJob {
    pub request: JobRequest,
    pub references: Vec<InputImage>,
    pub init: Option<InputImage>,
    pub mask: Option<InputImage>,
}

impl ReceivedJob {
    pub fn prompt(&self) -> &str {
        &self.request.prompts[0]
    }
}

/// Generates images of one colour on the calling thread. The prompts `slow`, `panic`, `panic in plan`, `fail`, `note`,
/// `silent` and `refuse` select its behaviour.
pub struct TestGenerator {
    pub received: Arc<Mutex<Vec<ReceivedJob>>>,
    pub batch_capacity: u32,
}

impl Generator for TestGenerator {
    type Plan = Arc<ReceivedJob>;

    fn plan(&self, job: &JobInputs<'_>) -> Result<Arc<ReceivedJob>, JobError> {
        let request = job.request();
        assert_ne!(request.prompts[0], "panic in plan", "on purpose");
        let image = |file: &FileRef| job.image(file);
        Ok(Arc::new(ReceivedJob {
            request: request.clone(),
            references: request.references.iter().map(image).collect::<Result<_, _>>()?,
            init: request.init.as_ref().map(image).transpose()?,
            mask: request.mask.as_ref().map(image).transpose()?,
        }))
    }

    fn batch_capacity(&self, _: &Arc<ReceivedJob>) -> u32 {
        self.batch_capacity
    }

    fn generate(&self, tasks: Vec<Task<Arc<ReceivedJob>>>) {
        let images = |task: &Task<Arc<ReceivedJob>>| task.plan.request.image_count() as u32;
        let all = tasks.iter().map(images).sum();
        for task in tasks {
            task.sink.batch(images(&task), all);
            self.received.lock().unwrap().push(ReceivedJob::clone(&task.plan));
            let result = generate(&task.plan.request, &*task.sink);
            if task.plan.prompt() != "silent" {
                task.sink.ended(result);
            }
        }
    }

    fn finish(&self) {}
}

fn generate(request: &JobRequest, sink: &dyn JobSink) -> Result<(), JobError> {
    match request.prompts[0].as_str() {
        "panic" => panic!("on purpose"),
        "fail" => return Err(JobError::new(ErrorCode::GenerationFailed, "the GPU is on fire")),
        "note" => sink.note("adjusted"),
        "refuse" => return Err(JobError::new(ErrorCode::InvalidRequest, "not that")),
        _ => {}
    }
    let (width, height) = (request.width.unwrap_or(64), request.height.unwrap_or(64));
    let (images, steps) = (request.image_count() as u32, request.steps.unwrap_or(4));
    for image in 0..images {
        for step in 0..steps {
            if sink.cancelled() {
                return Err(JobError::cancelled());
            }
            let fraction = (image * steps + step) as f32 / (images * steps) as f32;
            let progress =
                Progress { phase: Phase::Steps, image, images, step, steps, fraction, ..Progress::default() };
            sink.progress(progress);
            std::thread::sleep(Duration::from_millis(if request.prompts[0] == "slow" { 50 } else { 5 }));
            if sink.wants_preview() {
                sink.progress(Progress { step: step + 1, ..progress });
                sink.preview(RgbImage::black(width / 8, height / 8));
            }
        }
        sink.image(finished(request, image, width, height))?;
    }
    Ok(())
}

/// An image whose colour encodes its seed and number.
pub fn finished(request: &JobRequest, index: u32, width: u32, height: u32) -> FinishedImage {
    let seed = request.seeds(request.image_count())[index as usize];
    let pixels = (0..width * height).flat_map(|_| [seed as u8, index as u8, 7]).collect();
    FinishedImage {
        steps: StepCounts { computed: 4, reused: 0 },
        index,
        image: RgbImage::new(width, height, pixels).unwrap(),
        seed: Some(seed),
        recipe: format!(r#"{{"prompt":"{}"}}"#, request.prompts[0]),
    }
}

pub struct TestServer {
    pub inner: Server,
    pub received: Arc<Mutex<Vec<ReceivedJob>>>,
    router: Router,
    folder: Arc<TempDir>,
    #[cfg(feature = "fleet")]
    workers: Mutex<Vec<crate::nats::TestWorker>>,
}

pub struct TestResponse {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub bytes: Vec<u8>,
}

impl TestResponse {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.bytes)
            .unwrap_or_else(|e| panic!("{e} in {:?}", String::from_utf8_lossy(&self.bytes)))
    }

    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.bytes).unwrap()
    }

    #[track_caller]
    pub fn ok(self) -> TestResponse {
        assert!(self.status.is_success(), "{}: {}", self.status, String::from_utf8_lossy(&self.bytes));
        self
    }

    #[track_caller]
    pub fn expect_error(self, status: u16, code: &str) -> TestResponse {
        assert_eq!(self.status.as_u16(), status, "{}", String::from_utf8_lossy(&self.bytes));
        let error = &self.json()["error"];
        assert_eq!(error["code"], code, "{error}");
        assert!(error["message"].as_str().is_some_and(|m| !m.is_empty()) && error["type"].is_string());
        self
    }
}

pub fn config(folder: &Path) -> Config {
    Config {
        grace: Duration::from_millis(200),
        io_timeout: Duration::from_millis(400),
        ..Config::new(folder)
    }
}

/// Opens a server, once the threads of an earlier one have left its folder.
fn open_released(config: &Config) -> Server {
    for _ in 0..4000 {
        match Server::open(config.clone(), Arc::new(TestCatalogue)) {
            Err(StoreError::InUse) => std::thread::sleep(Duration::from_millis(5)),
            opened => return opened.unwrap(),
        }
    }
    panic!("the earlier server was not closed");
}

impl TestServer {
    pub fn new() -> TestServer {
        TestServer::with(|_| {})
    }

    pub fn with(change: impl FnOnce(&mut Config)) -> TestServer {
        TestServer::open(Arc::new(TempDir::new().unwrap()), change, true)
    }

    /// Opens a server on this folder. If not `generating`, jobs stay queued.
    pub fn open(folder: Arc<TempDir>, change: impl FnOnce(&mut Config), generating: bool) -> TestServer {
        let mut config = config(folder.path());
        change(&mut config);
        #[cfg(feature = "fleet")]
        let mut workers = Vec::new();
        let server = match crate::fleet_url() {
            #[cfg(feature = "fleet")]
            Some(url) => {
                // Announces its models; it generates once it is told to.
                workers.push(crate::nats::TestWorker::open(&url, folder.path()));
                kiln_server::fleet::open_gateway(config, crate::nats::fleet(&url, folder.path())).unwrap()
            }
            _ => open_released(&config),
        };
        let server = TestServer {
            router: router(server.clone()),
            inner: server,
            received: Arc::default(),
            folder,
            #[cfg(feature = "fleet")]
            workers: Mutex::new(workers),
        };
        if generating {
            server.generate(1);
        }
        server
    }

    /// A server that is open already.
    pub fn of(server: Server) -> TestServer {
        TestServer {
            router: router(server.clone()),
            inner: server,
            received: Arc::default(),
            folder: Arc::new(TempDir::new().unwrap()),
            #[cfg(feature = "fleet")]
            workers: Mutex::default(),
        }
    }

    /// Waits until a job that another server accepted is known here.
    #[cfg(feature = "fleet")]
    pub async fn wait_for(&self, id: &str) {
        while !self.get(&format!("/v1/jobs/{id}")).await.status.is_success() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Starts to generate the queued jobs, in batches of up to `batch_capacity` images.
    pub fn generate(&self, batch_capacity: u32) {
        let generator = TestGenerator { received: Arc::clone(&self.received), batch_capacity };
        #[cfg(feature = "fleet")]
        if let Some(worker) = self.workers.lock().unwrap().last() {
            return worker.generate(generator);
        }
        self.inner.generate_with(generator).unwrap();
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

    /// The response to a request, whose body is not read.
    pub async fn respond(&self, request: Request<Body>) -> axum::response::Response {
        self.router.clone().oneshot(request).await.unwrap()
    }

    pub async fn send(&self, request: Request<Body>) -> TestResponse {
        let (parts, body) = self.respond(request).await.into_parts();
        let bytes = to_bytes(body, usize::MAX).await.unwrap().to_vec();
        TestResponse { status: parts.status, headers: parts.headers, bytes }
    }

    pub async fn get(&self, path: &str) -> TestResponse {
        self.send(Request::get(path).header(header::HOST, "localhost").body(Body::empty()).unwrap()).await
    }

    pub async fn delete(&self, path: &str) -> TestResponse {
        self.send(Request::delete(path).header(header::HOST, "localhost").body(Body::empty()).unwrap()).await
    }

    pub async fn post(&self, path: &str, body: Value) -> TestResponse {
        self.send(post(path, body)).await
    }

    /// Sends JSON with this method as the client with the API key `key-NAME`.
    pub async fn send_as(&self, name: &str, method: &str, path: &str, body: Value) -> TestResponse {
        let request = Request::builder().method(method).uri(path).header(header::HOST, "localhost");
        let request = request
            .header(header::AUTHORIZATION, format!("Bearer key-{name}"))
            .header(header::CONTENT_TYPE, "application/json");
        self.send(request.body(Body::from(body.to_string())).unwrap()).await
    }

    /// Polls a job until it has ended.
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

/// A PNG file of a black image.
pub fn png(width: u32, height: u32) -> Vec<u8> {
    kiln_image::encode(&RgbImage::black(width, height), Format::Png, None).unwrap()
}

pub fn base64(bytes: &[u8]) -> String {
    use base64::Engine as _;
    base64::prelude::BASE64_STANDARD.encode(bytes)
}

pub fn decode(text: &Value) -> RgbImage {
    use base64::Engine as _;
    let bytes = base64::prelude::BASE64_STANDARD.decode(text.as_str().unwrap()).unwrap();
    kiln_image::from_bytes("answer", &bytes).unwrap()
}

/// Parses a stream of server-sent events into names and data.
pub fn events(text: &str) -> Vec<(String, Value)> {
    let event = |block: &str| {
        let field = |name: &str| block.lines().find_map(|line| line.strip_prefix(name)).map(str::to_owned);
        Some((field("event: ")?, serde_json::from_str(&field("data: ")?).unwrap()))
    };
    text.split("\n\n").filter_map(event).collect()
}
