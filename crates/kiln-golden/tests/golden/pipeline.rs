//! The pipeline on the repository's tiny checkpoints: invalid models and requests, cancelling, and reproducibility.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use kiln_cpu::{CpuBackend, CpuOptions};
use kiln_engine::pipeline::{LoadOptions, Pipeline, PipelineOutput};
use kiln_engine::{
    Error, ErrorKind, Event, Explain, LocalFiles, LoraRef, MissingComponent, Model, Plan, Request,
};
use kiln_family::flux2;
use kiln_golden::{Checkpoint, TestInputs, testdata};
use kiln_nn::Observer;
use kiln_ops::Backend;
use kiln_tensor::{DType, HostTensor};
use kiln_weights::WeightSource;
use serde_json::{Value, json};

fn checkpoint(name: &str) -> Checkpoint {
    Checkpoint::assemble(&testdata(), name).unwrap()
}

fn backend(threads: usize) -> CpuBackend {
    CpuBackend::new(CpuOptions { threads: Some(threads), ..CpuOptions::default() }).unwrap()
}

fn load(path: &Path, options: &LoadOptions) -> Result<Pipeline<CpuBackend>, Error> {
    Pipeline::load(backend(2), &Arc::new(Model::open(path)?), options, &mut ())
}

fn klein() -> (Checkpoint, Pipeline<CpuBackend>) {
    let folder = checkpoint("klein");
    let pipeline = load(folder.path(), &LoadOptions::default()).unwrap();
    (folder, pipeline)
}

fn small(prompt: &str) -> Request {
    Request {
        width: Some(64),
        height: Some(48),
        steps: Some(2),
        max_tokens: Some(32),
        ..Request::new(prompt)
    }
}

fn plan(pipeline: &Pipeline<CpuBackend>, request: &Request) -> Result<Plan, Error> {
    Plan::new(pipeline.model(), request, &LocalFiles)
}

fn generate(pipeline: &Pipeline<CpuBackend>, request: &Request) -> Result<Vec<PipelineOutput>, Error> {
    pipeline.generate(&plan(pipeline, request)?, &mut ())
}

/// Replaces a file (it may be a hard link into the golden set) by an edited copy.
fn edit_json(file: &Path, edit: impl FnOnce(&mut Value)) {
    let mut value = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
    edit(&mut value);
    fs::remove_file(file).unwrap();
    fs::write(file, value.to_string()).unwrap();
}

fn load_error(path: &Path) -> String {
    match load(path, &LoadOptions::default()) {
        Ok(_) => panic!("`{}` was accepted", path.display()),
        Err(e) => e.to_string(),
    }
}

#[test]
fn the_model_index_decides_the_variant() {
    let expected = [
        ("klein", flux2::DISTILLED, 4, None),
        ("klein-base", flux2::BASE, 50, Some(4.0)),
        ("klein-kv", flux2::KV, 4, None),
        ("dev", flux2::DEV, 50, Some(4.0)),
    ];
    for (name, variant, steps, guidance) in expected {
        let model = Model::open(checkpoint(name).path()).unwrap();
        assert_eq!(model.variant, variant);
        assert_eq!((variant.steps, variant.default_guidance()), (steps, guidance));
    }
}

#[test]
fn a_text_encoder_of_the_wrong_size_is_an_error_before_loading() {
    let folder = checkpoint("klein");
    edit_json(&folder.path().join("text_encoder/config.json"), |c| c["hidden_size"] = json!(4096));
    let e = Model::open(folder.path()).unwrap_err().to_string();
    assert!(e.contains("hidden size 16") && e.contains("hidden size 4096"), "{e}");
}

#[test]
fn shape_errors_name_the_tensor_and_both_shapes() {
    let folder = checkpoint("klein");
    edit_json(&folder.path().join("transformer/config.json"), |c| {
        c["num_attention_heads"] = json!(2);
    });
    let e = load_error(folder.path());
    assert!(
        e.contains("context_embedder.weight") && e.contains("[128, 48]") && e.contains("[256, 48]"),
        "{e}"
    );
}

