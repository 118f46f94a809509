//! One engine at a time, with the model and LoRAs that the next request needs.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use kiln_base::lock;
use kiln_model::Event;

use crate::engine::{Engine, Task};
use crate::error::{Error, Result};
use crate::model::Model;
use crate::panics::catch_panic;
use crate::pipeline::BatchLimit;
use crate::plan::Plan;
use crate::settings::Settings;
use crate::setup::Setup;
use crate::sink::Sink;

/// Keeps the last model loaded, and switches model and LoRAs as requests need them.
pub struct Session {
    settings: Settings,
    /// Maximum number of images per batch.
    max_batch: usize,
    /// Held while generating or loading.
    exclusive: Mutex<()>,
    loaded: RwLock<Option<Box<dyn Engine>>>,
}

impl Session {
    /// Creates a session with nothing loaded.
    pub fn new(settings: Settings, max_batch: usize) -> Session {
        Session { settings, max_batch, exclusive: Mutex::new(()), loaded: RwLock::new(None) }
    }

    fn read(&self) -> RwLockReadGuard<'_, Option<Box<dyn Engine>>> {
        self.loaded.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Option<Box<dyn Engine>>> {
        self.loaded.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Loads a model, unless it is loaded already.
    pub fn load(&self, model: &Arc<Model>, sink: &dyn Sink) -> Result<()> {
        let _exclusive = lock(&self.exclusive);
        self.load_model(model, sink)
    }

    fn load_model(&self, model: &Arc<Model>, sink: &dyn Sink) -> Result<()> {
        if self.read().as_ref().is_some_and(|engine| Arc::ptr_eq(engine.model(), model)) {
            return Ok(());
        }
        let mut loaded = self.write();
        // Dropped first, so that two models are never in memory together.
        *loaded = None;
        let setup = Setup::new(model, &self.settings, None)?;
        for note in setup.notes() {
            sink.event(&Event::Note(note.clone()));
        }
        *loaded = Some(setup.load(sink)?);
        Ok(())
    }

    /// Loads the model and the LoRAs of this plan.
    fn load_for(&self, plan: &Plan, sink: &dyn Sink) -> Result<()> {
        self.load_model(&plan.model, sink)?;
        let mut loaded = self.write();
        let Some(engine) = loaded.as_mut() else { return Ok(()) };
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
        match &*self.read() {
            Some(engine) if Arc::ptr_eq(engine.model(), &plan.model) => {
                engine.batch_capacity(plan, self.max_batch)
            }
            // Unknown until the model is loaded.
            _ => 1,
        }
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
            let Some(engine) = &*loaded else {
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
            let limit = BatchLimit { images: self.max_batch, rows: None, memory };
            // The engine reports a panic to its own tasks; the following ones still run.
            let run = catch_unwind(AssertUnwindSafe(|| engine.generate(&fitting, &limit)));
            panic = panic.or(run.err());
        }
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    /// Waits until every task so far has ended.
    pub fn finish(&self) {
        if let Some(engine) = &*self.read() {
            engine.finish();
        }
    }

    /// Unloads the model.
    pub fn reset(&self) {
        let _exclusive = lock(&self.exclusive);
        *self.write() = None;
    }
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
