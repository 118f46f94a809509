//! Progress events and intermediate tensors of a run.
//!
//! One observer serves progress bars, previews, cancellation and the golden tests, which look inside the transformer.

use kiln_image::RgbImage;
use kiln_ops::Backend;

use crate::Result;

/// A progress event, for progress bars and logs. Past participles report finished work, the others work that begins.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A component of the model is being loaded.
    Loading {
        /// `text encoder`, `transformer`, `vae`, …
        component: &'static str,
    },
    /// A block of the transformer was quantized to 8 bits while loading; sent where that takes time.
    BlockQuantized {
        /// Blocks done.
        done: usize,
        /// Blocks in all.
        total: usize,
    },
    /// A LoRA was applied to the transformer.
    LoraApplied {
        /// How many modules matched, rank and weight, in one line.
        report: String,
    },
    /// A layer of the text encoder is finished; `done` is 0 when the first begins.
    TextLayer {
        /// Index of the prompt, from 0; the negative prompt comes last.
        prompt: usize,
        /// Number of prompts.
        prompts: usize,
        /// Layers done.
        done: usize,
        /// Layers to run.
        total: usize,
    },
    /// A reference image is about to be encoded.
    EncodingReference {
        /// Index of the reference, from 0.
        index: usize,
        /// Number of references.
        total: usize,
    },
    /// A tile of an image that is upscaled begins; its own encoding, steps and decoding follow.
    TileStarted {
        /// Index of the image, from 0.
        image: usize,
        /// Index of the tile, from 0.
        tile: usize,
        /// Number of tiles.
        tiles: usize,
    },
    /// A step begins.
    StepStarted {
        /// Index of the image, from 0; the first if several take the step together.
        image: usize,
        /// Images of this request that take the step together.
        images: usize,
        /// Images of all requests that take the step together.
        batch: usize,
        /// Index of the step, from 0.
        step: usize,
        /// Number of steps in this run.
        steps: usize,
        /// Noise level before the step.
        sigma: f32,
    },
    /// A step is finished.
    StepFinished {
        /// Index of the image, from 0; the first if several took the step together.
        image: usize,
        /// Images of this request that took the step together.
        images: usize,
        /// Index of the step, from 0.
        step: usize,
        /// Number of steps in this run.
        steps: usize,
        /// Steps so far in which the (first) image reused the step cache.
        reused: usize,
    },
    /// A block of the transformer is finished. When a GPU replays a recorded step, all of its blocks are reported at once;
    /// blocks that the step cache replaces count as finished.
    Block {
        /// Blocks done.
        done: usize,
        /// Blocks of one step.
        total: usize,
    },
    /// An image is about to be decoded.
    DecodingImage {
        /// Index of the image, from 0.
        image: usize,
    },
    /// A tile of an image was decoded; an image that is not tiled counts as one tile.
    TileDecoded {
        /// Tiles done.
        done: usize,
        /// Tiles in all.
        total: usize,
    },
    /// Something the user should know: an option without effect, a size that was rounded.
    Note(String),
}

/// The state of one image after a step.
pub struct StepOutput<'a, B: Backend> {
    /// Index of the step, from 0.
    pub step: usize,
    /// Latents after the step, f32 `[tokens, channels]`.
    pub latents: &'a B::Tensor,
    /// The velocity that the step followed.
    pub velocity: &'a B::Tensor,
    /// Noise level after the step.
    pub sigma: f32,
}

/// The images of one request after a step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepEnd<T> {
    /// Index of the first image, from 0.
    pub image: usize,
    /// Index of the step, from 0.
    pub step: usize,
    /// Number of steps in this run.
    pub steps: usize,
    /// Noise level before the step.
    pub sigma: f32,
    /// Latents after the step, f32 `[tokens, channels]` for each image.
    pub latents: Vec<T>,
}

/// What the images of a request continue with after a step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepReply<T> {
    /// Latents to continue with, one for each image; the step's own if absent.
    pub latents: Option<Vec<T>>,
    /// Whether to skip the remaining steps and decode the latents as they are.
    pub stop: bool,
}

impl<T> Default for StepReply<T> {
    fn default() -> Self {
        StepReply { latents: None, stop: false }
    }
}

/// Observes a run, and can stop it.
///
/// An error returned from any method, such as [`Error::Cancelled`](crate::Error::Cancelled), ends the run at once.
/// `()` observes nothing.
pub trait Observer<B: Backend> {
    /// Receives a progress event.
    fn event(&mut self, event: Event) -> Result<()> {
        let _ = event;
        Ok(())
    }

    /// Receives the result of a step; the backend may still be computing it.
    fn step_output(&mut self, step: &StepOutput<'_, B>) -> Result<()> {
        let _ = step;
        Ok(())
    }

    /// Whether [`step_end`](Observer::step_end) is wanted.
    fn wants_step_end(&self) -> bool {
        false
    }

    /// Receives the images of its request that took a step together, and may change what they continue with.
    fn step_end(&mut self, step: &StepEnd<&B::Tensor>) -> Result<StepReply<B::Tensor>> {
        let _ = step;
        Ok(StepReply::default())
    }

    /// Receives an image that is finished in part: all of it, with some of its tiles upscaled.
    fn partial_image(&mut self, image: &RgbImage) -> Result<()> {
        let _ = image;
        Ok(())
    }

    /// Receives an intermediate tensor, named as in the golden files. Reading it costs a download.
    fn inspect(&mut self, name: &str, x: &B::Tensor) -> Result<()> {
        let _ = (name, x);
        Ok(())
    }

    /// Whether [`inspect`](Observer::inspect) needs the tensors inside the transformer. If not, a GPU may replay whole steps.
    fn wants_tensors(&self) -> bool {
        true
    }
}

impl<B: Backend> Observer<B> for () {
    fn wants_tensors(&self) -> bool {
        false
    }
}
