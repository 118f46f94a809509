//! An engine on this machine, over any backend.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, OnceLock};

use kiln_base::lock;
use kiln_model::{Autoencoder, Denoised, Event, Observer};
use kiln_ops::Backend;
use kiln_tensor::DType;
use kiln_weights::LoraReport;

use crate::engine::{About, Counters, Engine, Task};
use crate::error::{Error, Result};
use crate::finisher::Finisher;
use crate::model::{Model, VaeFile};
use crate::panics::caught;
use crate::pipeline::{BatchLimit, Generated, LoadOptions, Member, Pipeline, Unfinished};
use crate::plan::{Plan, PlannedLora};
use crate::preview::Previews;
use crate::recipe::Recipe;
use crate::sink::{Image, Sink};

/// What an engine asks of its device beyond the operations.
pub(crate) struct DeviceWatch<B> {
    /// Bytes that activations may take now.
    pub free_memory: fn(&B) -> Option<u64>,
    /// What was counted.
    pub counters: fn(&B) -> Counters,
    /// Gives memory that nothing needs back.
    pub release_memory: fn(&B),
}

/// A pipeline, and the thread that hands on what it makes.
pub(crate) struct LocalEngine<B: Backend> {
    /// Shared with work that is under way, and with nothing else.
    pipeline: Arc<Pipeline<B>>,
    about: About,
    watch: DeviceWatch<B>,
    preview_vae: Option<Arc<VaeFile>>,
    previews: Arc<OnceLock<Previews<B>>>,
    finisher: Finisher,
}

impl<B: Backend + 'static> LocalEngine<B> {
    pub fn load(
        backend: B,
        watch: DeviceWatch<B>,
        model: &Arc<Model>,
        options: &LoadOptions,
        about: About,
        preview_vae: Option<Arc<VaeFile>>,
        sink: &dyn Sink,
    ) -> Result<Self> {
        let finisher =
            Finisher::start().map_err(|error| Error::Panicked(format!("can't start a thread: {error}")))?;
        let pipeline = Arc::new(Pipeline::load(backend, model, options, &mut Loading(sink))?);
        let previews = Arc::new(OnceLock::new());
        Ok(LocalEngine { pipeline, about, watch, preview_vae, previews, finisher })
    }

    /// How previews are made, from the first time that somebody looks.
    fn previews(&self) -> Option<&Previews<B>> {
        if let Some(previews) = self.previews.get() {
            return Some(previews);
        }
        let (b, dtype) = (self.pipeline.backend(), self.pipeline.options().dtype);
        let made = match &self.preview_vae {
            Some(file) => Autoencoder::load(b, &file.weights, file.config.as_ref(), dtype)
                .map(|vae| Previews::decoded(Arc::new(vae)))
                .map_err(Error::from),
            None => Previews::projected(&self.pipeline),
        };
        // An image without previews is better than none.
        let made = made.ok()?;
        Some(self.previews.get_or_init(|| made))
    }
}

impl<B: Backend + 'static> Engine for LocalEngine<B> {
    fn about(&self) -> &About {
        &self.about
    }

    fn model(&self) -> &Arc<Model> {
        self.pipeline.model()
    }

    fn dtype(&self) -> DType {
        self.pipeline.options().dtype
    }

    fn set_loras(&mut self, loras: &[PlannedLora], partial: bool) -> Result<Option<Vec<LoraReport>>> {
        if self.pipeline.loras() == (loras, partial) {
            return Ok(None);
        }
        self.finisher.wait();
        let busy = || Error::Panicked("the model is in use".into());
        Arc::get_mut(&mut self.pipeline).ok_or_else(busy)?.set_loras(loras, partial).map(Some)
    }

    fn free_memory(&self) -> Option<u64> {
        (self.watch.free_memory)(self.pipeline.backend())
    }

    fn room(&self, plan: &Plan, images: usize) -> usize {
        let limit = BatchLimit { images, rows: None, memory: self.free_memory() };
        self.pipeline.room(plan.rows(), &limit)
    }

    fn prepare(&self, plan: &Plan, sink: &dyn Sink) -> Result<()> {
        self.pipeline.prepare(plan, &mut Loading(sink))
    }

    fn generate(&self, tasks: &[Task], limit: &BatchLimit) {
        let runs: Vec<Arc<Run>> = tasks.iter().map(|task| Arc::new(Run::new(task, &self.about))).collect();
        let mut follows: Vec<_> = runs.iter().map(|run| Follow { engine: self, run, shown: None }).collect();
        let mut takers: Vec<_> = runs.iter().map(|run| |image| self.hand_on(run, image)).collect();
        let mut members: Vec<Member<'_, B>> = runs
            .iter()
            .zip(&mut follows)
            .zip(&mut takers)
            .map(|((run, observer), done)| Member { plan: &run.task.plan, observer, done })
            .collect();
        self.pipeline.run(&mut members, limit, &mut |member, result| {
            let run = Arc::clone(&runs[member]);
            self.finisher.push(move || run.end(result));
        });
    }

    fn finish(&self) {
        self.finisher.wait();
    }

    fn counters(&self) -> Counters {
        (self.watch.counters)(self.pipeline.backend())
    }
}

