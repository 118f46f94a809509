//! Counts opens with Linux's `inotify`, on copies of models that nothing else opens.

use std::collections::BTreeMap;
use std::fs;
use std::mem::MaybeUninit;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kiln_engine::{
    BatchLimit, Device, GeneratedImage, ImageCollector, LocalFiles, LoraRef, Model, Plan, Precision, Request,
    Settings, Setup, Task,
};
use kiln_golden::{Checkpoint, testdata};
use kiln_weights::export::{self, Container, Storage, TensorNames, export};
use kiln_weights::{Component, WeightSource};
use rustix::fd::OwnedFd;
use rustix::fs::inotify;
use rustix::io::Errno;
use tempfile::TempDir;

/// A watch on all files below a folder.
struct Watch {
    events: OwnedFd,
    files: BTreeMap<i32, PathBuf>,
}

impl Watch {
    /// Watches folders, too: each open then gives two events, of the folder and of the file in turn. Otherwise the kernel
    /// would merge identical consecutive events.
    fn new(root: &Path) -> Watch {
        let events = inotify::init(inotify::CreateFlags::NONBLOCK).unwrap();
        let mut files = BTreeMap::new();
        for path in walk(root) {
            let watch = inotify::add_watch(&events, &path, inotify::WatchFlags::OPEN).unwrap();
            if path.is_file() {
                assert!(files.insert(watch, path).is_none(), "two names of one file");
            }
        }
        Watch { events, files }
    }

    /// Returns how often each file was opened.
    fn opened(self) -> BTreeMap<PathBuf, usize> {
        let mut count: BTreeMap<PathBuf, usize> = self.files.values().map(|file| (file.clone(), 0)).collect();
        let mut buffer = [MaybeUninit::uninit(); 1 << 14];
        let mut reader = inotify::Reader::new(&self.events, &mut buffer);
        loop {
            match reader.next() {
                Ok(event) => {
                    assert!(!event.events().contains(inotify::ReadFlags::QUEUE_OVERFLOW));
                    if let Some(file) = self.files.get(&event.wd()) {
                        *count.get_mut(file).unwrap() += 1;
                    }
                }
                Err(Errno::AGAIN) => return count,
                Err(error) => panic!("{error}"),
            }
        }
    }
}

/// Lists a folder and everything below it.
fn walk(folder: &Path) -> Vec<PathBuf> {
    let mut found = vec![folder.to_path_buf()];
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { found.extend(walk(&path)) } else { found.push(path) }
    }
    found
}

fn copy(from: &Path, to: &Path) {
    for path in walk(from) {
        let target = to.join(path.strip_prefix(from).unwrap());
        if path.is_dir() {
            fs::create_dir_all(&target).unwrap();
        } else {
            fs::copy(&path, &target).unwrap();
        }
    }
}

/// A folder with a model in `model`, and two images and a LoRA to use with it.
struct Fixture {
    klein: Checkpoint,
    folder: TempDir,
}

impl Fixture {
    fn new() -> Fixture {
        let fixture = Fixture {
            klein: Checkpoint::assemble(&testdata(), "klein").unwrap(),
            folder: tempfile::tempdir().unwrap(),
        };
        let image = testdata().join("reference/inputs/inpaint_100x72.png");
        for name in ["one.png", "two.png"] {
            fs::copy(&image, fixture.path(name)).unwrap();
        }
        fs::copy(testdata().join("tiny/lora/lora_diffusers.safetensors"), fixture.path("ink.safetensors"))
            .unwrap();
        fs::create_dir(fixture.path("model")).unwrap();
        fixture
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Opens the model, and generates images of two plans with the same engine.
    fn generate(&self, model: &Path) -> Vec<GeneratedImage> {
        let model = Arc::new(Model::open(model).unwrap());
        let request = Request {
            n: Some(2),
            width: Some(64),
            height: Some(64),
            steps: Some(2),
            max_tokens: Some(32),
            references: vec![self.path("one.png").into(), self.path("two.png").into()],
            loras: vec![LoraRef { path: self.path("ink.safetensors"), weight: 1.0, sha256: None }],
            ..Request::new("a fox")
        };
        let plan = Arc::new(Plan::new(&model, &request, &LocalFiles).unwrap());
        let settings = Settings {
            device: Device::Cpu,
            precision: Precision::F32,
            threads: Some(2),
            ..Settings::default()
        };
        let setup = Setup::new(&model, &settings, Some(&plan)).unwrap();
        let sink = Arc::new(ImageCollector::default());
        let mut engine = setup.load(&*sink).unwrap();
        let task = |plan: &Arc<Plan>| Task { plan: Arc::clone(plan), sink: sink.clone() };
        engine.prepare(&plan, &*sink).unwrap();
        engine.generate(&[task(&plan)], &BatchLimit::ONE);
        // Without reference images and LoRA, then with the LoRA again.
        let others = Request { references: Vec::new(), loras: Vec::new(), n: None, ..request };
        let other = Arc::new(Plan::new(&model, &others, &LocalFiles).unwrap());
        engine.set_loras(&other.loras, false).unwrap();
        engine.generate(&[task(&other)], &BatchLimit::ONE);
        engine.set_loras(&plan.loras, false).unwrap();
        engine.generate(&[task(&plan)], &BatchLimit::ONE);
        engine.finish();
        let images = sink.take().unwrap();
        assert_eq!(images.len(), 5);
        images
    }

    /// Generates images, and checks that every file is opened once.
    fn assert_opens_each_file_once(&self, model: &str, files: usize) {
        let watch = Watch::new(self.folder.path());
        let images = self.generate(&self.path(model));
        let opened = watch.opened();
        let recipe = &images[0].recipe;
        assert!(recipe.model.text_encoder.is_some() && recipe.model.vae.is_some());
        assert!(recipe.request.references.iter().all(|file| file.sha256.is_some()));
        assert_eq!(opened.len(), files + 3, "{opened:#?}");
        // A small `config.json` is also read with the weights, for their quantization.
        let is_config = |file: &Path| file.file_name().is_some_and(|name| name == "config.json");
        let is_once = |(file, count): &(&PathBuf, &usize)| **count == 1 || is_config(file) && **count == 2;
        let others: Vec<_> = opened.iter().filter(|entry| !is_once(entry)).collect();
        assert!(others.is_empty(), "not opened once: {others:#?}");
    }
}

#[test]
fn a_file_opened_twice_is_counted_twice() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a");
    fs::write(&file, b"").unwrap();
    fs::write(folder.path().join("b"), b"").unwrap();
    let watch = Watch::new(folder.path());
    let _both = [fs::File::open(&file).unwrap(), fs::File::open(&file).unwrap()];
    let opened: Vec<usize> = watch.opened().into_values().collect();
    assert_eq!(opened, [2, 0]);
}

