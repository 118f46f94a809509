//! The step cache in the pipeline, on the repository's tiny checkpoints: what it saves, and what it must not change.

use std::sync::Arc;

use kiln_cpu::{CpuBackend, CpuOptions};
use kiln_engine::pipeline::{BatchMember, LoadOptions, PendingOutput, Pipeline, PipelineOutput};
use kiln_engine::{BatchLimit, Event, InputResolver, LoraRef, Model, Plan, Request};
use kiln_golden::{Checkpoint, TestInputs, testdata};
use kiln_image::RgbImage;
use kiln_nn::Observer;
use kiln_ops::{Backend, TimedBackend};
use kiln_tensor::{DType, HostTensor};

type Timed = TimedBackend<CpuBackend>;

const STEPS: usize = 8;
/// A threshold above all changes: every step but the first and the last reuses the cache. Requests can't ask for it, but
/// the random weights of these models give changes above 1.
const ALWAYS: f32 = 1e9;
/// A threshold that every change stays above.
const NEVER: f32 = 1e-30;

struct Loaded {
    _folder: Checkpoint,
    pipeline: Pipeline<Timed>,
    inputs: TestInputs,
}

fn load(name: &str, dtype: DType) -> Loaded {
    let folder = Checkpoint::assemble(&testdata(), name).unwrap();
    let backend = CpuBackend::new(CpuOptions { threads: Some(2), ..CpuOptions::default() }).unwrap();
    let model = Arc::new(Model::open(folder.path()).unwrap());
    let options = LoadOptions { dtype, ..LoadOptions::default() };
    let pipeline = Pipeline::load(TimedBackend::new(backend), &model, &options, &mut ()).unwrap();
    Loaded { _folder: folder, pipeline, inputs: TestInputs::new() }
}

fn request(prompt: &str, cache: Option<f32>) -> Request {
    Request {
        width: Some(64),
        height: Some(64),
        steps: Some(STEPS as u32),
        max_tokens: Some(32),
        seed: vec![7],
        cache,
        ..Request::new(prompt)
    }
}

impl Loaded {
    fn plan(&self, request: &Request) -> Plan {
        let allowed = Request { cache: request.cache.map(|threshold| threshold.min(1.0)), ..request.clone() };
        let mut plan =
            Plan::new(self.pipeline.model(), &allowed, &self.inputs as &dyn InputResolver).unwrap();
        plan.cache = plan.cache.and(request.cache);
        plan
    }

    fn generate(&self, request: &Request) -> PipelineOutput {
        self.pipeline.generate(&self.plan(request), &mut ()).unwrap().remove(0)
    }

    /// Generates an image and counts the transformer's attention calls: one for each block that runs.
    fn blocks(&self, request: &Request) -> (PipelineOutput, usize) {
        let plan = self.plan(request);
        // Encoded now, so that only the transformer and the decoder are counted.
        let _ = self.pipeline.generate(&plan, &mut ()).unwrap();
        self.pipeline.backend().timer().take();
        let output = self.pipeline.generate(&plan, &mut ()).unwrap().remove(0);
        let operations = self.pipeline.backend().timer().take();
        let attention = operations.iter().filter(|stats| stats.op == "norm_rope_attention");
        (output, attention.map(|stats| stats.calls as usize).sum())
    }

    fn block_count(&self) -> usize {
        let config = &self.pipeline.model().transformer.config;
        config.num_layers + config.num_single_layers
    }

    /// A request for dev, whose prompts are embeddings.
    fn dev_request(&mut self, cache: Option<f32>) -> Request {
        let dim = self.pipeline.model().transformer.config.joint_attention_dim;
        let values = (0..32 * dim).map(|i| ((i * 37 % 101) as f32 - 50.0) / 40.0).collect();
        let text = HostTensor::from_f32([1, 32, dim], values).unwrap();
        let embeds = self.inputs.add_tensors("embeds", &[("prompt_embeds", text)]);
        Request { prompts: Vec::new(), embeds: Some(embeds), ..request("", cache) }
    }
}

fn relative_l2(found: &HostTensor, expected: &HostTensor) -> f64 {
    let (found, expected) = (found.to_f32().unwrap(), expected.to_f32().unwrap());
    let sum = |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>();
    let difference = sum(&mut found.iter().zip(expected.iter()).map(|(a, b)| a - b));
    (difference / sum(&mut expected.iter().copied())).sqrt()
}

#[test]
fn reused_steps_run_only_the_first_block() {
    let base = load("klein-base", DType::F32);
    let guided = |cache| Request { guidance: Some(3.0), ..request("a cat", cache) };
    let (full, all) = base.blocks(&guided(None));
    let (cached, fewer) = base.blocks(&guided(Some(ALWAYS)));
    assert_eq!((full.steps.computed, full.steps.reused), (STEPS, 0));
    assert_eq!((cached.steps.computed, cached.steps.reused), (2, STEPS - 2));
    // Two branches; each reused step saves all blocks but one of both.
    assert_eq!(all - fewer, 2 * (STEPS - 2) * (base.block_count() - 1));
    assert!(relative_l2(&cached.latents, &full.latents) > 0.0);
}

