//! Batched images are bit-identical to images generated alone, on the repository's tiny checkpoints.

use std::sync::Arc;

use kiln_cpu::{CpuBackend, CpuOptions};
use kiln_engine::pipeline::{BatchMember, LoadOptions, PendingOutput, Pipeline, PipelineOutput};
use kiln_engine::{BatchLimit, Error, Event, Explain, LocalFiles, Model, Plan, Request};
use kiln_golden::{Checkpoint, TestInputs, testdata};
use kiln_image::RgbImage;
use kiln_nn::Observer;
use kiln_tensor::{DType, HostTensor};

/// A limit above all batches of these tests.
const ALL: BatchLimit = BatchLimit { images: 16, rows: None, memory: None };

fn load(name: &str, dtype: DType) -> (Checkpoint, Pipeline<CpuBackend>) {
    let checkpoint = Checkpoint::assemble(&testdata(), name).unwrap();
    let backend = CpuBackend::new(CpuOptions { threads: Some(2), ..CpuOptions::default() }).unwrap();
    let model = Arc::new(Model::open(checkpoint.path()).unwrap());
    let options = LoadOptions { dtype, ..LoadOptions::default() };
    let pipeline = Pipeline::load(backend, &model, &options, &mut ()).unwrap();
    (checkpoint, pipeline)
}

fn request(prompt: &str, seed: u64) -> Request {
    Request {
        width: Some(64),
        height: Some(64),
        steps: Some(3),
        max_tokens: Some(32),
        seed: vec![seed],
        ..Request::new(prompt)
    }
}

fn plans(pipeline: &Pipeline<CpuBackend>, requests: &[Request]) -> Vec<Plan> {
    requests.iter().map(|request| Plan::new(pipeline.model(), request, &LocalFiles).unwrap()).collect()
}

fn noise_image(width: u32, height: u32, seed: u32) -> RgbImage {
    let pixels = (0..width * height * 3).map(|i| (i.wrapping_mul(2_654_435_761 + seed) >> 24) as u8);
    RgbImage::new(width, height, pixels.collect()).unwrap()
}

/// Records the sizes of its batches; cancels after `stop_after` steps.
#[derive(Default)]
struct BatchRecorder {
    batches: Vec<usize>,
    steps: usize,
    stop_after: Option<usize>,
}

impl Observer<CpuBackend> for BatchRecorder {
    fn event(&mut self, event: Event) -> kiln_nn::Result<()> {
        match event {
            Event::StepStarted { step: 0, batch: all, .. } => self.batches.push(all),
            Event::StepFinished { .. } => self.steps += 1,
            Event::Block { .. } if self.stop_after == Some(self.steps) => {
                return Err(kiln_nn::Error::Cancelled);
            }
            _ => {}
        }
        Ok(())
    }
}

/// The result of one request and its images.
type Outcome = (Result<(), Error>, Vec<PipelineOutput>);

/// Runs the plans in as few batches as `limit` allows.
fn run_batched(
    pipeline: &Pipeline<CpuBackend>,
    plans: &[Plan],
    recorders: &mut [BatchRecorder],
    limit: BatchLimit,
) -> Vec<Outcome> {
    let mut images: Vec<Vec<PipelineOutput>> = vec![Vec::new(); plans.len()];
    let mut outputs: Vec<_> = images
        .iter_mut()
        .zip(plans)
        .map(|(own, plan)| {
            |image: PendingOutput<CpuBackend>| {
                own.push(image.finish(pipeline.backend(), plan)?);
                Ok(())
            }
        })
        .collect();
    let mut members: Vec<BatchMember<'_, CpuBackend>> = plans
        .iter()
        .zip(recorders)
        .zip(&mut outputs)
        .map(|((plan, observer), done)| BatchMember { plan, observer, output: done })
        .collect();
    let mut ends: Vec<Option<Result<(), Error>>> = plans.iter().map(|_| None).collect();
    pipeline.run(&mut members, &limit, &mut |member, result| {
        assert!(ends[member].replace(result).is_none(), "request {member} ended twice");
    });
    drop(members);
    drop(outputs);
    ends.into_iter().map(|end| end.expect("every request ends")).zip(images).collect()
}

