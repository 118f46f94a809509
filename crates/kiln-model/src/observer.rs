use kiln_ops::Backend;

use crate::Result;

/// What a run is doing, for progress bars and logs.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A part of the model is being loaded.
    Loading {
        /// `text encoder`, `transformer`, `vae`, …
        part: &'static str,
    },
    /// Block `done` of `total` of the transformer is in 8 bits; told where that takes time.
    Rounded {
        /// Blocks done.
        done: usize,
        /// Blocks in all.
        total: usize,
    },
    /// A LoRA was laid over the transformer.
    Lora {
        /// How many modules matched, rank and weight, in one line.
        report: String,
    },
    /// Layer `done` of `total` of the text encoder is finished, for prompt `prompt`.
    Text {
        /// Which prompt, from 0; the negative prompt comes last.
        prompt: usize,
        /// How many prompts there are.
        prompts: usize,
        /// Layers done.
        done: usize,
        /// Layers to run.
        total: usize,
    },
    /// Reference `index` is about to be encoded.
    Reference {
        /// Which one, from 0.
        index: usize,
        /// How many there are.
        total: usize,
    },
    /// A step begins.
    StepStarted {
        /// Which picture, from 0; the first of several.
        picture: usize,
        /// How many pictures of this request take the step at once.
        own: usize,
        /// The same of all requests.
        all: usize,
        /// Which step, from 0.
        step: usize,
        /// How many steps this run takes.
        steps: usize,
        /// Noise level at its start.
        sigma: f32,
    },
    /// A step is finished.
    StepFinished {
        /// Which picture, from 0; the first of several.
        picture: usize,
        /// How many pictures of this request took the step at once.
        own: usize,
        /// Which step, from 0.
        step: usize,
        /// How many steps this run takes.
        steps: usize,
    },
    /// A block of the step is finished; of a step that a GPU replays, all are told of when it is launched.
    Block {
        /// Blocks done.
        done: usize,
        /// Blocks of one step.
        total: usize,
    },
    /// Picture `picture` is about to be decoded.
    Decoding {
        /// Which picture, from 0.
        picture: usize,
    },
    /// Tile `done` of `total` is decoded; one tile when the picture is decoded whole.
    Decode {
        /// Tiles done.
        done: usize,
        /// Tiles in all.
        total: usize,
    },
    /// Something the user should know: an option that has no effect, a size that was rounded.
    Note(String),
}

/// What a step made of one image.
pub struct Denoised<'a, B: Backend> {
    /// Which step, from 0.
    pub step: usize,
    /// The latents after it, f32 `[tokens, channels]`.
    pub latents: &'a B::Tensor,
    /// The velocity that was followed.
    pub velocity: &'a B::Tensor,
    /// The noise level after it.
    pub sigma: f32,
}

/// Watches a run, and can stop it.
///
/// Every call site asks for a `Result`: an error returned here, such as [`Error::Cancelled`](crate::Error::Cancelled),
/// ends the run at once. `()` watches nothing.
pub trait Observer<B: Backend> {
    /// Something happened.
    fn event(&mut self, event: Event) -> Result<()> {
        let _ = event;
        Ok(())
    }

    /// A step of an image was taken, on a backend that may still be at it.
    fn denoised(&mut self, step: &Denoised<'_, B>) -> Result<()> {
        let _ = step;
        Ok(())
    }

    /// An intermediate tensor, named as in the golden files. Looking at it costs a download.
    fn see(&mut self, name: &str, x: &B::Tensor) -> Result<()> {
        let _ = (name, x);
        Ok(())
    }

    /// Whether it wants to see tensors inside a call of the transformer. One that doesn't lets a GPU replay whole steps.
    fn looks_inside(&self) -> bool {
        true
    }
}

impl<B: Backend> Observer<B> for () {
    fn looks_inside(&self) -> bool {
        false
    }
}
