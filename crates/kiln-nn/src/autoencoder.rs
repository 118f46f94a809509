//! Images to tokens and back, with FLUX.2's autoencoder or TAEF2.
//!
//! ```text
//! image [h, w, 3] ──encode, in tiles if large──▶ latent [h/8, w/8, 32] ──2×2 patches, batch norm──▶ tokens [h/16 · w/16, 128]
//! tokens ──batch norm undone, unpatched──▶ latent ──decode, in tiles if large──▶ image
//! ```
//! TAEF2 works on normalised latents (no batch norm) and on pixels in [0, 1]; FLUX.2's on pixels in [-1, 1].

use kiln_image::RgbImage;
use kiln_ops::{Backend, Tensor as _};
use kiln_tensor::{DType, HostTensor};
use kiln_weights::WeightSource;

use crate::taef2::Taef2;
use crate::vae::{self, Vae};
use crate::{Error, Event, Observer, Result, are_finite, tiles};

/// Image pixels along a side of a latent pixel, in both autoencoders: three halvings.
const SCALE: usize = 8;

/// An image that is still being decoded; calling it waits.
pub type PendingImage = Box<dyn FnOnce() -> Result<RgbImage> + Send>;

/// FLUX.2's autoencoder, or the tiny one.
pub enum Autoencoder<B: Backend> {
    /// FLUX.2's, with the full or the small decoder.
    Full(Vae<B>),
    /// TAEF2.
    Tiny(Taef2<B>),
}

impl<B: Backend> Autoencoder<B> {
    /// Loads FLUX.2's autoencoder with this configuration, or TAEF2 without one.
    pub fn load(b: &B, source: &WeightSource, config: Option<&vae::Config>, dtype: DType) -> Result<Self> {
        match config {
            Some(config) => Ok(Autoencoder::Full(Vae::load(b, &source.root(), config, dtype)?)),
            None => Ok(Autoencoder::Tiny(Taef2::load(b, &source.root(), dtype)?)),
        }
    }

    /// Image pixels along a side of a latent pixel, and latent pixels along a side of a token.
    fn geometry(&self) -> [usize; 2] {
        match self {
            Autoencoder::Full(vae) => [SCALE, vae.patch()],
            Autoencoder::Tiny(_) => [SCALE, 2],
        }
    }

    /// Encodes an image, whose sides must be whole tokens, to normalised tokens, f32 `[rows · columns, channels]`.
    pub fn encode(&self, b: &B, image: &RgbImage, observer: &mut dyn Observer<B>) -> Result<B::Tensor> {
        let values = match self {
            Autoencoder::Full(_) => kiln_image::to_signed_f32(image),
            Autoencoder::Tiny(_) => kiln_image::to_unit_f32(image),
        };
        let [scale, patch] = self.geometry();
        let shape = [image.height() as usize, image.width() as usize, 3];
        let pixels = HostTensor::from_f32(shape, values)?;
        let latent = if tiles::fits_untiled([shape[0] / scale, shape[1] / scale]) {
            // The latent stays on the device.
            self.encode_tile(b, &pixels, observer)?
        } else {
            let latent = tiles::map_tiles(&pixels, [scale, 1], |tile, _, _| {
                Ok(b.download(&self.encode_tile(b, tile, observer)?)?)
            })?;
            b.upload(&latent, DType::F32)?
        };
        let patches = if patch == 1 { latent } else { b.space_to_depth(&latent)? };
        let patches = match self {
            Autoencoder::Full(vae) => vae.normalise(b, &patches)?,
            Autoencoder::Tiny(_) => patches,
        };
        let (rows, channels) = (patches.shape().rows(), patches.shape().last());
        Ok(b.reshape(&patches, [rows, channels].into())?)
    }

    /// Decodes normalised tokens on a `grid` of height and width. Values that are not finite are an error.
    pub fn decode(
        &self,
        b: &B,
        tokens: &B::Tensor,
        grid: [usize; 2],
        observer: &mut dyn Observer<B>,
    ) -> Result<RgbImage> {
        self.decode_async(b, tokens, grid, observer)?()
    }

