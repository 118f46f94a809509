//! Images whose work is on the device, and images that are done.

use kiln_image::Picture;
use kiln_model::PictureLater;
use kiln_ops::{Backend, Later};
use kiln_tensor::HostTensor;

use crate::error::{Error, Result};
use crate::plan::{Plan, Start};

/// What messages call an encoded text.
pub(super) const TEXT: &str = "the text encoder's result";

/// Work that is left for when the device is done; it may give a note for the user.
pub(super) type Afterwards = Box<dyn FnOnce() -> Result<Option<String>> + Send>;

/// An image that is done.
#[derive(Clone, Debug)]
pub struct Generated {
    /// The image.
    pub picture: Picture,
    /// Its final normalised tokens, f32 `[h/16 · w/16, 128]`.
    pub latents: HostTensor,
    /// Its number in the request, from 0; images of one prompt follow each other.
    pub index: usize,
    /// What the user should know.
    pub notes: Vec<String>,
}

/// An image whose work is asked for: the device may still be at it.
pub struct Unfinished<B: Backend> {
    pub(super) index: usize,
    pub(super) picture: PictureLater,
    pub(super) latents: Later<HostTensor>,
    pub(super) text: B::Tensor,
    /// Checks of what several images share, and texts to be kept, with the first of those images.
    pub(super) afterwards: Vec<Afterwards>,
}

impl<B: Backend> Unfinished<B> {
    /// Its number in the request, from 0.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Waits for it, and checks that nothing of it is NaN or infinite.
    pub fn finish(self, b: &B, plan: &Plan) -> Result<Generated> {
        let mut notes = Vec::new();
        for afterwards in self.afterwards {
            notes.extend(afterwards()?);
        }
        let latents = (self.latents)()?;
        if let Err(error) = finite("the transformer's result", &latents) {
            finite(TEXT, &b.download(&self.text)?)?;
            return Err(error);
        }
        let picture = (self.picture)()?;
        let picture = match &plan.start {
            Start::Inpaint(inpaint) => kiln_image::paste_back(inpaint, &picture),
            Start::Noise | Start::Image(_) => picture,
        };
        Ok(Generated { picture, latents, index: self.index, notes })
    }
}

/// Refuses NaN and infinity, which would otherwise end as a black image.
pub(super) fn finite(what: &'static str, x: &HostTensor) -> Result<()> {
    match x.to_f32()?.iter().all(|v| v.is_finite()) {
        true => Ok(()),
        false => Err(Error::Model(kiln_model::Error::NotFinite { what })),
    }
}