#[test]
fn a_missing_block_is_a_missing_tensor() {
    let folder = checkpoint("klein");
    edit_json(&folder.path().join("transformer/config.json"), |c| c["num_single_layers"] = json!(3));
    let e = load_error(folder.path());
    assert!(e.contains("single_transformer_blocks.2."), "{e}");
}

#[test]
fn invalid_configs_are_errors() {
    type Edit = fn(&mut Value);
    let edits: [(&str, Edit, &str); 16] = [
        ("transformer/config.json", |c| c["rope_theta"] = json!(0), "rope_theta"),
        ("transformer/config.json", |c| c["mlp_ratio"] = json!(-3.0), "mlp_ratio"),
        ("vae/config.json", |c| c["act_fn"] = json!("gelu"), "act_fn"),
        ("text_encoder/config.json", |c| c["rope_scaling"] = json!({"type": "yarn"}), "rotary"),
        (
            "scheduler/scheduler_config.json",
            |c| c["_class_name"] = json!("DDIMScheduler"),
            "scheduler other than",
        ),
        ("scheduler/scheduler_config.json", |c| c["num_train_timesteps"] = json!(500), "num_train_timesteps"),
        ("transformer/config.json", |c| c["axes_dims_rope"] = json!([32, 32, 32]), "axes_dims_rope"),
        ("transformer/config.json", |c| c["attention_head_dim"] = json!(0), "attention_head_dim"),
        ("transformer/config.json", |c| c["num_layers"] = json!("two"), "invalid type"),
        ("vae/config.json", |c| c["norm_num_groups"] = json!(5), "5 groups"),
        ("text_encoder/config.json", |c| c["num_hidden_layers"] = json!(12), "num_hidden_layers is 12"),
        ("text_encoder/config.json", |c| c["model_type"] = json!("llama"), "llama"),
        ("scheduler/scheduler_config.json", |c| c["use_karras_sigmas"] = json!(true), "use_karras_sigmas"),
        (
            "scheduler/scheduler_config.json",
            |c| c["stochastic_sampling"] = json!(true),
            "stochastic_sampling",
        ),
        (
            "model_index.json",
            |c| c["scheduler"] = json!(["diffusers", "DDIMScheduler"]),
            "the scheduler is `DDIMScheduler`",
        ),
        ("model_index.json", |c| c["_class_name"] = json!("FluxPipeline"), "FluxPipeline"),
    ];
    for (file, edit, expected) in edits {
        let folder = checkpoint("klein");
        edit_json(&folder.path().join(file), edit);
        let e = load_error(folder.path());
        assert!(e.contains(expected), "{file}: {e}");
    }
}

#[test]
fn a_folder_without_a_model_is_an_error() {
    let empty = tempfile::tempdir().unwrap();
    assert!(load_error(empty.path()).contains("model_index.json"));
    assert!(load_error(&empty.path().join("nowhere")).contains("no such folder"));
}

#[test]
fn a_folder_without_tokenizer_uses_the_built_in_one() {
    let folder = checkpoint("klein");
    fs::remove_dir_all(folder.path().join("tokenizer")).unwrap();
    let pipeline = load(folder.path(), &LoadOptions::default()).unwrap();
    // The tiny model's embedding has fewer rows than Qwen3 has tokens: the error proves which tokenizer was used.
    let e = generate(&pipeline, &small("a cat")).unwrap_err().to_string();
    assert!(e.contains("outside the embedding"), "{e}");
}

#[test]
fn a_model_without_vae_needs_one() {
    let folder = checkpoint("klein");
    fs::remove_dir_all(folder.path().join("vae")).unwrap();
    assert!(load_error(folder.path()).contains("vae"));
    let model = Arc::new(Model::open(folder.path()).unwrap());
    let error = Plan::new(&model, &small("a cat"), &LocalFiles).unwrap_err();
    assert!(matches!(error, Error::MissingComponent { component: MissingComponent::Vae, .. }), "{error:?}");
    let vae = testdata().join("tiny/klein/vae/diffusion_pytorch_model.safetensors");
    let request = Request { vae: Some(vae.into()), ..small("a cat") };
    let plan = Plan::new(&model, &request, &LocalFiles).unwrap();
    let options = LoadOptions { vae: plan.vae.clone(), ..LoadOptions::default() };
    let pipeline = Pipeline::load(backend(2), &model, &options, &mut ()).unwrap();
    assert_eq!(pipeline.generate(&plan, &mut ()).unwrap().len(), 1);
}

