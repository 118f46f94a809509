//! The tiny dev's text encoder in every naming and quantization gives the embeddings of transformers.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use kiln_family::flux2;
use kiln_nn::text_encoder::Config;
use kiln_nn::tokenizer::TokenizerFiles;
use kiln_tensor::packed::Format;
use kiln_tensor::packed::small_floats::to_e4m3;
use kiln_tensor::{DType, HostTensor};
use kiln_weights::export::{self, Container, Storage, TensorNames};
use kiln_weights::{Component, WeightSource, save};
use serde_json::json;
use tempfile::TempDir;

use super::dev::{Encoder, dev, reference, relative_error, tokens};

/// Layers that ComfyUI's files have.
const KEPT: usize = 30;
const STATES: [usize; 3] = [10, 20, 30];
/// Tokens of the prompt P0 that are no padding, and the width of their embeddings.
const REAL: usize = 48;
const TEXT_DIM: usize = 96;

type Tensors = Vec<(String, HostTensor)>;

/// The text encoder of the tiny dev, and a folder for files of it.
struct Fixture {
    encoder: WeightSource,
    dir: TempDir,
}

impl Fixture {
    fn new() -> Fixture {
        let checkpoint = dev();
        let folder = checkpoint.path().join("text_encoder");
        Fixture {
            // The files stay mapped when their folder is removed.
            encoder: WeightSource::open_component(folder, Component::TextEncoder).unwrap(),
            dir: tempfile::tempdir().unwrap(),
        }
    }

    fn tensor(&self, name: &str) -> HostTensor {
        self.encoder.tensor(name).unwrap()
    }

    /// The tensors of ComfyUI's files, under its names: the layers that encode prompts, and the vision tower.
    fn comfy(&self) -> Tensors {
        let is_kept = |name: &&str| match name.strip_prefix("model.layers.").and_then(|n| n.split_once('.')) {
            Some((number, _)) => number.parse::<usize>().unwrap() < KEPT,
            None => !name.starts_with("lm_head"),
        };
        self.encoder.names().filter(is_kept).map(|name| (name.to_owned(), self.tensor(name))).collect()
    }

    fn save(&self, name: &str, tensors: &[(String, HostTensor)], metadata: &[(&str, String)]) -> PathBuf {
        let file = self.dir.path().join(name);
        let named: Vec<(&str, HostTensor)> =
            tensors.iter().map(|(name, t)| (name.as_str(), t.clone())).collect();
        let metadata = metadata.iter().map(|(key, value)| ((*key).to_owned(), value.clone()));
        save::save(&file, &named, &metadata.collect()).unwrap();
        file
    }

    fn export(&self, name: &str, container: Container, names: TensorNames, storage: Storage) -> PathBuf {
        let file = self.dir.path().join(name);
        let component = Component::TextEncoder;
        let options = export::Options { component, container, names, storage, threads: 2 };
        let source = self.encoder.clone().with_metadata([("head_dim".into(), "16".into())]);
        export::export(&source, &file, &options, &mut |_, _| Ok(())).unwrap();
        file
    }
}

/// The embeddings of P0 with the text encoder in a file that has no configuration.
fn embeddings(file: &Path) -> Vec<f32> {
    let weights = WeightSource::open_component(file, Component::TextEncoder).unwrap();
    let config = Config::from_tensors(&weights).unwrap();
    assert_eq!(config.encoder(), &flux2::MISTRAL);
    assert_eq!((config.problem(), config.head_dim(), config.rope_theta()), (None, 16, 1e9));
    weights.check_tensors(Component::TextEncoder, &config.tensors()).unwrap();
    let prompts = reference("prompts.safetensors");
    Encoder::new(&weights, config).encode(&tokens(&prompts, "P0", REAL), &STATES)
}

/// Compares the rows of the prompt with a tensor of the reference.
fn assert_embeddings(file: &Path, (source, tensor): (&str, &str)) {
    let expected = reference(source).tensor(tensor).unwrap();
    let expected = expected.to_f32().unwrap();
    let ours = embeddings(file);
    let real = REAL * TEXT_DIM;
    let error = relative_error(&ours[ours.len() - real..], &expected[expected.len() - real..]);
    assert!(error < 1e-5, "{}: {error:e}", file.display());
}

