//! dev's text encoder on the tiny model that a recipe describes, and what dev refuses.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use kiln_cpu::CpuBackend;
use kiln_engine::pipeline::{LoadOptions, Pipeline};
use kiln_engine::{ComponentPaths, LocalFiles, LoraRef, Model, Plan, Request};
use kiln_family::flux2;
use kiln_golden::{Checkpoint, testdata};
use kiln_nn::text_encoder::{Config, TextEncoder};
use kiln_nn::tokenizer::Tokens;
use kiln_nn::{ResidencyPlan, config};
use kiln_ops::Backend;
use kiln_tensor::{DType, HostTensor};
use kiln_weights::{Component, WeightSource};
use serde_json::Value;
use sha2::{Digest, Sha256};

pub(super) fn dev() -> Checkpoint {
    Checkpoint::assemble(&testdata().join("dev"), "dev").unwrap()
}

pub(super) fn reference(name: &str) -> WeightSource {
    WeightSource::open(testdata().join("dev/reference").join(name)).unwrap()
}

pub(super) struct Encoder {
    b: CpuBackend,
    pub config: Config,
    encoder: TextEncoder<CpuBackend>,
}

impl Encoder {
    fn load(model: &Path, layers: &[usize]) -> Encoder {
        let folder = model.join("text_encoder");
        let config: Config = config::read(&folder.join("config.json")).unwrap();
        let weights = WeightSource::open_component(&folder, Component::TextEncoder).unwrap();
        Encoder::new(&weights, config.with_output_layers(layers))
    }

    pub fn new(weights: &WeightSource, config: Config) -> Encoder {
        let b = CpuBackend::new(Default::default()).unwrap();
        let plan = ResidencyPlan::all_on_device();
        let encoder = TextEncoder::load(&b, &weights.root(), &config, DType::F32, &plan).unwrap();
        Encoder { b, config, encoder }
    }

    pub fn encode(&self, tokens: &Tokens, layers: &[usize]) -> Vec<f32> {
        let text = self.encoder.forward(&self.b, tokens, layers, (0, 1), &mut ()).unwrap();
        self.b.download(&text).unwrap().to_f32().unwrap().into_owned()
    }
}

/// The ids of a prompt as the pipeline makes them.
pub(super) fn tokens(prompts: &WeightSource, name: &str, real: usize) -> Tokens {
    let ids = prompts.tensor(&format!("{name}.input_ids")).unwrap();
    let ids: Vec<u32> =
        ids.bytes().chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect();
    Tokens { real: ids.len() - real..ids.len(), ids }
}

pub(super) fn relative_error(ours: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(ours.len(), expected.len());
    let sum = |f: &dyn Fn(f64, f64) -> f64| {
        let pairs = ours.iter().zip(expected);
        pairs.map(|(a, b)| f(f64::from(*a), f64::from(*b))).sum::<f64>().sqrt()
    };
    sum(&|a, b| (a - b).powi(2)) / sum(&|_, b| b * b)
}

#[test]
fn the_text_encoder_gives_the_embeddings_of_the_pipeline() {
    let folder = dev();
    let encoder = Encoder::load(folder.path(), &[10, 20, 30]);
    assert_eq!(encoder.config.encoder(), &flux2::MISTRAL);
    let dim = encoder.config.text_dim();
    let prompts = reference("prompts.safetensors");
    let info: BTreeMap<String, Value> = config::read(&testdata().join("dev/reference/prompts.json")).unwrap();
    for (name, prompt) in info["prompts"].as_object().unwrap() {
        let real = prompt["n_tokens"].as_u64().unwrap() as usize;
        let ours = encoder.encode(&tokens(&prompts, name, real), &[10, 20, 30]);
        assert_eq!(ours.len(), 512 * dim);
        let expected = prompts.tensor(&format!("{name}.prompt_embeds")).unwrap();
        let expected = expected.to_f32().unwrap();
        let error = relative_error(&ours[ours.len() - expected.len()..], &expected);
        assert!(error < 1e-5, "{name}: {error:e}");
        // One state for all of the padding.
        let pads: Vec<&[f32]> = ours.chunks_exact(dim).take(512 - real).collect();
        assert!(pads.iter().all(|pad| *pad == pads[0]), "{name}");
    }
}

#[test]
fn states_are_taken_in_any_order_and_from_the_loaded_layers_only() {
    let folder = dev();
    let encoder = Encoder::load(folder.path(), &[10, 20, 30]);
    let dim = encoder.config.hidden_size;
    let tokens = tokens(&reference("prompts.safetensors"), "P0", 48);
    let usual = encoder.encode(&tokens, &[10, 20, 30]);
    let other = encoder.encode(&tokens, &[30, 10, 10]);
    for (usual, other) in usual.chunks_exact(3 * dim).zip(other.chunks_exact(3 * dim)) {
        assert_eq!(
            [&other[..dim], &other[dim..2 * dim], &other[2 * dim..]],
            [&usual[2 * dim..], &usual[..dim], &usual[..dim]]
        );
    }
    let failed = encoder.encoder.forward(&encoder.b, &tokens, &[10, 20, 31], (0, 1), &mut ());
    let message = failed.err().unwrap().to_string();
    assert!(message.contains("31") && message.contains("30 layers"), "{message}");
}

