//! The double block: text and image streams with separate weights, joined by one attention.
//!
//! ```text
//! text  [t, dim] ──ada norm, qkv──▶ q, k, v ─┐             ┌──▶ to_out, gate ──▶ ada norm, SwiGLU MLP, gate ──▶ [t, dim]
//!                                            ├▶ attention ─┤
//! image [n, dim] ──ada norm, qkv──▶ q, k, v ─┘             └──▶ to_out, gate ──▶ ada norm, SwiGLU MLP, gate ──▶ [n, dim]
//! ```
//! Text comes before image in the attention. Queries and keys are normed per head, then rotated.

use kiln_ops::{Backend, HeadBlock, RopeTable};
use kiln_tensor::DType;
use kiln_weights::Vars;

use super::attention::{BatchAttention, Qkv};
use super::config::Config;
use super::linear::Linear;
use super::modulation::DoubleModulation;
use super::rope::RopeTables;
use crate::{ResidencyPlan, Result};

/// A double block.
#[derive(Clone)]
pub(super) struct DoubleBlock<B: Backend> {
    pub(super) text: Stream<B>,
    pub(super) image: Stream<B>,
}

/// The weights of one stream.
#[derive(Clone)]
pub(super) struct Stream<B: Backend> {
    pub(super) qkv: Linear<B>,
    pub(super) norm_q: B::Tensor,
    pub(super) norm_k: B::Tensor,
    pub(super) to_out: Linear<B>,
    pub(super) linear_in: Linear<B>,
    pub(super) linear_out: Linear<B>,
    pub(super) dim: usize,
    /// Width of the MLP's gate and value together.
    pub(super) mlp_width: usize,
    pub(super) eps: f32,
}

/// The checkpoint's names for one stream's layers.
struct LayerNames {
    qkv: [&'static str; 3],
    norms: [&'static str; 2],
    out: &'static str,
    feed_forward: &'static str,
}

const IMAGE_NAMES: LayerNames = LayerNames {
    qkv: ["attn.to_q", "attn.to_k", "attn.to_v"],
    norms: ["attn.norm_q", "attn.norm_k"],
    out: "attn.to_out.0",
    feed_forward: "ff",
};

const TEXT_NAMES: LayerNames = LayerNames {
    qkv: ["attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"],
    norms: ["attn.norm_added_q", "attn.norm_added_k"],
    out: "attn.to_add_out",
    feed_forward: "ff_context",
};

impl<B: Backend> DoubleBlock<B> {
    pub(super) fn load(b: &B, vars: &Vars<'_>, plan: &ResidencyPlan, config: &Config) -> Result<Self> {
        Ok(DoubleBlock {
            text: Stream::load(b, vars, plan, config, &TEXT_NAMES)?,
            image: Stream::load(b, vars, plan, config, &IMAGE_NAMES)?,
        })
    }

    pub(super) fn linears(&mut self) -> impl Iterator<Item = &mut Linear<B>> {
        self.text.linears().into_iter().chain(self.image.linears())
    }

    /// `text`: `[t, dim]`, all text streams; `image`: `[n, dim]`, all image streams.
    #[expect(clippy::too_many_arguments, reason = "two streams, each with its modulation")]
    pub(super) fn forward(
        &self,
        b: &B,
        text: B::Tensor,
        image: B::Tensor,
        text_mod: &DoubleModulation<B>,
        image_mod: &DoubleModulation<B>,
        rope: &RopeTables<B>,
        attention: &mut BatchAttention<'_, B>,
    ) -> Result<(B::Tensor, B::Tensor)> {
        let text_qkv = self.text.project(b, &text, text_mod)?;
        let image_qkv = self.image.project(b, &image, image_mod)?;
        let of_text = self.text.qkv(&text_qkv, &rope.text);
        let of_image = self.image.qkv(&image_qkv, &rope.image);
        let [attended_text, attended_image] = attention.double(b, of_text, of_image, self.image.eps)?;
        // Frees their memory for what follows.
        drop([text_qkv, image_qkv]);
        let text = self.text.residual(b, text, &attended_text, text_mod)?;
        let image = self.image.residual(b, image, &attended_image, image_mod)?;
        Ok((text, image))
    }
}

impl<B: Backend> Stream<B> {
    fn load(
        b: &B,
        vars: &Vars<'_>,
        plan: &ResidencyPlan,
        config: &Config,
        names: &LayerNames,
    ) -> Result<Self> {
        let (dim, mlp) = (config.dim(), config.mlp_dim());
        let feed_forward = vars.at(names.feed_forward);
        let norm = |name: &str| {
            let weight = vars.at(name).tensor("weight", [config.attention_head_dim])?;
            Ok::<_, crate::Error>(b.upload(&weight, DType::F32)?)
        };
        Ok(Stream {
            qkv: Linear::load_stack(b, vars, plan, &names.qkv.map(|name| (name, dim)), dim)?,
            norm_q: norm(names.norms[0])?,
            norm_k: norm(names.norms[1])?,
            to_out: Linear::load(b, vars, plan, names.out, dim, dim)?,
            linear_in: Linear::load(b, &feed_forward, plan, "linear_in", 2 * mlp, dim)?,
            linear_out: Linear::load(b, &feed_forward, plan, "linear_out", dim, mlp)?,
            dim,
            mlp_width: 2 * mlp,
            eps: config.eps,
        })
    }

    fn linears(&mut self) -> [&mut Linear<B>; 4] {
        [&mut self.qkv, &mut self.to_out, &mut self.linear_in, &mut self.linear_out]
    }

    /// Computes queries, keys (neither normed nor rotated) and values.
    fn project(&self, b: &B, x: &B::Tensor, m: &DoubleModulation<B>) -> Result<[B::Tensor; 3]> {
        let modulation = [&m.attn.scale, &m.attn.shift];
        Ok(b.ada_linear_split(x, modulation, &m.groups, self.eps, &self.qkv, [self.dim; 3])?)
    }

    /// Those of [`Stream::project`] with what norms and rotates them.
    fn qkv<'a>(&'a self, [q, k, v]: &'a [B::Tensor; 3], rope: &'a RopeTable<B::Tensor>) -> Qkv<'a, B> {
        Qkv { qk: HeadBlock { qk: [q, k], weights: [&self.norm_q, &self.norm_k], rope }, v }
    }

    /// Adds the gated output projection, then the gated MLP.
    fn residual(
        &self,
        b: &B,
        x: B::Tensor,
        attended: &B::Tensor,
        m: &DoubleModulation<B>,
    ) -> Result<B::Tensor> {
        let x = b.linear_gated_add(&[attended], &self.to_out, Some((&m.attn.gate, &m.groups)), &x)?;
        let modulation = [&m.mlp.scale, &m.mlp.shift];
        let width = [self.mlp_width];
        let [mlp] = b.ada_linear_swiglu(&x, modulation, &m.groups, self.eps, &self.linear_in, width)?;
        Ok(b.linear_gated_add(&[&mlp], &self.linear_out, Some((&m.mlp.gate, &m.groups)), &x)?)
    }
}
