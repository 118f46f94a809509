//! FLUX.2's autoencoder: pictures in [-1, 1] to latents at an eighth of the size, and back.
//!
//! ```text
//! picture [h, w, 3] ──encoder, quant_conv──▶ mean [h/8, w/8, 32] ──2×2 patches──▶ [h/16, w/16, 128] ──batch norm──▶
//! tokens [h/16 · w/16, 128] ──batch norm undone──▶ unpatched [h/8, w/8, 32] ──post_quant_conv, decoder──▶ [h, w, 3]
//! ```
//! Tensors are channels-last. The encoder's distribution is never sampled: only the mean half of `quant_conv` is
//! loaded. The batch norm has running statistics and no weights; its epsilon is 1e-4, every other norm's 1e-6.

mod blocks;
mod decoder;
mod encoder;

use kiln_ops::Backend;
use kiln_tensor::{DType, HostTensor};
use kiln_weights::{Vars, WeightSource};
use serde::Deserialize;

use crate::{Error, Observer, Result, config};
use decoder::Decoder;
use encoder::Encoder;

/// `vae/config.json`.
#[derive(Clone, Debug, Deserialize)]
pub struct Config {
    /// Channels of each level, from full size to an eighth.
    pub block_out_channels: Vec<usize>,
    /// The decoder's own, when it is smaller than the encoder.
    pub decoder_block_out_channels: Option<Vec<usize>>,
    /// Residual blocks of an encoder level; a decoder level has one more.
    #[serde(default = "default_layers")]
    pub layers_per_block: usize,
    /// Channels of the latent.
    #[serde(default = "default_latent_channels")]
    pub latent_channels: usize,
    /// Groups of every group norm.
    #[serde(default = "default_groups")]
    pub norm_num_groups: usize,
    /// Epsilon of the batch norm.
    #[serde(default = "default_batch_norm_eps")]
    pub batch_norm_eps: f32,
    /// Whether a 1×1 convolution follows the encoder.
    #[serde(default = "yes")]
    pub use_quant_conv: bool,
    /// Whether a 1×1 convolution precedes the decoder.
    #[serde(default = "yes")]
    pub use_post_quant_conv: bool,
    /// Whether the middle blocks attend.
    #[serde(default = "yes")]
    pub mid_block_add_attention: bool,
    /// Activation of every block; FLUX.2 uses SiLU.
    #[serde(default = "default_activation")]
    pub act_fn: String,
    /// Latent patch; FLUX.2 uses 2×2.
    #[serde(default = "default_patch")]
    pub patch_size: [usize; 2],
}

fn default_layers() -> usize {
    2
}
fn default_latent_channels() -> usize {
    32
}
fn default_groups() -> usize {
    32
}
fn default_batch_norm_eps() -> f32 {
    1e-4
}
fn default_activation() -> String {
    "silu".into()
}
fn default_patch() -> [usize; 2] {
    [2, 2]
}
fn yes() -> bool {
    true
}

impl Config {
    /// Channels of one token: a patch of latents.
    pub fn token_channels(&self) -> usize {
        4 * self.latent_channels
    }

    /// Channels of each level of the decoder.
    pub fn decoder_channels(&self) -> &[usize] {
        self.decoder_block_out_channels.as_deref().unwrap_or(&self.block_out_channels)
    }

    /// The configuration that these tensors, in diffusers' naming, must have been saved with.
    pub fn from_tensors(source: &WeightSource) -> Option<Config> {
        let rows = |name: String| source.entry(&name)?.1.dims().first().copied();
        let first_conv = |half: &str, i| rows(format!("{half}.{i}.resnets.0.conv1.weight"));
        let encoder: Option<Vec<usize>> = (0..4).map(|i| first_conv("encoder.down_blocks", i)).collect();
        let decoder: Option<Vec<usize>> = (0..4).rev().map(|i| first_conv("decoder.up_blocks", i)).collect();
        let resnet = |j: &usize| source.contains(&format!("encoder.down_blocks.0.resnets.{j}.conv1.weight"));
        Some(Config {
            block_out_channels: encoder?,
            decoder_block_out_channels: decoder,
            layers_per_block: (0..).take_while(resnet).count(),
            latent_channels: source.entry("decoder.conv_in.weight")?.1.dims().get(1).copied()?,
            norm_num_groups: default_groups(),
            batch_norm_eps: default_batch_norm_eps(),
            use_quant_conv: source.contains("quant_conv.weight"),
            use_post_quant_conv: source.contains("post_quant_conv.weight"),
            mid_block_add_attention: source.contains("decoder.mid_block.attentions.0.to_q.weight"),
            act_fn: default_activation(),
            patch_size: default_patch(),
        })
    }