const LOSSLESS: (&str, &str) = ("prompts.safetensors", "P0.prompt_embeds");
const FP8: (&str, &str) = ("formats.safetensors", "P0.prompt_embeds_fp8");
const Q8_0: (&str, &str) = ("formats.safetensors", "P0.prompt_embeds_q8_0");

fn bytes(text: &[u8]) -> HostTensor {
    HostTensor::new(DType::U8, [text.len()], text.to_vec().into()).unwrap()
}

#[test]
fn every_naming_gives_the_same_embeddings() {
    let fixture = Fixture::new();
    let all: Tensors = fixture.encoder.names().map(|name| (name.to_owned(), fixture.tensor(name))).collect();
    let renamed = |rename: &dyn Fn(&str) -> String| -> Tensors {
        all.iter().map(|(name, tensor)| (rename(name), tensor.clone())).collect()
    };
    let transformers_4 = renamed(&|name| match name.strip_prefix("model.") {
        Some(rest) => format!("language_model.model.{rest}"),
        None if name.starts_with("lm_head") => format!("language_model.{name}"),
        None => name.to_owned(),
    });
    let transformers_5 = renamed(&|name| match name.strip_prefix("model.") {
        Some(rest) => format!("model.language_model.{rest}"),
        None if name.starts_with("lm_head") => name.to_owned(),
        None => format!("model.{name}"),
    });
    let mut comfy = fixture.comfy();
    comfy.push(("tekken_model".into(), bytes(b"{}")));
    for (name, tensors) in [("4", &transformers_4), ("5", &transformers_5), ("comfy", &comfy)] {
        assert_embeddings(&fixture.save(name, tensors, &[]), LOSSLESS);
    }
    let gguf = fixture.export("llama.gguf", Container::Gguf, TensorNames::Original, Storage::Keep);
    assert!(WeightSource::open_component(&gguf, Component::TextEncoder).unwrap().has_interleaved_rotary());
    assert_embeddings(&gguf, LOSSLESS);
    // ComfyUI's names in a GGUF, as gguf-org's files have them.
    let cow = fixture.export("cow.gguf", Container::Gguf, TensorNames::Diffusers, Storage::Keep);
    assert!(!WeightSource::open_component(&cow, Component::TextEncoder).unwrap().has_interleaved_rotary());
    assert_embeddings(&cow, LOSSLESS);
    let names = TensorNames::Original;
    let llama = fixture.export("llama.safetensors", Container::Safetensors, names, Storage::Keep);
    assert_embeddings(&llama, LOSSLESS);
}

/// ComfyUI's fp8 tensors, with scales under the name that `scale` has.
fn fp8(fixture: &Fixture, scale: &str) -> (Tensors, Vec<String>) {
    let (mut tensors, mut layers) = (Tensors::new(), Vec::new());
    for (name, tensor) in fixture.comfy() {
        let is_vision = name.starts_with("vision_tower") || name.starts_with("multi_modal");
        if is_vision || name == "model.norm.weight" {
            continue;
        }
        let module = name.strip_suffix(".weight").unwrap().to_owned();
        if !name.starts_with("model.layers.") || tensor.shape().rank() != 2 {
            tensors.push((name, tensor));
            continue;
        }
        let values = tensor.to_f32().unwrap();
        let largest = values.iter().fold(0f32, |max, value| max.max(value.abs())) / 448.0;
        let codes: Vec<u8> = values.iter().map(|value| to_e4m3(value / largest)).collect();
        tensors.push((name, HostTensor::new(DType::F8E4M3, tensor.shape(), codes.into()).unwrap()));
        let scalar = |value: f32| HostTensor::from_f32([0; 0], vec![value]).unwrap();
        tensors.push((format!("{module}.{scale}"), scalar(largest)));
        let input = if scale == "weight_scale" { "input_scale" } else { "scale_input" };
        tensors.push((format!("{module}.{input}"), scalar(0.0123)));
        layers.push(module);
    }
    (tensors, layers)
}

