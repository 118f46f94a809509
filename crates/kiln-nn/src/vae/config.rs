//! The autoencoder's configuration, from `vae/config.json` or inferred from the tensors.

use kiln_family::{FAMILIES, Family, Latent};
use kiln_weights::{KnownTensors, WeightSource};
use serde::Deserialize;

use crate::config;

/// `vae/config.json`.
#[derive(Clone, Debug, Deserialize)]
pub struct Config {
    /// Channels of each level, from full resolution to an eighth.
    pub block_out_channels: Vec<usize>,
    /// The decoder's channels, if it is smaller than the encoder.
    pub decoder_block_out_channels: Option<Vec<usize>>,
    /// Number of residual blocks per encoder level; a decoder level has one more.
    #[serde(default = "default_layers")]
    pub layers_per_block: usize,
    /// Channels of the latent.
    #[serde(default = "default_latent_channels")]
    pub latent_channels: usize,
    /// Number of groups of every group norm.
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
    /// Whether the middle blocks have attention.
    #[serde(default = "yes")]
    pub mid_block_add_attention: bool,
    /// Activation of every block; FLUX.2 uses SiLU.
    #[serde(default = "default_activation")]
    pub act_fn: String,
    /// Latent patch: 1×1 or 2×2.
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
    /// Latent pixels along a side of the patch that makes one token.
    pub fn patch(&self) -> usize {
        self.patch_size[0]
    }

    /// Channels of a token: a patch of the latent.
    pub fn token_channels(&self) -> usize {
        self.patch() * self.patch() * self.latent_channels
    }

    /// Channels of each level of the decoder.
    pub fn decoder_channels(&self) -> &[usize] {
        self.decoder_block_out_channels.as_deref().unwrap_or(&self.block_out_channels)
    }

    /// Infers the configuration from the names and shapes of tensors in diffusers' naming.
    pub fn from_tensors(source: &WeightSource) -> Option<Config> {
        let rows = |name: String| source.entry(&name)?.1.dims().first().copied();
        let first_conv = |half: &str, i| rows(format!("{half}.{i}.resnets.0.conv1.weight"));
        let encoder: Option<Vec<usize>> = (0..4).map(|i| first_conv("encoder.down_blocks", i)).collect();
        let decoder: Option<Vec<usize>> = (0..4).rev().map(|i| first_conv("decoder.up_blocks", i)).collect();
        let resnet = |j: &usize| source.contains(&format!("encoder.down_blocks.0.resnets.{j}.conv1.weight"));
        let latent_channels = source.entry("decoder.conv_in.weight")?.1.dims().get(1).copied()?;
        let unpatched = || rows("bn.running_mean".into()).filter(|channels| *channels == latent_channels);
        let patch = unpatched().map(|_| [1, 1]);
        Some(Config {
            block_out_channels: encoder?,
            decoder_block_out_channels: decoder,
            layers_per_block: (0..).take_while(resnet).count(),
            latent_channels,
            norm_num_groups: default_groups(),
            batch_norm_eps: default_batch_norm_eps(),
            use_quant_conv: source.contains("quant_conv.weight"),
            use_post_quant_conv: source.contains("post_quant_conv.weight"),
            mid_block_add_attention: source.contains("decoder.mid_block.attentions.0.to_q.weight"),
            act_fn: default_activation(),
            patch_size: patch.unwrap_or_else(default_patch),
        })
    }

    /// Lists all tensors.
    pub fn tensors(&self) -> KnownTensors {
        let latent = self.latent_channels;
        let mut tensors = KnownTensors::default();
        let encoder = &self.block_out_channels;
        self.add_half(&mut tensors, "encoder", encoder, [3, 2 * latent]);
        self.add_blocks(&mut tensors, "encoder.down_blocks", "downsamplers", encoder, self.layers_per_block);
        let decoder: Vec<usize> = self.decoder_channels().iter().rev().copied().collect();
        self.add_half(&mut tensors, "decoder", &decoder, [latent, 3]);
        self.add_blocks(&mut tensors, "decoder.up_blocks", "upsamplers", &decoder, self.layers_per_block + 1);
        if self.use_quant_conv {
            tensors.add_biased("quant_conv", [2 * latent, 2 * latent, 1, 1]);
        }
        if self.use_post_quant_conv {
            tensors.add_biased("post_quant_conv", [latent, latent, 1, 1]);
        }
        tensors.add("bn.running_mean", [self.token_channels()]);
        tensors.add("bn.running_var", [self.token_channels()]);
        tensors
    }

