//! The transformer's configuration, from `transformer/config.json` or inferred from the tensors.

use kiln_weights::WeightSource;
use serde::Deserialize;

use crate::config;

/// `transformer/config.json`.
#[derive(Clone, Debug, Deserialize)]
pub struct Config {
    /// Latent channels of one token.
    pub in_channels: usize,
    /// Channels of the velocity; `in_channels` when absent.
    pub out_channels: Option<usize>,
    /// Number of double blocks.
    pub num_layers: usize,
    /// Number of single blocks.
    pub num_single_layers: usize,
    /// Width of one head.
    pub attention_head_dim: usize,
    /// Number of heads.
    pub num_attention_heads: usize,
    /// Width of a text token: three hidden states side by side.
    pub joint_attention_dim: usize,
    /// Channels of the sinusoidal time embedding.
    #[serde(default = "default_time_channels")]
    pub timestep_guidance_channels: usize,
    /// Width of the MLP relative to the model's width.
    #[serde(default = "default_mlp_ratio")]
    pub mlp_ratio: f64,
    /// Number of a head's elements that each position axis (t, h, w, l) rotates.
    #[serde(default = "default_axes")]
    pub axes_dims_rope: Vec<usize>,
    /// Base of the rotary frequencies.
    #[serde(default = "default_theta")]
    pub rope_theta: f64,
    /// Epsilon of every norm.
    #[serde(default = "default_eps")]
    pub eps: f32,
    /// Whether guidance is an input (FLUX.2 dev).
    #[serde(default)]
    pub guidance_embeds: bool,
    /// Latent patch; FLUX.2 patchifies outside of the transformer.
    #[serde(default = "default_patch")]
    pub patch_size: usize,
}

fn default_time_channels() -> usize {
    256
}
fn default_mlp_ratio() -> f64 {
    3.0
}
fn default_axes() -> Vec<usize> {
    vec![32; 4]
}
fn default_theta() -> f64 {
    2000.0
}
fn default_eps() -> f32 {
    1e-6
}
fn default_patch() -> usize {
    1
}

/// Returns the size that most tensors have; the first of several.
fn most_common<const N: usize>(sizes: [Option<usize>; N]) -> Option<usize> {
    let count = |size: &usize| sizes.iter().filter(|other| **other == Some(*size)).count();
    let found = || sizes.iter().copied().flatten();
    let most = found().map(|size| count(&size)).max()?;
    found().find(|size| count(size) == most)
}

impl Config {
    /// Infers the configuration from the tensors' names and shapes; the rest is the same for all FLUX.2 models.
    pub fn from_tensors(source: &WeightSource) -> Option<Config> {
        let side = |name: &str, axis: usize| source.entry(name)?.1.dims().get(axis).copied();
        let count = |blocks: &str| {
            let has = |i: &usize| source.contains(&format!("{blocks}.{i}.attn.norm_q.weight"));
            (0..).take_while(has).count()
        };
        let (doubles, singles) = (count("transformer_blocks"), count("single_transformer_blocks"));
        let norm = |blocks: &str| side(&format!("{blocks}.0.attn.norm_q.weight"), 0);
        let head = norm("transformer_blocks").or_else(|| norm("single_transformer_blocks"))?;
        const EMBEDDERS: &str = "time_guidance_embed";
        // Each size from several tensors: if one of them is wrong, it is the one that the error names.
        let dim = most_common([
            side("x_embedder.weight", 0),
            side("proj_out.weight", 1),
            side("context_embedder.weight", 0),
            side(&format!("{EMBEDDERS}.timestep_embedder.linear_2.weight"), 0),
        ])?;
        let block = "transformer_blocks.0";
        let mlp = most_common([
            side(&format!("{block}.ff.linear_out.weight"), 1),
            side(&format!("{block}.ff_context.linear_out.weight"), 1),
            side(&format!("{block}.ff.linear_in.weight"), 0).map(|rows| rows / 2),
            side("single_transformer_blocks.0.attn.to_out.weight", 1).and_then(|cols| cols.checked_sub(dim)),
        ])?;
        // The side of a matrix that is not the model's width, also if it is transposed.
        let other_side = |name: &str, axis: usize| {
            let (own, other) = (side(name, axis)?, side(name, 1 - axis)?);
            Some(if own == dim && other != dim { other } else { own })
        };
        Some(Config {
            in_channels: other_side("x_embedder.weight", 1)?,
            out_channels: other_side("proj_out.weight", 0),
            num_layers: doubles,
            num_single_layers: singles,
            attention_head_dim: head,
            num_attention_heads: dim / head.max(1),
            joint_attention_dim: other_side("context_embedder.weight", 1)?,
            timestep_guidance_channels: side(&format!("{EMBEDDERS}.timestep_embedder.linear_1.weight"), 1)?,
            mlp_ratio: mlp as f64 / dim.max(1) as f64,
            axes_dims_rope: vec![head / 4; 4],
            rope_theta: default_theta(),
            eps: default_eps(),
            guidance_embeds: source.contains(&format!("{EMBEDDERS}.guidance_embedder.linear_1.weight")),
            patch_size: default_patch(),
        })
    }

    /// Width of the model.
    pub fn dim(&self) -> usize {
        self.num_attention_heads * self.attention_head_dim
    }

    pub(super) fn mlp_dim(&self) -> usize {
        (self.dim() as f64 * self.mlp_ratio) as usize
    }

    /// Describes what is wrong with the configuration, if anything.
    pub fn problem(&self) -> Option<String> {
        let head = self.attention_head_dim;
        let sizes = [
            ("in_channels", self.in_channels),
            ("out_channels", self.out_channels.unwrap_or(self.in_channels)),
            ("attention_head_dim", head),
            ("num_attention_heads", self.num_attention_heads),
            ("joint_attention_dim", self.joint_attention_dim),
            ("timestep_guidance_channels", self.timestep_guidance_channels),
        ];
        let layers = [("num_layers", self.num_layers), ("num_single_layers", self.num_single_layers)];
        if let Some(problem) = config::implausible_size(&sizes, &layers) {
            return Some(problem);
        }
        let above_zero =
            [("rope_theta", self.rope_theta), ("mlp_ratio", self.mlp_ratio), ("eps", self.eps.into())];
        if let Some((name, value)) = above_zero.iter().find(|(_, v)| !(*v > 0.0 && *v < 1e6)) {
            return Some(format!("{name} must lie between 0 and a million, found {value}"));
        }
        if self.axes_dims_rope.len() != 4 || self.axes_dims_rope.iter().any(|d| !d.is_multiple_of(2)) {
            return Some(format!(
                "axes_dims_rope must be four even numbers, found {:?}",
                self.axes_dims_rope
            ));
        }
        if self.axes_dims_rope.iter().fold(0, |sum: usize, d| sum.saturating_add(*d)) != head {
            let found = &self.axes_dims_rope;
            return Some(format!("axes_dims_rope {found:?} must add up to attention_head_dim {head}"));
        }
        if !self.timestep_guidance_channels.is_multiple_of(2) || self.patch_size != 1 {
            return Some("timestep_guidance_channels must be even and patch_size 1".into());
        }
        None
    }
}