    /// What is wrong with these numbers, if anything is.
    pub fn problem(&self) -> Option<String> {
        let widths = [("latent_channels", self.latent_channels), ("norm_num_groups", self.norm_num_groups)];
        if let Some(problem) = config::absurd(&widths, &[("layers_per_block", self.layers_per_block)]) {
            return Some(problem);
        }
        for channels in [&self.block_out_channels[..], self.decoder_channels()] {
            if let Some(problem) =
                config::absurd(&channels.iter().map(|&c| ("a level", c)).collect::<Vec<_>>(), &[])
            {
                return Some(problem);
            }
            if channels.len() != 4 {
                return Some(format!("block_out_channels must list four levels, found {channels:?}"));
            }
            if let Some(c) = channels.iter().find(|c| !c.is_multiple_of(self.norm_num_groups)) {
                return Some(format!("{c} channels can't be split into {} groups", self.norm_num_groups));
            }
        }
        (self.patch_size != [2, 2] || self.act_fn != "silu")
            .then(|| "patch_size must be [2, 2] and act_fn `silu`".into())
    }
}

/// The autoencoder's weights on a backend.
pub struct Vae<B: Backend> {
    dtype: DType,
    encoder: Encoder<B>,
    decoder: Decoder<B>,
    norm: BatchNorm<B>,
}

/// The batch norm over patches, as one scale and shift a channel in each direction.
struct BatchNorm<B: Backend> {
    normalise: [B::Tensor; 2],
    denormalise: [B::Tensor; 2],
}

impl<B: Backend> Vae<B> {
    /// Loads encoder and decoder; activations will be `dtype`.
    pub fn load(b: &B, vars: &Vars<'_>, config: &Config, dtype: DType) -> Result<Self> {
        Ok(Vae {
            dtype,
            encoder: Encoder::load(b, vars, config)?,
            decoder: Decoder::load(b, vars, config)?,
            norm: BatchNorm::load(b, &vars.at("bn"), config)?,
        })
    }

    /// What its activations are.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The latent's mean, `[h/8, w/8, 32]`, of a picture, `[h, w, 3]` in [-1, 1].
    pub fn encode(&self, b: &B, picture: B::Tensor, observer: &mut dyn Observer<B>) -> Result<B::Tensor> {
        self.encoder.forward(b, picture, observer)
    }

    /// The picture, `[8h, 8w, 3]` in about [-1, 1], of a latent, `[h, w, 32]`.
    pub fn decode(&self, b: &B, latent: B::Tensor, observer: &mut dyn Observer<B>) -> Result<B::Tensor> {
        self.decoder.forward(b, latent, observer)
    }

    /// The batch norm of patches, `[h, w, 128]`.
    pub fn normalise(&self, b: &B, patches: &B::Tensor) -> Result<B::Tensor> {
        let [scale, shift] = &self.norm.normalise;
        Ok(b.affine(patches, scale, shift)?)
    }

    /// The inverse of [`Vae::normalise`].
    pub fn denormalise(&self, b: &B, patches: &B::Tensor) -> Result<B::Tensor> {
        let [scale, shift] = &self.norm.denormalise;
        Ok(b.affine(patches, scale, shift)?)
    }
}

impl<B: Backend> BatchNorm<B> {
    fn load(b: &B, vars: &Vars<'_>, config: &Config) -> Result<Self> {
        let channels = config.token_channels();
        let mean = vars.tensor("running_mean", [channels])?.to_f32()?.into_owned();
        let variance = vars.tensor("running_var", [channels])?.to_f32()?.into_owned();
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