#[test]
fn the_config_of_a_vae_is_inferred_from_its_tensors() {
    let (folder, pipeline) = klein();
    let expected = generate(&pipeline, &small("a cat")).unwrap();
    let alone = tempfile::tempdir().unwrap();
    let file = alone.path().join("vae.safetensors");
    fs::copy(testdata().join("tiny/klein/vae/diffusion_pytorch_model.safetensors"), &file).unwrap();
    let request = Request { vae: Some(file.into()), ..small("a cat") };
    // Given when the model is loaded, or later.
    let plan = plan(&pipeline, &request).unwrap();
    let options = LoadOptions { vae: plan.vae.clone(), ..LoadOptions::default() };
    let other = load(folder.path(), &options).unwrap();
    for pipeline in [&pipeline, &other] {
        assert_eq!(pipeline.generate(&plan, &mut ()).unwrap()[0].image, expected[0].image);
    }
}

#[test]
fn the_same_request_gives_the_same_bytes_on_any_number_of_threads() {
    let folder = checkpoint("klein");
    let model = Arc::new(Model::open(folder.path()).unwrap());
    let plan = Plan::new(&model, &small("a cat"), &LocalFiles).unwrap();
    let generate = |threads| {
        let pipeline = Pipeline::load(backend(threads), &model, &LoadOptions::default(), &mut ()).unwrap();
        pipeline.generate(&plan, &mut ()).unwrap().remove(0)
    };
    let (one, three) = (generate(1), generate(3));
    assert_eq!(one.latents, three.latents);
    assert_eq!(one.image, three.image);
}

struct StopAtBlock;

impl<B: Backend> Observer<B> for StopAtBlock {
    fn event(&mut self, event: Event) -> kiln_nn::Result<()> {
        match event {
            Event::Block { done: 2, .. } => Err(kiln_nn::Error::Cancelled),
            Event::StepFinished { .. } => panic!("the step was finished"),
            _ => Ok(()),
        }
    }
}

#[test]
fn an_observer_stops_a_run_within_a_step() {
    let (_folder, pipeline) = klein();
    let plan = plan(&pipeline, &small("a cat")).unwrap();
    assert!(pipeline.generate(&plan, &mut StopAtBlock).unwrap_err().is_cancelled());
}

#[test]
fn invalid_requests_are_errors() {
    let folder = checkpoint("klein");
    let model = Arc::new(Model::open(folder.path()).unwrap());
    let mut inputs = TestInputs::new();
    let narrow = inputs.add_tensors("narrow", &[("prompt_embeds", HostTensor::zeros([4, 7]))]);
    let negatives = |n: usize| vec!["a dog".to_owned(); n];
    let bad = [
        (Request { width: Some(0), ..small("x") }, "width"),
        (Request { height: Some(15), ..small("x") }, "height"),
        (Request { width: Some(u32::MAX), ..small("x") }, "width"),
        (Request { steps: Some(0), ..small("x") }, "steps"),
        (Request { steps: Some(1_000_000), ..small("x") }, "steps"),
        (Request { n: Some(0), ..small("x") }, "`n` must be"),
        (Request { n: Some(u32::MAX), ..small("x") }, "too many"),
        (Request { prompts: Vec::new(), ..small("x") }, "`prompt` is missing"),
        (Request { max_tokens: Some(0), ..small("x") }, "max_tokens"),
        (Request { guidance: Some(f32::NAN), ..small("x") }, "guidance"),
        (Request { sigmas: vec![0.5, 0.9], ..small("x") }, "sigmas"),
        (Request { prompts: Vec::new(), embeds: Some(narrow), ..small("x") }, "[tokens, 48]"),
        (Request { negative_prompts: negatives(2), ..small("x") }, "2 values of `negative_prompt`"),
        (Request { seed: vec![1, 2, 3], n: Some(2), ..small("x") }, "3 values of `seed`"),
    ];
    for (request, expected) in bad {
        match Plan::new(&model, &request, &inputs) {
            Ok(_) => panic!("accepted, expected an error about {expected}"),
            Err(e) => assert!(
                e.to_string().contains(expected) && matches!(e.kind(), ErrorKind::Value | ErrorKind::Request),
                "{e}"
            ),
        }
    }
}