    /// Adds what the encoder, with these channels of its levels, or the decoder has before and after its levels.
    fn add_half(
        &self,
        tensors: &mut KnownTensors,
        half: &str,
        channels: &[usize],
        [input, output]: [usize; 2],
    ) {
        let (first, last) = (channels[0], channels[channels.len() - 1]);
        let middle = if half == "encoder" { last } else { first };
        tensors.add_biased(&format!("{half}.conv_in"), [first, input, 3, 3]);
        tensors.add_biased(&format!("{half}.conv_norm_out"), [last]);
        tensors.add_biased(&format!("{half}.conv_out"), [output, last, 3, 3]);
        (0..2).for_each(|i| add_resnet(tensors, &format!("{half}.mid_block.resnets.{i}"), [middle; 2]));
        if self.mid_block_add_attention {
            let attention = |layer: &str| format!("{half}.mid_block.attentions.0.{layer}");
            tensors.add_biased(&attention("group_norm"), [middle]);
            for linear in ["to_q", "to_k", "to_v", "to_out.0"] {
                tensors.add_linear(&attention(linear), [middle; 2]);
            }
        }
    }

    fn add_blocks(
        &self,
        tensors: &mut KnownTensors,
        blocks: &str,
        sampler: &str,
        channels: &[usize],
        resnets: usize,
    ) {
        for (i, &width) in channels.iter().enumerate() {
            for j in 0..resnets {
                let input = if j == 0 { channels[i.saturating_sub(1)] } else { width };
                add_resnet(tensors, &format!("{blocks}.{i}.resnets.{j}"), [input, width]);
            }
            if i + 1 < channels.len() {
                tensors.add_biased(&format!("{blocks}.{i}.{sampler}.0.conv"), [width, width, 3, 3]);
            }
        }
    }

    /// Describes what is wrong with the configuration, if anything.
    pub fn problem(&self) -> Option<String> {
        let widths = [("latent_channels", self.latent_channels), ("norm_num_groups", self.norm_num_groups)];
        if let Some(problem) =
            config::implausible_size(&widths, &[("layers_per_block", self.layers_per_block)])
        {
            return Some(problem);
        }
        let latent = self.latent_channels;
        let mut related =
            FAMILIES.iter().flat_map(|family| family.related_vaes.iter().map(|vae| (*family, vae)));
        if let Some((family, (_, other))) = related.find(|(_, (channels, _))| *channels == latent) {
            let Family { name, latent: Latent { channels, .. }, .. } = family;
            return Some(format!(
                "this is a VAE of {other}, with {latent} latent channels; {name}'s has {channels}"
            ));
        }
        for channels in [&self.block_out_channels[..], self.decoder_channels()] {
            if let Some(problem) =
                config::implausible_size(&channels.iter().map(|&c| ("a level", c)).collect::<Vec<_>>(), &[])
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
        (![[1, 1], [2, 2]].contains(&self.patch_size) || self.act_fn != "silu")
            .then(|| "patch_size must be [2, 2] or [1, 1], and act_fn `silu`".into())
    }
}

fn add_resnet(tensors: &mut KnownTensors, name: &str, [input, out]: [usize; 2]) {
    tensors.add_biased(&format!("{name}.norm1"), [input]);
    tensors.add_biased(&format!("{name}.conv1"), [out, input, 3, 3]);
    tensors.add_biased(&format!("{name}.norm2"), [out]);
    tensors.add_biased(&format!("{name}.conv2"), [out, out, 3, 3]);
    if input != out {
        tensors.add_biased(&format!("{name}.conv_shortcut"), [out, input, 1, 1]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kiln_tensor::HostTensor;
    use kiln_weights::save;

    /// The decoder's levels are stored in the opposite order.
    #[test]
    fn levels_of_both_halves_are_listed_from_full_resolution_down() {
        let mut tensors = vec![("decoder.conv_in.weight".to_owned(), HostTensor::zeros([8, 4, 1, 1]))];
        for (i, (down, up)) in [(32, 256), (64, 128), (96, 64), (128, 32)].into_iter().enumerate() {
            for j in 0..2 {
                let name = format!("encoder.down_blocks.{i}.resnets.{j}.conv1.weight");
                tensors.push((name, HostTensor::zeros([down, 1, 1, 1])));
            }
            let name = format!("decoder.up_blocks.{i}.resnets.0.conv1.weight");
            tensors.push((name, HostTensor::zeros([up, 1, 1, 1])));
        }
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("vae.safetensors");
        let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor.clone())).collect();
        save::save(&file, &tensors, &Default::default()).unwrap();
        let config = Config::from_tensors(&WeightSource::open(&file).unwrap()).unwrap();
        assert_eq!(config.block_out_channels, [32, 64, 96, 128]);
        assert_eq!(config.decoder_channels(), [32, 64, 128, 256]);
        assert_eq!((config.layers_per_block, config.latent_channels), (2, 4));
        assert!(!config.use_quant_conv && !config.mid_block_add_attention);
    }
}
