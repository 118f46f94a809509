//! An engine that runs on this machine, generic over the backend.
//!
//! The calling thread queues work on the device; an [`OutputThread`] waits for images and previews and passes them to the
//! sinks. Every task ends exactly once, even if its sink panics.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, OnceLock};

use kiln_base::lock;
use kiln_image::RgbImage;
use kiln_nn::{Autoencoder, Event, Observer, StepEnd, StepOutput, StepReply};
use kiln_ops::Backend;
use kiln_tensor::{DType, HostTensor};
use kiln_weights::LoraReport;

use crate::backend::DeviceHooks;
use crate::counters::Counters;
use crate::engine::{Engine, EngineInfo, Task};
use crate::error::{Error, Result};
use crate::model::{Model, VaeFile};
use crate::output_thread::OutputThread;
use crate::panics::catch_panic;
use crate::pipeline::{BatchLimit, BatchMember, LoadOptions, PendingOutput, Pipeline, PipelineOutput};
use crate::plan::{Plan, PlannedLora};
use crate::preview::{PreviewDecoder, shrink};
use crate::recipe::Recipe;
use crate::shared_device::SharedDevice;
use crate::sink::{GeneratedImage, Sink};

/// A pipeline, and the thread that delivers its images.
pub(crate) struct LocalEngine<B: Backend> {
    /// Shared only with queued work.
    pipeline: Arc<Pipeline<B>>,
    info: EngineInfo,
    hooks: DeviceHooks<B>,
    preview_vae: Option<Arc<VaeFile>>,
    preview_decoder: Arc<OnceLock<PreviewDecoder<B>>>,
    output: OutputThread,
}

impl<B: Backend + 'static> LocalEngine<B> {
    pub fn load(
        backend: B,
        hooks: DeviceHooks<B>,
        model: &Arc<Model>,
        options: &LoadOptions,
        info: EngineInfo,
        preview_vae: Option<Arc<VaeFile>>,
        sink: &dyn Sink,
    ) -> Result<Self> {
        let output = OutputThread::start()
            .map_err(|error| Error::Panicked(format!("can't start a thread: {error}")))?;
        let pipeline = Arc::new(Pipeline::load(backend, model, options, &mut LoadObserver(sink))?);
        let preview_decoder = Arc::new(OnceLock::new());
        Ok(LocalEngine { pipeline, info, hooks, preview_vae, preview_decoder, output })
    }

    /// Returns the preview decoder; creates it on first use.
    fn preview_decoder(&self) -> Option<&PreviewDecoder<B>> {
        if let Some(decoder) = self.preview_decoder.get() {
            return Some(decoder);
        }
        let (b, dtype) = (self.pipeline.backend(), self.pipeline.options().dtype);
        let decoder = match &self.preview_vae {
            Some(file) => Autoencoder::load(b, &file.weights, file.config.as_ref(), dtype)
                .map(|vae| PreviewDecoder::Autoencoder(Arc::new(vae)))
                .map_err(Error::from),
            None => PreviewDecoder::linear(&self.pipeline),
        };
        // An image without previews is better than none.
        let decoder = decoder.ok()?;
        Some(self.preview_decoder.get_or_init(|| decoder))
    }

    /// Queues an image for the output thread, which waits for it and passes it to the task's sink.
    fn queue_output(&self, run: &Arc<TaskRun>, output: PendingOutput<B>) {
        let (run, pipeline) = (Arc::clone(run), Arc::clone(&self.pipeline));
        let (preview_decoder, take_notes) = (Arc::clone(&self.preview_decoder), self.hooks.take_notes);
        self.output.push(move || {
            if run.has_failed() {
                return;
            }
            run.attempt(|| {
                let plan = &run.task.plan;
                let mut output = output.finish(pipeline.backend(), plan)?;
                output.notes.extend(take_notes(pipeline.backend()));
                let decoder = preview_decoder.get().filter(|_| run.task.sink.wants_preview());
                if let Some(decoder) = decoder.filter(|_| plan.request.init.is_none()) {
                    decoder.learn(&output);
                }
                // Saving the image must not keep the pipeline alive or shared.
                drop(pipeline);
                run.deliver(output)
            });
        });
    }
}