#[test]
fn nan_and_overflow_are_errors_wherever_they_come_from() {
    let (_folder, mut pipeline) = klein();
    let mut inputs = TestInputs::new();
    let nans = |shape: &[usize]| {
        let count = shape.iter().product();
        HostTensor::from_f32(shape, vec![f32::NAN; count]).unwrap()
    };
    let noise = Some(inputs.add_tensors("noise", &[("noise", nans(&[1, 128, 3, 4]))]));
    let e = plan(&pipeline, &Request { noise, ..small("x") }).unwrap_err().to_string();
    assert!(e.contains("noise") && e.contains("NaN"), "{e}");
    let embeds = Some(inputs.add_tensors("text", &[("prompt_embeds", nans(&[4, 48]))]));
    let e = plan(&pipeline, &Request { prompts: Vec::new(), embeds, ..small("") }).unwrap_err().to_string();
    assert!(e.contains("embedding"), "{e}");

    let path = testdata().join("tiny/lora/lora_diffusers.safetensors");
    let loras = vec![LoraRef { path, weight: 1e38, sha256: None }];
    let plan = plan(&pipeline, &Request { loras, ..small("x") }).unwrap();
    pipeline.set_loras(&plan.loras, false).unwrap();
    let e = pipeline.generate(&plan, &mut ()).unwrap_err().to_string();
    assert!(e.contains("the latent after step 1 of 2"), "{e}");
}

/// A reference image whose latents are NaN is an error that names them.
#[test]
fn nan_latents_of_a_reference_image_are_an_error() {
    let folder = checkpoint("klein");
    let file = folder.path().join("vae/diffusion_pytorch_model.safetensors");
    let tensors: Vec<(String, HostTensor)> = {
        let source = WeightSource::open(&file).unwrap();
        let with_overflow = |name: &str| {
            let tensor = source.tensor(name).unwrap();
            let shape = tensor.shape().dims().to_vec();
            let huge = || HostTensor::from_f32(shape.clone(), vec![3e38; shape.iter().product()]).unwrap();
            (name.to_owned(), if name == "encoder.conv_in.bias" { huge() } else { tensor })
        };
        source.names().map(with_overflow).collect()
    };
    assert!(tensors.iter().any(|(name, _)| name == "encoder.conv_in.bias"));
    let tensors: Vec<_> = tensors.iter().map(|(name, t)| (name.as_str(), t.clone())).collect();
    let broken = folder.path().join("broken.safetensors");
    kiln_weights::save::save(&broken, &tensors, &Default::default()).unwrap();
    fs::rename(&broken, &file).unwrap();
    let pipeline = load(folder.path(), &LoadOptions::default()).unwrap();
    assert_eq!(generate(&pipeline, &small("a cat")).unwrap().len(), 1);
    let reference = testdata().join("reference/inputs/inpaint_100x72.png");
    let request = Request { references: vec![reference.into()], ..small("a cat") };
    let e = generate(&pipeline, &request).unwrap_err().to_string();
    assert!(e.contains("the autoencoder's latent"), "{e}");
}

#[test]
fn a_huge_size_is_an_error_with_the_memory_it_needs() {
    let folder = checkpoint("klein");
    let model = Arc::new(Model::open(folder.path()).unwrap());
    let request = Request { width: Some(65536), height: Some(65536), ..small("x") };
    let plan = Plan::new(&model, &request, &LocalFiles).unwrap();
    let error = plan.check_memory(DType::F32, Some(1 << 30)).unwrap_err();
    assert!(matches!(error, Error::Memory { any_size: false, .. }), "{error:?}");
    let e = error.to_string();
    assert!(e.contains("65536×65536") && e.contains("GiB"), "{e}");
    assert!(plan.check_memory(DType::F32, None).is_ok());
    let plan = Plan::new(&model, &small("x"), &LocalFiles).unwrap();
    assert!(plan.check_memory(DType::F32, Some(1 << 30)).is_ok());
}