#[test]
fn fp8_in_every_convention_of_comfyui_gives_its_embeddings() {
    let fixture = Fixture::new();
    let (listed, layers) = fp8(&fixture, "weight_scale");
    let list: BTreeMap<&String, _> =
        layers.iter().map(|layer| (layer, json!({ "format": "float8_e4m3fn" }))).collect();
    let header = json!({ "format_version": "1.0", "layers": list }).to_string();
    let file = fixture.save("listed.safetensors", &listed, &[("_quantization_metadata", header)]);
    assert_embeddings(&file, FP8);
    let mark = |layer: &String| (format!("{layer}.comfy_quant"), bytes(br#"{"format": "float8_e4m3fn"}"#));
    let marked: Tensors = listed.iter().cloned().chain(layers.iter().map(mark)).collect();
    assert_embeddings(&fixture.save("marked.safetensors", &marked, &[]), FP8);
    let mut older = fp8(&fixture, "scale_weight").0;
    older.push(("scaled_fp8".into(), HostTensor::new(DType::F8E4M3, [0], Vec::new().into()).unwrap()));
    assert_embeddings(&fixture.save("older.safetensors", &older, &[]), FP8);
}

#[test]
fn quantized_files_give_the_embeddings_of_their_values() {
    let fixture = Fixture::new();
    let q8_0 = Storage::Quantized(Format::Q8_0);
    assert_embeddings(&fixture.export("q8.gguf", Container::Gguf, TensorNames::Original, q8_0), Q8_0);
    let nvfp4 = |name: &str, names| {
        fixture.export(name, Container::Safetensors, names, Storage::Quantized(Format::NvFp4))
    };
    let file = nvfp4("nvfp4.safetensors", TensorNames::Diffusers);
    let source = WeightSource::open_component(&file, Component::TextEncoder).unwrap();
    assert_eq!(source.storage_name("model.layers.0.mlp.up_proj.weight"), Some("nvfp4"));
    let values: Tensors =
        source.names().map(|name| (name.to_owned(), source.tensor(name).unwrap())).collect();
    let values = embeddings(&fixture.save("values.safetensors", &values, &[]));
    for file in [file, nvfp4("llama.safetensors", TensorNames::Original)] {
        let error = relative_error(&embeddings(&file), &values);
        assert!(error < 1e-5, "{}: {error:e}", file.display());
    }
}

#[test]
fn a_tokenizer_inside_a_file_is_found() {
    let fixture = Fixture::new();
    let mut comfy = fixture.comfy();
    let encoder = |tensors: &Tensors| {
        let file = fixture.save("comfy.safetensors", tensors, &[]);
        WeightSource::open_component(&file, Component::TextEncoder).unwrap()
    };
    assert!(TokenizerFiles::embedded(&encoder(&comfy)).is_none());
    comfy.push(("tekken_model".into(), bytes(b"{}")));
    assert!(TokenizerFiles::embedded(&encoder(&comfy)).is_some());
}

#[test]
fn files_that_are_cut_or_wrong_are_refused() {
    let fixture = Fixture::new();
    let problem = |tensors: Tensors, metadata: &[(&str, String)]| {
        let file = fixture.save("wrong.safetensors", &tensors, metadata);
        let weights = WeightSource::open_component(&file, Component::TextEncoder).unwrap();
        let config = Config::from_tensors(&weights).unwrap();
        let checked = || weights.check_tensors(Component::TextEncoder, &config.tensors()).unwrap_err();
        config.problem().unwrap_or_else(|| checked().to_string())
    };
    let without = |part: &str| -> Tensors {
        fixture.comfy().into_iter().filter(|(name, _)| !name.contains(part)).collect()
    };
    let short = problem(without("model.layers.29."), &[]);
    assert!(short.contains("num_hidden_layers is 29"), "{short}");
    let gap = problem(without("model.layers.12.mlp.up_proj"), &[]);
    assert!(gap.contains("no tensor `model.layers.12.mlp.up_proj.weight`"), "{gap}");
    // Heads that q and k can't be cut into, in the file's metadata.
    let heads = problem(without("lm_head"), &[("head_dim", "20".into())]);
    assert!(heads.contains("_proj.weight`") && heads.contains("expected ["), "{heads}");
    let number = problem(without("lm_head"), &[("head_dim", "wide".into())]);
    assert!(number.contains("head_dim"), "{number}");
}
