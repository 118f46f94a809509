//! Loaded models: the one that the next request needs, and others as far as memory allows.

mod sharing;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

use kiln_base::lock;
use kiln_nn::Event;

use crate::device_lease::DeviceLease;
use crate::engine::{Engine, EngineInfo, Task};
use crate::error::{Error, ErrorKind, Explain, Result};
use crate::model::Model;
use crate::panics::catch_panic;
use crate::pipeline::BatchLimit;
use crate::plan::Plan;
use crate::settings::Settings;
use crate::setup::Setup;
use crate::sink::Sink;

/// A model that a session has loaded.
#[derive(Clone, Debug)]
pub struct LoadedEngine {
    /// Its device and precision.
    pub info: EngineInfo,
    /// The model.
    pub model: Arc<Model>,
    /// How long loading took.
    pub load_time: Duration,
    /// Bytes that its device has left, if known.
    pub free_memory: Option<u64>,
}

/// An engine, and how long loading it took.
struct Entry {
    engine: Box<dyn Engine>,
    load_time: Duration,
}

/// Keeps models loaded, and switches model and LoRAs as requests need them.
pub struct Session {
    settings: Settings,
    /// Maximum number of images per batch.
    max_batch: usize,
    /// Maximum bytes of the files of all loaded models; one model is loaded even beyond it.
    model_memory: u64,
    /// Held while generating or loading.
    exclusive: Mutex<()>,
    /// Least recently used first: the last one is the current one.
    loaded: RwLock<Vec<Entry>>,
    /// What a training on the same device holds.
    lease: Mutex<Option<DeviceLease>>,
}

impl Session {
    /// Creates a session with nothing loaded. It keeps one model at a time.
    pub fn new(settings: Settings, max_batch: usize) -> Session {
        Session {
            settings,
            max_batch,
            model_memory: 0,
            exclusive: Mutex::new(()),
            loaded: RwLock::default(),
            lease: Mutex::default(),
        }
    }

    /// Keeps several models loaded as long as their files have at most this many bytes together; the least recently used
    /// one is dropped first.
    pub fn with_model_memory(self, bytes: u64) -> Session {
        Session { model_memory: bytes, ..self }
    }

    /// The loaded models, least recently used first.
    pub fn loaded(&self) -> Vec<LoadedEngine> {
        let describe = |Entry { engine, load_time }: &Entry| LoadedEngine {
            info: engine.info().clone(),
            model: Arc::clone(engine.model()),
            load_time: *load_time,
            free_memory: engine.free_memory(),
        };
        self.read().iter().map(describe).collect()
    }

    fn read(&self) -> RwLockReadGuard<'_, Vec<Entry>> {
        self.loaded.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Vec<Entry>> {
        self.loaded.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Loads a model, unless it is loaded already.
    pub fn load(&self, model: &Arc<Model>, sink: &dyn Sink) -> Result<()> {
        let _exclusive = lock(&self.exclusive);
        self.load_model(model, sink)
    }

    /// Makes a model the current one; loads it if it isn't loaded.
    fn load_model(&self, model: &Arc<Model>, sink: &dyn Sink) -> Result<()> {
        let is_current = |entry: &Entry| Arc::ptr_eq(entry.engine.model(), model);
        if self.read().last().is_some_and(is_current) {
            return Ok(());
        }
        {
            let mut loaded = self.write();
            if let Some(index) = loaded.iter().position(is_current) {
                let entry = loaded.remove(index);
                loaded.push(entry);
                return Ok(());
            }
            // Dropped first, so that the limit holds while the new model is loaded.
            while !loaded.is_empty() && total_bytes(&loaded) + model.file_bytes() > self.model_memory {
                loaded.remove(0);
            }
        }
        let entry = match self.load_entry(model, sink) {
            // Other models take the memory after all; a GPU without room for one more context can't be used, either.
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::TooLarge | ErrorKind::OutOfMemory | ErrorKind::Device
                ) && !self.read().is_empty() =>
            {
                self.write().clear();
                self.load_entry(model, sink)?
            }
            entry => entry?,
        };
        self.write().push(entry);
        Ok(())
    }

    fn load_entry(&self, model: &Arc<Model>, sink: &dyn Sink) -> Result<Entry> {
        let started = Instant::now();
        let lease = lock(&self.lease).clone();
        let setup = match lease {
            Some(lease) => Setup::shared(model, &self.settings, &lease.device)?,
            None => Setup::new(model, &self.settings, None)?,
        };
        for note in setup.notes() {
            sink.event(&Event::Note(note.clone()));
        }
        let engine = setup.load(sink)?;
        Ok(Entry { engine, load_time: started.elapsed() })
    }

