//! Pictures that are painted together are those that are painted alone, to the last bit: on the repository's tiny
//! checkpoints.

use kiln_cpu::{CpuBackend, Options as CpuOptions};
use kiln_golden::{Checkpoint, in_tree};
use kiln_image::{GrayPicture, Picture};
use kiln_model::{
    Error, Event, Generated, Member, ModelFolder, Noise, Observer, Options, Pipeline, Prompt, Request, Rng,
    Task, Together,
};
use kiln_tensor::{DType, HostTensor};

const ALL: Together = Together { most: 16, rows: None, memory: None };

fn load(name: &str, dtype: DType) -> (Checkpoint, Pipeline<CpuBackend>) {
    let checkpoint = Checkpoint::assemble(&in_tree(), name).unwrap();
    let backend = CpuBackend::new(CpuOptions { threads: Some(2), ..CpuOptions::default() }).unwrap();
    let folder = ModelFolder::open(checkpoint.path()).unwrap();
    let options = Options { dtype, ..Options::default() };
    let pipeline = Pipeline::load(backend, &folder, &options, &mut ()).unwrap();
    (checkpoint, pipeline)
}

fn request(prompt: &str, seed: u64) -> Request {
    let noise = Noise::Seed { seed, rng: Rng::Cpu };
    Request {
        width: Some(64),
        height: Some(64),
        steps: Some(3),
        max_tokens: 32,
        noise,
        ..Request::new(prompt)
    }
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
            Event::Block { .. } if self.stop_after == Some(self.steps) => return Err(Error::Cancelled),
            _ => {}
        }
        Ok(())
    }
}

type Ended = (Result<(), Error>, Vec<Generated>);

fn together(
    pipeline: &Pipeline<CpuBackend>,
    requests: &[Request],
    watchers: &mut [Watcher],
    limit: Together,
) -> Vec<Ended> {
    let mut pictures: Vec<Vec<Generated>> = vec![Vec::new(); requests.len()];
    let mut takers: Vec<_> = pictures
        .iter_mut()
        .map(|own| {
            |done: Generated| {
                own.push(done);
                Ok(())
            }
        })
        .collect();
    let mut members: Vec<Member<'_, CpuBackend>> = requests
        .iter()
        .zip(watchers)
        .zip(&mut takers)
        .map(|((request, observer), done)| Member { request, observer, done })
        .collect();
    let mut ends: Vec<Option<Result<(), Error>>> = requests.iter().map(|_| None).collect();
    pipeline.generate_together(&mut members, &limit, &mut |member, result| {
        assert!(ends[member].replace(result).is_none(), "request {member} ended twice");
    });
    drop(members);
    drop(takers);
    ends.into_iter().map(|end| end.expect("every request ends")).zip(pictures).collect()
}

fn watchers(count: usize) -> Vec<Watcher> {
    (0..count).map(|_| Watcher::default()).collect()
}

/// All of these requests, painted together in one batch, give what each gives alone.
#[track_caller]
fn same(pipeline: &Pipeline<CpuBackend>, requests: &[Request]) {
    let mut watchers = watchers(requests.len());
    let ended = together(pipeline, requests, &mut watchers, ALL);
    let all: usize = ended.iter().map(|(_, pictures)| pictures.len()).sum();
    for (i, (request, (end, found))) in requests.iter().zip(ended).enumerate() {
        end.unwrap();
        let alone = pipeline.generate(request, &mut ()).unwrap();
        assert_eq!(found.len(), alone.len());
        for (found, alone) in found.iter().zip(&alone) {
            assert_eq!(found.index, alone.index);
            assert!(found.latents == alone.latents, "latents of picture {} of request {i}", found.index);
            assert!(found.picture == alone.picture, "picture {} of request {i}", found.index);
        }
        assert_eq!(watchers[i].batches, [all], "request {i} was not in the batch");
    }
}

#[test]
fn requests_with_different_prompts_and_seeds_give_what_they_give_alone() {
    for dtype in [DType::F32, DType::BF16] {
        let (_folder, pipeline) = load("klein", dtype);
        let several = Request { pictures_per_prompt: 3, ..request("a dog", 9) };
        let long = Request { max_tokens: 48, ..request("a cat that sits on a mat", 3) };
        same(&pipeline, &[request("a cat", 1), several, request("a cat", 2), long]);
    }
}

#[test]
fn guidance_with_negative_prompts_of_their_own_gives_what_it_gives_alone() {
    let (_folder, pipeline) = load("klein-base", DType::F32);
    let guided = |prompt: &str, negative: Option<&str>, seed| {
        let negative = negative.map(str::to_owned);
        let prompt = Prompt::Text { prompts: vec![prompt.into()], negative };
        Request { prompt, guidance: Some(3.0), ..request("", seed) }
    };
    same(&pipeline, &[guided("a cat", Some("a dog"), 1), guided("a house", None, 2)]);
}

#[test]
fn edits_and_inpainting_beside_plain_pictures_give_what_they_give_alone() {
    let (_folder, pipeline) = load("klein", DType::F32);
    let edit = Request { references: vec![picture(64, 64, 1)], ..request("a cat", 1) };
    let two = Request { references: vec![picture(96, 64, 2), picture(64, 64, 3)], ..request("a dog", 2) };
    let mask = GrayPicture::from(&picture(64, 64, 4));
    let task = Task::Inpaint { source: picture(64, 64, 5), mask, strength: 1.0, padding: None };
    let inpaint = Request { task, width: None, height: None, ..request("a tree", 3) };
    same(&pipeline, &[edit, request("a house", 4), two, inpaint]);
}

