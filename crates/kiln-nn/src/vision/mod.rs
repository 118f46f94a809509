//! Pixtral, the eyes of Mistral Small 3: an image as embeddings that stand in a text for `[IMG]` tokens.
//!
//! ```text
//! image ──pixels──▶ patches [rows · columns, 3 · 14 · 14] ──patch_conv, ln_pre──▶ [patches, hidden] ──layers──▶
//!       ──projector: norm, 2×2 patches merged, two linear layers──▶ [patches / 4, hidden of the language model]
//! ```
//! Easy to get wrong: the rotary embedding has two axes, of which the row takes the even frequencies and the column the odd
//! ones; the merged patches are ordered by channel first; the projector's GELU is exact.

mod config;
mod pixels;
mod projector;

use kiln_ops::{AttentionMask, AttentionSpec, Backend, RopeLayout, RopeTable, Tensor as _};
use kiln_tensor::{DType, HostLinear, HostTensor};
use kiln_weights::Vars;

use crate::{Error, ResidencyPlan, Result};

pub use config::Config;
use config::EPS;
pub use pixels::Patches;
use projector::Projector;

/// Vision tower and projector on a backend.
pub struct VisionTower<B: Backend> {
    config: Config,
    dtype: DType,
    patch_conv: B::Weight,
    ln_pre: B::Tensor,
    layers: Vec<Layer<B>>,
    projector: Projector<B>,
}

impl<B: Backend> VisionTower<B> {
    /// Loads `vision_tower` and `multi_modal_projector`, whose result is `text_dim` wide; activations are `dtype`.
    pub fn load(
        b: &B,
        vars: &Vars<'_>,
        config: &Config,
        text_dim: usize,
        dtype: DType,
        plan: &ResidencyPlan,
    ) -> Result<Self> {
        let tower = vars.at("vision_tower");
        let (dim, patch) = (config.hidden_size, config.patch_size);
        let kernel = tower.tensor("patch_conv.weight", [dim, 3, patch, patch])?;
        // A convolution whose stride is its size is a linear layer of the patches.
        let patch_conv = HostLinear::dense(vec![kernel.reshape([dim, 3 * patch * patch])?]);
        let patch_conv =
            patch_conv.map_err(|error| Error::config(vars.source().path(), error.to_string()))?;
        let layer = |i: usize| Layer::load(b, &tower.at("transformer.layers").at(i), config, plan);
        Ok(VisionTower {
            patch_conv: plan.load(b, patch_conv)?,
            ln_pre: b.upload(&tower.tensor("ln_pre.weight", [dim])?, DType::F32)?,
            layers: (0..config.num_hidden_layers).map(layer).collect::<Result<_>>()?,
            projector: Projector::load(b, &vars.at("multi_modal_projector"), dim, text_dim, plan)?,
            config: config.clone(),
            dtype,
        })
    }

    /// Embeds an image: `[patches / 4, text_dim]`, rows of merged patches from the top.
    pub fn forward(&self, b: &B, patches: &Patches) -> Result<B::Tensor> {
        let x = self.encode(b, patches)?;
        self.projector.forward(b, &x, patches.grid)
    }

    /// The patches' states after the last layer, `[patches, hidden]`.
    pub fn encode(&self, b: &B, patches: &Patches) -> Result<B::Tensor> {
        let rope = self.rope(b, patches.grid)?;
        let x = b.linear(&b.upload(&patches.values, self.dtype)?, &self.patch_conv)?;
        let mut x = b.rms_norm(&x, &self.ln_pre, EPS)?;
        for layer in &self.layers {
            x = layer.forward(b, &x, &rope)?;
        }
        Ok(x)
    }

    /// The rotary table of patches in rows and columns; angles are f32, as in transformers.
    fn rope(&self, b: &B, [rows, columns]: [usize; 2]) -> Result<RopeTable<B::Tensor>> {
        let (dim, count) = (self.config.head_dim(), rows * columns);
        let frequency = |i: usize| 1.0 / self.config.rope_theta.powf((2 * i) as f64 / dim as f64) as f32;
        let mut angles = Vec::with_capacity(count * dim / 2);
        for (row, column) in (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column))) {
            let angle = |position: usize, i: usize| f64::from(position as f32 * frequency(i));
            angles.extend((0..dim / 2).step_by(2).map(|i| angle(row, i)));
            angles.extend((1..dim / 2).step_by(2).map(|i| angle(column, i)));
        }
        let upload = |f: fn(f64) -> f64| {
            let values = angles.iter().map(|&a| f(a) as f32).collect();
            Ok::<_, Error>(b.upload(&HostTensor::from_f32([count, dim / 2], values)?, DType::F32)?)
        };
        Ok(RopeTable { cos: upload(f64::cos)?, sin: upload(f64::sin)?, pairs: RopeLayout::HalfSplit })
    }
}

/// Attention of all patches to all, then an MLP.
struct Layer<B: Backend> {
    heads: usize,
    attention_norm: B::Tensor,
    qkv: B::Weight,
    o_proj: B::Weight,
    ffn_norm: B::Tensor,
    gate_up: B::Weight,
    down_proj: B::Weight,
}

impl<B: Backend> Layer<B> {
    fn load(b: &B, vars: &Vars<'_>, config: &Config, plan: &ResidencyPlan) -> Result<Self> {
        let (dim, mlp) = (config.hidden_size, config.intermediate_size);
        let norm = |name: &str| Ok::<_, Error>(b.upload(&vars.tensor(name, [dim])?, DType::F32)?);
        let qkv = [("attention.q_proj", dim), ("attention.k_proj", dim), ("attention.v_proj", dim)];
        let gate_up = [("feed_forward.gate_proj", mlp), ("feed_forward.up_proj", mlp)];
        Ok(Layer {
            heads: config.num_attention_heads,
            attention_norm: norm("attention_norm.weight")?,
            qkv: plan.load(b, vars.linear_stack(&qkv, dim)?)?,
            o_proj: plan.load(b, vars.linear("attention.o_proj", dim, dim)?)?,
            ffn_norm: norm("ffn_norm.weight")?,
            gate_up: plan.load(b, vars.linear_stack(&gate_up, dim)?)?,
            down_proj: plan.load(b, vars.linear("feed_forward.down_proj", dim, mlp)?)?,
        })
    }

    /// `x`: `[patches, hidden]`.
    fn forward(&self, b: &B, x: &B::Tensor, rope: &RopeTable<B::Tensor>) -> Result<B::Tensor> {
        let dim = x.shape().last();
        let h = b.rms_norm(x, &self.attention_norm, EPS)?;
        let [q, k, v] = b.linear_split(&h, &self.qkv, [dim; 3])?;
        let [q, k] = b.qk_norm_rope([&q, &k], None, rope, EPS)?;
        let spec = AttentionSpec::new(self.heads, self.heads, AttentionMask::None);
        let attended = b.attention(&[&q], &[&k], &[&v], &spec)?;
        let x = b.linear_gated_add(&[&attended], &self.o_proj, None, x)?;
        let h = b.rms_norm(&x, &self.ffn_norm, EPS)?;
        let h = b.linear_swiglu(&h, &self.gate_up)?;
        Ok(b.linear_gated_add(&[&h], &self.down_proj, None, &x)?)
    }
}
