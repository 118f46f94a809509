//! Tiny models, requests for them, and a sink that remembers what it hears.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kiln_base::{lock, wait};
use kiln_engine::{
    Collect, Device, Engine, Error, Event, Image, LocalFiles, Model, Plan, Precision, Request, Result,
    Settings, Setup, Sink, Task,
};
use kiln_golden::{Checkpoint, in_tree};
use kiln_image::Picture;

/// Longer than anything here takes, even on a busy machine.
pub const LONG: Duration = Duration::from_secs(120);

pub fn settings() -> Settings {
    Settings { device: Device::Cpu, precision: Precision::F32, threads: Some(2), ..Settings::default() }
}

/// A tiny model of the golden set.
pub struct Tiny {
    _folder: Checkpoint,
    pub model: Arc<Model>,
}

pub fn tiny(name: &str) -> Tiny {
    let folder = Checkpoint::assemble(&in_tree(), name).unwrap();
    let model = Arc::new(Model::open(folder.path()).unwrap());
    Tiny { _folder: folder, model }
}

impl Tiny {
    pub fn plan(&self, request: &Request) -> Arc<Plan> {
        Arc::new(Plan::new(&self.model, request, &LocalFiles).unwrap())
    }

    pub fn load(&self) -> Box<dyn Engine> {
        Setup::new(&self.model, &settings(), None).unwrap().load(&Collect::default()).unwrap()
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

/// What a sink heard.
#[derive(Debug)]
pub enum Heard {
    Event(Event),
    Preview(Picture),
    Image(Box<Image>),
    Ended(Result<()>),
}

type On<T, R = ()> = Box<dyn Fn(&T) -> R + Send + Sync>;

/// Remembers what it hears, and does what a test wants it to do.
pub struct Listener {
    pub heard: Mutex<Vec<Heard>>,
    pub more: Condvar,
    pub stop: AtomicBool,
    pub wants_preview: On<(), bool>,
    pub on_cancelled: On<()>,
    pub on_event: On<Event>,
    pub on_preview: On<()>,
    pub on_image: On<Image, Result<()>>,
    pub on_ended: On<Result<()>>,
}

impl Default for Listener {
    fn default() -> Listener {
        Listener {
            heard: Mutex::default(),
            more: Condvar::new(),
            stop: AtomicBool::new(false),
            wants_preview: Box::new(|()| false),
            on_cancelled: Box::new(|()| ()),
            on_event: Box::new(|_| ()),
            on_preview: Box::new(|()| ()),
            on_image: Box::new(|_| Ok(())),
            on_ended: Box::new(|_| ()),
        }
    }
}

impl Listener {
    pub fn task(self: &Arc<Self>, plan: &Arc<Plan>) -> Task {
        Task { plan: Arc::clone(plan), sink: Arc::clone(self) as Arc<dyn Sink> }
    }

    fn hear(&self, heard: Heard) {
        lock(&self.heard).push(heard);
        self.more.notify_all();
    }

    /// How many of the things heard so far are such.
    pub fn count(&self, such: impl Fn(&Heard) -> bool) -> usize {
        let heard = lock(&self.heard);
        heard.iter().filter(|heard| such(heard)).count()
    }

    /// Waits until this many such things were heard; whether they were.
    pub fn wait_for(&self, count: usize, such: impl Fn(&Heard) -> bool) -> bool {
        let until = Instant::now() + LONG;
        let mut heard = lock(&self.heard);
        while heard.iter().filter(|heard| such(heard)).count() < count {
            let Some(left) = until.checked_duration_since(Instant::now()) else { return false };
            heard = self.more.wait_timeout(heard, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// The images, and how it ended: which it must have done once, after everything else.
    #[track_caller]
    pub fn finished(&self) -> (Vec<Image>, Result<()>) {
        let heard = std::mem::take(&mut *lock(&self.heard));
        let ends = heard.iter().filter(|heard| matches!(heard, Heard::Ended(_))).count();
        assert_eq!(ends, 1, "ended {ends} times: {heard:?}");
        assert!(matches!(heard.last(), Some(Heard::Ended(_))), "the end is not the last: {heard:?}");
        let (mut images, mut end) = (Vec::new(), Ok(()));
        for heard in heard {
            match heard {
                Heard::Image(image) => images.push(*image),
                Heard::Ended(result) => end = result,
                Heard::Event(_) | Heard::Preview(_) => {}
            }
        }
        (images, end)
    }

    /// The images of a task that went well.
    #[track_caller]
    pub fn images(&self) -> Vec<Image> {
        let (images, end) = self.finished();
        end.unwrap();
        images
    }

    /// Why it ended, and how many images came before.
    #[track_caller]
    pub fn error(&self) -> (Error, usize) {
        let (images, end) = self.finished();
        (end.unwrap_err(), images.len())
    }
}

impl Sink for Listener {
    fn cancelled(&self) -> bool {
        (self.on_cancelled)(&());
        self.stop.load(SeqCst)
    }

    fn event(&self, event: &Event) {
        self.hear(Heard::Event(event.clone()));
        (self.on_event)(event);
    }

    fn wants_preview(&self) -> bool {
        (self.wants_preview)(&())
    }

    fn preview(&self, picture: Picture) {
        self.hear(Heard::Preview(picture));
        (self.on_preview)(&());
    }

    fn image(&self, image: Image) -> Result<()> {
        (self.on_image)(&image)?;
        self.hear(Heard::Image(Box::new(image)));
        Ok(())
    }

    fn ended(&self, result: Result<()>) {
        (self.on_ended)(&result);
        self.hear(Heard::Ended(result));
    }
}

pub fn is_image(heard: &Heard) -> bool {
    matches!(heard, Heard::Image(_))
}

pub fn is_end(heard: &Heard) -> bool {
    matches!(heard, Heard::Ended(_))
}

/// A door that opens once; nobody waits for it forever.
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
        let _ = self.opened.wait_timeout_while(open, LONG, |open| !*open);
    }
}