    /// Loads the model and the LoRAs of this plan.
    fn load_for(&self, plan: &Plan, sink: &dyn Sink) -> Result<()> {
        self.load_model(&plan.model, sink)?;
        let mut loaded = self.write();
        let Some(Entry { engine, .. }) = loaded.last_mut() else { return Ok(()) };
        for report in engine.set_loras(&plan.loras, plan.lora_partial)?.into_iter().flatten() {
            sink.event(&Event::LoraApplied { report: report.to_string() });
        }
        Ok(())
    }

    /// Loads the model and LoRAs, which are the same for all tasks. Ends the tasks that fail; returns the others.
    fn load_for_any<'a>(&self, mut tasks: &'a [Task]) -> Option<&'a [Task]> {
        while let [first, others @ ..] = tasks {
            match catch_panic(|| self.load_for(&first.plan, &*first.sink)) {
                Ok(()) => return Some(tasks),
                // Only the first task was cancelled or panicked: load the model for the others.
                Err(error) if error.is_cancelled() || matches!(error, Error::Panicked(_)) => {
                    end(first, error);
                    tasks = others;
                }
                Err(error) => {
                    end_all(tasks, error);
                    return None;
                }
            }
        }
        None
    }

    /// Returns how many images of a plan like this one run in one batch.
    pub fn batch_capacity(&self, plan: &Plan) -> usize {
        let loaded = self.read();
        let entry = loaded.iter().find(|entry| Arc::ptr_eq(entry.engine.model(), &plan.model));
        // Unknown until the model is loaded.
        entry.map_or(1, |entry| entry.engine.batch_capacity(plan, self.max_batch))
    }

    /// Generates the images of these tasks; consecutive tasks with the same model and LoRAs are batched. Returns when all
    /// work is queued on the device. Calls from several threads run one after the other.
    pub fn generate(&self, tasks: &[Task]) {
        let _exclusive = lock(&self.exclusive);
        let same = |a: &Task, b: &Task| {
            let needs = |task: &Task| (task.plan.loras.clone(), task.plan.lora_partial);
            Arc::ptr_eq(&a.plan.model, &b.plan.model) && needs(a) == needs(b)
        };
        let mut panic = None;
        for tasks in tasks.chunk_by(same) {
            let Some(tasks) = self.load_for_any(tasks) else { continue };
            let loaded = self.read();
            let Some(Entry { engine, .. }) = loaded.last() else {
                end_all(tasks, Error::Load("the model is not loaded".into()));
                continue;
            };
            let memory = engine.free_memory();
            let mut fitting = Vec::with_capacity(tasks.len());
            for task in tasks {
                match task.plan.check_memory(engine.dtype(), memory) {
                    Ok(()) => fitting.push(task.clone()),
                    Err(error) => end(task, error),
                }
            }
            // Latents of a step are passed on for all images of a request at once.
            let limit = if fitting.iter().any(|task| task.sink.wants_step_end()) {
                BatchLimit { images: usize::MAX, rows: Some(usize::MAX), memory }
            } else {
                BatchLimit { images: self.max_batch, rows: None, memory }
            };
            // The engine reports a panic to its own tasks; the following ones still run.
            let run = catch_unwind(AssertUnwindSafe(|| engine.generate(&fitting, &limit)));
            panic = panic.or(run.err());
        }
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    /// Calls a function with the engine of a model, which is loaded first if it isn't. Waits for other calls to end.
    pub fn with_engine<T>(
        &self,
        model: &Arc<Model>,
        sink: &dyn Sink,
        call: impl FnOnce(&dyn Engine) -> Result<T>,
    ) -> Result<T> {
        let _exclusive = lock(&self.exclusive);
        self.load_model(model, sink)?;
        match self.read().last() {
            Some(Entry { engine, .. }) => catch_panic(|| call(&**engine)),
            None => Err(Error::Load("the model is not loaded".into())),
        }
    }

    /// Waits until every task so far has ended.
    pub fn finish(&self) {
        self.read().iter().for_each(|entry| entry.engine.finish());
    }

    /// Unloads all models.
    pub fn reset(&self) {
        let _exclusive = lock(&self.exclusive);
        self.write().clear();
    }
}

fn total_bytes(loaded: &[Entry]) -> u64 {
    loaded.iter().map(|entry| entry.engine.model().file_bytes()).sum()
}

/// Ends tasks that share a failure: the first with the error itself, the others with its message.
fn end_all(tasks: &[Task], error: Error) {
    let message = error.to_string();
    let mut error = Some(error);
    for task in tasks {
        end(task, error.take().unwrap_or_else(|| Error::Load(message.clone())));
    }
}

/// Ends a task. Ignores a panic of its sink, so that the other tasks are ended, too.
fn end(task: &Task, error: Error) {
    let _ = catch_panic(|| {
        task.sink.ended(Err(error));
        Ok(())
    });
}
