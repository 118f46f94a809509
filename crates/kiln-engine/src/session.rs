//! One engine at a time, for whichever model and LoRAs the next request needs.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use kiln_base::lock;
use kiln_model::Event;

use crate::engine::{Engine, Task};
use crate::error::{Error, Result};
use crate::model::Model;
use crate::panics::caught;
use crate::pipeline::BatchLimit;
use crate::plan::Plan;
use crate::settings::Settings;
use crate::setup::Setup;
use crate::sink::Sink;

/// Keeps the last model loaded, and changes model and LoRAs as requests ask for them.
pub struct Session {
    settings: Settings,
    /// Images that are made at once, at most.
    max_batch: usize,
    /// Held by whoever uses what is loaded, or loads something else.
    turn: Mutex<()>,
    loaded: RwLock<Option<Box<dyn Engine>>>,
}

impl Session {
    /// With nothing loaded.
    pub fn new(settings: Settings, max_batch: usize) -> Session {
        Session { settings, max_batch, turn: Mutex::new(()), loaded: RwLock::new(None) }
    }

    fn turn(&self) -> MutexGuard<'_, ()> {
        lock(&self.turn)
    }

    fn read(&self) -> RwLockReadGuard<'_, Option<Box<dyn Engine>>> {
        self.loaded.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Option<Box<dyn Engine>>> {
        self.loaded.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Loads a model, unless it is the one that is loaded.
    pub fn load(&self, model: &Arc<Model>, sink: &dyn Sink) -> Result<()> {
        let _turn = self.turn();
        self.load_model(model, sink)
    }

    fn load_model(&self, model: &Arc<Model>, sink: &dyn Sink) -> Result<()> {
        if self.read().as_ref().is_some_and(|engine| Arc::ptr_eq(engine.model(), model)) {
            return Ok(());
        }
        let mut loaded = self.write();
        // First, so that two models are never in memory.
        *loaded = None;
        let setup = Setup::new(model, &self.settings, None)?;
        for note in setup.notes() {
            sink.event(&Event::Note(note.clone()));
        }
        *loaded = Some(setup.load(sink)?);
        Ok(())
    }

    /// Loads what this plan needs.
    fn load_for(&self, plan: &Plan, sink: &dyn Sink) -> Result<()> {
        self.load_model(&plan.model, sink)?;
        let mut loaded = self.write();
        let Some(engine) = loaded.as_mut() else { return Ok(()) };
        for report in engine.set_loras(&plan.loras, plan.lora_partial)?.into_iter().flatten() {
            sink.event(&Event::Lora { report: report.to_string() });
        }
        Ok(())
    }

    /// Loads what these tasks need, which is the same for all. Ends those that don't go on; the others come back.
    fn load_for_any<'a>(&self, mut tasks: &'a [Task]) -> Option<&'a [Task]> {
        while let [first, others @ ..] = tasks {
            match caught(|| self.load_for(&first.plan, &*first.sink)) {
                Ok(()) => return Some(tasks),
                // The first one's own wish or fault: the others may still have the model.
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

    /// How many images like this plan's are made at once.
    pub fn room(&self, plan: &Plan) -> usize {
        match &*self.read() {
            Some(engine) if Arc::ptr_eq(engine.model(), &plan.model) => engine.room(plan, self.max_batch),
            // It has to be loaded first: whatever comes then may come together.
            _ => 1,
        }
    }

    /// Makes the images of these plans; every task hears how it ended. Those that need the same model and LoRAs are made
    /// together. Returns when the work of all is on the device. Calls from several threads take turns.
    pub fn generate(&self, tasks: &[Task]) {
        let _turn = self.turn();
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
            // Its own tasks hear of a panic from the engine; those that follow have nothing to do with it.
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

    /// Drops the loaded model.
    pub fn reset(&self) {
        let _turn = self.turn();
        *self.write() = None;
    }
}

/// Ends tasks that share a failure: the first with the error itself, the others with its words.
fn end_all(tasks: &[Task], error: Error) {
    let words = error.to_string();
    let mut error = Some(error);
    for task in tasks {
        end(task, error.take().unwrap_or_else(|| Error::Load(words.clone())));
    }
}

/// Ends a task. A sink that panics at that is not heard: the others have to hear of theirs.
fn end(task: &Task, error: Error) {
    let _ = caught(|| {
        task.sink.ended(Err(error));
        Ok(())
    });
}
