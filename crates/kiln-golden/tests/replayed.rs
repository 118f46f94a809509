//! CUDA graphs in a whole pipeline: images of replayed steps are bit-identical, and observers get the same events. Skipped
//! without a GPU.

use std::sync::Arc;

use kiln_cuda::{CudaBackend, Graphs, Options as CudaOptions};
use kiln_engine::pipeline::{LoadOptions, Pipeline};
use kiln_engine::{Event, LocalFiles, LoraRef, Model, Plan, Request};
use kiln_golden::{Checkpoint, testdata};
use kiln_nn::Observer;
use kiln_ops::Backend;
use kiln_tensor::{DType, HostTensor};

struct Klein {
    _folder: Checkpoint,
    pipeline: Pipeline<CudaBackend>,
}

/// Loads klein; `None`, with a message, without a GPU.
fn klein(graphs: Graphs, dtype: DType) -> Option<Klein> {
    load("klein", graphs, dtype)
}

fn load(name: &str, graphs: Graphs, dtype: DType) -> Option<Klein> {
    let options = CudaOptions { graphs, ..CudaOptions::default() };
    let backend = CudaBackend::new(&options).map_err(|e| println!("skipped: {e}")).ok()?;
    let folder = Checkpoint::assemble(&testdata(), name).unwrap();
    let model = Arc::new(Model::open(folder.path()).unwrap());
    let options = LoadOptions { dtype, ..LoadOptions::default() };
    let pipeline = Pipeline::load(backend, &model, &options, &mut ()).unwrap();
    Some(Klein { _folder: folder, pipeline })
}

/// Counts the blocks of each step.
#[derive(Default)]
struct BlockCounter(Vec<usize>);

impl<B: Backend> Observer<B> for BlockCounter {
    fn event(&mut self, event: Event) -> kiln_nn::Result<()> {
        match event {
            Event::StepStarted { .. } => self.0.push(0),
            Event::Block { .. } => *self.0.last_mut().unwrap() += 1,
            _ => {}
        }
        Ok(())
    }

    fn wants_tensors(&self) -> bool {
        false
    }
}

impl Klein {
    fn plan(&self, prompt: &str, loras: Vec<LoraRef>) -> Plan {
        let request = Request {
            width: Some(64),
            height: Some(48),
            steps: Some(4),
            max_tokens: Some(32),
            loras,
            ..Request::new(prompt)
        };
        Plan::new(self.pipeline.model(), &request, &LocalFiles).unwrap()
    }

    /// Generates an image. Returns its latents and the number of blocks of each step.
    fn generate(&self, prompt: &str) -> (HostTensor, Vec<usize>) {
        let mut blocks = BlockCounter::default();
        let images = self.pipeline.generate(&self.plan(prompt, Vec::new()), &mut blocks).unwrap();
        (images[0].latents.clone(), blocks.0)
    }
}

#[test]
fn images_of_replayed_steps_are_bit_identical() {
    for dtype in [DType::BF16, DType::F32] {
        let Some(direct) = klein(Graphs::Never, dtype) else { return };
        let Some(replaying) = klein(Graphs::Always, dtype) else { return };
        for prompt in ["fox", "a house by the sea"] {
            let (expected, blocks) = direct.generate(prompt);
            assert!(blocks.len() == 4 && blocks[0] > 0);
            let (latents, replayed_blocks) = replaying.generate(prompt);
            assert!(latents == expected, "{dtype}, {prompt}");
            assert_eq!(replayed_blocks, blocks);
        }
        // All steps except the first of the first image.
        assert_eq!(replaying.pipeline.backend().graph_replays(), 7);
        assert_eq!(direct.pipeline.backend().graph_replays(), 0);
    }
}

#[test]
fn graphs_are_not_replayed_after_switching_loras() {
    let lora = testdata().join("tiny/lora/lora_diffusers.safetensors");
    let Some(mut direct) = klein(Graphs::Never, DType::BF16) else { return };
    let Some(mut replaying) = klein(Graphs::Always, DType::BF16) else { return };
    let mut seen: Vec<HostTensor> = Vec::new();
    let lora = |weight| LoraRef { path: lora.clone(), weight, sha256: None };
    for loras in [vec![], vec![lora(1.0)], vec![lora(0.3)]] {
        let loras = direct.plan("fox", loras).loras;
        direct.pipeline.set_loras(&loras, false).unwrap();
        replaying.pipeline.set_loras(&loras, false).unwrap();
        let latents = replaying.generate("fox").0;
        assert!(latents == direct.generate("fox").0);
        assert!(!seen.contains(&latents), "the LoRA has no effect");
        seen.push(latents);
    }
    assert_eq!(replaying.pipeline.backend().graph_replays(), 3 * 3);
}

#[test]
fn steps_with_the_step_cache_are_bit_identical_when_replayed() {
    for dtype in [DType::BF16, DType::F32] {
        let Some(direct) = load("klein-base", Graphs::Never, dtype) else { return };
        let Some(replaying) = load("klein-base", Graphs::Always, dtype) else { return };
        let mut reused = Vec::new();
        // The random weights of this model change by about 1 from step to step.
        for threshold in [1e-30, 0.9, 1.1, 1e9] {
            for (prompt, guidance) in [("fox", 3.0), ("a house by the sea", 1.0)] {
                let generate = |klein: &Klein| {
                    let mut plan = klein.plan(prompt, Vec::new());
                    let request = Request {
                        cache: Some(0.1),
                        steps: Some(8),
                        guidance: Some(guidance),
                        ..plan.request.clone()
                    };
                    plan = Plan::new(klein.pipeline.model(), &request, &LocalFiles).unwrap();
                    plan.cache = Some(threshold);
                    let mut blocks = BlockCounter::default();
                    let image = klein.pipeline.generate(&plan, &mut blocks).unwrap().remove(0);
                    (image.latents, image.steps, blocks.0)
                };
                let (expected, found) = (generate(&direct), generate(&replaying));
                assert!(expected == found, "{dtype}, {threshold}, {prompt}");
                reused.push(found.1.reused);
            }
        }
        assert_eq!((reused[0], reused[reused.len() - 1]), (0, 6));
        assert!(replaying.pipeline.backend().graph_replays() > 20);
        // Without the cache, the whole step is a graph of its own.
        assert!(direct.generate("fox").0 == replaying.generate("fox").0);
    }
}