#[test]
fn kept_references_stay_with_their_picture() {
    let (_folder, pipeline) = load("klein-kv", DType::F32);
    let edit = |seed: u64, references| Request { references, ..request("a cat", seed) };
    let references = |n: u32| (0..n).map(|i| picture(64, 64, 7 * n + i)).collect::<Vec<_>>();
    same(&pipeline, &[edit(1, references(1)), edit(2, references(2)), edit(3, Vec::new())]);
    // More runs of rows than the few that are multiplied in another way.
    same(&pipeline, &[1, 2, 3, 4].map(|seed| edit(seed, references(1))));
}

#[test]
fn pictures_that_are_not_alike_are_painted_one_after_the_other() {
    let (_folder, pipeline) = load("klein", DType::F32);
    let requests = [
        request("a cat", 1),
        Request { steps: Some(2), ..request("a cat", 1) },
        Request { width: Some(80), ..request("a cat", 1) },
        request("a dog", 2),
    ];
    let mut watchers = watchers(4);
    let ended = together(&pipeline, &requests, &mut watchers, ALL);
    assert_eq!(watchers.iter().map(|w| w.batches[0]).collect::<Vec<_>>(), [2, 1, 1, 2]);
    for (request, (end, found)) in requests.iter().zip(ended) {
        end.unwrap();
        assert!(found[0].picture == pipeline.generate(request, &mut ()).unwrap()[0].picture);
    }
}

#[test]
fn a_batch_is_no_larger_than_what_is_asked_for_and_what_fits_into_memory() {
    let (_folder, pipeline) = load("klein", DType::F32);
    let five = [Request { pictures_per_prompt: 5, ..request("a cat", 1) }];
    let sizes = |limit: Together| {
        let mut watchers = watchers(1);
        together(&pipeline, &five, &mut watchers, limit)[0].0.as_ref().unwrap();
        watchers.remove(0).batches
    };
    // Text and image rows of one such picture.
    let rows = 32 + 4 * 4;
    assert_eq!(sizes(Together { most: 2, ..ALL }), [2, 2, 1]);
    assert_eq!(sizes(Together { most: 1, ..ALL }), [1; 5]);
    assert_eq!(sizes(Together { memory: Some(1), ..ALL }), [1; 5]);
    assert_eq!(sizes(Together { rows: Some(3 * rows), ..ALL }), [3, 2]);
    assert_eq!(pipeline.room(rows, &ALL), 16);
    assert_eq!(pipeline.room(1 << 20, &ALL), 1);
}

#[test]
fn one_that_is_cancelled_leaves_the_others_as_they_are() {
    let (_folder, pipeline) = load("klein", DType::F32);
    let requests = [request("a cat", 1), request("a dog", 2), request("a house", 3)];
    let mut watchers = watchers(3);
    watchers[1].stop_after = Some(1);
    let ended = together(&pipeline, &requests, &mut watchers, ALL);
    assert!(matches!(ended[1], (Err(Error::Cancelled), ref none) if none.is_empty()));
    assert_eq!(watchers.iter().map(|w| w.steps).collect::<Vec<_>>(), [3, 1, 3]);
    for i in [0, 2] {
        assert!(ended[i].0.is_ok());
        let alone = pipeline.generate(&requests[i], &mut ()).unwrap();
        assert!(ended[i].1[0].picture == alone[0].picture);
    }
}

#[test]
fn one_that_goes_wrong_does_not_spoil_the_others() {
    let (_folder, pipeline) = load("klein", DType::F32);
    let unfit = Request { steps: Some(0), ..request("a dog", 2) };
    // Its latents are no numbers: found after the steps that it took with the others.
    let bad = HostTensor::from_f32([32, 48], vec![f32::MAX; 32 * 48]).unwrap();
    let prompt = Prompt::Embeddings { prompts: vec![bad], negative: None };
    let requests = [request("a cat", 1), unfit, Request { prompt, ..request("", 3) }];
    let ended = together(&pipeline, &requests, &mut watchers(3), ALL);
    assert!(matches!(ended[1].0, Err(Error::Request(_))));
    assert!(matches!(ended[2].0, Err(Error::NotFinite { .. })), "{:?}", ended[2].0);
    assert!(ended[0].1[0].picture == pipeline.generate(&requests[0], &mut ()).unwrap()[0].picture);
}

#[test]
fn a_handful_of_rows_goes_alone_since_it_is_multiplied_in_another_way() {
    let (_folder, pipeline) = load("klein", DType::F32);
    let words = |rows: usize| {
        let values = (0..rows * 48).map(|i| (i % 7) as f32 * 0.1).collect();
        let prompt = HostTensor::from_f32([rows, 48], values).unwrap();
        Prompt::Embeddings { prompts: vec![prompt], negative: None }
    };
    let of = |rows, seed| Request { prompt: words(rows), ..request("", seed) };
    same(&pipeline, &[of(16, 1), of(21, 2)]);
    let requests = [of(5, 1), of(16, 2), Request { width: Some(32), height: Some(32), ..of(16, 3) }];
    let mut watchers = watchers(3);
    let ended = together(&pipeline, &requests, &mut watchers, ALL);
    assert!(watchers.iter().all(|w| w.batches == [1]));
    for (request, (end, found)) in requests.iter().zip(ended) {
        end.unwrap();
        assert!(found[0].latents == pipeline.generate(request, &mut ()).unwrap()[0].latents);
    }
}
