//! With Linux's `inotify`, on copies that nothing else opens.

use std::collections::BTreeMap;
use std::fs;
use std::mem::MaybeUninit;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kiln_engine::{
    BatchLimit, Collect, Device, Image, LocalFiles, LoraRef, Model, Plan, Precision, Request, Settings,
    Setup, Task,
};
use kiln_golden::{Checkpoint, in_tree};
use kiln_weights::export::{self, Container, Names, Storage, export};
use kiln_weights::{Component, WeightSource};
use rustix::fd::OwnedFd;
use rustix::fs::inotify;
use rustix::io::Errno;
use tempfile::TempDir;

/// Watches all files below a folder.
struct Watch {
    events: OwnedFd,
    files: BTreeMap<i32, PathBuf>,
}

impl Watch {
    /// Folders are watched, too. Each opening is two events, then, by turns of the folder and of the file: of two events in a
    /// row that are the same the kernel would keep one.
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

    /// How often each file was opened.
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

/// A folder and everything below it.
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

/// A folder with the model in `model`, and two images and a LoRA to use with it.
struct Kit {
    klein: Checkpoint,
    folder: TempDir,
}

impl Kit {
    fn new() -> Kit {
        let kit = Kit {
            klein: Checkpoint::assemble(&in_tree(), "klein").unwrap(),
            folder: tempfile::tempdir().unwrap(),
        };
        let image = in_tree().join("reference/inputs/inpaint_100x72.png");
        for name in ["one.png", "two.png"] {
            fs::copy(&image, kit.path(name)).unwrap();
        }
        fs::copy(in_tree().join("tiny/lora/lora_diffusers.safetensors"), kit.path("ink.safetensors"))
            .unwrap();
        fs::create_dir(kit.path("model")).unwrap();
        kit
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The whole way from a model's name to images, and a second plan for the same engine.
    fn generate(&self, model: &Path) -> Vec<Image> {
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
        let sink = Arc::new(Collect::default());
        let mut engine = setup.load(&*sink).unwrap();
        let task = |plan: &Arc<Plan>| Task { plan: Arc::clone(plan), sink: sink.clone() };
        engine.prepare(&plan, &*sink).unwrap();
        engine.generate(&[task(&plan)], &BatchLimit::ONE);
        // Without references and LoRA, and with the LoRA again.
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

    /// Goes the whole way; every file must be opened once.
    fn opens_each_file_once(&self, model: &str, files: usize) {
        let watch = Watch::new(self.folder.path());
        let images = self.generate(&self.path(model));
        let opened = watch.opened();
        let recipe = &images[0].recipe;
        assert!(recipe.model.text_encoder.is_some() && recipe.model.vae.is_some());
        assert!(recipe.request.references.iter().all(|file| file.sha256.is_some()));
        assert_eq!(opened.len(), files + 3, "{opened:#?}");
        let others: Vec<_> = opened.iter().filter(|(_, count)| **count != 1).collect();
        assert!(others.is_empty(), "not opened once: {others:#?}");
    }
}

#[test]
fn what_is_opened_twice_is_counted_twice() {
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
    let kit = Kit::new();
    copy(kit.klein.path(), &kit.path("model"));
    // Its text encoder is in two files and a list of them.
    kit.opens_each_file_once("model", 12);
}

#[test]
fn a_packed_model() {
    let kit = Kit::new();
    kit.klein.pack(&kit.path("model/klein.safetensors"), &[]).unwrap();
    kit.opens_each_file_once("model/klein.safetensors", 1);
}

fn write_parts(kit: &Kit, parts: [(Component, &str, &str); 3]) {
    for (component, folder, name) in parts {
        let source = WeightSource::open_component(kit.klein.path().join(folder), component).unwrap();
        let container = if name.ends_with(".gguf") { Container::Gguf } else { Container::Safetensors };
        let published = component == Component::TextEncoder && container == Container::Safetensors;
        let names = if published { Names::Diffusers } else { Names::Original };
        let storage = Storage::Plain(kiln_tensor::DType::F32);
        let options = export::Options { component, container, names, storage, threads: 2 };
        let file = kit.path("model").join(name);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        export(&source, &file, &options, &mut |_, _| Ok(())).unwrap();
    }
    copy(&kit.klein.path().join("tokenizer"), &kit.path("model/tokenizer"));
}

const TRANSFORMER: (Component, &str) = (Component::Transformer, "transformer");
const TEXT_ENCODER: (Component, &str) = (Component::TextEncoder, "text_encoder");
const VAE: (Component, &str) = (Component::Vae, "vae");

fn parts(files: [&'static str; 3]) -> [(Component, &'static str, &'static str); 3] {
    let [transformer, text_encoder, vae] = files;
    [
        (TRANSFORMER.0, TRANSFORMER.1, transformer),
        (TEXT_ENCODER.0, TEXT_ENCODER.1, text_encoder),
        (VAE.0, VAE.1, vae),
    ]
}

#[test]
fn separate_files_beside_each_other() {
    let kit = Kit::new();
    write_parts(&kit, parts(["flux-2-klein-4b.safetensors", "qwen_3_4b.safetensors", "ae.safetensors"]));
    kit.opens_each_file_once("model/flux-2-klein-4b.safetensors", 5);
}

#[test]
fn a_folder_of_separate_files() {
    let kit = Kit::new();
    write_parts(&kit, parts(["flux-2-klein-4b.safetensors", "qwen_3_4b.safetensors", "ae.safetensors"]));
    kit.opens_each_file_once("model", 5);
}

#[test]
fn separate_files_in_comfyuis_folders() {
    let kit = Kit::new();
    let files = ["unet/flux-2-klein-4b.gguf", "text_encoders/qwen3.gguf", "vae/flux2-vae.safetensors"];
    write_parts(&kit, parts(files));
    kit.opens_each_file_once("model/unet/flux-2-klein-4b.gguf", 5);
}

#[test]
fn a_set_of_named_parts() {
    let kit = Kit::new();
    write_parts(&kit, parts(["a/t.safetensors", "b/e.safetensors", "c/v.safetensors"]));
    let set = "transformer = 'a/t.safetensors'\ntext_encoder = 'b/e.safetensors'\nvae = 'c/v.safetensors'\n\
               tokenizer = 'tokenizer'\nvariant = 'distilled'";
    fs::write(kit.path("model/model.toml"), set).unwrap();
    kit.opens_each_file_once("model", 6);
}