fn recorders(count: usize) -> Vec<BatchRecorder> {
    (0..count).map(|_| BatchRecorder::default()).collect()
}

/// Checks that the plans, run in one batch, give the results of running each alone.
#[track_caller]
fn assert_batched_equals_alone(pipeline: &Pipeline<CpuBackend>, plans: &[Plan]) {
    let mut recorders = recorders(plans.len());
    let outcomes = run_batched(pipeline, plans, &mut recorders, ALL);
    let all: usize = outcomes.iter().map(|(_, images)| images.len()).sum();
    for (i, (plan, (end, found))) in plans.iter().zip(outcomes).enumerate() {
        end.unwrap();
        let alone = pipeline.generate(plan, &mut ()).unwrap();
        assert_eq!((found.len(), alone.len()), (plan.images, plan.images));
        for (found, alone) in found.iter().zip(&alone) {
            assert_eq!(found.index, alone.index);
            assert!(found.latents == alone.latents, "latents of image {} of request {i}", found.index);
            assert!(found.image == alone.image, "image {} of request {i}", found.index);
        }
        assert_eq!(recorders[i].batches, [all], "request {i} was not in the batch");
    }
}

#[test]
fn different_prompts_and_seeds_can_be_batched() {
    for dtype in [DType::F32, DType::BF16] {
        let (_folder, pipeline) = load("klein", dtype);
        let several = Request { n: Some(3), ..request("a dog", 9) };
        let long = Request { max_tokens: Some(48), ..request("a cat that sits on a mat", 3) };
        assert_batched_equals_alone(
            &pipeline,
            &plans(&pipeline, &[request("a cat", 1), several, request("a cat", 2), long]),
        );
    }
}

fn guided(prompts: &[&str], negatives: &[&str], seed: u64) -> Request {
    let owned = |texts: &[&str]| texts.iter().map(|text| text.to_string()).collect();
    Request {
        prompts: owned(prompts),
        negative_prompts: owned(negatives),
        guidance: Some(3.0),
        ..request("", seed)
    }
}

#[test]
fn guidance_with_different_negative_prompts_can_be_batched() {
    let (_folder, pipeline) = load("klein-base", DType::F32);
    let requests = [guided(&["a cat"], &["a dog"], 1), guided(&["a house"], &[], 2)];
    assert_batched_equals_alone(&pipeline, &plans(&pipeline, &requests));
}

#[test]
fn each_prompt_has_its_own_negative_prompt() {
    let (_folder, pipeline) = load("klein-base", DType::F32);
    let generate = |request: Request| pipeline.generate(&plans(&pipeline, &[request])[0], &mut ()).unwrap();
    let both =
        Request { seed: vec![5, 6], ..guided(&["a cat", "a house"], &["a dog", "rain, fog and snow"], 0) };
    let images = generate(both.clone());
    let singles = [
        generate(guided(&["a cat"], &["a dog"], 5)),
        generate(guided(&["a house"], &["rain, fog and snow"], 6)),
    ];
    assert_eq!(images.len(), 2);
    for (both, single) in images.iter().zip(&singles) {
        assert!(both.latents == single[0].latents && both.image == single[0].image);
    }
    // The same in one batch with another request.
    let seeded = |seed| Request { seed: vec![seed, seed + 1], ..both.clone() };
    assert_batched_equals_alone(&pipeline, &plans(&pipeline, &[seeded(5), seeded(8)]));
    // A shared negative prompt changes only the second prompt's image.
    let shared = generate(Request { negative_prompts: vec!["a dog".into()], ..both });
    assert!(shared[0].latents == singles[0][0].latents);
    assert!(shared[1].latents != singles[1][0].latents);
}

