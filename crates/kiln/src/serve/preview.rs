//! What a picture looks like before it is done: by a small autoencoder where there is one, else by a projection.

use std::path::Path;

use kiln_image::{Filter, Picture};
use kiln_model::{Autoencoder, Generated, Pipeline, Result};
use kiln_ops::Backend;
use kiln_tensor::DType;

use super::projection::{Projection, card};
use crate::failure::{Failure, While};

/// The side of the card that a projection begins with.
const CARD: u32 = 256;
/// The longest side of a preview.
const LONGEST: u32 = 512;

/// How previews are made.
pub enum Previews<B: Backend> {
    /// With an autoencoder of their own.
    Decoded(Box<Autoencoder<B>>),
    /// With a fitted map.
    Projected(Projection),
}

impl<B: Backend> Previews<B> {
    pub fn new(
        pipeline: &Pipeline<B>,
        vae: Option<&Path>,
        dtype: DType,
    ) -> std::result::Result<Previews<B>, Failure> {
        let b = pipeline.backend();
        if let Some(path) = vae {
            let vae = Autoencoder::open(b, path, dtype).while_doing(|| "opening --preview-vae".into())?;
            return Ok(Previews::Decoded(Box::new(vae)));
        }
        let mut projection = Projection::new(pipeline.folder().transformer.config.in_channels);
        let card = card(CARD);
        let tokens = pipeline.autoencoder().encode(b, &card, &mut ());
        // Without it, previews are grey until the first picture is done.
        if let Ok(tokens) = tokens.and_then(|tokens| Ok(b.download(&tokens)?.to_f32()?.into_owned())) {
            projection.learn(&tokens, &card);
        }
        Ok(Previews::Projected(projection))
    }

    /// Learns from a finished picture.
    pub fn learn(&mut self, done: &Generated) {
        if let (Previews::Projected(projection), Ok(tokens)) = (self, done.latents.to_f32()) {
            projection.learn(&tokens, &done.picture);
        }
    }

    /// The picture of tokens on a `grid` of height and width.
    pub fn show(&mut self, b: &B, tokens: &B::Tensor, grid: [usize; 2]) -> Result<Option<Picture>> {
        let [height, width] = grid;
        match self {
            Previews::Projected(projection) => {
                Ok(projection.show(&b.download(tokens)?.to_f32()?, width, height))
            }
            Previews::Decoded(vae) => {
                let picture = vae.decode(b, tokens, grid, &mut ())?;
                let longest = picture.width().max(picture.height());
                if longest <= LONGEST {
                    return Ok(Some(picture));
                }
                let side = |side: u32| (side * LONGEST / longest).max(1);
                let (width, height) = (side(picture.width()), side(picture.height()));
                Ok(Some(kiln_image::resize(&picture, width, height, Filter::Bicubic)))
            }
        }
    }
}
