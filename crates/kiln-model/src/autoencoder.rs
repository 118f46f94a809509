//! Pictures to tokens and back, with whichever autoencoder is at hand.

use std::path::Path;

use kiln_image::Picture;
use kiln_ops::{Backend, Tensor as _};
use kiln_tensor::{DType, HostTensor};
use kiln_weights::{Component, WeightSource};

use crate::taef2::Taef2;
use crate::vae::{self, Vae};
use crate::{Error, Event, Observer, Part, Result, folder, tiles};

/// FLUX.2's autoencoder or its tiny stand-in.
pub enum Autoencoder<B: Backend> {
    /// The real one, with the full or the small decoder.
    Full(Vae<B>),
    /// TAEF2.
    Tiny(Taef2<B>),
}

impl<B: Backend> Autoencoder<B> {
    /// Loads a model's own autoencoder.
    pub fn load(b: &B, part: &Part<vae::Config>, dtype: DType) -> Result<Self> {
        Ok(Autoencoder::Full(Vae::load(b, &part.weights()?.root(), &part.config, dtype)?))
    }

    /// Loads a folder with a `config.json`, or a file: TAEF2, or a FLUX.2 autoencoder with its configuration beside it
    /// or read off its tensors.
    pub fn open(b: &B, path: &Path, dtype: DType) -> Result<Self> {
        let source = WeightSource::open(path)?;
        if Taef2::<B>::recognise(&source.root()) {
            return Ok(Autoencoder::Tiny(Taef2::load(b, &source.root(), dtype)?));
        }
        let source = source.component(Component::Vae)?.unwrap_or(source);
        let vars = source.root();
        let beside = if path.is_dir() { path.to_path_buf() } else { path.with_file_name("") };
        let config_file = beside.join("config.json");
        let config = if config_file.is_file() {
            folder::read(&config_file)?
        } else {
            vae::Config::from_tensors(&source)
                .ok_or_else(|| Error::config(path, "neither TAEF2 nor a FLUX.2 autoencoder"))?
        };
        if let Some(what) = config.problem() {
            return Err(Error::config(config_file, what));
        }
        Ok(Autoencoder::Full(Vae::load(b, &vars, &config, dtype)?))
    }

    /// Normalised tokens, f32 `[h/16 · w/16, 128]`, of a picture whose sides are multiples of 16.
    pub fn encode(&self, b: &B, picture: &Picture, observer: &mut dyn Observer<B>) -> Result<B::Tensor> {
        let values = match self {
            Autoencoder::Full(_) => kiln_image::to_signed_f32(picture),
            Autoencoder::Tiny(_) => kiln_image::to_unit_f32(picture),
        };
        let shape = [picture.height() as usize, picture.width() as usize, 3];
        let picture = HostTensor::from_f32(shape, values)?;
        let latent = tiles::map(&picture, [8, 1], |tile, _, _| {
            let latent = match self {
                Autoencoder::Full(vae) => vae.encode(b, b.upload(tile, vae.dtype())?, observer)?,
                Autoencoder::Tiny(taef2) => taef2.encode(b, b.upload(tile, taef2.dtype())?, observer)?,
            };
            Ok(b.download(&b.cast(&latent, DType::F32)?)?)
        })?;
        let patches = b.space_to_depth(&b.upload(&latent, DType::F32)?)?;
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
            return Ok(Picture::new(width, height, b.download_bytes(&picture, scale, shift)?)?);
        }
        let values = tiles::map(&b.download(&latent)?, [1, 8], |tile, done, total| {
            let picture = self.decode_tile(b, &b.upload(tile, DType::F32)?, observer)?;
            let picture = b.download(&b.cast(&picture, DType::F32)?)?;
            observer.event(Event::Decode { done: done + 1, total })?;
            Ok(picture)
        })?;
        Ok(match self {
            Autoencoder::Full(_) => kiln_image::from_signed_f32(width, height, &values.to_f32()?)?,
            Autoencoder::Tiny(_) => kiln_image::from_unit_f32(width, height, &values.to_f32()?)?,
        })
    }

    /// `[h, w, latent]` in f32 to `[8h, 8w, 3]`, at once.
    fn decode_tile(&self, b: &B, latent: &B::Tensor, observer: &mut dyn Observer<B>) -> Result<B::Tensor> {
        match self {
            Autoencoder::Full(vae) => vae.decode(b, b.cast(latent, vae.dtype())?, observer),
            Autoencoder::Tiny(taef2) => taef2.decode(b, b.cast(latent, taef2.dtype())?, observer),
        }
    }
}
