//! What an image looks like before it is done: by a small autoencoder where there is one, else by a projection.

use std::sync::{Arc, Mutex};

use kiln_base::lock;
use kiln_image::{Filter, Picture};
use kiln_model::{Autoencoder, Denoised};
use kiln_ops::Backend;

use crate::error::Result;
use crate::pipeline::{Generated, Pipeline};
use crate::projection::{Projection, card};

/// The side of the card that a projection begins with.
const CARD: u32 = 256;
/// The longest side of a preview.
const LONGEST: u32 = 512;

/// A preview that the device is still at; calling it waits. `None` where there is nothing to show.
pub(crate) type PreviewLater = Box<dyn FnOnce() -> Result<Option<Picture>> + Send>;

/// How previews are made. Nothing is made before somebody looks.
pub(crate) enum Previews<B: Backend> {
    /// With an autoencoder of their own.
    Decoded(Arc<Autoencoder<B>>),
    /// With a fitted map.
    Projected(Arc<Mutex<Projection>>),
}

impl<B: Backend> Previews<B> {
    /// Previews by this autoencoder.
    pub fn decoded(vae: Arc<Autoencoder<B>>) -> Previews<B> {
        Previews::Decoded(vae)
    }

    /// Previews by a map that begins with what the pipeline's autoencoder makes of a card of colours.
    pub fn projected(pipeline: &Pipeline<B>) -> Result<Previews<B>> {
        let b = pipeline.backend();
        let mut projection = Projection::new(pipeline.model().transformer.config.in_channels);
        let card = card(CARD);
        // Without it, previews are grey until the first image is done.
        let tokens = pipeline.autoencoder(None)?.encode(b, &card, &mut ());
        if let Ok(tokens) = tokens.and_then(|tokens| Ok(b.download(&tokens)?.to_f32()?.into_owned())) {
            projection.learn(&tokens, &card);
        }
        Ok(Previews::Projected(Arc::new(Mutex::new(projection))))
    }

    /// Learns from an image that is done.
    pub fn learn(&self, done: &Generated) {
        if let (Previews::Projected(projection), Ok(tokens)) = (self, done.latents.to_f32()) {
            let mut projection = lock(&projection);
            projection.learn(&tokens, &done.picture);
        }
    }

    /// What the image would be if the step's direction were right: its latents, taken to the end at once.
    pub fn show(&self, b: &B, step: &Denoised<'_, B>, grid: [usize; 2]) -> Result<PreviewLater> {
        let guess = b.add_scaled(step.latents, step.velocity, -step.sigma)?;
        let [height, width] = grid;
        Ok(match self {
            Previews::Projected(projection) => {
                let (tokens, projection) = (b.download_later(&guess)?, Arc::clone(projection));
                Box::new(move || {
                    let tokens = tokens()?;
                    let projection = lock(&projection);
                    Ok(projection.show(&tokens.to_f32()?, width, height))
                })
            }
            Previews::Decoded(vae) => {
                let picture = vae.decode_later(b, &guess, grid, &mut ())?;
                Box::new(move || Ok(Some(shrunk(picture()?))))
            }
        })
    }
}

fn shrunk(picture: Picture) -> Picture {
    let longest = picture.width().max(picture.height());
    if longest <= LONGEST {
        return picture;
    }
    let side = |side: u32| (side * LONGEST / longest).max(1);
    kiln_image::resize(&picture, side(picture.width()), side(picture.height()), Filter::Bicubic)
}
