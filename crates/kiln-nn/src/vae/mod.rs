//! The autoencoder, here with FLUX.2's channels and patches: images in [-1, 1] to latents at an eighth of the size, and back.
//!
//! ```text
//! image [h, w, 3] ──encoder, quant_conv──▶ mean [h/8, w/8, 32] ──2×2 patches──▶ [h/16, w/16, 128] ──batch norm──▶
//! tokens [h/16 · w/16, 128] ──batch norm undone──▶ unpatched [h/8, w/8, 32] ──post_quant_conv, decoder──▶ [h, w, 3]
//! ```
//! Tensors are channels-last. The encoder's distribution is never sampled: only the mean half of `quant_conv` is
//! loaded. The batch norm has running statistics and no weights; its epsilon is 1e-4, every other norm's 1e-6.

mod blocks;
mod config;
mod decoder;
mod encoder;

use kiln_ops::Backend;
use kiln_tensor::{DType, HostTensor};
use kiln_weights::Vars;

use crate::{Error, Observer, Result};
pub use config::Config;
use decoder::Decoder;
use encoder::Encoder;

/// The autoencoder's weights on a backend.
pub struct Vae<B: Backend> {
    dtype: DType,
    patch: usize,
    encoder: Encoder<B>,
    decoder: Decoder<B>,
    norm: BatchNorm<B>,
}

/// The batch norm over patches and its inverse, as scale and shift per channel.
struct BatchNorm<B: Backend> {
    normalise: [B::Tensor; 2],
    denormalise: [B::Tensor; 2],
}

impl<B: Backend> Vae<B> {
    /// Loads encoder and decoder; activations are `dtype`.
    pub fn load(b: &B, vars: &Vars<'_>, config: &Config, dtype: DType) -> Result<Self> {
        Ok(Vae {
            dtype,
            patch: config.patch(),
            encoder: Encoder::load(b, vars, config)?,
            decoder: Decoder::load(b, vars, config)?,
            norm: BatchNorm::load(b, &vars.at("bn"), config)?,
        })
    }

    /// The dtype of the activations.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Latent pixels along a side of the patch that makes one token.
    pub fn patch(&self) -> usize {
        self.patch
    }

    /// Encodes an image, `[h, w, 3]` in [-1, 1], to the latent's mean, `[h/8, w/8, 32]`.
    pub fn encode(&self, b: &B, image: B::Tensor, observer: &mut dyn Observer<B>) -> Result<B::Tensor> {
        self.encoder.forward(b, image, observer)
    }

    /// Decodes a latent, `[h, w, 32]`, to an image, `[8h, 8w, 3]` in about [-1, 1].
    pub fn decode(&self, b: &B, latent: B::Tensor, observer: &mut dyn Observer<B>) -> Result<B::Tensor> {
        self.decoder.forward(b, latent, observer)
    }

    /// Applies the batch norm to patches, `[h, w, 128]`.
    pub fn normalise(&self, b: &B, patches: &B::Tensor) -> Result<B::Tensor> {
        let [scale, shift] = &self.norm.normalise;
        Ok(b.affine(patches, scale, shift)?)
    }

    /// Inverts [`Vae::normalise`].
    pub fn denormalise(&self, b: &B, patches: &B::Tensor) -> Result<B::Tensor> {
        let [scale, shift] = &self.norm.denormalise;
        Ok(b.affine(patches, scale, shift)?)
    }
}

impl<B: Backend> BatchNorm<B> {
    fn load(b: &B, vars: &Vars<'_>, config: &Config) -> Result<Self> {
        let channels = config.token_channels();
        let mean = vars.finite_tensor("running_mean", [channels])?.to_f32()?.into_owned();
        let variance = vars.finite_tensor("running_var", [channels])?.to_f32()?.into_owned();
        if let Some(variance) = variance.iter().find(|variance| **variance < 0.0) {
            let name = vars.name("running_var");
            return Err(Error::config(
                vars.source().path(),
                format!("`{name}` has a negative value, {variance}"),
            ));
        }
        let deviation: Vec<f32> = variance.iter().map(|v| (v + config.batch_norm_eps).sqrt()).collect();
        let parameter = |values: Vec<f32>| {
            Ok::<_, Error>(b.upload(&HostTensor::from_f32([channels], values)?, DType::F32)?)
        };
        Ok(BatchNorm {
            normalise: [
                parameter(deviation.iter().map(|d| 1.0 / d).collect())?,
                parameter(mean.iter().zip(&deviation).map(|(m, d)| -m / d).collect())?,
            ],
            denormalise: [parameter(deviation)?, parameter(mean)?],
        })
    }
}
