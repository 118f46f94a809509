//! Images that are made together are those that are made alone, to the last bit: on the repository's tiny checkpoints.

use std::sync::Arc;

use kiln_cpu::{CpuBackend, Options as CpuOptions};
use kiln_engine::pipeline::{Generated, LoadOptions, Member, Pipeline, Unfinished};
use kiln_engine::{BatchLimit, Error, Event, LocalFiles, Model, Plan, Request};
use kiln_golden::{Checkpoint, MadeUpInputs, in_tree};
use kiln_image::Picture;
use kiln_model::Observer;
use kiln_tensor::{DType, HostTensor};

const ALL: BatchLimit = BatchLimit { images: 16, rows: None, memory: None };

fn load(name: &str, dtype: DType) -> (Checkpoint, Pipeline<CpuBackend>) {
    let checkpoint = Checkpoint::assemble(&in_tree(), name).unwrap();
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

fn picture(width: u32, height: u32, seed: u32) -> Picture {
    let pixels = (0..width * height * 3).map(|i| (i.wrapping_mul(2_654_435_761 + seed) >> 24) as u8);
    Picture::new(width, height, pixels.collect()).unwrap()
}

/// Remembers the sizes of the batches it was in, and may stop.
#[derive(Default)]
struct Watcher {
    batches: Vec<usize>,
    steps: usize,
    stop_after: Option<usize>,
}

impl Observer<CpuBackend> for Watcher {
    fn event(&mut self, event: Event) -> kiln_model::Result<()> {
        match event {
            Event::StepStarted { step: 0, all, .. } => self.batches.push(all),
            Event::StepFinished { .. } => self.steps += 1,
            Event::Block { .. } if self.stop_after == Some(self.steps) => {
                return Err(kiln_model::Error::Cancelled);
            }
            _ => {}
        }
        Ok(())
    }
}

type Ended = (Result<(), Error>, Vec<Generated>);

fn together(
    pipeline: &Pipeline<CpuBackend>,
    plans: &[Plan],
    watchers: &mut [Watcher],
    limit: BatchLimit,
) -> Vec<Ended> {
    let mut images: Vec<Vec<Generated>> = vec![Vec::new(); plans.len()];
    let mut takers: Vec<_> = images
        .iter_mut()
        .zip(plans)
        .map(|(own, plan)| {
            |image: Unfinished<CpuBackend>| {
                own.push(image.finish(pipeline.backend(), plan)?);
                Ok(())
            }
        })
        .collect();
    let mut members: Vec<Member<'_, CpuBackend>> = plans
        .iter()
        .zip(watchers)
        .zip(&mut takers)
        .map(|((plan, observer), done)| Member { plan, observer, done })
        .collect();
    let mut ends: Vec<Option<Result<(), Error>>> = plans.iter().map(|_| None).collect();
    pipeline.run(&mut members, &limit, &mut |member, result| {
        assert!(ends[member].replace(result).is_none(), "request {member} ended twice");
    });
    drop(members);
    drop(takers);
    ends.into_iter().map(|end| end.expect("every request ends")).zip(images).collect()
}

fn watchers(count: usize) -> Vec<Watcher> {
    (0..count).map(|_| Watcher::default()).collect()
}

/// All of these plans, carried out together in one batch, give what each gives alone.
#[track_caller]
fn same(pipeline: &Pipeline<CpuBackend>, plans: &[Plan]) {
    let mut watchers = watchers(plans.len());
    let ended = together(pipeline, plans, &mut watchers, ALL);
    let all: usize = ended.iter().map(|(_, images)| images.len()).sum();
    for (i, (plan, (end, found))) in plans.iter().zip(ended).enumerate() {
        end.unwrap();
        let alone = pipeline.generate(plan, &mut ()).unwrap();
        assert_eq!((found.len(), alone.len()), (plan.images, plan.images));
        for (found, alone) in found.iter().zip(&alone) {
            assert_eq!(found.index, alone.index);
            assert!(found.latents == alone.latents, "latents of image {} of request {i}", found.index);
            assert!(found.picture == alone.picture, "image {} of request {i}", found.index);
        }
        assert_eq!(watchers[i].batches, [all], "request {i} was not in the batch");
    }
}

#[test]
fn requests_with_different_prompts_and_seeds_give_what_they_give_alone() {
    for dtype in [DType::F32, DType::BF16] {
        let (_folder, pipeline) = load("klein", dtype);
        let several = Request { n: Some(3), ..request("a dog", 9) };
        let long = Request { max_tokens: Some(48), ..request("a cat that sits on a mat", 3) };
        same(&pipeline, &plans(&pipeline, &[request("a cat", 1), several, request("a cat", 2), long]));
    }
}

fn guided(prompts: &[&str], negatives: &[&str], seed: u64) -> Request {
    let own = |texts: &[&str]| texts.iter().map(|text| text.to_string()).collect();
    Request {
        prompts: own(prompts),
        negative_prompts: own(negatives),
        guidance: Some(3.0),
        ..request("", seed)
    }
}

#[test]
fn guidance_with_negative_prompts_of_their_own_gives_what_it_gives_alone() {
    let (_folder, pipeline) = load("klein-base", DType::F32);
    let requests = [guided(&["a cat"], &["a dog"], 1), guided(&["a house"], &[], 2)];
    same(&pipeline, &plans(&pipeline, &requests));
}

#[test]
fn each_prompt_has_its_own_negative_prompt() {
    let (_folder, pipeline) = load("klein-base", DType::F32);
    let make = |request: Request| pipeline.generate(&plans(&pipeline, &[request])[0], &mut ()).unwrap();
    let both =
        Request { seed: vec![5, 6], ..guided(&["a cat", "a house"], &["a dog", "rain, fog and snow"], 0) };
    let made = make(both.clone());
    let singles =
        [make(guided(&["a cat"], &["a dog"], 5)), make(guided(&["a house"], &["rain, fog and snow"], 6))];
    assert_eq!(made.len(), 2);
    for (both, single) in made.iter().zip(&singles) {
        assert!(both.latents == single[0].latents && both.picture == single[0].picture);
    }
    // The same in one batch, and beside another request.
    let seeded = |seed| Request { seed: vec![seed, seed + 1], ..both.clone() };
    same(&pipeline, &plans(&pipeline, &[seeded(5), seeded(8)]));
    // One for all is another image of the second prompt, and the same of the first.
    let shared = make(Request { negative_prompts: vec!["a dog".into()], ..both });
    assert!(shared[0].latents == singles[0][0].latents);
    assert!(shared[1].latents != singles[1][0].latents);
}

#[test]
fn several_prompts_have_several_images_each_in_their_order() {
    let (_folder, pipeline) = load("klein-base", DType::F32);
    let (prompts, negatives) = (["a cat", "a house"], ["a dog", "rain, fog and snow"]);
    let all = Request { n: Some(3), seed: (1..=6).collect(), ..guided(&prompts, &negatives, 0) };
    let plan = &plans(&pipeline, &[all])[0];
    assert_eq!((plan.images, plan.per_prompt), (6, 3));
    let mut watchers = watchers(1);
    let made = together(&pipeline, std::slice::from_ref(plan), &mut watchers, ALL).remove(0).1;
    assert_eq!(watchers[0].batches, [6]);
    assert_eq!(made.iter().map(|image| image.index).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
    for (i, image) in made.iter().enumerate() {
        let own = guided(&prompts[i / 3..=i / 3], &negatives[i / 3..=i / 3], i as u64 + 1);
        let alone = pipeline.generate(&plans(&pipeline, &[own])[0], &mut ()).unwrap();
        assert!(image.latents == alone[0].latents && image.picture == alone[0].picture, "image {i}");
        let told = plan.image(i);
        let words = (told.prompt.as_deref(), told.negative.as_deref(), told.seed);
        assert_eq!(words, (Some(prompts[i / 3]), Some(negatives[i / 3]), Some(i as u64 + 1)));
    }
    // One generator draws the noise of all six, prompt after prompt.
    let one_seed = Request { n: Some(3), ..guided(&prompts, &negatives, 7) };
    let drawn = pipeline.generate(&plans(&pipeline, &[one_seed])[0], &mut ()).unwrap();
    let first = pipeline.generate(&plans(&pipeline, &[guided(&["a cat"], &["a dog"], 7)])[0], &mut ());
    assert!(drawn[0].latents == first.unwrap()[0].latents);
    for (i, image) in drawn.iter().enumerate() {
        assert!(drawn[..i].iter().all(|other| other.latents != image.latents), "image {i}");
    }
}

#[test]
fn edits_and_inpainting_beside_plain_images_give_what_they_give_alone() {
    let (_folder, pipeline) = load("klein", DType::F32);
    let mut inputs = MadeUpInputs::new();
    let mut image = |name, width, seed| inputs.add_image(name, picture(width, 64, seed));
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
    same(&pipeline, &[edit, request("a house", 4), two, inpaint].map(plan));
}

#[test]
fn cached_references_stay_with_their_image() {
    let (_folder, pipeline) = load("klein-kv", DType::F32);
    let mut inputs = MadeUpInputs::new();
    let mut references = |n: u32| -> Vec<_> {
        let image = |i| inputs.add_image(&format!("{n}.{i}"), picture(64, 64, 7 * n + i));
        (0..n).map(image).collect()
    };
    let (none, one, two) = (references(0), references(1), references(2));
    let edit = |seed: u64, references: &[_]| {
        let request = Request { references: references.to_vec(), ..request("a cat", seed) };
        Plan::new(pipeline.model(), &request, &inputs).unwrap()
    };
    same(&pipeline, &[edit(1, &one), edit(2, &two), edit(3, &none)]);
    // More runs of rows than the few that are multiplied in another way.
    same(&pipeline, &[1, 2, 3, 4].map(|seed| edit(seed, &one)));
}

#[test]
fn images_that_are_not_alike_are_made_one_after_the_other() {
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
    let mut watchers = watchers(4);
    let ended = together(&pipeline, &plans, &mut watchers, ALL);
    assert_eq!(watchers.iter().map(|w| w.batches[0]).collect::<Vec<_>>(), [2, 1, 1, 2]);
    for (plan, (end, found)) in plans.iter().zip(ended) {
        end.unwrap();
        assert!(found[0].picture == pipeline.generate(plan, &mut ()).unwrap()[0].picture);
    }
}

#[test]
fn a_batch_is_no_larger_than_what_is_asked_for_and_what_fits_into_memory() {
    let (_folder, pipeline) = load("klein", DType::F32);
    let five = plans(&pipeline, &[Request { n: Some(5), ..request("a cat", 1) }]);
    let sizes = |limit: BatchLimit| {
        let mut watchers = watchers(1);
        together(&pipeline, &five, &mut watchers, limit)[0].0.as_ref().unwrap();
        watchers.remove(0).batches
    };
    // Text and image rows of one such image.
    let rows = 32 + 4 * 4;
    assert_eq!(five[0].rows(), rows);
    assert_eq!(sizes(BatchLimit { images: 2, ..ALL }), [2, 2, 1]);
    assert_eq!(sizes(BatchLimit::ONE), [1; 5]);
    assert_eq!(sizes(BatchLimit { memory: Some(1), ..ALL }), [1; 5]);
    assert_eq!(sizes(BatchLimit { rows: Some(3 * rows), ..ALL }), [3, 2]);
    assert_eq!(pipeline.room(rows, &ALL), 16);
    assert_eq!(pipeline.room(1 << 20, &ALL), 1);
}

#[test]
fn one_that_is_cancelled_leaves_the_others_as_they_are() {
    let (_folder, pipeline) = load("klein", DType::F32);
    let plans = plans(&pipeline, &[request("a cat", 1), request("a dog", 2), request("a house", 3)]);
    let mut watchers = watchers(3);
    watchers[1].stop_after = Some(1);
    let ended = together(&pipeline, &plans, &mut watchers, ALL);
    assert!(ended[1].0.as_ref().unwrap_err().is_cancelled() && ended[1].1.is_empty());
    assert_eq!(watchers.iter().map(|w| w.steps).collect::<Vec<_>>(), [3, 1, 3]);
    for i in [0, 2] {
        assert!(ended[i].0.is_ok());
        let alone = pipeline.generate(&plans[i], &mut ()).unwrap();
        assert!(ended[i].1[0].picture == alone[0].picture);
    }
}

#[test]
fn one_that_goes_wrong_does_not_spoil_the_others() {
    let (_folder, pipeline) = load("klein", DType::F32);
    let mut inputs = MadeUpInputs::new();
    // Its latents are no numbers: found after the steps that it took with the others.
    let bad = HostTensor::from_f32([32, 48], vec![f32::MAX; 32 * 48]).unwrap();
    let embeds = inputs.add_tensors("bad", &[("prompt_embeds", bad)]);
    let broken = Request { prompts: Vec::new(), embeds: Some(embeds), ..request("", 3) };
    let plan = |request| Plan::new(pipeline.model(), &request, &inputs).unwrap();
    let plans = [request("a cat", 1), broken, request("a dog", 2)].map(plan);
    let mut watchers = watchers(3);
    let ended = together(&pipeline, &plans, &mut watchers, ALL);
    assert!(watchers.iter().all(|w| w.batches == [3]), "they were made one by one");
    let found = ended[1].0.as_ref().unwrap_err();
    assert!(matches!(found, Error::Model(kiln_model::Error::NotFinite { .. })), "{found:?}");
    for i in [0, 2] {
        assert!(ended[i].0.is_ok());
        let alone = pipeline.generate(&plans[i], &mut ()).unwrap();
        assert!(ended[i].1[0].picture == alone[0].picture);
    }
}

/// What can't be found before the run: a text with more tokens than the text encoder knows.
#[test]
fn one_that_can_not_begin_does_not_spoil_the_others() {
    let (folder, pipeline) = load("klein", DType::F32);
    drop(pipeline);
    std::fs::remove_dir_all(folder.path().join("tokenizer")).unwrap();
    let backend = CpuBackend::new(CpuOptions { threads: Some(2), ..CpuOptions::default() }).unwrap();
    let model = Arc::new(Model::open(folder.path()).unwrap());
    let pipeline = Pipeline::load(backend, &model, &LoadOptions::default(), &mut ()).unwrap();
    let mut inputs = MadeUpInputs::new();
    let text = HostTensor::from_f32([32, 48], (0..32 * 48).map(|i| (i % 7) as f32 * 0.1).collect()).unwrap();
    let embeds = Some(inputs.add_tensors("text", &[("prompt_embeds", text)]));
    let given = |seed| Request { prompts: Vec::new(), embeds: embeds.clone(), ..request("", seed) };
    let plan = |request| Plan::new(pipeline.model(), &request, &inputs).unwrap();
    let plans = [given(1), request("a cat", 2), given(3)].map(plan);
    let mut watchers = watchers(3);
    let ended = together(&pipeline, &plans, &mut watchers, ALL);
    let found = ended[1].0.as_ref().unwrap_err().to_string();
    assert!(found.contains("rows of the embedding") && watchers[1].batches.is_empty(), "{found}");
    for i in [0, 2] {
        assert_eq!(watchers[i].batches, [2]);
        assert!(ended[i].1[0].picture == pipeline.generate(&plans[i], &mut ()).unwrap()[0].picture);
    }
}

#[test]
fn a_handful_of_rows_goes_alone_since_it_is_multiplied_in_another_way() {
    let (_folder, pipeline) = load("klein", DType::F32);
    let mut inputs = MadeUpInputs::new();
    let mut words = |rows: usize| {
        let values = (0..rows * 48).map(|i| (i % 7) as f32 * 0.1).collect();
        let prompt = HostTensor::from_f32([rows, 48], values).unwrap();
        Some(inputs.add_tensors(&rows.to_string(), &[("prompt_embeds", prompt)]))
    };
    let [w5, w16, w21] = [words(5), words(16), words(21)];
    let of = |embeds: &Option<_>, seed| Request {
        prompts: Vec::new(),
        embeds: embeds.clone(),
        ..request("", seed)
    };
    let plan = |request| Plan::new(pipeline.model(), &request, &inputs).unwrap();
    same(&pipeline, &[of(&w16, 1), of(&w21, 2)].map(plan));
    let small = Request { width: Some(32), height: Some(32), ..of(&w16, 3) };
    let plans = [of(&w5, 1), of(&w16, 2), small].map(plan);
    let mut watchers = watchers(3);
    let ended = together(&pipeline, &plans, &mut watchers, ALL);
    assert!(watchers.iter().all(|w| w.batches == [1]));
    for (plan, (end, found)) in plans.iter().zip(ended) {
        end.unwrap();
        assert!(found[0].latents == pipeline.generate(plan, &mut ()).unwrap()[0].latents);
    }
}
