//! Images whose work is on the device, and images that are done.

use kiln_image::Picture;
use kiln_model::PictureLater;
use kiln_ops::{Backend, Later};
use kiln_tensor::HostTensor;

use super::{finite, text};
use crate::error::Result;
use crate::plan::{Plan, Start};

/// An image that is done.
#[derive(Clone, Debug)]
pub struct Generated {
    /// The image.
    pub picture: Picture,
    /// Its final normalised tokens, f32 `[h/16 · w/16, 128]`.
    pub latents: HostTensor,
    /// Its number in the request, from 0; images of one prompt follow each other.
    pub index: usize,
}

/// An image whose work is asked for: the device may still be at it.
pub struct Unfinished<B: Backend> {
    pub(super) index: usize,
    pub(super) picture: PictureLater,
    pub(super) latents: Later<HostTensor>,
    pub(super) text: B::Tensor,
    /// References as the autoencoder gave them, with the first image that uses them.
    pub(super) references: Vec<Later<HostTensor>>,
}

impl<B: Backend> Unfinished<B> {
    /// Its number in the request, from 0.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Waits for it, and checks that nothing of it is NaN or infinite.
    pub fn finish(self, b: &B, plan: &Plan) -> Result<Generated> {
        for reference in self.references {
            finite("the autoencoder's latent", &reference()?)?;
        }
        let latents = (self.latents)()?;
        if let Err(error) = finite("the transformer's result", &latents) {
            finite(text::RESULT, &b.download(&self.text)?)?;
            return Err(error);
        }
        let picture = (self.picture)()?;
        let picture = match &plan.start {
            Start::Inpaint(inpaint) => kiln_image::paste_back(inpaint, &picture),
            Start::Noise | Start::Image(_) => picture,
        };
        Ok(Generated { picture, latents, index: self.index })
    }
}