#[test]
fn a_dev_model_needs_text_embeddings() {
    let folder = checkpoint("dev");
    let pipeline = load(folder.path(), &LoadOptions::default()).unwrap();
    let e = plan(&pipeline, &small("a cat")).unwrap_err();
    assert!(matches!(e, Error::MissingComponent { component: MissingComponent::TextEncoder, .. }), "{e:?}");
}

#[test]
fn options_without_effect_are_noted() {
    struct Notes(Vec<String>);
    impl<B: Backend> Observer<B> for Notes {
        fn event(&mut self, event: Event) -> kiln_nn::Result<()> {
            if let Event::Note(note) = event {
                self.0.push(note);
            }
            Ok(())
        }
    }
    let (_folder, pipeline) = klein();
    let negative_prompts = vec!["a dog".into()];
    let request = Request { negative_prompts, guidance: Some(4.0), width: Some(70), ..small("a cat") };
    let plan = plan(&pipeline, &request).unwrap();
    let notes = plan.notes.join("\n");
    for expected in ["guidance", "negative", "70 is rounded down to 64"] {
        assert!(notes.contains(expected), "{notes}");
    }
    let mut notes = Notes(Vec::new());
    pipeline.generate(&plan, &mut notes).unwrap();
    assert_eq!(notes.0, plan.notes);
}

#[test]
fn less_strength_stays_closer_to_the_initial_image() {
    let (_folder, pipeline) = klein();
    let init = testdata().join("reference/inputs/inpaint_100x72.png");
    let vary = |strength| {
        let request = Request {
            init: Some(init.clone().into()),
            strength: Some(strength),
            width: None,
            height: None,
            steps: Some(10),
            ..small("a cat")
        };
        let output = generate(&pipeline, &request).unwrap().remove(0);
        assert_eq!((output.image.width(), output.image.height()), (96, 64));
        output.latents
    };
    let distance = |a: &HostTensor, b: &HostTensor| {
        let (a, b) = (a.to_f32().unwrap(), b.to_f32().unwrap());
        a.iter().zip(b.iter()).map(|(a, b)| (a - b).powi(2)).sum::<f32>().sqrt()
    };
    let almost = vary(0.1);
    assert!(distance(&vary(0.2), &almost) < distance(&vary(0.9), &almost));
}

#[test]
fn bf16_noise_is_the_rounded_f32_noise() {
    let folder = checkpoint("klein");
    let options = LoadOptions { dtype: DType::BF16, ..LoadOptions::default() };
    let pipeline = load(folder.path(), &options).unwrap();
    struct Noise<'a>(&'a CpuBackend, Option<HostTensor>);
    impl Observer<CpuBackend> for Noise<'_> {
        fn inspect(&mut self, name: &str, x: &<CpuBackend as Backend>::Tensor) -> kiln_nn::Result<()> {
            if name == "noise" {
                self.1 = Some(self.0.download(x)?);
            }
            Ok(())
        }
    }
    let mut noise = Noise(pipeline.backend(), None);
    pipeline.generate(&plan(&pipeline, &small("a cat")).unwrap(), &mut noise).unwrap();
    let noise = noise.1.unwrap();
    assert_eq!(noise.to_dtype(DType::BF16).unwrap().to_dtype(DType::F32).unwrap(), noise);
}

/// Writes a single-file model with its own default size and metadata.
fn write_single_file(folder: &Checkpoint, file: &Path, metadata: &[(&str, &str)]) {
    folder.write_single_file(file, &[&[("default_size", "48")], metadata].concat()).unwrap();
}

#[test]
fn a_single_file_model_gives_the_same_image_as_its_folder() {
    let (folder, pipeline) = klein();
    let file = folder.path().join("klein.safetensors");
    write_single_file(&folder, &file, &[]);
    let single_file = load(&file, &LoadOptions::default()).unwrap();
    let image = |p: &Pipeline<CpuBackend>| generate(p, &small("a cat")).unwrap().remove(0).image;
    assert_eq!(image(&single_file), image(&pipeline));
    let fingerprint = |p: &Pipeline<CpuBackend>| p.model().transformer.fingerprint().unwrap().to_owned();
    assert_eq!(fingerprint(&single_file), fingerprint(&pipeline));
    let plan = plan(&single_file, &Request { width: None, height: None, ..small("a cat") }).unwrap();
    assert_eq!((plan.width, plan.height), (48, 48));
}

