//! The tiny klein in every checkpoint layout gives the images of diffusers; quantized weights give the results of their
//! dequantized values.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kiln_cpu::{CpuBackend, CpuOptions};
use kiln_engine::pipeline::{LoadOptions, Pipeline};
use kiln_engine::{ComponentPaths, LocalFiles, Model, Plan, Request};
use kiln_family::flux2;
use kiln_golden::{Checkpoint, Tolerance, run_case, testdata};
use kiln_tensor::packed::Format;
use kiln_tensor::{DType, HostTensor};
use kiln_weights::export::{self, Container, Storage, TensorNames, export};
use kiln_weights::{Component, WeightSource, save};
use tempfile::TempDir;

const CASE: &str = "t2i_64x64";

fn backend() -> CpuBackend {
    CpuBackend::new(CpuOptions { threads: Some(2), ..CpuOptions::default() }).unwrap()
}

/// The tiny klein, and a folder for exports of it.
struct Fixture {
    klein: Checkpoint,
    dir: TempDir,
}

impl Fixture {
    fn new() -> Fixture {
        Fixture {
            klein: Checkpoint::assemble(&testdata(), "klein").unwrap(),
            dir: tempfile::tempdir().unwrap(),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn component(&self, component: Component) -> WeightSource {
        let folder = match component {
            Component::Transformer => "transformer",
            Component::TextEncoder => "text_encoder",
            Component::Vae => "vae",
        };
        WeightSource::open_component(self.klein.path().join(folder), component).unwrap()
    }

    /// Exports one component to a file.
    fn export(&self, component: Component, name: &str, names: TensorNames, storage: Storage) -> PathBuf {
        let file = self.path(name);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        let container = if name.ends_with(".gguf") { Container::Gguf } else { Container::Safetensors };
        let options = export::Options { component, container, names, storage, threads: 2 };
        export(&self.component(component), &file, &options, &mut |_, _| Ok(())).unwrap();
        file
    }

    fn copy_tokenizer(&self) {
        fs::create_dir_all(self.path("tokenizer")).unwrap();
        for name in ["tokenizer.json", "tokenizer_config.json"] {
            let to = self.path("tokenizer").join(name);
            fs::copy(self.klein.path().join("tokenizer").join(name), to).unwrap();
        }
    }

    fn assert_matches_reference(&self, model: &Path) {
        let model = Arc::new(Model::open(model).unwrap());
        run_case(backend(), CASE, Tolerance::F32, &model).unwrap();
    }
}

use Component::{TextEncoder, Transformer, Vae};

#[test]
fn single_files_in_one_folder_are_a_model() {
    let fixture = Fixture::new();
    let file =
        fixture.export(Transformer, "flux-2-klein-4b.safetensors", TensorNames::Original, Storage::Keep);
    fixture.export(TextEncoder, "qwen_3_4b.safetensors", TensorNames::Diffusers, Storage::Keep);
    fixture.export(Vae, "ae.safetensors", TensorNames::Original, Storage::Keep);
    fixture.copy_tokenizer();
    let names: Vec<String> = WeightSource::open(&file).unwrap().names().map(str::to_owned).collect();
    assert!(names.contains(&"double_blocks.0.img_attn.norm.query_norm.scale".to_owned()), "{names:?}");
    assert!(names.iter().all(|n| !n.contains("transformer_blocks")));
    let vae = WeightSource::open(fixture.path("ae.safetensors")).unwrap();
    assert_eq!(vae.entry("decoder.mid.attn_1.q.weight").unwrap().1.dims(), [32, 32, 1, 1]);
    fixture.assert_matches_reference(&file);
    assert_eq!(Model::open(fixture.dir.path()).unwrap().transformer.path, file);
}

#[test]
fn gguf_files_in_comfyuis_folders_are_a_model() {
    let fixture = Fixture::new();
    let file =
        fixture.export(Transformer, "unet/flux-2-klein-4b-BF16.gguf", TensorNames::Original, Storage::Keep);
    fixture.export(
        TextEncoder,
        "text_encoders/qwen3.gguf",
        TensorNames::Original,
        Storage::Dense(DType::F32),
    );
    fixture.export(Vae, "vae/flux2-vae.safetensors", TensorNames::Diffusers, Storage::Keep);
    fixture.copy_tokenizer();
    let text = WeightSource::open(fixture.path("text_encoders/qwen3.gguf")).unwrap();
    assert!(text.is_gguf() && text.contains("blk.27.ffn_gate.weight"));
    fixture.assert_matches_reference(&file);
}

#[test]
fn an_all_in_one_checkpoint_is_a_model() {
    let fixture = Fixture::new();
    let components = [
        (Transformer, "model.diffusion_model.", TensorNames::Original),
        (TextEncoder, "text_encoders.qwen3_4b.transformer.", TensorNames::Diffusers),
        (Vae, "first_stage_model.", TensorNames::Original),
    ];
    let mut tensors: Vec<(String, HostTensor)> = Vec::new();
    for (component, prefix, names) in components {
        let file = fixture.export(component, "component.safetensors", names, Storage::Keep);
        let source = WeightSource::open(&file).unwrap();
        let named = |name: &str| (format!("{prefix}{name}"), source.tensor(name).unwrap());
        tensors.extend(source.names().map(named));
        fs::remove_file(file).unwrap();
    }
    let tensors: Vec<(&str, HostTensor)> = tensors.iter().map(|(n, t)| (n.as_str(), t.clone())).collect();
    let file = fixture.path("klein-checkpoint.safetensors");
    save::save(&file, &tensors, &Default::default()).unwrap();
    fixture.copy_tokenizer();
    fixture.assert_matches_reference(&file);
}

/// With links to blobs, and with the files themselves, where there are no links.
#[test]
fn a_folder_of_the_hugging_face_cache_is_a_model() {
    for linked in [true, false].into_iter().filter(|linked| cfg!(unix) || !linked) {
        let fixture = Fixture::new();
        let cache = fixture.path("models--bfl--FLUX.2-klein");
        let snapshot = cache.join("snapshots/0a1b2c");
        fs::create_dir_all(cache.join("refs")).unwrap();
        fs::create_dir_all(cache.join("blobs")).unwrap();
        fs::write(cache.join("refs/main"), "0a1b2c").unwrap();
        fs::create_dir_all(cache.join("snapshots/older")).unwrap();
        for (i, entry) in walk(fixture.klein.path()).into_iter().enumerate() {
            let (blob, file) = (cache.join(format!("blobs/{i}")), snapshot.join(&entry));
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::copy(fixture.klein.path().join(&entry), if linked { &blob } else { &file }).unwrap();
            #[cfg(unix)]
            if linked {
                std::os::unix::fs::symlink(&blob, &file).unwrap();
            }
        }
        fixture.assert_matches_reference(&cache);
    }
}

/// All files below a folder, by their relative paths.
fn walk(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = PathBuf::from(path.file_name().unwrap());
        if path.is_dir() {
            files.extend(walk(&path).iter().map(|below| name.join(below)));
        } else {
            files.push(name);
        }
    }
    files
}

#[test]
fn components_are_given_by_a_toml_file_or_one_by_one() {
    let fixture = Fixture::new();
    let transformer = fixture.export(Transformer, "a/t.safetensors", TensorNames::Original, Storage::Keep);
    fixture.export(TextEncoder, "b/e.safetensors", TensorNames::Diffusers, Storage::Keep);
    fixture.export(Vae, "c/v.safetensors", TensorNames::Original, Storage::Keep);
    fixture.copy_tokenizer();
    let set = "transformer = 'a/t.safetensors'\ntext_encoder = 'b/e.safetensors'\nvae = 'c/v.safetensors'\n\
               tokenizer = 'tokenizer'\nvariant = 'distilled'";
    fs::write(fixture.path("model.toml"), set).unwrap();
    fixture.assert_matches_reference(&fixture.path("model.toml"));
    let named = Model::open(fixture.dir.path()).unwrap();
    assert_eq!((named.variant, named.path.ends_with("model.toml")), (flux2::DISTILLED, true));

    let alone = Model::open(&transformer).unwrap();
    assert!(alone.text_encoder.is_none() && alone.vae.is_none());
    assert!(
        alone.searched_folders.iter().any(|folder| folder.ends_with("a")),
        "{:?}",
        alone.searched_folders
    );
    let paths = ComponentPaths {
        transformer: Some(transformer),
        text_encoder: Some(fixture.path("b/e.safetensors")),
        variant: Some(flux2::BASE),
        tokenizer: Some(fixture.path("tokenizer/tokenizer.json")),
        ..ComponentPaths::default()
    };
    let whole = Model::open_with(Some(fixture.klein.path()), &paths).unwrap();
    assert_eq!((whole.variant, whole.vae.is_some()), (flux2::BASE, true));
    let error = Model::open(fixture.path("c/v.safetensors")).unwrap_err().to_string();
    assert!(error.contains("holds no FLUX.2 transformer: it has a VAE"), "{error}");
    fs::remove_dir_all(fixture.path("tokenizer")).unwrap();
    let error = Model::open_with(None, &ComponentPaths { tokenizer: None, ..paths }).unwrap_err().to_string();
    assert!(error.contains("448 tokens") && error.contains("tokenizer.json"), "{error}");
}

/// The final latents of a small image.
fn latents(fixture: &Fixture, transformer: PathBuf, text_encoder: Option<PathBuf>, dtype: DType) -> Vec<f32> {
    let paths = ComponentPaths { transformer: Some(transformer), text_encoder, ..ComponentPaths::default() };
    let model = Arc::new(Model::open_with(Some(fixture.klein.path()), &paths).unwrap());
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
fn quantized_weights_equal_their_dequantized_values() {
    let fixture = Fixture::new();
    let exact = latents(&fixture, fixture.klein.path().join("transformer"), None, DType::F32);
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
    for (format, max_error) in formats {
        let small = matches!(format, Format::F8E4M3 | Format::NvFp4);
        let name = if small { "klein.safetensors" } else { "klein.gguf" };
        let quantized = fixture.export(Transformer, name, TensorNames::Original, Storage::Quantized(format));
        let source = WeightSource::open_component(&quantized, Transformer).unwrap();
        assert!(source.names().any(|n| source.packed_format(n) == Some(format)), "{format}");
        let dequantized = fixture.path("dequantized.safetensors");
        let options = export::Options {
            component: Transformer,
            container: Container::Safetensors,
            names: TensorNames::Diffusers,
            storage: Storage::Dense(DType::F32),
            threads: 2,
        };
        export(&source, &dequantized, &options, &mut |_, _| Ok(())).unwrap();
        let found = latents(&fixture, quantized.clone(), None, DType::F32);
        let expected = latents(&fixture, dequantized.clone(), None, DType::F32);
        let error = distance(&found, &expected);
        assert!(error < 1e-5, "{format}: {error:e} off its dequantized values");
        let lost = distance(&expected, &exact);
        assert!(lost > 0.0 && lost < max_error, "{format}: {lost} off the original model");
        // The bf16 kernels use the same weights.
        let found = latents(&fixture, quantized.clone(), None, DType::BF16);
        let error = distance(&found, &expected);
        assert!(error < 0.15, "{format}: {error} in bf16");
        fs::remove_file(quantized).unwrap();
        fs::remove_file(dequantized).unwrap();
    }
}

#[test]
fn a_quantized_text_encoder_equals_its_dequantized_values() {
    let fixture = Fixture::new();
    let transformer = fixture.klein.path().join("transformer");
    // Rows of 16 values are too short for the blocks of GGUF formats.
    let quantized = fixture.export(
        TextEncoder,
        "e.safetensors",
        TensorNames::Diffusers,
        Storage::Quantized(Format::F8E4M3),
    );
    let source = WeightSource::open_component(&quantized, TextEncoder).unwrap();
    let options = export::Options {
        component: TextEncoder,
        container: Container::Gguf,
        names: TensorNames::Original,
        storage: Storage::Dense(DType::F32),
        threads: 1,
    };
    let dequantized = fixture.path("dequantized.gguf");
    export(&source, &dequantized, &options, &mut |_, _| Ok(())).unwrap();
    let found = latents(&fixture, transformer.clone(), Some(quantized), DType::F32);
    let expected = latents(&fixture, transformer, Some(dequantized), DType::F32);
    assert!(distance(&found, &expected) < 1e-5);
}
