//! A server in an empty folder, requests to it, and its painter.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{HeaderMap, Request, StatusCode, header};
use kiln_image::{Format, Picture};
use kiln_server::{
    Catalogue, Config, ModelInfo, Order, Painted, Painter, Part, Phase, Progress, Server, Trouble, Watch,
    Work, router,
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
}

/// What the painter was given.
#[derive(Clone, Debug)]
pub struct Seen {
    pub order: Order,
    pub references: Vec<PathBuf>,
    pub init: Option<PathBuf>,
    pub mask: Option<PathBuf>,
}

/// Paints plain colours. `slow`, `panic`, `fail` and `refuse` in the prompt say how it goes.
pub struct Quick {
    pub seen: Arc<Mutex<Vec<Seen>>>,
    /// Pictures that are painted at once.
    pub room: u32,
}

impl Painter for Quick {
    fn room(&mut self, _: &Order) -> u32 {
        self.room
    }

    fn paint(&mut self, parts: &mut [Part<'_>]) {
        let all = parts.iter().map(|part| part.work.order.pictures()).sum();
        for part in parts {
            part.watch.together(part.work.order.pictures(), all);
            let result = self.paint_one(&part.work, part.watch);
            part.watch.ended(result);
        }
    }
}

impl Quick {
    fn paint_one(&mut self, work: &Work<'_>, watch: &mut dyn Watch) -> Result<(), Trouble> {
        let order = work.order;
        self.seen.lock().unwrap().push(Seen {
            order: order.clone(),
            references: work.references.clone(),
            init: work.init.clone(),
            mask: work.mask.clone(),
        });
        match order.prompt.as_str() {
            "panic" => panic!("on purpose"),
            "fail" => return Err(Trouble::server("painting_failed", "the brush broke")),
            "refuse" => return Err(Trouble::order("invalid_request", "not that")),
            _ => {}
        }
        let (width, height) = (order.width.unwrap_or(64), order.height.unwrap_or(64));
        let (pictures, steps) = (order.pictures(), order.steps.unwrap_or(4));
        for picture in 0..pictures {
            for step in 0..steps {
                if watch.cancelled() {
                    return Err(Trouble::cancelled());
                }
                let fraction = (picture * steps + step) as f32 / (pictures * steps) as f32;
                watch.progress(Progress { phase: Phase::Steps, picture, pictures, step, steps, fraction });
                std::thread::sleep(Duration::from_millis(if order.prompt == "slow" { 50 } else { 5 }));
                if watch.wants_preview() {
                    watch.progress(Progress {
                        phase: Phase::Steps,
                        picture,
                        pictures,
                        step: step + 1,
                        steps,
                        fraction,
                    });
                    watch.preview(Picture::black(width / 8, height / 8));
                }
            }
            let colour = [order.seed.unwrap_or(0) as u8, picture as u8, 7];
            let pixels = (0..width * height).flat_map(|_| colour).collect();
            watch.painted(Painted {
                index: picture,
                picture: Picture::new(width, height, pixels).unwrap(),
                seed: order.seed,
                recipe: format!(r#"{{"prompt":"{}"}}"#, order.prompt),
            })?;
        }
        Ok(())
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

    /// `painting` or with nobody who paints.
    pub fn open(folder: Arc<TempDir>, change: impl FnOnce(&mut Config), painting: bool) -> Kit {
        let mut config = config(folder.path());
        change(&mut config);
        let server = Server::open(config, Box::new(Names)).unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        if painting {
            server.paint_with(Box::new(Quick { seen: Arc::clone(&seen), room: 1 })).unwrap();
        }
        Kit { router: router(server.clone()), server, seen, folder }
    }

    /// Begins to paint what waits, so many pictures at once.
    pub fn paint(&self, room: u32) {
        let quick = Quick { seen: Arc::clone(&self.seen), room };
        self.server.paint_with(Box::new(quick)).unwrap();
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

    pub async fn submit(&self, order: Value) -> String {
        self.post("/v1/jobs", order).await.ok().json()["id"].as_str().unwrap().to_owned()
    }
}

pub fn post(path: &str, body: Value) -> Request<Body> {
    let request = Request::post(path)
        .header(header::HOST, "localhost")
        .header(header::CONTENT_TYPE, "application/json");
    request.body(Body::from(body.to_string())).unwrap()
}

/// A plain picture's file.
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
