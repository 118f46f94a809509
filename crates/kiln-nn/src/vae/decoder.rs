//! The decoder: `[h, w, latent] → post_quant_conv → conv_in → mid_block → up_blocks → norm, SiLU → conv_out → [8h, 8w, 3]`.

use kiln_ops::{Activation, Backend, ConvGeometry};
use kiln_weights::Vars;

use super::blocks::{GroupNorm, MidBlock, ResnetBlock, conv};
use super::config::Config;
use crate::{Observer, Result};

const UPSAMPLE: ConvGeometry = ConvGeometry { upsample: true, ..ConvGeometry::same(3) };

/// The decoder: latent to image.
pub(super) struct Decoder<B: Backend> {
    post_quant_conv: Option<B::Conv>,
    conv_in: B::Conv,
    mid_block: MidBlock<B>,
    up_blocks: Vec<UpBlock<B>>,
    conv_norm_out: GroupNorm<B>,
    conv_out: B::Conv,
}

struct UpBlock<B: Backend> {
    resnets: Vec<ResnetBlock<B>>,
    upsample: Option<B::Conv>,
}

impl<B: Backend> Decoder<B> {
    pub(super) fn load(b: &B, vars: &Vars<'_>, config: &Config) -> Result<Self> {
        let (groups, latent) = (config.norm_num_groups, config.latent_channels);
        let channels: Vec<usize> = config.decoder_channels().iter().rev().copied().collect();
        let last = channels[channels.len() - 1];
        let decoder = vars.at("decoder");
        let up_blocks = (0..channels.len())
            .map(|i| {
                let vars = decoder.at("up_blocks").at(i);
                let input = channels[i.saturating_sub(1)];
                let resnets = (0..=config.layers_per_block).map(|j| {
                    let input = if j == 0 { input } else { channels[i] };
                    ResnetBlock::load(b, &vars.at("resnets").at(j), [input, channels[i]], groups)
                });
                let upsample = (i + 1 < channels.len())
                    .then(|| conv(b, &vars.at("upsamplers.0.conv"), [channels[i]; 2], 3));
                Ok(UpBlock { resnets: resnets.collect::<Result<_>>()?, upsample: upsample.transpose()? })
            })
            .collect::<Result<_>>()?;
        let post_quant_conv = config
            .use_post_quant_conv
            .then(|| conv(b, &vars.at("post_quant_conv"), [latent; 2], 1))
            .transpose()?;
        Ok(Decoder {
            post_quant_conv,
            conv_in: conv(b, &decoder.at("conv_in"), [channels[0], latent], 3)?,
            mid_block: MidBlock::load(b, &decoder.at("mid_block"), channels[0], config)?,
            up_blocks,
            conv_norm_out: GroupNorm::load(b, &decoder.at("conv_norm_out"), last, groups)?,
            conv_out: conv(b, &decoder.at("conv_out"), [3, last], 3)?,
        })
    }

    /// Decodes `[h, w, latent]` to `[8h, 8w, 3]`.
    pub(super) fn forward(&self, b: &B, x: B::Tensor, observer: &mut dyn Observer<B>) -> Result<B::Tensor> {
        let x = match &self.post_quant_conv {
            Some(conv) => b.conv2d(&x, conv, ConvGeometry::same(1), None)?,
            None => x,
        };
        observer.inspect("vae.post_quant_conv", &x)?;
        let x = b.conv2d(&x, &self.conv_in, ConvGeometry::same(3), None)?;
        observer.inspect("vae.dec.conv_in", &x)?;
        let mut x = self.mid_block.forward(b, x, "vae.dec.mid", observer)?;
        for (i, block) in self.up_blocks.iter().enumerate() {
            for (j, resnet) in block.resnets.iter().enumerate() {
                x = resnet.forward(b, x)?;
                observer.inspect(&format!("vae.dec.up{i}.resnet{j}"), &x)?;
            }
            if let Some(upsample) = &block.upsample {
                x = b.conv2d(&x, upsample, UPSAMPLE, None)?;
            }
            observer.inspect(&format!("vae.dec.up{i}"), &x)?;
        }
        x = self.conv_norm_out.forward(b, &x, Some(Activation::Silu))?;
        x = b.conv2d(&x, &self.conv_out, ConvGeometry::same(3), None)?;
        observer.inspect("vae.decoded", &x)?;
        Ok(x)
    }
}
