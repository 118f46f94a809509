//! Whole images on the CUDA backend: with steps that are replayed they are the same to the last bit, and everybody is told
//! of as many blocks. Nothing where there is no GPU.

use std::sync::Arc;

use kiln_cuda::{CudaBackend, Graphs, Options as CudaOptions};
use kiln_engine::pipeline::{LoadOptions, Pipeline};
use kiln_engine::{Event, LocalFiles, LoraRef, Model, Plan, Request};
use kiln_golden::{Checkpoint, in_tree};
use kiln_model::Observer;
use kiln_ops::Backend;
use kiln_tensor::{DType, HostTensor};

struct Klein {
    _folder: Checkpoint,
    pipeline: Pipeline<CudaBackend>,
}

/// The model, or `None` with a word about it.
fn klein(graphs: Graphs, dtype: DType) -> Option<Klein> {
    let options = CudaOptions { graphs, ..CudaOptions::default() };
    let backend = CudaBackend::new(&options).map_err(|e| println!("skipped: {e}")).ok()?;
    let folder = Checkpoint::assemble(&in_tree(), "klein").unwrap();
    let model = Arc::new(Model::open(folder.path()).unwrap());
    let options = LoadOptions { dtype, ..LoadOptions::default() };
    let pipeline = Pipeline::load(backend, &model, &options, &mut ()).unwrap();
    Some(Klein { _folder: folder, pipeline })
}

/// Counts blocks.
#[derive(Default)]
struct Blocks(Vec<usize>);

impl<B: Backend> Observer<B> for Blocks {
    fn event(&mut self, event: Event) -> kiln_model::Result<()> {
        match event {
            Event::StepStarted { .. } => self.0.push(0),
            Event::Block { .. } => *self.0.last_mut().unwrap() += 1,
            _ => {}
        }
        Ok(())
    }

    fn looks_inside(&self) -> bool {
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

    /// The latents of an image, and the blocks of each step.
    fn generate(&self, prompt: &str) -> (HostTensor, Vec<usize>) {
        let mut blocks = Blocks::default();
        let images = self.pipeline.generate(&self.plan(prompt, Vec::new()), &mut blocks).unwrap();
        (images[0].latents.clone(), blocks.0)
    }
}

#[test]
fn an_image_of_replayed_steps_is_the_same_to_the_last_bit() {
    for dtype in [DType::BF16, DType::F32] {
        let Some(usual) = klein(Graphs::Never, dtype) else { return };
        let Some(replaying) = klein(Graphs::Always, dtype) else { return };
        for prompt in ["fox", "a house by the sea"] {
            let (expected, blocks) = usual.generate(prompt);
            assert!(blocks.len() == 4 && blocks[0] > 0);
            let (latents, told) = replaying.generate(prompt);
            assert!(latents == expected, "{dtype}, {prompt}");
            assert_eq!(told, blocks);
        }
        // All steps but the very first.
        assert_eq!(replaying.pipeline.backend().replayed(), 7);
        assert_eq!(usual.pipeline.backend().replayed(), 0);
    }
}

#[test]
fn other_loras_are_never_replayed_as_those_before() {
    let lora = in_tree().join("tiny/lora/lora_diffusers.safetensors");
    let Some(mut usual) = klein(Graphs::Never, DType::BF16) else { return };
    let Some(mut replaying) = klein(Graphs::Always, DType::BF16) else { return };
    let mut seen: Vec<HostTensor> = Vec::new();
    let lora = |weight| LoraRef { path: lora.clone(), weight, sha256: None };
    for loras in [vec![], vec![lora(1.0)], vec![lora(0.3)]] {
        let loras = usual.plan("fox", loras).loras;
        usual.pipeline.set_loras(&loras, false).unwrap();
        replaying.pipeline.set_loras(&loras, false).unwrap();
        let latents = replaying.generate("fox").0;
        assert!(latents == usual.generate("fox").0);
        assert!(!seen.contains(&latents), "a LoRA without an effect shows nothing");
        seen.push(latents);
    }
    assert_eq!(replaying.pipeline.backend().replayed(), 3 * 3);
}