#[test]
fn a_single_file_model_has_its_own_defaults() {
    let folder = checkpoint("klein");
    let file = folder.path().join("klein.safetensors");
    let own = [("default_steps", "24"), ("default_guidance", "2.5")];
    let planned = |own: &[(&str, &str)], request: &Request| {
        write_single_file(&folder, &file, own);
        let plan = Plan::new(&Arc::new(Model::open(&file).unwrap()), request, &LocalFiles).unwrap();
        (plan.steps, plan.guidance)
    };
    let plain = Request { steps: None, ..small("a cat") };
    // Distilled: its own steps, but still no guidance.
    assert_eq!(planned(&own, &plain), (24, None));
    edit_json(&folder.path().join("model_index.json"), |index| index["is_distilled"] = json!(false));
    assert_eq!(planned(&[], &plain), (50, Some(4.0)));
    assert_eq!(planned(&own, &plain), (24, Some(2.5)));
    let explicit = Request { steps: Some(3), guidance: Some(3.0), ..small("a cat") };
    assert_eq!(planned(&own, &explicit), (3, Some(3.0)));
}

#[test]
fn invalid_defaults_are_errors() {
    let folder = checkpoint("klein");
    let file = folder.path().join("klein.safetensors");
    for own in [("default_steps", "-4"), ("default_guidance", "-1"), ("default_guidance", "much")] {
        write_single_file(&folder, &file, &[own]);
        let error = load(&file, &LoadOptions::default()).err().unwrap().to_string();
        assert!(error.contains(own.0), "{error}");
    }
}

/// Configs are untrusted input.
#[test]
fn no_number_in_a_config_causes_a_panic() {
    let numbers = [
        json!(0),
        json!(1),
        json!(-1),
        json!(3),
        json!(1u64 << 40),
        json!(u64::MAX),
        json!(1e300),
        json!(null),
    ];
    for file in ["transformer/config.json", "text_encoder/config.json", "vae/config.json"] {
        let folder = checkpoint("klein");
        let path = folder.path().join(file);
        let original: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        for key in original.as_object().unwrap().keys() {
            for number in &numbers {
                edit_json(&path, |c| {
                    *c = original.clone();
                    c[key] = number.clone();
                });
                if let Ok(model) = Model::open(folder.path()).map(Arc::new) {
                    if let Ok(plan) = Plan::new(&model, &small("a cat"), &LocalFiles) {
                        let _ = plan.check_memory(DType::F32, Some(1 << 30));
                    }
                    let _ = Pipeline::load(backend(1), &model, &LoadOptions::default(), &mut ());
                }
            }
        }
    }
}

#[test]
fn a_file_without_a_transformer_is_an_error_that_names_its_component() {
    let e = load_error(&testdata().join("tiny/klein/vae/diffusion_pytorch_model.safetensors"));
    assert!(e.contains("holds no FLUX.2 transformer: it has a VAE"), "{e}");
}

#[test]
fn too_many_reference_images_are_an_error_with_their_count() {
    let folder = checkpoint("klein");
    let model = Arc::new(Model::open(folder.path()).unwrap());
    let mut inputs = TestInputs::new();
    let one = inputs.add_image("one", kiln_image::RgbImage::black(1024, 1024));
    let plan = |count: usize| {
        let references = vec![one.clone(); count];
        Plan::new(&model, &Request { references, ..small("a cat") }, &inputs)
    };
    assert!(plan(3).unwrap().notes.is_empty());
    let notes = plan(4).unwrap().notes.join("\n");
    assert!(notes.contains("4 references take 16384 tokens: a step costs "), "{notes}");
    let error = plan(13).unwrap_err().to_string();
    for expected in ["13 reference images take 53248 tokens", "52000 positions"] {
        assert!(error.contains(expected), "{error}");
    }
}