impl<B: Backend + 'static> LocalEngine<B> {
    /// Has an image finished and taken to its sink on the other thread.
    fn hand_on(&self, run: &Arc<Run>, image: Unfinished<B>) -> Result<()> {
        let (run, pipeline) = (Arc::clone(run), Arc::clone(&self.pipeline));
        let previews = Arc::clone(&self.previews);
        self.finisher.push(move || {
            if run.has_failed() {
                return;
            }
            run.attempt(|| {
                let plan = &run.task.plan;
                let done = image.finish(pipeline.backend(), plan)?;
                let previews = previews.get().filter(|_| run.task.sink.wants_preview());
                if let Some(previews) = previews.filter(|_| plan.request.init.is_none()) {
                    previews.learn(&done);
                }
                // Nothing of the pipeline is held while the image is saved.
                drop(pipeline);
                run.take(done)
            });
        });
        Ok(())
    }
}

/// A task under way. Its sink hears of its end once: when that is told, or at the latest when the last owner lets go of it.
struct Run {
    task: Task,
    about: About,
    /// Why no more images are wanted.
    error: Mutex<Option<Error>>,
    failed: AtomicBool,
    ended: AtomicBool,
}

impl Run {
    fn new(task: &Task, about: &About) -> Run {
        let (task, about) = (task.clone(), about.clone());
        Run {
            task,
            about,
            error: Mutex::new(None),
            failed: AtomicBool::new(false),
            ended: AtomicBool::new(false),
        }
    }

    fn take(&self, done: Generated) -> Result<()> {
        for note in done.notes {
            self.task.sink.event(&Event::Note(note));
        }
        let plan = &self.task.plan;
        let recipe = Recipe::new(plan, done.index, self.about.dtype, &self.about.backend)?;
        let seed = plan.image(done.index).seed;
        self.task.sink.image(Image {
            index: done.index,
            picture: done.picture,
            latents: done.latents,
            seed,
            recipe,
        })
    }

    /// Does something for the task; an error of it is the task's, and so is a panic.
    fn attempt<T>(&self, call: impl FnOnce() -> Result<T>) -> Option<T> {
        caught(call).map_err(|error| self.fail(error)).ok()
    }

    /// Asks the sink, or tells it something.
    fn sink<T>(&self, call: impl FnOnce(&dyn Sink) -> T) -> Option<T> {
        self.attempt(|| Ok(call(&*self.task.sink)))
    }

    fn has_failed(&self) -> bool {
        self.failed.load(SeqCst)
    }

    fn fail(&self, error: Error) {
        lock(&self.error).get_or_insert(error);
        self.failed.store(true, SeqCst);
    }

    fn end(&self, result: Result<()>) {
        if !self.ended.swap(true, SeqCst) {
            let failed = lock(&self.error).take();
            self.sink(|sink| sink.ended(failed.map_or(result, Err)));
        }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.end(Err(Error::Panicked("a thread of the engine panicked".into())));
    }
}

/// Reports what the pipeline does to a task's sink.
struct Follow<'a, B: Backend> {
    engine: &'a LocalEngine<B>,
    run: &'a Arc<Run>,
    /// The step whose preview was shown: of several images it is the first one's.
    shown: Option<usize>,
}

impl<B: Backend> Follow<'_, B> {
    fn go_on(&self) -> kiln_model::Result<()> {
        let goes_on = !self.run.has_failed() && self.run.sink(|sink| !sink.cancelled()) == Some(true);
        if goes_on { Ok(()) } else { Err(kiln_model::Error::Cancelled) }
    }
}

impl<B: Backend + 'static> Observer<B> for Follow<'_, B> {
    fn event(&mut self, event: Event) -> kiln_model::Result<()> {
        if matches!(event, Event::StepStarted { step: 0, .. }) {
            self.shown = None;
        }
        self.run.sink(|sink| sink.event(&event));
        self.go_on()
    }

    fn denoised(&mut self, step: &Denoised<'_, B>) -> kiln_model::Result<()> {
        // After the last step the image itself follows.
        let wanted = || self.run.sink(|sink| sink.wants_preview()) == Some(true);
        let due = step.sigma > 0.0 && self.shown != Some(step.step) && wanted();
        if due && let Some(previews) = self.engine.previews() {
            self.shown = Some(step.step);
            let grid = self.run.task.plan.grid();
            if let Ok(preview) = previews.show(self.engine.pipeline.backend(), step, grid) {
                let run = Arc::clone(self.run);
                self.engine.finisher.push(move || {
                    if let Ok(Some(picture)) = preview() {
                        run.sink(|sink| sink.preview(picture));
                    }
                });
            }
        }
        self.go_on()
    }

    fn see(&mut self, _: &str, _: &B::Tensor) -> kiln_model::Result<()> {
        self.go_on()
    }

    // Previews are made of what comes out of a step.
    fn looks_inside(&self) -> bool {
        false
    }
}

/// Reports what is loaded.
struct Loading<'a>(&'a dyn Sink);

impl<B: Backend> Observer<B> for Loading<'_> {
    fn event(&mut self, event: Event) -> kiln_model::Result<()> {
        self.0.event(&event);
        if self.0.cancelled() { Err(kiln_model::Error::Cancelled) } else { Ok(()) }
    }

    fn looks_inside(&self) -> bool {
        false
    }
}
