//! Tiny models, requests for them, and a sink that records everything it receives.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kiln_base::lock;
use kiln_engine::{
    Device, Engine, Error, Event, GeneratedImage, ImageCollector, LocalFiles, Model, Plan, Precision,
    Request, Result, Settings, Setup, Sink, Task,
};
use kiln_golden::{Checkpoint, testdata};
use kiln_image::RgbImage;

/// Longer than any of these tests, even on a busy machine.
pub const TIMEOUT: Duration = Duration::from_secs(120);

pub fn settings() -> Settings {
    Settings { device: Device::Cpu, precision: Precision::F32, threads: Some(2), ..Settings::default() }
}

/// A tiny model of the golden set.
pub struct Tiny {
    _folder: Checkpoint,
    pub model: Arc<Model>,
}

pub fn tiny(name: &str) -> Tiny {
    let folder = Checkpoint::assemble(&testdata(), name).unwrap();
    let model = Arc::new(Model::open(folder.path()).unwrap());
    Tiny { _folder: folder, model }
}

impl Tiny {
    pub fn plan(&self, request: &Request) -> Arc<Plan> {
        Arc::new(Plan::new(&self.model, request, &LocalFiles).unwrap())
    }

    pub fn load(&self) -> Box<dyn Engine> {
        Setup::new(&self.model, &settings(), None).unwrap().load(&ImageCollector::default()).unwrap()
    }
}

pub fn request(prompt: &str, seed: u64) -> Request {
    Request {
        width: Some(64),
        height: Some(64),
        steps: Some(3),
        max_tokens: Some(32),
        seed: vec![seed],
        ..Request::new(prompt)
    }
}

/// A call of a sink.
#[derive(Debug)]
pub enum SinkCall {
    Event(Event),
    Preview(RgbImage),
    Image(Box<GeneratedImage>),
    Ended(Result<()>),
}

type Callback<T, R = ()> = Box<dyn Fn(&T) -> R + Send + Sync>;

/// A sink that records its calls, with a callback for each.
pub struct RecordingSink {
    pub calls: Mutex<Vec<SinkCall>>,
    pub called: Condvar,
    pub cancel: AtomicBool,
    pub wants_preview: Callback<(), bool>,
    pub on_cancelled: Callback<()>,
    pub on_event: Callback<Event>,
    pub on_preview: Callback<()>,
    pub on_image: Callback<GeneratedImage, Result<()>>,
    pub on_ended: Callback<Result<()>>,
}

impl Default for RecordingSink {
    fn default() -> RecordingSink {
        RecordingSink {
            calls: Mutex::default(),
            called: Condvar::new(),
            cancel: AtomicBool::new(false),
            wants_preview: Box::new(|()| false),
            on_cancelled: Box::new(|()| ()),
            on_event: Box::new(|_| ()),
            on_preview: Box::new(|()| ()),
            on_image: Box::new(|_| Ok(())),
            on_ended: Box::new(|_| ()),
        }
    }
}

impl RecordingSink {
    pub fn task(self: &Arc<Self>, plan: &Arc<Plan>) -> Task {
        Task { plan: Arc::clone(plan), sink: Arc::clone(self) as Arc<dyn Sink> }
    }

    fn record(&self, call: SinkCall) {
        lock(&self.calls).push(call);
        self.called.notify_all();
    }

    /// Counts the calls so far that match.
    pub fn count(&self, matches: impl Fn(&SinkCall) -> bool) -> usize {
        lock(&self.calls).iter().filter(|call| matches(call)).count()
    }

    /// Waits for this many matching calls. Returns false after a timeout.
    pub fn wait_for(&self, count: usize, matches: impl Fn(&SinkCall) -> bool) -> bool {
        let deadline = Instant::now() + TIMEOUT;
        let mut calls = lock(&self.calls);
        while calls.iter().filter(|call| matches(call)).count() < count {
            let Some(left) = deadline.checked_duration_since(Instant::now()) else { return false };
            calls = self.called.wait_timeout(calls, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Returns the images and the result. The task must have ended once, after everything else.
    #[track_caller]
    pub fn finished(&self) -> (Vec<GeneratedImage>, Result<()>) {
        let calls = std::mem::take(&mut *lock(&self.calls));
        let ends = calls.iter().filter(|call| is_end(call)).count();
        assert_eq!(ends, 1, "ended {ends} times: {calls:?}");
        assert!(calls.last().is_some_and(is_end), "the end is not the last call: {calls:?}");
        let (mut images, mut end) = (Vec::new(), Ok(()));
        for call in calls {
            match call {
                SinkCall::Image(image) => images.push(*image),
                SinkCall::Ended(result) => end = result,
                SinkCall::Event(_) | SinkCall::Preview(_) => {}
            }
        }
        (images, end)
    }

    /// Returns the images of a task that succeeded.
    #[track_caller]
    pub fn images(&self) -> Vec<GeneratedImage> {
        let (images, end) = self.finished();
        end.unwrap();
        images
    }

    /// Returns the error of a task that failed, and the number of images before it.
    #[track_caller]
    pub fn error(&self) -> (Error, usize) {
        let (images, end) = self.finished();
        (end.unwrap_err(), images.len())
    }
}

impl Sink for RecordingSink {
    fn cancelled(&self) -> bool {
        (self.on_cancelled)(&());
        self.cancel.load(SeqCst)
    }

    fn event(&self, event: &Event) {
        self.record(SinkCall::Event(event.clone()));
        (self.on_event)(event);
    }

    fn wants_preview(&self) -> bool {
        (self.wants_preview)(&())
    }

    fn preview(&self, image: RgbImage) {
        self.record(SinkCall::Preview(image));
        (self.on_preview)(&());
    }

    fn image(&self, image: GeneratedImage) -> Result<()> {
        (self.on_image)(&image)?;
        self.record(SinkCall::Image(Box::new(image)));
        Ok(())
    }

    fn ended(&self, result: Result<()>) {
        (self.on_ended)(&result);
        self.record(SinkCall::Ended(result));
    }
}

pub fn is_image(call: &SinkCall) -> bool {
    matches!(call, SinkCall::Image(_))
}

pub fn is_end(call: &SinkCall) -> bool {
    matches!(call, SinkCall::Ended(_))
}

/// A gate that opens once; waiting for it times out.
#[derive(Default)]
pub struct Gate {
    open: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    pub fn open(&self) {
        *lock(&self.open) = true;
        self.opened.notify_all();
    }

    pub fn wait(&self) {
        let open = lock(&self.open);
        let _ = self.opened.wait_timeout_while(open, TIMEOUT, |open| !*open);
    }
}
