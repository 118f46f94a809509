//! A training and image jobs on one device, with the same frozen weights.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use kiln_catalog::ModelFolders;
use kiln_engine::{
    ComponentPaths, Device, DeviceLease, Event, GeneratedImage, ImageCollector, LocalFiles, LoraRef, Model,
    Plan, Precision, Request, Session, Settings, SharedDevice, Sink, Task,
};
use kiln_golden::{Checkpoint, testdata};
use kiln_image::{Format, RgbImage, encode};
use kiln_train::{EncodingStage, JobWatcher, PreparedTraining, Result, Status, TrainRequest, Watcher};

fn settings() -> Settings {
    Settings { device: Device::Cpu, precision: Precision::F32, threads: Some(2), ..Settings::default() }
}

/// A training of four steps over two images.
fn training(folder: &Path, model: &Path, output: &str) -> PreparedTraining {
    let data = folder.join("images");
    fs::create_dir_all(&data).unwrap();
    for (name, level) in [("a fox", 40), ("a hen", 160)] {
        let pixels = (0..64 * 64 * 3).map(|i| level + (i * 7 % 61) as u8).collect();
        let image = RgbImage::new(64, 64, pixels).unwrap();
        fs::write(data.join(format!("{name}.png")), encode(&image, Format::Png, None).unwrap()).unwrap();
        fs::write(data.join(format!("{name}.txt")), name).unwrap();
    }
    let request = TrainRequest {
        data,
        model: Some(model.to_owned()),
        output: folder.join(output),
        cache_dir: Some(folder.join("cache")),
        rank: Some(4),
        resolution: vec![64],
        learning_rate: Some(0.01),
        steps: Some(4),
        ..TrainRequest::default()
    };
    PreparedTraining::new(request, ModelFolders::from_env(), &ComponentPaths::default(), settings()).unwrap()
}

/// Collects an image and the components that were loaded for it; cancels at a step if it is told to.
#[derive(Default)]
struct Job {
    images: ImageCollector,
    loaded: Mutex<Vec<&'static str>>,
    is_cancelled: bool,
}

impl Sink for Job {
    fn cancelled(&self) -> bool {
        self.is_cancelled
    }

    fn event(&self, event: &Event) {
        if let Event::Loading { component } = event {
            self.loaded.lock().unwrap().push(component);
        }
    }

    fn image(&self, image: GeneratedImage) -> kiln_engine::Result<()> {
        self.images.image(image)
    }

    fn ended(&self, result: kiln_engine::Result<()>) {
        self.images.ended(result);
    }
}

/// The image of a model with these LoRAs, and what was loaded for it.
fn generate(
    session: &Session,
    model: &Arc<Model>,
    loras: &[LoraRef],
    is_cancelled: bool,
) -> (kiln_engine::Result<RgbImage>, Vec<&'static str>) {
    let request = Request {
        width: Some(64),
        height: Some(64),
        steps: Some(2),
        max_tokens: Some(16),
        seed: vec![7],
        loras: loras.to_vec(),
        ..Request::new("a fox")
    };
    let plan = Arc::new(Plan::new(model, &request, &LocalFiles).unwrap());
    let sink = Arc::new(Job { is_cancelled, ..Job::default() });
    session.generate(&[Task { plan, sink: sink.clone() }]);
    session.finish();
    let image = sink.images.take().map(|mut images| images.remove(0).image);
    (image, sink.loaded.lock().unwrap().clone())
}

/// Calls a function when the model is loaded, and after each step.
struct Beside<'a> {
    loaded: &'a dyn Fn(SharedDevice, u64),
    stepped: &'a dyn Fn(u64),
}

impl Watcher for Beside<'_> {
    fn stepped(&mut self, status: &Status) {
        (self.stepped)(status.report.step);
    }

    fn is_cancelled(&self) -> bool {
        false
    }
}

impl JobWatcher for Beside<'_> {
    fn encoding(&mut self, _: EncodingStage, _: usize, _: usize) {}

    fn note(&mut self, _: &str) {}

    fn loaded(&mut self, device: SharedDevice, activations: u64) {
        (self.loaded)(device, activations);
    }

    fn starting(&mut self, _: u64) {}

    fn sampled(&mut self, _: u64, _: Result<PathBuf>) -> Result<()> {
        Ok(())
    }
}

#[test]
fn image_jobs_between_steps_share_the_weights_and_change_nothing() {
    let checkpoint = Checkpoint::assemble(&testdata(), "klein-base").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let open = || Arc::new(Model::open(checkpoint.path()).unwrap());
    let lora = [LoraRef {
        path: testdata().join("tiny/lora/lora_diffusers.safetensors"),
        weight: 1.0,
        sha256: None,
    }];
    let quiet = |output| {
        let mut watcher = Beside { loaded: &|_, _| (), stepped: &|_| () };
        training(folder.path(), checkpoint.path(), output).run(&mut watcher).unwrap();
        fs::read(folder.path().join(output)).unwrap()
    };
    let alone = quiet("alone.safetensors");

    let (session, model, opened_again) = (Session::new(settings(), 1), open(), open());
    let plain = generate(&session, &model, &[], false).0.unwrap();
    // The training takes the weights from under this LoRA.
    let changed = generate(&session, &model, &lora, false).0.unwrap();
    assert!(plain != changed);
    let mut beside = training(folder.path(), checkpoint.path(), "beside.safetensors");
    let device = session.share(&beside.needs("cpu")).unwrap().expect("both fit");
    assert!(device.has_transformer(&beside.job.model, beside.job.settings.base.linear(1)));
    assert!(session.share(&beside.needs("cuda:0")).unwrap().is_none(), "nothing is loaded there");
    beside.job.shared = Some(device);
    let loaded = |device, activations| session.begin_lease(DeviceLease { device, activations });
    let stepped = |step| match step {
        1 => {
            let (image, loaded) = generate(&session, &model, &[], false);
            assert!(image.unwrap() == plain && loaded.is_empty());
        }
        2 => assert!(generate(&session, &model, &lora, false).0.unwrap() == changed),
        3 => assert!(generate(&session, &model, &[], true).0.is_err()),
        // The session loads it once more, but for the weights that the training has.
        _ => {
            let (image, loaded) = generate(&session, &opened_again, &[], false);
            assert!(image.unwrap() == plain);
            assert_eq!(loaded, ["text encoder", "tokenizer", "vae"]);
        }
    };
    beside.run(&mut Beside { loaded: &loaded, stepped: &stepped }).unwrap();
    assert!(fs::read(folder.path().join("beside.safetensors")).unwrap() == alone);
    session.end_lease();
    let (image, loaded) = generate(&session, &model, &[], false);
    assert!(image.unwrap() == plain && loaded.contains(&"transformer"));
}