#[test]
fn a_text_encoder_of_another_family_is_refused_before_weights_are_read() {
    let (dev, klein) = (dev(), Checkpoint::assemble(&testdata(), "klein").unwrap());
    for (model, other) in [(&dev, &klein), (&klein, &dev)] {
        let text_encoder = other.path().join("text_encoder");
        let paths = ComponentPaths { text_encoder: Some(text_encoder), ..ComponentPaths::default() };
        let error = Model::open_with(Some(model.path()), &paths).unwrap_err().to_string();
        assert!(error.contains("Qwen3") && error.contains("Mistral"), "{error}");
    }
    // The configuration is enough.
    let config = dev.path().join("text_encoder/config.json");
    fs::remove_file(&config).unwrap();
    fs::copy(klein.path().join("text_encoder/config.json"), &config).unwrap();
    let error = Model::open(dev.path()).unwrap_err().to_string();
    assert!(error.contains("takes its text from Mistral"), "{error}");
}

#[test]
fn text_layers_are_checked_and_recorded() {
    let folder = dev();
    let model = Arc::new(Model::open(folder.path()).unwrap());
    let plan = |layers: &[u32]| {
        let request = Request { text_layers: layers.to_vec(), ..Request::new("a fox") };
        Plan::new(&model, &request, &LocalFiles)
    };
    let usual = plan(&[]).unwrap();
    assert_eq!((&usual.text_layers[..], usual.request.text_layers.len()), (&[10, 20, 30][..], 0));
    assert_eq!((usual.steps, usual.guidance), (50, Some(4.0)));
    let chosen = plan(&[8, 16, 24]).unwrap();
    assert_eq!(
        (&chosen.text_layers[..], &chosen.request.text_layers[..]),
        (&[8, 16, 24][..], &[8, 16, 24][..])
    );
    for (layers, word) in [(&[10, 20][..], "takes 3 text layers, found 2"), (&[10, 20, 34], "has 33 layers")]
    {
        let error = plan(layers).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    }
}

#[test]
fn values_of_a_recipe_are_those_of_torch() {
    let recipe: Value = config::read(&testdata().join("dev/tiny/dev/recipe.json")).unwrap();
    let folder = dev();
    for (component, description) in recipe.as_object().unwrap() {
        let source = WeightSource::open(folder.path().join(component)).unwrap();
        let mut hash = Sha256::new();
        for tensor in description["tensors"].as_array().unwrap() {
            let tensor: HostTensor = source.tensor(tensor["name"].as_str().unwrap()).unwrap();
            hash.update(tensor.bytes());
        }
        assert_eq!(kiln_base::hex(hash.finalize()), description["sha256"].as_str().unwrap(), "{component}");
    }
}

/// Writes a LoRA for two layers of dev, under these names, each with its rows and columns.
fn write_lora(file: &Path, modules: [(&str, [usize; 2]); 2]) {
    let mut tensors = Vec::new();
    for (module, [rows, cols]) in modules {
        for (name, shape, start) in [("lora_A", [4, cols], 1), ("lora_B", [rows, 4], 7)] {
            let value = |i: usize| ((i + start) as f32 * 0.37).sin() * 0.2;
            let values = (0..shape[0] * shape[1]).map(value).collect();
            tensors.push((format!("{module}.{name}.weight"), HostTensor::from_f32(shape, values).unwrap()));
        }
    }
    let tensors: Vec<(&str, HostTensor)> =
        tensors.iter().map(|(name, t)| (name.as_str(), t.clone())).collect();
    kiln_weights::save::save(file, &tensors, &BTreeMap::new()).unwrap();
}

#[test]
fn loras_of_dev_reach_its_guidance_in_both_namings() {
    let (folder, files) = (dev(), tempfile::tempdir().unwrap());
    let model = Arc::new(Model::open(folder.path()).unwrap());
    let (diffusers, bfl) = (files.path().join("d.safetensors"), files.path().join("b.safetensors"));
    let (guidance, single) = ([128, 256], [128, 512]);
    write_lora(
        &diffusers,
        [
            ("transformer.time_guidance_embed.guidance_embedder.linear_1", guidance),
            ("transformer.single_transformer_blocks.2.attn.to_out", single),
        ],
    );
    write_lora(
        &bfl,
        [
            ("diffusion_model.guidance_in.in_layer", guidance),
            ("diffusion_model.single_blocks.2.linear2", single),
        ],
    );
    let latents = |lora: Option<&Path>| {
        let lora = lora.map(|path| LoraRef { path: path.into(), weight: 1.0, sha256: None });
        let loras = lora.into_iter().collect();
        let small = Request { width: Some(64), height: Some(64), steps: Some(2), ..Request::new("a fox") };
        let plan = Plan::new(&model, &Request { max_tokens: Some(64), loras, ..small }, &LocalFiles).unwrap();
        let options = LoadOptions { loras: plan.loras.clone(), ..LoadOptions::default() };
        let b = CpuBackend::new(Default::default()).unwrap();
        let pipeline = Pipeline::load(b, &model, &options, &mut ()).unwrap();
        pipeline.generate(&plan, &mut ()).unwrap().remove(0).latents.to_f32().unwrap().into_owned()
    };
    let without = latents(None);
    let with = latents(Some(&diffusers));
    assert!(relative_error(&with, &without) > 1e-2);
    assert_eq!(with, latents(Some(&bfl)));
}