    /// [`Autoencoder::decode`] without waiting for the result, unless the image is tiled.
    pub fn decode_async(
        &self,
        b: &B,
        tokens: &B::Tensor,
        grid: [usize; 2],
        observer: &mut dyn Observer<B>,
    ) -> Result<PendingImage> {
        let latent = self.unpack(b, tokens, grid)?;
        observer.inspect("vae.decode_input", &latent)?;
        let [scale, patch] = self.geometry();
        let [height, width] = grid.map(|side| (side * patch * scale) as u32);
        // The latent stays on the device, and only bytes are downloaded.
        if tiles::fits_untiled(grid.map(|side| patch * side)) {
            let image = self.decode_tile(b, &latent, observer)?;
            observer.event(Event::TileDecoded { done: 1, total: 1 })?;
            let (scale, shift) = match self {
                Autoencoder::Full(_) => (0.5, 0.5),
                Autoencoder::Tiny(_) => (1.0, 0.0),
            };
            // As bytes, NaN would be black.
            let finite = are_finite(b, &[&image])?;
            let bytes = b.download_bytes_async(&image, scale, shift)?;
            return Ok(Box::new(move || {
                check_decoded(finite()?.iter().all(|finite| *finite))?;
                Ok(RgbImage::new(width, height, bytes()?)?)
            }));
        }
        let values = tiles::map_tiles(&b.download(&latent)?, [1, scale], |tile, done, total| {
            let image = self.decode_tile(b, &b.upload(tile, DType::F32)?, observer)?;
            let image = b.download(&b.cast(&image, DType::F32)?)?;
            observer.event(Event::TileDecoded { done: done + 1, total })?;
            Ok(image)
        })?;
        check_decoded(values.is_finite())?;
        let image = match self {
            Autoencoder::Full(_) => kiln_image::from_signed_f32(width, height, &values.to_f32()?)?,
            Autoencoder::Tiny(_) => kiln_image::from_unit_f32(width, height, &values.to_f32()?)?,
        };
        Ok(Box::new(move || Ok(image)))
    }

    /// Undoes the batch norm and the patches of tokens on a `grid` of height and width: f32 `[rows · patch, columns · patch, latent]`.
    pub fn unpack(&self, b: &B, tokens: &B::Tensor, grid: [usize; 2]) -> Result<B::Tensor> {
        let patches = b.reshape(tokens, [grid[0], grid[1], tokens.shape().last()].into())?;
        let patches = match self {
            Autoencoder::Full(vae) => vae.denormalise(b, &patches)?,
            Autoencoder::Tiny(_) => patches,
        };
        let [_, patch] = self.geometry();
        if patch == 1 { Ok(patches) } else { Ok(b.depth_to_space(&patches)?) }
    }

    /// Encodes `[8h, 8w, 3]` on the host to the latent, f32 `[h, w, latent]`.
    fn encode_tile(&self, b: &B, tile: &HostTensor, observer: &mut dyn Observer<B>) -> Result<B::Tensor> {
        let latent = match self {
            Autoencoder::Full(vae) => vae.encode(b, b.upload(tile, vae.dtype())?, observer)?,
            Autoencoder::Tiny(taef2) => taef2.encode(b, b.upload(tile, taef2.dtype())?, observer)?,
        };
        Ok(b.cast(&latent, DType::F32)?)
    }

    /// Decodes f32 `[h, w, latent]` to `[8h, 8w, 3]`.
    fn decode_tile(&self, b: &B, latent: &B::Tensor, observer: &mut dyn Observer<B>) -> Result<B::Tensor> {
        match self {
            Autoencoder::Full(vae) => vae.decode(b, b.cast(latent, vae.dtype())?, observer),
            Autoencoder::Tiny(taef2) => taef2.decode(b, b.cast(latent, taef2.dtype())?, observer),
        }
    }
}

fn check_decoded(finite: bool) -> Result<()> {
    if finite { Ok(()) } else { Err(Error::NotFinite { what: "the decoded image".into() }) }
}