impl<B: Backend + 'static> Engine for LocalEngine<B> {
    fn info(&self) -> &EngineInfo {
        &self.info
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
        self.output.wait();
        let busy = || Error::Panicked("the model is in use".into());
        Arc::get_mut(&mut self.pipeline).ok_or_else(busy)?.set_loras(loras, partial).map(Some)
    }

    fn share(&self) -> Result<SharedDevice> {
        let (pipeline, b) = (&self.pipeline, self.pipeline.backend());
        let device = SharedDevice::new((self.hooks.any)(b));
        if pipeline.options().residency.is_some() {
            return Ok(device);
        }
        let precision = pipeline.options().linear_precision;
        device.with_transformer(b, pipeline.model(), precision, pipeline.transformer())
    }

    fn free_memory(&self) -> Option<u64> {
        (self.hooks.free_memory)(self.pipeline.backend())
    }

    fn batch_capacity(&self, plan: &Plan, max_images: usize) -> usize {
        if plan.upscale().is_some() {
            return 1;
        }
        let limit = BatchLimit { images: max_images, rows: None, memory: self.free_memory() };
        self.pipeline.batch_capacity(plan.rows(), &limit)
    }

    fn prepare(&self, plan: &Plan, sink: &dyn Sink) -> Result<()> {
        self.pipeline.prepare(plan, &mut LoadObserver(sink))
    }

    fn generate(&self, tasks: &[Task], limit: &BatchLimit) {
        let runs: Vec<Arc<TaskRun>> =
            tasks.iter().map(|task| Arc::new(TaskRun::new(task, &self.info))).collect();
        let mut observers: Vec<_> =
            runs.iter().map(|run| TaskObserver { engine: self, run, previewed_step: None }).collect();
        let mut receivers: Vec<_> = runs
            .iter()
            .map(|run| {
                |output: PendingOutput<B>| -> Result<()> {
                    self.queue_output(run, output);
                    Ok(())
                }
            })
            .collect();
        let mut members: Vec<BatchMember<'_, B>> = runs
            .iter()
            .zip(&mut observers)
            .zip(&mut receivers)
            .map(|((run, observer), output)| BatchMember { plan: &run.task.plan, observer, output })
            .collect();
        self.pipeline.run(&mut members, limit, &mut |member, result| {
            let run = Arc::clone(&runs[member]);
            self.output.push(move || run.end(result));
        });
    }

    fn encode_prompts(&self, plan: &Plan, sink: &dyn Sink) -> Result<Vec<HostTensor>> {
        self.pipeline.encode_prompts(plan, &mut LoadObserver(sink))
    }

    fn encode_image(
        &self,
        image: &RgbImage,
        vae: Option<&Arc<VaeFile>>,
        sink: &dyn Sink,
    ) -> Result<HostTensor> {
        self.pipeline.encode_image(image, vae, &mut LoadObserver(sink))
    }

    fn decode_latents(
        &self,
        latents: &HostTensor,
        grid: [usize; 2],
        vae: Option<&Arc<VaeFile>>,
        sink: &dyn Sink,
    ) -> Result<RgbImage> {
        self.pipeline.decode_latents(latents, grid, vae, &mut LoadObserver(sink))
    }

    fn unpack_latents(
        &self,
        latents: &HostTensor,
        grid: [usize; 2],
        vae: Option<&Arc<VaeFile>>,
    ) -> Result<HostTensor> {
        self.pipeline.unpack_latents(latents, grid, vae)
    }

    fn finish(&self) {
        self.output.wait();
    }

    fn counters(&self) -> Counters {
        (self.hooks.counters)(self.pipeline.backend())
    }
}

/// A running task. Its sink is told of its end once: by [`TaskRun::end`], or at the latest when the last owner drops it.
struct TaskRun {
    task: Task,
    info: EngineInfo,
    /// The first error of the task, after which its images are dropped.
    error: Mutex<Option<Error>>,
    failed: AtomicBool,
    ended: AtomicBool,
}

impl TaskRun {
    fn new(task: &Task, info: &EngineInfo) -> TaskRun {
        TaskRun {
            task: task.clone(),
            info: info.clone(),
            error: Mutex::new(None),
            failed: AtomicBool::new(false),
            ended: AtomicBool::new(false),
        }
    }

    /// Passes an image to the sink.
    fn deliver(&self, output: PipelineOutput) -> Result<()> {
        for note in output.notes {
            self.task.sink.event(&Event::Note(note));
        }
        let plan = &self.task.plan;
        let mut recipe = Recipe::new(plan, output.index, self.info.dtype, &self.info.backend)?;
        recipe.reused_steps = plan.cache.map(|_| output.steps.reused);
        self.task.sink.image(GeneratedImage {
            index: output.index,
            image: output.image,
            latents: output.latents,
            seed: plan.image(output.index).seed,
            steps: output.steps,
            recipe,
        })
    }

    /// Calls a function; its error or panic fails the task.
    fn attempt<T>(&self, call: impl FnOnce() -> Result<T>) -> Option<T> {
        catch_panic(call).map_err(|error| self.fail(error)).ok()
    }

    /// Calls the sink; a panic fails the task.
    fn call_sink<T>(&self, call: impl FnOnce(&dyn Sink) -> T) -> Option<T> {
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
            let error = lock(&self.error).take();
            self.call_sink(|sink| sink.ended(error.map_or(result, Err)));
        }
    }
}

impl Drop for TaskRun {
    fn drop(&mut self) {
        self.end(Err(Error::Panicked("a thread of the engine panicked".into())));
    }
}

/// Reports a task's progress to its sink.
struct TaskObserver<'a, B: Backend> {
    engine: &'a LocalEngine<B>,
    run: &'a Arc<TaskRun>,
    /// The step that was previewed last. If several images take a step together, only the first is shown.
    previewed_step: Option<usize>,
}

