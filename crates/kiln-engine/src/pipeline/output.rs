//! Images: finished, or still being computed by the device.

use kiln_image::RgbImage;
use kiln_nn::PendingImage;
use kiln_ops::{Backend, Pending};
use kiln_tensor::HostTensor;

use crate::error::{Error, Result};
use crate::plan::{Plan, StartingPoint};
use crate::progress::StepCounts;

/// The name of an encoded text in messages.
pub(super) const TEXT: &str = "the text encoder's result";

/// The name of an encoded image in messages.
pub(super) const IMAGE: &str = "the autoencoder's latent";

/// Work that needs a finished result of the device, such as checks and cache writes. May return a note for the user.
pub(super) type DeferredWork = Box<dyn FnOnce() -> Result<Option<String>> + Send>;

/// A finished image.
#[derive(Clone, Debug)]
pub struct PipelineOutput {
    /// The pixels.
    pub image: RgbImage,
    /// The final normalized latents as tokens, f32 `[height/16 · width/16, channels]`.
    pub latents: HostTensor,
    /// Its index in the request, from 0; images of one prompt are consecutive.
    pub index: usize,
    /// Steps computed and reused; of all tiles when upscaling.
    pub steps: StepCounts,
    /// Notes for the user.
    pub notes: Vec<String>,
}

/// An image whose work is queued; the device may still compute it.
pub struct PendingOutput<B: Backend> {
    pub(super) index: usize,
    pub(super) steps: StepCounts,
    pub(super) image: PendingImage,
    pub(super) latents: Pending<HostTensor>,
    pub(super) text: B::Tensor,
    /// Work for results that the images of a request share; comes with the first of them.
    pub(super) deferred: Vec<DeferredWork>,
}

impl<B: Backend> PendingOutput<B> {
    /// Returns its index in the request, from 0.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Waits for the image, and checks that it contains no NaN or infinity.
    pub fn finish(self, b: &B, plan: &Plan) -> Result<PipelineOutput> {
        let mut notes = Vec::new();
        for work in self.deferred {
            notes.extend(work()?);
        }
        let latents = (self.latents)()?;
        if !latents.is_finite() {
            let done = self.steps.computed + self.steps.reused;
            // The images were checked by the deferred work.
            return Err(not_finite_after(b, [done, plan.steps - plan.first_step], &self.text, &[]));
        }
        let image = (self.image)()?;
        let image = match &plan.start {
            StartingPoint::Inpaint(inpaint) => kiln_image::paste_back(inpaint, &image),
            StartingPoint::Noise | StartingPoint::Image(_) | StartingPoint::Upscale(_) => image,
        };
        Ok(PipelineOutput { image, latents, index: self.index, steps: self.steps, notes })
    }
}

/// Refuses NaN and infinity, which would otherwise give a black image.
pub(super) fn check_finite(what: &str, x: &HostTensor) -> Result<()> {
    if x.to_f32()?.iter().all(|v| v.is_finite()) { Ok(()) } else { Err(not_finite(what)) }
}

/// Returns the error for a latent with NaN or infinity after `done` of `steps` steps with this text and these encoded
/// images. Blames an encoder if the fault began there.
pub(super) fn not_finite_after<B: Backend>(
    b: &B,
    [done, steps]: [usize; 2],
    text: &B::Tensor,
    images: &[&B::Tensor],
) -> Error {
    let check_inputs = || {
        check_finite(TEXT, &b.download(text)?)?;
        images.iter().try_for_each(|image| check_finite(IMAGE, &b.download(image)?))
    };
    check_inputs().err().unwrap_or_else(|| not_finite(format!("the latent after step {done} of {steps}")))
}

fn not_finite(what: impl Into<String>) -> Error {
    Error::Model(kiln_nn::Error::NotFinite { what: what.into() })
}
