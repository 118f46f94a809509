//! Sinks that see and change the latents of each step, and parts of the pipeline alone.

use std::sync::{Arc, Mutex};

use kiln_base::lock;
use kiln_engine::{
    BatchLimit, ErrorKind, Event, Explain, GeneratedImage, ImageCollector, InputImage, InputResolver,
    InputTensors, LocalFiles, Plan, Request, Result, Sink, StepEnd, StepReply, Task,
};
use kiln_tensor::HostTensor;

use crate::recording_sink::{request, tiny};

type StepCall = fn(&StepEnd<HostTensor>) -> StepReply<HostTensor>;

/// Collects images, and answers each step.
struct StepSink {
    images: ImageCollector,
    steps: Mutex<Vec<(usize, usize, usize)>>,
    answer: StepCall,
}

impl StepSink {
    fn new(answer: StepCall) -> Arc<StepSink> {
        Arc::new(StepSink { images: ImageCollector::default(), steps: Mutex::default(), answer })
    }
}

impl Sink for StepSink {
    fn event(&self, _: &Event) {}

    fn wants_step_end(&self) -> bool {
        true
    }

    fn step_end(&self, step: StepEnd<HostTensor>) -> Result<StepReply<HostTensor>> {
        lock(&self.steps).push((step.image, step.step, step.latents.len()));
        Ok((self.answer)(&step))
    }

    fn image(&self, image: GeneratedImage) -> Result<()> {
        self.images.image(image)
    }

    fn ended(&self, result: Result<()>) {
        self.images.ended(result);
    }
}

const TOGETHER: BatchLimit = BatchLimit { images: usize::MAX, rows: Some(usize::MAX), memory: None };

fn nothing(_: &StepEnd<HostTensor>) -> StepReply<HostTensor> {
    StepReply::default()
}

fn zeros(step: &StepEnd<HostTensor>) -> StepReply<HostTensor> {
    let latents = step.latents.iter().map(|x| HostTensor::zeros(x.shape().clone())).collect();
    StepReply { latents: Some(latents), stop: false }
}

fn stop(_: &StepEnd<HostTensor>) -> StepReply<HostTensor> {
    StepReply { latents: None, stop: true }
}

fn wrong_shape(_: &StepEnd<HostTensor>) -> StepReply<HostTensor> {
    StepReply { latents: Some(vec![HostTensor::zeros([3, 128])]), stop: false }
}

#[test]
fn a_sink_changes_the_steps_of_its_own_request_only() {
    let klein = tiny("klein");
    let engine = klein.load();
    let plans = [7, 8, 9].map(|seed| klein.plan(&request("a cat", seed)));
    let alone = |plan: &Arc<Plan>| {
        let sink = Arc::new(ImageCollector::default());
        engine.generate(&[Task { plan: Arc::clone(plan), sink: sink.clone() }], &BatchLimit::ONE);
        engine.finish();
        sink.take().unwrap()
    };
    let expected = plans.each_ref().map(alone);
    let sinks = [StepSink::new(nothing), StepSink::new(zeros), StepSink::new(stop)];
    let tasks: Vec<Task> = plans
        .iter()
        .zip(&sinks)
        .map(|(plan, sink)| Task { plan: Arc::clone(plan), sink: Arc::clone(sink) as Arc<dyn Sink> })
        .collect();
    engine.generate(&tasks, &TOGETHER);
    engine.finish();
    let images = sinks.each_ref().map(|sink| sink.images.take().unwrap().remove(0));
    assert_eq!(images[0].image, expected[0][0].image);
    assert!(images[1].latents.to_f32().unwrap().iter().all(|v| *v == 0.0));
    assert_ne!(images[2].latents, expected[2][0].latents);
    let steps = sinks.each_ref().map(|sink| lock(&sink.steps).len());
    assert_eq!(steps, [3, 3, 1]);
}

#[test]
fn the_images_of_a_request_take_a_step_together() {
    let klein = tiny("klein");
    let sink = StepSink::new(nothing);
    let plan = klein.plan(&Request { n: Some(3), ..request("a cat", 7) });
    let session = kiln_engine::Session::new(crate::recording_sink::settings(), 1);
    session.generate(&[Task { plan, sink: Arc::clone(&sink) as Arc<dyn Sink> }]);
    session.finish();
    assert_eq!(sink.images.take().unwrap().len(), 3);
    assert_eq!(*lock(&sink.steps), [(0, 0, 3), (0, 1, 3), (0, 2, 3)]);
}

#[test]
fn latents_of_another_shape_are_refused() {
    let klein = tiny("klein");
    let engine = klein.load();
    let sink = StepSink::new(wrong_shape);
    let plan = klein.plan(&request("a cat", 7));
    engine.generate(&[Task { plan, sink: Arc::clone(&sink) as Arc<dyn Sink> }], &BatchLimit::ONE);
    engine.finish();
    let error = sink.images.take().unwrap_err();
    assert!(error.kind() == ErrorKind::Request && error.to_string().contains("[16, 128]"), "{error}");
}

/// Tensors in memory.
struct Memory(InputTensors);

impl InputResolver for Memory {
    fn image(&self, name: &std::path::Path) -> Result<InputImage> {
        LocalFiles.image(name)
    }

    fn lora(&self, name: &std::path::Path) -> Result<std::path::PathBuf> {
        LocalFiles.lora(name)
    }

    fn vae(&self, name: &std::path::Path) -> Result<std::path::PathBuf> {
        LocalFiles.vae(name)
    }

    fn tensors(&self, _: &std::path::Path) -> Result<InputTensors> {
        Ok(self.0.clone())
    }
}

#[test]
fn prompts_and_latents_alone_give_the_same_image() {
    let klein = tiny("klein");
    let engine = klein.load();
    let sink = Arc::new(ImageCollector::default());
    let plan = klein.plan(&request("a cat", 7));
    engine.generate(&[Task { plan: Arc::clone(&plan), sink: sink.clone() }], &BatchLimit::ONE);
    engine.finish();
    let image = sink.take().unwrap().remove(0);
    let decoded = engine.decode_latents(&image.latents, plan.grid(), None, &*sink).unwrap();
    assert_eq!(decoded, image.image);
    let embeds = engine.encode_prompts(&plan, &*sink).unwrap().remove(0);
    let tensors = InputTensors::in_memory("memory", [("prompt_embeds".to_owned(), embeds)].into());
    let given =
        Request { prompts: Vec::new(), embeds: Some("memory".into()), max_tokens: None, ..request("", 7) };
    let plan = Arc::new(Plan::new(&klein.model, &given, &Memory(tensors)).unwrap());
    assert_eq!(plan.request.embeds.as_ref().unwrap().path.to_str(), Some("memory"));
    engine.generate(&[Task { plan, sink: sink.clone() }], &BatchLimit::ONE);
    engine.finish();
    assert_eq!(sink.take().unwrap().remove(0).image, image.image);
    let encoded = engine.encode_image(&image.image, None, &*sink).unwrap();
    assert_eq!(encoded.shape().dims(), [16, 128]);
    assert!(engine.encode_image(&image.image.crop(0, 0, 60, 64), None, &*sink).is_err());
}
