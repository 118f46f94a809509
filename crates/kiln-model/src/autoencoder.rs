//! Pictures to tokens and back, with whichever autoencoder is at hand.

use kiln_image::Picture;
use kiln_ops::{Backend, Tensor as _};
use kiln_tensor::{DType, HostTensor};
use kiln_weights::WeightSource;

use crate::taef2::Taef2;
use crate::vae::{self, Vae};
use crate::{Event, Observer, Result, tiles};

/// A picture that is still being decoded; calling it waits.
pub type PictureLater = Box<dyn FnOnce() -> Result<Picture> + Send>;

/// FLUX.2's autoencoder or its tiny stand-in.
pub enum Autoencoder<B: Backend> {
    /// The real one, with the full or the small decoder.
    Full(Vae<B>),
    /// TAEF2.
    Tiny(Taef2<B>),
}

impl<B: Backend> Autoencoder<B> {
    /// Loads FLUX.2's autoencoder of this configuration, or TAEF2 where there is none.
    pub fn load(b: &B, source: &WeightSource, config: Option<&vae::Config>, dtype: DType) -> Result<Self> {
        match config {
            Some(config) => Ok(Autoencoder::Full(Vae::load(b, &source.root(), config, dtype)?)),
            None => Ok(Autoencoder::Tiny(Taef2::load(b, &source.root(), dtype)?)),
        }
    }

    /// Normalised tokens, f32 `[h/16 · w/16, 128]`, of a picture whose sides are multiples of 16.
    pub fn encode(&self, b: &B, picture: &Picture, observer: &mut dyn Observer<B>) -> Result<B::Tensor> {
        let values = match self {
            Autoencoder::Full(_) => kiln_image::to_signed_f32(picture),
            Autoencoder::Tiny(_) => kiln_image::to_unit_f32(picture),
        };
        let shape = [picture.height() as usize, picture.width() as usize, 3];
        let picture = HostTensor::from_f32(shape, values)?;
        let latent = match tiles::in_one_piece([shape[0] / 8, shape[1] / 8]) {
            // What is done in one piece never leaves the device.
            true => self.encode_tile(b, &picture, observer)?,
            false => {
                let latent = tiles::map(&picture, [8, 1], |tile, _, _| {
                    Ok(b.download(&self.encode_tile(b, tile, observer)?)?)
                })?;
                b.upload(&latent, DType::F32)?
            }
        };
        let patches = b.space_to_depth(&latent)?;
        let patches = match self {
            Autoencoder::Full(vae) => vae.normalise(b, &patches)?,
            Autoencoder::Tiny(_) => patches,
        };
        let (rows, channels) = (patches.shape().rows(), patches.shape().last());
        Ok(b.reshape(&patches, [rows, channels].into())?)
    }

    /// The picture of normalised tokens on a `grid` of height and width.
    pub fn decode(
        &self,
        b: &B,
        tokens: &B::Tensor,
        grid: [usize; 2],
        observer: &mut dyn Observer<B>,
    ) -> Result<Picture> {
        self.decode_later(b, tokens, grid, observer)?()
    }

    /// [`Autoencoder::decode`] without the wait, as far as the picture is decoded in one piece.
    pub fn decode_later(
        &self,
        b: &B,
        tokens: &B::Tensor,
        grid: [usize; 2],
        observer: &mut dyn Observer<B>,
    ) -> Result<PictureLater> {
        let patches = b.reshape(tokens, [grid[0], grid[1], tokens.shape().last()].into())?;
        let patches = match self {
            Autoencoder::Full(vae) => vae.denormalise(b, &patches)?,
            Autoencoder::Tiny(_) => patches,
        };
        let latent = b.depth_to_space(&patches)?;
        observer.see("vae.decode_input", &latent)?;
        let [height, width] = grid.map(|side| (side * 16) as u32);
        // What is done in one piece never leaves the device before it is bytes.
        if tiles::in_one_piece(grid.map(|side| 2 * side)) {
            let picture = self.decode_tile(b, &latent, observer)?;
            observer.event(Event::Decode { done: 1, total: 1 })?;
            let (scale, shift) = match self {
                Autoencoder::Full(_) => (0.5, 0.5),
                Autoencoder::Tiny(_) => (1.0, 0.0),
            };
            let bytes = b.download_bytes_later(&picture, scale, shift)?;
            return Ok(Box::new(move || Ok(Picture::new(width, height, bytes()?)?)));
        }
        let values = tiles::map(&b.download(&latent)?, [1, 8], |tile, done, total| {
            let picture = self.decode_tile(b, &b.upload(tile, DType::F32)?, observer)?;
            let picture = b.download(&b.cast(&picture, DType::F32)?)?;
            observer.event(Event::Decode { done: done + 1, total })?;
            Ok(picture)
        })?;
        let picture = match self {
            Autoencoder::Full(_) => kiln_image::from_signed_f32(width, height, &values.to_f32()?)?,
            Autoencoder::Tiny(_) => kiln_image::from_unit_f32(width, height, &values.to_f32()?)?,
        };
        Ok(Box::new(move || Ok(picture)))
    }

    /// `[8h, 8w, 3]` on the host to the latent `[h, w, latent]` in f32, at once.
    fn encode_tile(&self, b: &B, tile: &HostTensor, observer: &mut dyn Observer<B>) -> Result<B::Tensor> {
        let latent = match self {
            Autoencoder::Full(vae) => vae.encode(b, b.upload(tile, vae.dtype())?, observer)?,
            Autoencoder::Tiny(taef2) => taef2.encode(b, b.upload(tile, taef2.dtype())?, observer)?,
        };
        Ok(b.cast(&latent, DType::F32)?)
    }

    /// `[h, w, latent]` in f32 to `[8h, 8w, 3]`, at once.
    fn decode_tile(&self, b: &B, latent: &B::Tensor, observer: &mut dyn Observer<B>) -> Result<B::Tensor> {
        match self {
            Autoencoder::Full(vae) => vae.decode(b, b.cast(latent, vae.dtype())?, observer),
            Autoencoder::Tiny(taef2) => taef2.decode(b, b.cast(latent, taef2.dtype())?, observer),
        }
    }
}