#[test]
fn without_reuse_the_result_has_the_same_bits() {
    for dtype in [DType::F32, DType::BF16] {
        let base = load("klein-base", dtype);
        let full = base.generate(&request("a cat", None));
        for threshold in [0.0, NEVER] {
            let cached = base.generate(&request("a cat", Some(threshold)));
            assert_eq!((cached.steps.computed, cached.steps.reused), (STEPS, 0));
            assert!(cached.latents == full.latents && cached.image == full.image, "{dtype}, {threshold}");
        }
        let off = base.plan(&request("a cat", Some(0.0)));
        assert_eq!((off.cache, off.request.cache), (None, None));
    }
}

#[test]
fn a_higher_threshold_reuses_more_and_is_less_exact() {
    let base = load("klein-base", DType::F32);
    let full = base.generate(&request("a cat", None));
    let mut reused = 0;
    for threshold in [NEVER, 0.5, 1.0, 2.0, 4.0, ALWAYS] {
        let cached = base.generate(&request("a cat", Some(threshold)));
        assert!(cached.steps.reused >= reused, "{threshold}");
        assert_eq!(cached.steps.computed + cached.steps.reused, STEPS);
        assert_eq!(cached.latents == full.latents, cached.steps.reused == 0);
        reused = cached.steps.reused;
    }
    assert_eq!(reused, STEPS - 2);
}

#[test]
fn the_branches_of_guidance_have_caches_of_their_own() {
    let base = load("klein-base", DType::F32);
    let guided = |negative: &str, guidance| Request {
        guidance: Some(guidance),
        negative_prompts: vec![negative.into()],
        ..request("a cat", Some(ALWAYS))
    };
    // The same text in both branches: guidance changes nothing, so it equals the unguided image. If a branch used the
    // other's cache, a different negative prompt would not matter or these would differ.
    let unguided = base.generate(&Request { guidance: Some(1.0), ..request("a cat", Some(ALWAYS)) });
    let same = base.generate(&guided("a cat", 2.0));
    assert!(relative_l2(&same.latents, &unguided.latents) < 1e-4);
    let other = base.generate(&guided("rain, fog and snow", 2.0));
    assert!(relative_l2(&other.latents, &same.latents) > 1e-3);
}

#[test]
fn dev_runs_with_the_cache() {
    let mut dev = load("dev", DType::F32);
    let (off, on) = (dev.dev_request(None), dev.dev_request(Some(ALWAYS)));
    let (full, all) = dev.blocks(&off);
    let (cached, fewer) = dev.blocks(&on);
    assert_eq!((cached.steps.computed, cached.steps.reused), (2, STEPS - 2));
    assert_eq!(all - fewer, (STEPS - 2) * (dev.block_count() - 1));
    assert!(relative_l2(&cached.latents, &full.latents) > 0.0);
    assert!(dev.generate(&on).latents == cached.latents);
}

fn noise_image(width: u32, height: u32, seed: u32) -> RgbImage {
    let pixels = (0..width * height * 3).map(|i| (i.wrapping_mul(2_654_435_761 + seed) >> 24) as u8);
    RgbImage::new(width, height, pixels.collect()).unwrap()
}

#[test]
fn edits_inpainting_and_image_to_image_run_with_the_cache() {
    let mut base = load("klein-base", DType::F32);
    let mut image = |name, seed| base.inputs.add_image(name, noise_image(64, 64, seed));
    let (reference, init) = (image("reference", 1), image("init", 2));
    let mask = base
        .inputs
        .add_image("mask", RgbImage::new(64, 64, [[255; 3 * 32], [0; 3 * 32]].concat().repeat(64)).unwrap());
    let edit = |cache| Request { references: vec![reference.clone()], ..request("a cat", cache) };
    let start = |cache| Request { init: Some(init.clone()), strength: Some(0.7), ..request("a cat", cache) };
    let inpaint = |cache| Request { mask: Some(mask.clone()), ..start(cache) };
    for request in [&edit as &dyn Fn(Option<f32>) -> Request, &start, &inpaint] {
        let full = base.generate(&request(None));
        let exact = base.generate(&request(Some(NEVER)));
        assert!(exact.latents == full.latents);
        let (cached, steps) = (base.generate(&request(Some(ALWAYS))), full.steps.computed);
        assert_eq!((cached.steps.computed, cached.steps.reused), (2, steps - 2));
        assert!(relative_l2(&cached.latents, &full.latents) > 0.0);
    }
    // Outside the mask the image is the initial one, with the cache as without it.
    let [full, cached] = [None, Some(ALWAYS)]
        .map(|cache| base.generate(&inpaint(cache)).latents.to_f32().unwrap().into_owned());
    let channels = full.len() / 16;
    let row = |values: &[f32], token: usize| values[token * channels..][..channels].to_vec();
    for token in [2, 3, 6, 7, 10, 11, 14, 15] {
        assert_eq!(row(&full, token), row(&cached, token), "token {token}");
    }
}

