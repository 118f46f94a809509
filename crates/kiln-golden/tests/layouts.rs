//! The tiny klein in every layout that people have gives the images that diffusers gave for it; packed weights give what
//! their widened values give.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kiln_cpu::{CpuBackend, Options as CpuOptions};
use kiln_engine::pipeline::{LoadOptions, Pipeline};
use kiln_engine::{LocalFiles, Model, Parts, Plan, Request, Variant};
use kiln_golden::{Checkpoint, Tolerance, in_tree, run_case};
use kiln_tensor::packed::Format;
use kiln_tensor::{DType, HostTensor};
use kiln_weights::export::{self, Container, Names, Storage, export};
use kiln_weights::{Component, WeightSource, save};
use tempfile::TempDir;

const CASE: &str = "t2i_64x64";

fn backend() -> CpuBackend {
    CpuBackend::new(CpuOptions { threads: Some(2), ..CpuOptions::default() }).unwrap()
}

/// The tiny klein, and a folder to write it into again.
struct Kit {
    klein: Checkpoint,
    dir: TempDir,
}

impl Kit {
    fn new() -> Kit {
        Kit { klein: Checkpoint::assemble(&in_tree(), "klein").unwrap(), dir: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn part(&self, component: Component) -> WeightSource {
        let folder = match component {
            Component::Transformer => "transformer",
            Component::TextEncoder => "text_encoder",
            Component::Vae => "vae",
        };
        WeightSource::open_component(self.klein.path().join(folder), component).unwrap()
    }

    /// Writes one part as a file.
    fn write(&self, component: Component, name: &str, names: Names, storage: Storage) -> PathBuf {
        let file = self.path(name);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        let container = if name.ends_with(".gguf") { Container::Gguf } else { Container::Safetensors };
        let options = export::Options { component, container, names, storage, threads: 2 };
        export(&self.part(component), &file, &options, &mut |_, _| Ok(())).unwrap();
        file
    }

    fn tokenizer(&self) {
        fs::create_dir_all(self.path("tokenizer")).unwrap();
        for name in ["tokenizer.json", "tokenizer_config.json"] {
            let to = self.path("tokenizer").join(name);
            fs::copy(self.klein.path().join("tokenizer").join(name), to).unwrap();
        }
    }

    fn gives_the_reference(&self, model: &Path) {
        let model = Arc::new(Model::open(model).unwrap());
        run_case(backend(), CASE, Tolerance::F32, &model).unwrap();
    }
}

use Component::{TextEncoder, Transformer, Vae};

#[test]
fn single_files_beside_each_other_are_a_model() {
    let kit = Kit::new();
    let file = kit.write(Transformer, "flux-2-klein-4b.safetensors", Names::Original, Storage::Keep);
    kit.write(TextEncoder, "qwen_3_4b.safetensors", Names::Diffusers, Storage::Keep);
    kit.write(Vae, "ae.safetensors", Names::Original, Storage::Keep);
    kit.tokenizer();
    let names: Vec<String> = WeightSource::open(&file).unwrap().names().map(str::to_owned).collect();
    assert!(names.contains(&"double_blocks.0.img_attn.norm.query_norm.scale".to_owned()), "{names:?}");
    assert!(names.iter().all(|n| !n.contains("transformer_blocks")));
    let vae = WeightSource::open(kit.path("ae.safetensors")).unwrap();
    assert_eq!(vae.entry("decoder.mid.attn_1.q.weight").unwrap().1.dims(), [32, 32, 1, 1]);
    kit.gives_the_reference(&file);
    assert_eq!(Model::open(kit.dir.path()).unwrap().transformer.path, file);
}

#[test]
fn gguf_files_in_comfyuis_folders_are_a_model() {
    let kit = Kit::new();
    let file = kit.write(Transformer, "unet/flux-2-klein-4b-BF16.gguf", Names::Original, Storage::Keep);
    kit.write(TextEncoder, "text_encoders/qwen3.gguf", Names::Original, Storage::Plain(DType::F32));
    kit.write(Vae, "vae/flux2-vae.safetensors", Names::Diffusers, Storage::Keep);
    kit.tokenizer();
    let text = WeightSource::open(kit.path("text_encoders/qwen3.gguf")).unwrap();
    assert!(text.is_gguf() && text.contains("blk.27.ffn_gate.weight"));
    kit.gives_the_reference(&file);
}

#[test]
fn one_checkpoint_with_everything_is_a_model() {
    let kit = Kit::new();
    let parts = [
        (Transformer, "model.diffusion_model.", Names::Original),
        (TextEncoder, "text_encoders.qwen3_4b.transformer.", Names::Diffusers),
        (Vae, "first_stage_model.", Names::Original),
    ];
    let mut tensors: Vec<(String, HostTensor)> = Vec::new();
    for (component, prefix, names) in parts {
        let file = kit.write(component, "part.safetensors", names, Storage::Keep);
        let source = WeightSource::open(&file).unwrap();
        let named = |name: &str| (format!("{prefix}{name}"), source.tensor(name).unwrap());
        tensors.extend(source.names().map(named));
        fs::remove_file(file).unwrap();
    }
    let tensors: Vec<(&str, HostTensor)> = tensors.iter().map(|(n, t)| (n.as_str(), t.clone())).collect();
    let file = kit.path("klein-checkpoint.safetensors");
    save::save(&file, &tensors, &Default::default()).unwrap();
    kit.tokenizer();
    kit.gives_the_reference(&file);
}

#[cfg(unix)]
#[test]
fn a_folder_of_the_hugging_face_cache_is_a_model() {
    use std::os::unix::fs::symlink;
    let kit = Kit::new();
    let cache = kit.path("models--bfl--FLUX.2-klein");
    let snapshot = cache.join("snapshots/0a1b2c");
    fs::create_dir_all(cache.join("refs")).unwrap();
    fs::create_dir_all(cache.join("blobs")).unwrap();
    fs::write(cache.join("refs/main"), "0a1b2c").unwrap();
    fs::create_dir_all(cache.join("snapshots/older")).unwrap();
    for (i, entry) in walk(kit.klein.path()).into_iter().enumerate() {
        let (blob, link) = (cache.join(format!("blobs/{i}")), snapshot.join(&entry));
        fs::copy(kit.klein.path().join(&entry), &blob).unwrap();
        fs::create_dir_all(link.parent().unwrap()).unwrap();
        symlink(&blob, &link).unwrap();
    }
    kit.gives_the_reference(&cache);
}

/// All files below a folder, by their relative paths.
fn walk(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = PathBuf::from(path.file_name().unwrap());
        match path.is_dir() {
            true => files.extend(walk(&path).iter().map(|below| name.join(below))),
            false => files.push(name),
        }
    }
    files
}

#[test]
fn parts_are_named_by_a_set_or_one_by_one() {
    let kit = Kit::new();
    let transformer = kit.write(Transformer, "a/t.safetensors", Names::Original, Storage::Keep);
    kit.write(TextEncoder, "b/e.safetensors", Names::Diffusers, Storage::Keep);
    kit.write(Vae, "c/v.safetensors", Names::Original, Storage::Keep);
    kit.tokenizer();
    let set = "transformer = 'a/t.safetensors'\ntext_encoder = 'b/e.safetensors'\nvae = 'c/v.safetensors'\n\
               tokenizer = 'tokenizer'\nvariant = 'distilled'";
    fs::write(kit.path("model.toml"), set).unwrap();
    kit.gives_the_reference(&kit.path("model.toml"));
    let named = Model::open(kit.dir.path()).unwrap();
    assert_eq!((named.variant, named.path.ends_with("model.toml")), (Variant::Distilled, true));

    let alone = Model::open(&transformer).unwrap();
    assert!(alone.text_encoder.is_none() && alone.vae.is_none());
    assert!(alone.searched.iter().any(|place| place.ends_with("a")), "{:?}", alone.searched);
    let parts = Parts {
        transformer: Some(transformer),
        text_encoder: Some(kit.path("b/e.safetensors")),
        variant: Some(Variant::Base),
        tokenizer: Some(kit.path("tokenizer/tokenizer.json")),
        ..Parts::default()
    };
    let whole = Model::open_with(Some(kit.klein.path()), &parts).unwrap();
    assert_eq!((whole.variant, whole.vae.is_some()), (Variant::Base, true));
    let told = Model::open(kit.path("c/v.safetensors")).unwrap_err().to_string();
    assert!(told.contains("holds no FLUX.2 transformer: it has a VAE"), "{told}");
    fs::remove_dir_all(kit.path("tokenizer")).unwrap();
    let told = Model::open_with(None, &Parts { tokenizer: None, ..parts }).unwrap_err().to_string();
    assert!(told.contains("448 tokens") && told.contains("tokenizer.json"), "{told}");
}

/// Final latents of a small image.
fn latents(kit: &Kit, transformer: PathBuf, text_encoder: Option<PathBuf>, dtype: DType) -> Vec<f32> {
    let parts = Parts { transformer: Some(transformer), text_encoder, ..Parts::default() };
    let model = Arc::new(Model::open_with(Some(kit.klein.path()), &parts).unwrap());
    let options = LoadOptions { dtype, ..LoadOptions::default() };
    let pipeline = Pipeline::load(backend(), &model, &options, &mut ()).unwrap();
    let request = Request {
        width: Some(64),
        height: Some(48),
        steps: Some(2),
        max_tokens: Some(32),
        ..Request::new("a fox")
    };
    let plan = Plan::new(&model, &request, &LocalFiles).unwrap();
    let images = pipeline.generate(&plan, &mut ()).unwrap();
    images[0].latents.to_f32().unwrap().into_owned()
}

fn distance(found: &[f32], expected: &[f32]) -> f64 {
    let norm =
        |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>().sqrt();
    let error = norm(&mut found.iter().zip(expected).map(|(f, e)| f - e));
    error / norm(&mut expected.iter().copied())
}

#[test]
fn packed_weights_give_what_their_widened_values_give() {
    let kit = Kit::new();
    let exact = latents(&kit, kit.klein.path().join("transformer"), None, DType::F32);
    let formats = [
        (Format::Q4_0, 0.6),
        (Format::Q4_1, 0.5),
        (Format::Q5_0, 0.3),
        (Format::Q5_1, 0.3),
        (Format::Q8_0, 0.05),
        (Format::Q2K, 1.5),
        (Format::Q3K, 1.0),
        (Format::Q4K, 0.5),
        (Format::Q5K, 0.3),
        (Format::Q6K, 0.2),
        (Format::F8E4M3, 0.3),
        (Format::NvFp4, 0.8),
    ];
    for (format, most) in formats {
        let small = matches!(format, Format::F8E4M3 | Format::NvFp4);
        let name = if small { "klein.safetensors" } else { "klein.gguf" };
        let packed = kit.write(Transformer, name, Names::Original, Storage::Packed(format));
        let source = WeightSource::open_component(&packed, Transformer).unwrap();
        assert!(source.names().any(|n| source.packing(n) == Some(format)), "{format}");
        let wide = kit.path("wide.safetensors");
        let options = export::Options {
            component: Transformer,
            container: Container::Safetensors,
            names: Names::Diffusers,
            storage: Storage::Plain(DType::F32),
            threads: 2,
        };
        export(&source, &wide, &options, &mut |_, _| Ok(())).unwrap();
        let found = latents(&kit, packed.clone(), None, DType::F32);
        let expected = latents(&kit, wide.clone(), None, DType::F32);
        let error = distance(&found, &expected);
        assert!(error < 1e-5, "{format}: {error:e} from its widened values");
        let lost = distance(&expected, &exact);
        assert!(lost > 0.0 && lost < most, "{format}: {lost} from the model it was made of");
        // The kernels that round to bf16 see the same weights.
        let found = latents(&kit, packed.clone(), None, DType::BF16);
        let error = distance(&found, &expected);
        assert!(error < 0.15, "{format}: {error} in bf16");
        fs::remove_file(packed).unwrap();
        fs::remove_file(wide).unwrap();
    }
}

#[test]
fn a_packed_text_encoder_gives_what_its_widened_values_give() {
    let kit = Kit::new();
    let transformer = kit.klein.path().join("transformer");
    // 16 wide: no block fits a row but those of small floats.
    let packed = kit.write(TextEncoder, "e.safetensors", Names::Diffusers, Storage::Packed(Format::F8E4M3));
    let source = WeightSource::open_component(&packed, TextEncoder).unwrap();
    let options = export::Options {
        component: TextEncoder,
        container: Container::Gguf,
        names: Names::Original,
        storage: Storage::Plain(DType::F32),
        threads: 1,
    };
    let wide = kit.path("wide.gguf");
    export(&source, &wide, &options, &mut |_, _| Ok(())).unwrap();
    let found = latents(&kit, transformer.clone(), Some(packed), DType::F32);
    let expected = latents(&kit, transformer, Some(wide), DType::F32);
    assert!(distance(&found, &expected) < 1e-5);
}