impl<B: Backend> TaskObserver<'_, B> {
    /// Stops the run if the task has failed or is cancelled.
    fn check_cancelled(&self) -> kiln_nn::Result<()> {
        let active = !self.run.has_failed() && self.run.call_sink(|sink| !sink.cancelled()) == Some(true);
        if active { Ok(()) } else { Err(kiln_nn::Error::Cancelled) }
    }
}

impl<B: Backend + 'static> Observer<B> for TaskObserver<'_, B> {
    fn event(&mut self, event: Event) -> kiln_nn::Result<()> {
        if matches!(event, Event::StepStarted { step: 0, .. }) {
            self.previewed_step = None;
        }
        self.run.call_sink(|sink| sink.event(&event));
        self.check_cancelled()
    }

    fn step_output(&mut self, step: &StepOutput<'_, B>) -> kiln_nn::Result<()> {
        // An upscaled image is shown whole, after each tile.
        if self.run.task.plan.upscale().is_some() {
            return self.check_cancelled();
        }
        // The last step needs no preview: the image itself follows.
        let wanted = || self.run.call_sink(|sink| sink.wants_preview()) == Some(true);
        let due = step.sigma > 0.0 && self.previewed_step != Some(step.step) && wanted();
        if due && let Some(decoder) = self.engine.preview_decoder() {
            self.previewed_step = Some(step.step);
            let grid = self.run.task.plan.grid();
            if let Ok(preview) = decoder.decode(self.engine.pipeline.backend(), step, grid) {
                let run = Arc::clone(self.run);
                self.engine.output.push(move || {
                    if let Ok(Some(image)) = preview() {
                        run.call_sink(|sink| sink.preview(image));
                    }
                });
            }
        }
        self.check_cancelled()
    }

    fn wants_step_end(&self) -> bool {
        self.run.task.plan.upscale().is_none()
            && self.run.call_sink(|sink| sink.wants_step_end()) == Some(true)
    }

    fn step_end(&mut self, step: &StepEnd<&B::Tensor>) -> kiln_nn::Result<StepReply<B::Tensor>> {
        let b = self.engine.pipeline.backend();
        let &StepEnd { image, step: number, steps, sigma, .. } = step;
        let latents = step.latents.iter().map(|x| b.download(x)).collect::<kiln_ops::Result<_>>()?;
        let end = StepEnd { image, step: number, steps, sigma, latents };
        let reply = self.run.attempt(|| {
            let reply = self.run.task.sink.step_end(end)?;
            check_latents(step, reply.latents.as_deref())?;
            Ok(reply)
        });
        let Some(StepReply { latents, stop }) = reply else { return Err(kiln_nn::Error::Cancelled) };
        let upload = |x: &HostTensor| b.upload(x, DType::F32);
        let latents =
            latents.map(|new| new.iter().map(upload).collect::<kiln_ops::Result<_>>()).transpose()?;
        self.check_cancelled()?;
        Ok(StepReply { latents, stop })
    }

    fn partial_image(&mut self, image: &RgbImage) -> kiln_nn::Result<()> {
        if self.run.call_sink(|sink| sink.wants_preview()) == Some(true) {
            let (run, image) = (Arc::clone(self.run), shrink(image));
            self.engine.output.push(move || {
                run.call_sink(|sink| sink.preview(image));
            });
        }
        self.check_cancelled()
    }

    fn inspect(&mut self, _: &str, _: &B::Tensor) -> kiln_nn::Result<()> {
        self.check_cancelled()
    }

    // Previews need only the output of a step.
    fn wants_tensors(&self) -> bool {
        false
    }
}

/// Refuses latents that a sink returned if they can't take the place of the step's.
fn check_latents<T: kiln_ops::Tensor>(step: &StepEnd<&T>, given: Option<&[HostTensor]>) -> Result<()> {
    let Some(given) = given else { return Ok(()) };
    let (expected, found) = (step.latents.len(), given.len());
    if expected != found {
        return Err(Error::request(format!(
            "{found} latents were returned after a step of {expected} images"
        )));
    }
    for (own, given) in step.latents.iter().zip(given) {
        let (expected, found) = (own.shape(), given.shape());
        if expected != found {
            let what = format!("latents of shape {found} were returned after a step, expected {expected}");
            return Err(Error::request(what));
        }
        if !given.is_finite() {
            return Err(Error::request("the latents that were returned after a step have NaN or infinity"));
        }
    }
    Ok(())
}

/// Reports the progress of loading to a sink.
struct LoadObserver<'a>(&'a dyn Sink);

impl<B: Backend> Observer<B> for LoadObserver<'_> {
    fn event(&mut self, event: Event) -> kiln_nn::Result<()> {
        self.0.event(&event);
        if self.0.cancelled() { Err(kiln_nn::Error::Cancelled) } else { Ok(()) }
    }

    fn wants_tensors(&self) -> bool {
        false
    }
}