/// Counts blocks and records the reused steps that the events tell.
#[derive(Default)]
struct Progress {
    blocks: usize,
    reused: Vec<usize>,
}

impl<B: Backend> Observer<B> for Progress {
    fn event(&mut self, event: Event) -> kiln_nn::Result<()> {
        match event {
            Event::Block { .. } => self.blocks += 1,
            Event::StepFinished { reused, .. } => self.reused.push(reused),
            _ => {}
        }
        Ok(())
    }
}

#[test]
fn events_count_skipped_blocks_and_reused_steps() {
    let base = load("klein-base", DType::F32);
    let mut progress = Progress::default();
    let plan = base.plan(&Request { guidance: Some(3.0), ..request("a cat", Some(ALWAYS)) });
    base.pipeline.generate(&plan, &mut progress).unwrap();
    assert_eq!(progress.blocks, 2 * STEPS * base.block_count());
    assert_eq!(progress.reused, [0, 1, 2, 3, 4, 5, 6, 6]);
}

/// Generates plans in one batch.
fn batched(pipeline: &Pipeline<Timed>, plans: &[&Plan]) -> Vec<PipelineOutput> {
    let mut images: Vec<Vec<PipelineOutput>> = vec![Vec::new(); plans.len()];
    let mut outputs: Vec<_> = images
        .iter_mut()
        .zip(plans)
        .map(|(own, plan)| {
            |image: PendingOutput<Timed>| {
                own.push(image.finish(pipeline.backend(), plan)?);
                Ok(())
            }
        })
        .collect();
    let mut observers: Vec<()> = vec![(); plans.len()];
    let mut members: Vec<BatchMember<'_, Timed>> = plans
        .iter()
        .zip(&mut observers)
        .zip(&mut outputs)
        .map(|((plan, observer), output)| BatchMember { plan, observer, output })
        .collect();
    let limit = BatchLimit { images: 16, rows: Some(100_000), memory: None };
    pipeline.run(&mut members, &limit, &mut |_, result| result.unwrap());
    drop(members);
    drop(outputs);
    images.into_iter().flatten().collect()
}

#[test]
fn each_image_of_a_batch_decides_for_itself() {
    let base = load("klein-base", DType::F32);
    let one = |prompt: &str, seed, threshold| Request {
        seed: vec![seed],
        guidance: Some(3.0),
        ..request(prompt, Some(threshold))
    };
    // Thresholds between which some images reuse a step that others compute.
    let mut mixed = false;
    for threshold in [0.7, 0.85, 1.0, 1.15, 1.3, 1.5] {
        let plans: Vec<Plan> = [("a cat", 1), ("a house by the sea", 2), ("", 3)]
            .map(|(prompt, seed)| base.plan(&one(prompt, seed, threshold)))
            .into();
        let together = batched(&base.pipeline, &plans.iter().collect::<Vec<_>>());
        for (plan, found) in plans.iter().zip(&together) {
            let alone = base.pipeline.generate(plan, &mut ()).unwrap().remove(0);
            assert!(found.latents == alone.latents, "{threshold}");
            assert_eq!(found.steps, alone.steps);
        }
        mixed |= together.iter().any(|image| image.steps != together[0].steps);
    }
    assert!(mixed, "no threshold gave different decisions");
}

#[test]
fn nothing_is_kept_between_requests() {
    let mut base = load("klein-base", DType::F32);
    let first = base.generate(&request("a cat", Some(ALWAYS)));
    base.generate(&request("a house by the sea", Some(ALWAYS)));
    let path = testdata().join("tiny/lora/lora_diffusers.safetensors");
    let lora = Request {
        loras: vec![LoraRef { path, weight: 1.0, sha256: None }],
        ..request("a cat", Some(ALWAYS))
    };
    let loras = base.plan(&lora).loras;
    base.pipeline.set_loras(&loras, false).unwrap();
    let with_lora = base.generate(&lora);
    assert!(with_lora.latents != first.latents);
    base.pipeline.set_loras(&[], false).unwrap();
    assert!(base.generate(&request("a cat", Some(ALWAYS))).latents == first.latents);
}

#[test]
fn invalid_thresholds_and_models_without_many_steps() {
    let base = load("klein-base", DType::F32);
    let inputs = &base.inputs as &dyn InputResolver;
    for threshold in [-0.1, 1.5, f32::NAN, f32::INFINITY] {
        let error = Plan::new(base.pipeline.model(), &request("a cat", Some(threshold)), inputs).unwrap_err();
        let message = error.to_string();
        assert!(message.contains("between 0 and 1") && message.contains(&threshold.to_string()), "{message}");
    }
    for name in ["klein", "klein-kv"] {
        let model = load(name, DType::F32);
        let plan = model.plan(&request("a cat", Some(0.1)));
        assert_eq!(plan.cache, None);
        assert!(plan.notes.iter().any(|note| note.contains("step cache has no effect")), "{:?}", plan.notes);
    }
}
