//! Where images and news of them go.

use kiln_image::Picture;
use kiln_model::Event;
use kiln_tensor::HostTensor;

use crate::error::Result;
use crate::recipe::Recipe;

/// An image that is done.
#[derive(Clone, Debug)]
pub struct Image {
    /// Its number in the request, from 0; images of one prompt follow each other.
    pub index: usize,
    /// The image.
    pub picture: Picture,
    /// Its final normalised tokens, f32 `[h/16 · w/16, 128]`.
    pub latents: HostTensor,
    /// Its seed, where it has one.
    pub seed: Option<u64>,
    /// How it was made.
    pub recipe: Recipe,
}

/// Hears of one request while its images are made. Events come from the thread that generates; previews, images and the end
/// from another, in this order, and perhaps at the same time as events of the request's next image. A panic ends the
/// request with an error. Nothing here may call back into the engine.
pub trait Sink: Send + Sync {
    /// Whether nobody wants the images any more. Asked several times a step.
    fn cancelled(&self) -> bool {
        false
    }

    /// Something happened.
    fn event(&self, event: &Event);

    /// Whether somebody looks at previews. Where nobody does, none are made.
    fn wants_preview(&self) -> bool {
        false
    }

    /// What an image looks like so far.
    fn preview(&self, picture: Picture) {
        let _ = picture;
    }

    /// Takes an image; an error ends the request with it. While this runs, the device works on.
    fn image(&self, image: Image) -> Result<()>;

    /// The request is done, or there will be no more of it. Called once, after everything else.
    fn ended(&self, result: Result<()>);
}
