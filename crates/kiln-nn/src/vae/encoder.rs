//! The encoder: `[h, w, 3] → conv_in → down_blocks → mid_block → norm, SiLU → conv_out → quant_conv → mean [h/8, w/8, latent]`.
//!
//! The checkpoint's `quant_conv` gives mean and log variance; only the mean is loaded.

use kiln_ops::{Activation, Backend, ConvGeometry};
use kiln_weights::Vars;

use super::blocks::{GroupNorm, MidBlock, ResnetBlock, conv};
use super::config::Config;
use crate::{Observer, Result};

/// Pads right and bottom only, as the checkpoints require.
const DOWNSAMPLE: ConvGeometry = ConvGeometry { stride: 2, padding: [0, 1, 0, 1], upsample: false };

/// The encoder: image to latent mean.
pub(super) struct Encoder<B: Backend> {
    conv_in: B::Conv,
    down_blocks: Vec<DownBlock<B>>,
    mid_block: MidBlock<B>,
    conv_norm_out: GroupNorm<B>,
    conv_out: B::Conv,
    quant_conv: Option<B::Conv>,
}

struct DownBlock<B: Backend> {
    resnets: Vec<ResnetBlock<B>>,
    downsample: Option<B::Conv>,
}

impl<B: Backend> Encoder<B> {
    pub(super) fn load(b: &B, vars: &Vars<'_>, config: &Config) -> Result<Self> {
        let (groups, latent) = (config.norm_num_groups, config.latent_channels);
        let channels = &config.block_out_channels;
        let last = channels[channels.len() - 1];
        let encoder = vars.at("encoder");
        let down_blocks = (0..channels.len())
            .map(|i| {
                let vars = encoder.at("down_blocks").at(i);
                let input = channels[i.saturating_sub(1)];
                let resnets = (0..config.layers_per_block).map(|j| {
                    let input = if j == 0 { input } else { channels[i] };
                    ResnetBlock::load(b, &vars.at("resnets").at(j), [input, channels[i]], groups)
                });
                let downsample = (i + 1 < channels.len())
                    .then(|| conv(b, &vars.at("downsamplers.0.conv"), [channels[i]; 2], 3));
                Ok(DownBlock {
                    resnets: resnets.collect::<Result<_>>()?,
                    downsample: downsample.transpose()?,
                })
            })
            .collect::<Result<_>>()?;
        // Only the mean, the first half of the channels, is ever used.
        let (conv_out_channels, quant_conv) = if config.use_quant_conv {
            let vars = vars.at("quant_conv");
            let weight = vars.finite_tensor("weight", [2 * latent, 2 * latent, 1, 1])?.rows(0..latent)?;
            let bias = vars.finite_tensor("bias", [2 * latent])?.rows(0..latent)?;
            (2 * latent, Some(b.load_conv(&weight, Some(&bias))?))
        } else {
            (latent, None)
        };
        let conv_out = {
            let vars = encoder.at("conv_out");
            let weight =
                vars.finite_tensor("weight", [2 * latent, last, 3, 3])?.rows(0..conv_out_channels)?;
            let bias = vars.finite_tensor("bias", [2 * latent])?.rows(0..conv_out_channels)?;
            b.load_conv(&weight, Some(&bias))?
        };
        Ok(Encoder {
            conv_in: conv(b, &encoder.at("conv_in"), [channels[0], 3], 3)?,
            down_blocks,
            mid_block: MidBlock::load(b, &encoder.at("mid_block"), last, config)?,
            conv_norm_out: GroupNorm::load(b, &encoder.at("conv_norm_out"), last, groups)?,
            conv_out,
            quant_conv,
        })
    }

    /// Encodes `[h, w, 3]` to `[h/8, w/8, latent]`.
    pub(super) fn forward(&self, b: &B, x: B::Tensor, observer: &mut dyn Observer<B>) -> Result<B::Tensor> {
        let mut x = b.conv2d(&x, &self.conv_in, ConvGeometry::same(3), None)?;
        for (i, block) in self.down_blocks.iter().enumerate() {
            for (j, resnet) in block.resnets.iter().enumerate() {
                x = resnet.forward(b, x)?;
                observer.inspect(&format!("vae.enc.down{i}.resnet{j}"), &x)?;
            }
            if let Some(downsample) = &block.downsample {
                x = b.conv2d(&x, downsample, DOWNSAMPLE, None)?;
            }
            observer.inspect(&format!("vae.enc.down{i}"), &x)?;
        }
        let x = self.mid_block.forward(b, x, "vae.enc.mid", observer)?;
        let x = self.conv_norm_out.forward(b, &x, Some(Activation::Silu))?;
        let x = b.conv2d(&x, &self.conv_out, ConvGeometry::same(3), None)?;
        observer.inspect("vae.enc.conv_out", &x)?;
        match &self.quant_conv {
            Some(quant_conv) => Ok(b.conv2d(&x, quant_conv, ConvGeometry::same(1), None)?),
            None => Ok(x),
        }
    }
}