#[test]
fn a_folder_in_diffusers_layout() {
    let fixture = Fixture::new();
    copy(fixture.klein.path(), &fixture.path("model"));
    // Its text encoder has two shards and an index.
    fixture.assert_opens_each_file_once("model", 12);
}

#[test]
fn a_packed_model() {
    let fixture = Fixture::new();
    fixture.klein.write_single_file(&fixture.path("model/klein.safetensors"), &[]).unwrap();
    fixture.assert_opens_each_file_once("model/klein.safetensors", 1);
}

fn write_components(fixture: &Fixture, components: [(Component, &str, &str); 3]) {
    for (component, folder, name) in components {
        let source = WeightSource::open_component(fixture.klein.path().join(folder), component).unwrap();
        let container = if name.ends_with(".gguf") { Container::Gguf } else { Container::Safetensors };
        let published = component == Component::TextEncoder && container == Container::Safetensors;
        let names = if published { TensorNames::Diffusers } else { TensorNames::Original };
        let storage = Storage::Dense(kiln_tensor::DType::F32);
        let options = export::Options { component, container, names, storage, threads: 2 };
        let file = fixture.path("model").join(name);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        export(&source, &file, &options, &mut |_, _| Ok(())).unwrap();
    }
    copy(&fixture.klein.path().join("tokenizer"), &fixture.path("model/tokenizer"));
}

const TRANSFORMER: (Component, &str) = (Component::Transformer, "transformer");
const TEXT_ENCODER: (Component, &str) = (Component::TextEncoder, "text_encoder");
const VAE: (Component, &str) = (Component::Vae, "vae");

fn components(files: [&'static str; 3]) -> [(Component, &'static str, &'static str); 3] {
    let [transformer, text_encoder, vae] = files;
    [
        (TRANSFORMER.0, TRANSFORMER.1, transformer),
        (TEXT_ENCODER.0, TEXT_ENCODER.1, text_encoder),
        (VAE.0, VAE.1, vae),
    ]
}

#[test]
fn separate_files_in_one_folder() {
    let fixture = Fixture::new();
    write_components(
        &fixture,
        components(["flux-2-klein-4b.safetensors", "qwen_3_4b.safetensors", "ae.safetensors"]),
    );
    fixture.assert_opens_each_file_once("model/flux-2-klein-4b.safetensors", 5);
}

#[test]
fn a_folder_of_separate_files() {
    let fixture = Fixture::new();
    write_components(
        &fixture,
        components(["flux-2-klein-4b.safetensors", "qwen_3_4b.safetensors", "ae.safetensors"]),
    );
    fixture.assert_opens_each_file_once("model", 5);
}

#[test]
fn separate_files_in_comfyuis_folders() {
    let fixture = Fixture::new();
    let files = ["unet/flux-2-klein-4b.gguf", "text_encoders/qwen3.gguf", "vae/flux2-vae.safetensors"];
    write_components(&fixture, components(files));
    fixture.assert_opens_each_file_once("model/unet/flux-2-klein-4b.gguf", 5);
}

#[test]
fn a_manifest() {
    let fixture = Fixture::new();
    write_components(&fixture, components(["a/t.safetensors", "b/e.safetensors", "c/v.safetensors"]));
    let manifest = "transformer = 'a/t.safetensors'\ntext_encoder = 'b/e.safetensors'\nvae = 'c/v.safetensors'\n\
               tokenizer = 'tokenizer'\nvariant = 'distilled'";
    fs::write(fixture.path("model/model.toml"), manifest).unwrap();
    fixture.assert_opens_each_file_once("model", 6);
}
