//! One engine at a time, for whichever model and LoRAs the next request needs.

use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use kiln_model::Event;

use crate::engine::{Engine, Task};
use crate::error::{Error, Result};
use crate::model::Model;
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
    loaded: RwLock<Option<Box<dyn Engine>>>,
}

impl Session {
    /// With nothing loaded.
    pub fn new(settings: Settings, max_batch: usize) -> Session {
        Session { settings, max_batch, loaded: RwLock::new(None) }
    }

    fn read(&self) -> RwLockReadGuard<'_, Option<Box<dyn Engine>>> {
        self.loaded.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Option<Box<dyn Engine>>> {
        self.loaded.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Loads a model, unless it is the one that is loaded.
    pub fn load(&self, model: &Arc<Model>, sink: &dyn Sink) -> Result<()> {
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
        self.load(&plan.model, sink)?;
        let mut loaded = self.write();
        let Some(engine) = loaded.as_mut() else { return Ok(()) };
        for report in engine.set_loras(&plan.loras, plan.lora_partial)?.into_iter().flatten() {
            sink.event(&Event::Lora { report: report.to_string() });
        }
        Ok(())
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
    /// together. Returns when the work of all is on the device.
    pub fn generate(&self, tasks: &[Task]) {
        let same = |a: &Task, b: &Task| {
            let needs = |task: &Task| (task.plan.loras.clone(), task.plan.lora_partial);
            Arc::ptr_eq(&a.plan.model, &b.plan.model) && needs(a) == needs(b)
        };
        for tasks in tasks.chunk_by(same) {
            let Some(first) = tasks.first() else { continue };
            if let Err(error) = self.load_for(&first.plan, &*first.sink) {
                end_all(tasks, error);
                continue;
            }
            let loaded = self.read();
            let Some(engine) = &*loaded else { continue };
            let memory = engine.free_memory();
            let mut fitting = Vec::with_capacity(tasks.len());
            for task in tasks {
                match task.plan.check_memory(engine.dtype(), memory) {
                    Ok(()) => fitting.push(task.clone()),
                    Err(error) => task.sink.ended(Err(error)),
                }
            }
            engine.generate(&fitting, &BatchLimit { images: self.max_batch, rows: None, memory });
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
        *self.write() = None;
    }
}

/// Ends tasks that share a failure: the first with the error itself, the others with its words.
fn end_all(tasks: &[Task], error: Error) {
    let (cancelled, words) = (error.is_cancelled(), error.to_string());
    let mut error = Some(error);
    for task in tasks {
        let again = || if cancelled { Error::CANCELLED } else { Error::Load(words.clone()) };
        task.sink.ended(Err(error.take().unwrap_or_else(again)));
    }
}
