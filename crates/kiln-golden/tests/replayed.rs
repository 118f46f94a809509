//! Whole pictures on the CUDA backend: with steps that are replayed they are the same to the last bit, and everybody is told
//! of as many blocks. Nothing where there is no GPU.

use kiln_cuda::{CudaBackend, Graphs, Options as CudaOptions};
use kiln_golden::{Checkpoint, in_tree};
use kiln_model::{Event, ModelFolder, Observer, Options, Pipeline, Request};
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
    let model = ModelFolder::open(folder.path()).unwrap();
    let options = Options { dtype, ..Options::default() };
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
    /// The latents of a picture, and the blocks of each step.
    fn paint(&self, prompt: &str) -> (HostTensor, Vec<usize>) {
        let request = Request {
            width: Some(64),
            height: Some(48),
            steps: Some(4),
            max_tokens: 32,
            ..Request::new(prompt)
        };
        let mut blocks = Blocks::default();
        let pictures = self.pipeline.generate(&request, &mut blocks).unwrap();
        (pictures[0].latents.clone(), blocks.0)
    }
}

#[test]
fn a_picture_of_replayed_steps_is_the_same_to_the_last_bit() {
    for dtype in [DType::BF16, DType::F32] {
        let Some(usual) = klein(Graphs::Never, dtype) else { return };
        let Some(replaying) = klein(Graphs::Always, dtype) else { return };
        for prompt in ["fox", "a house by the sea"] {
            let (expected, blocks) = usual.paint(prompt);
            assert!(blocks.len() == 4 && blocks[0] > 0);
            let (latents, told) = replaying.paint(prompt);
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
    for loras in [vec![], vec![(lora.clone(), 1.0)], vec![(lora, 0.3)]] {
        usual.pipeline.set_loras(&loras).unwrap();
        replaying.pipeline.set_loras(&loras).unwrap();
        let latents = replaying.paint("fox").0;
        assert!(latents == usual.paint("fox").0);
        assert!(!seen.contains(&latents), "a LoRA without an effect shows nothing");
        seen.push(latents);
    }
    assert_eq!(replaying.pipeline.backend().replayed(), 3 * 3);
}
