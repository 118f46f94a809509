//! The receiver of a request's progress and images.

use kiln_image::RgbImage;
use kiln_nn::{Event, StepEnd, StepReply};
use kiln_tensor::HostTensor;

use crate::error::Result;
use crate::progress::StepCounts;
use crate::recipe::Recipe;

/// A generated image.
#[derive(Clone, Debug)]
pub struct GeneratedImage {
    /// Its index in the request, from 0; images of one prompt are consecutive.
    pub index: usize,
    /// The pixels.
    pub image: RgbImage,
    /// The final normalized latents as tokens, f32 `[height/16 · width/16, channels]`.
    pub latents: HostTensor,
    /// The seed, if the noise was drawn from one.
    pub seed: Option<u64>,
    /// Steps computed and reused.
    pub steps: StepCounts,
    /// How it was generated.
    pub recipe: Recipe,
}

/// Receives the progress and the images of one request.
///
/// Events come from the thread that generates. Previews, images and the end come from another thread, in this order, and
/// perhaps at the same time as events of the request's next image. A panic ends the request with an error. A sink must
/// not call the engine.
pub trait Sink: Send + Sync {
    /// Whether the request is cancelled. Called several times per step.
    fn cancelled(&self) -> bool {
        false
    }

    /// Receives a progress event.
    fn event(&self, event: &Event);

    /// Whether previews are wanted now; if not, none are computed.
    fn wants_preview(&self) -> bool {
        false
    }

    /// Receives a preview of the image in progress.
    fn preview(&self, image: RgbImage) {
        let _ = image;
    }

    /// Whether [`step_end`](Sink::step_end) is wanted. Each step then waits for the device and for the sink.
    fn wants_step_end(&self) -> bool {
        false
    }

    /// Receives the latents of the images that took a step together, and may replace them or skip the remaining steps. An
    /// error ends the request. Not called when upscaling.
    fn step_end(&self, step: StepEnd<HostTensor>) -> Result<StepReply<HostTensor>> {
        let _ = step;
        Ok(StepReply::default())
    }

    /// Receives an image; an error ends the request. The device continues meanwhile.
    fn image(&self, image: GeneratedImage) -> Result<()>;

    /// Receives the result of the request. Called once, after everything else.
    fn ended(&self, result: Result<()>);
}