#[test]
fn images_of_several_prompts_are_in_order() {
    let (_folder, pipeline) = load("klein-base", DType::F32);
    let (prompts, negatives) = (["a cat", "a house"], ["a dog", "rain, fog and snow"]);
    let all = Request { n: Some(3), seed: (1..=6).collect(), ..guided(&prompts, &negatives, 0) };
    let plan = &plans(&pipeline, &[all])[0];
    assert_eq!((plan.images, plan.images_per_prompt), (6, 3));
    let mut recorders = recorders(1);
    let images = run_batched(&pipeline, std::slice::from_ref(plan), &mut recorders, ALL).remove(0).1;
    assert_eq!(recorders[0].batches, [6]);
    assert_eq!(images.iter().map(|image| image.index).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
    for (i, image) in images.iter().enumerate() {
        let own = guided(&prompts[i / 3..=i / 3], &negatives[i / 3..=i / 3], i as u64 + 1);
        let alone = pipeline.generate(&plans(&pipeline, &[own])[0], &mut ()).unwrap();
        assert!(image.latents == alone[0].latents && image.image == alone[0].image, "image {i}");
        let info = plan.image(i);
        let info = (info.prompt.as_deref(), info.negative.as_deref(), info.seed);
        assert_eq!(info, (Some(prompts[i / 3]), Some(negatives[i / 3]), Some(i as u64 + 1)));
    }
    // One generator draws the noise of all six images, prompt after prompt.
    let one_seed = Request { n: Some(3), one_generator: true, ..guided(&prompts, &negatives, 7) };
    let drawn = pipeline.generate(&plans(&pipeline, &[one_seed])[0], &mut ()).unwrap();
    let first = pipeline.generate(&plans(&pipeline, &[guided(&["a cat"], &["a dog"], 7)])[0], &mut ());
    assert!(drawn[0].latents == first.unwrap()[0].latents);
    for (i, image) in drawn.iter().enumerate() {
        assert!(drawn[..i].iter().all(|other| other.latents != image.latents), "image {i}");
    }
}

#[test]
fn edits_and_inpainting_can_be_batched_with_text_to_image() {
    let (_folder, pipeline) = load("klein", DType::F32);
    let mut inputs = TestInputs::new();
    let mut image = |name, width, seed| inputs.add_image(name, noise_image(width, 64, seed));
    let edit = Request { references: vec![image("a", 64, 1)], ..request("a cat", 1) };
    let two = Request { references: vec![image("b", 96, 2), image("c", 64, 3)], ..request("a dog", 2) };
    let inpaint = Request {
        init: Some(image("source", 64, 5)),
        mask: Some(image("mask", 64, 4)),
        strength: Some(1.0),
        width: None,
        height: None,
        ..request("a tree", 3)
    };
    let plan = |request| Plan::new(pipeline.model(), &request, &inputs).unwrap();
    assert_batched_equals_alone(&pipeline, &[edit, request("a house", 4), two, inpaint].map(plan));
}

#[test]
fn cached_references_stay_with_their_image() {
    let (_folder, pipeline) = load("klein-kv", DType::F32);
    let mut inputs = TestInputs::new();
    let mut references = |n: u32| -> Vec<_> {
        let image = |i| inputs.add_image(&format!("{n}.{i}"), noise_image(64, 64, 7 * n + i));
        (0..n).map(image).collect()
    };
    let (none, one, two) = (references(0), references(1), references(2));
    let edit = |seed: u64, references: &[_]| {
        let request = Request { references: references.to_vec(), ..request("a cat", seed) };
        Plan::new(pipeline.model(), &request, &inputs).unwrap()
    };
    assert_batched_equals_alone(&pipeline, &[edit(1, &one), edit(2, &two), edit(3, &none)]);
    // More row groups than the small-batch kernels take.
    assert_batched_equals_alone(&pipeline, &[1, 2, 3, 4].map(|seed| edit(seed, &one)));
}

#[test]
fn images_of_different_size_or_steps_are_not_batched() {
    let (_folder, pipeline) = load("klein", DType::F32);
    let plans = plans(
        &pipeline,
        &[
            request("a cat", 1),
            Request { steps: Some(2), ..request("a cat", 1) },
            Request { width: Some(80), ..request("a cat", 1) },
            request("a dog", 2),
        ],
    );
    let mut recorders = recorders(4);
    let outcomes = run_batched(&pipeline, &plans, &mut recorders, ALL);
    assert_eq!(recorders.iter().map(|w| w.batches[0]).collect::<Vec<_>>(), [2, 1, 1, 2]);
    for (plan, (end, found)) in plans.iter().zip(outcomes) {
        end.unwrap();
        assert!(found[0].image == pipeline.generate(plan, &mut ()).unwrap()[0].image);
    }
}

#[test]
fn batches_respect_the_limit_and_the_memory() {
    let (_folder, pipeline) = load("klein", DType::F32);
    let five = plans(&pipeline, &[Request { n: Some(5), ..request("a cat", 1) }]);
    let sizes = |limit: BatchLimit| {
        let mut recorders = recorders(1);
        run_batched(&pipeline, &five, &mut recorders, limit)[0].0.as_ref().unwrap();
        recorders.remove(0).batches
    };
    // Text and image rows of one such image.
    let rows = 32 + 4 * 4;
    assert_eq!(five[0].rows(), rows);
    assert_eq!(sizes(BatchLimit { images: 2, ..ALL }), [2, 2, 1]);
    assert_eq!(sizes(BatchLimit::ONE), [1; 5]);
    assert_eq!(sizes(BatchLimit { memory: Some(1), ..ALL }), [1; 5]);
    assert_eq!(sizes(BatchLimit { rows: Some(3 * rows), ..ALL }), [3, 2]);
    assert_eq!(pipeline.batch_capacity(rows, &ALL), 16);
    assert_eq!(pipeline.batch_capacity(1 << 20, &ALL), 1);
}

#[test]
fn cancelling_one_request_does_not_affect_the_others() {
    let (_folder, pipeline) = load("klein", DType::F32);
    let plans = plans(&pipeline, &[request("a cat", 1), request("a dog", 2), request("a house", 3)]);
    let mut recorders = recorders(3);
    recorders[1].stop_after = Some(1);
    let outcomes = run_batched(&pipeline, &plans, &mut recorders, ALL);
    assert!(outcomes[1].0.as_ref().unwrap_err().is_cancelled() && outcomes[1].1.is_empty());
    assert_eq!(recorders.iter().map(|w| w.steps).collect::<Vec<_>>(), [3, 1, 3]);
    for i in [0, 2] {
        assert!(outcomes[i].0.is_ok());
        let alone = pipeline.generate(&plans[i], &mut ()).unwrap();
        assert!(outcomes[i].1[0].image == alone[0].image);
    }
}

#[test]
fn a_failing_request_does_not_affect_the_others() {
    let (_folder, pipeline) = load("klein", DType::F32);
    let mut inputs = TestInputs::new();
    // Its latents become NaN, which is detected after the steps of the batch.
    let bad = HostTensor::from_f32([32, 48], vec![f32::MAX; 32 * 48]).unwrap();
    let embeds = inputs.add_tensors("bad", &[("prompt_embeds", bad)]);
    let broken = Request { prompts: Vec::new(), embeds: Some(embeds), ..request("", 3) };
    let plan = |request| Plan::new(pipeline.model(), &request, &inputs).unwrap();
    let plans = [request("a cat", 1), broken, request("a dog", 2)].map(plan);
    let mut recorders = recorders(3);
    let outcomes = run_batched(&pipeline, &plans, &mut recorders, ALL);
    assert!(recorders.iter().all(|w| w.batches == [3]), "not batched");
    let error = outcomes[1].0.as_ref().unwrap_err();
    assert!(matches!(error, Error::Model(kiln_nn::Error::NotFinite { .. })), "{error:?}");
    for i in [0, 2] {
        assert!(outcomes[i].0.is_ok());
        let alone = pipeline.generate(&plans[i], &mut ()).unwrap();
        assert!(outcomes[i].1[0].image == alone[0].image);
    }
}

/// A failure that is only detected during the run: token ids beyond the text encoder's embedding.
#[test]
fn a_request_that_fails_to_start_does_not_affect_the_others() {
    let (folder, pipeline) = load("klein", DType::F32);
    drop(pipeline);
    std::fs::remove_dir_all(folder.path().join("tokenizer")).unwrap();
    let backend = CpuBackend::new(CpuOptions { threads: Some(2), ..CpuOptions::default() }).unwrap();
    let model = Arc::new(Model::open(folder.path()).unwrap());
    let pipeline = Pipeline::load(backend, &model, &LoadOptions::default(), &mut ()).unwrap();
    let mut inputs = TestInputs::new();
    let text = HostTensor::from_f32([32, 48], (0..32 * 48).map(|i| (i % 7) as f32 * 0.1).collect()).unwrap();
    let embeds = Some(inputs.add_tensors("text", &[("prompt_embeds", text)]));
    let with_embeds = |seed| Request { prompts: Vec::new(), embeds: embeds.clone(), ..request("", seed) };
    let plan = |request| Plan::new(pipeline.model(), &request, &inputs).unwrap();
    let plans = [with_embeds(1), request("a cat", 2), with_embeds(3)].map(plan);
    let mut recorders = recorders(3);
    let outcomes = run_batched(&pipeline, &plans, &mut recorders, ALL);
    let error = outcomes[1].0.as_ref().unwrap_err().to_string();
    assert!(error.contains("outside the embedding") && recorders[1].batches.is_empty(), "{error}");
    for i in [0, 2] {
        assert_eq!(recorders[i].batches, [2]);
        assert!(outcomes[i].1[0].image == pipeline.generate(&plans[i], &mut ()).unwrap()[0].image);
    }
}

#[test]
fn few_rows_are_not_batched_since_another_kernel_multiplies_them() {
    let (_folder, pipeline) = load("klein", DType::F32);
    let mut inputs = TestInputs::new();
    let mut embeds = |rows: usize| {
        let values = (0..rows * 48).map(|i| (i % 7) as f32 * 0.1).collect();
        let prompt = HostTensor::from_f32([rows, 48], values).unwrap();
        Some(inputs.add_tensors(&rows.to_string(), &[("prompt_embeds", prompt)]))
    };
    let [rows5, rows16, rows21] = [embeds(5), embeds(16), embeds(21)];
    let with = |embeds: &Option<_>, seed| Request {
        prompts: Vec::new(),
        embeds: embeds.clone(),
        ..request("", seed)
    };
    let plan = |request| Plan::new(pipeline.model(), &request, &inputs).unwrap();
    assert_batched_equals_alone(&pipeline, &[with(&rows16, 1), with(&rows21, 2)].map(plan));
    let small = Request { width: Some(32), height: Some(32), ..with(&rows16, 3) };
    let plans = [with(&rows5, 1), with(&rows16, 2), small].map(plan);
    let mut recorders = recorders(3);
    let outcomes = run_batched(&pipeline, &plans, &mut recorders, ALL);
    assert!(recorders.iter().all(|w| w.batches == [1]));
    for (plan, (end, found)) in plans.iter().zip(outcomes) {
        end.unwrap();
        assert!(found[0].latents == pipeline.generate(plan, &mut ()).unwrap()[0].latents);
    }
}
