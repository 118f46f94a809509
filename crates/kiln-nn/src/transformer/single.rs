//! The single block: attention and MLP in parallel, from one projection of the joined rows.
//!
//! `x [tokens, dim] → ada norm → [q, k, v, gate and value] → [attention, SwiGLU] → to_out → gate → + x`

use kiln_ops::{Backend, HeadBlock, RopeTable};
use kiln_tensor::DType;
use kiln_weights::Vars;

use super::attention::{BatchAttention, Qkv};
use super::config::Config;
use super::linear::Linear;
use super::modulation::SingleModulation;
use crate::{ResidencyPlan, Result};

/// A single block.
#[derive(Clone)]
pub(super) struct SingleBlock<B: Backend> {
    pub(super) to_qkv_mlp_proj: Linear<B>,
    pub(super) norm_q: B::Tensor,
    pub(super) norm_k: B::Tensor,
    pub(super) to_out: Linear<B>,
    /// Widths of q, k, v and the MLP's gate and value in the projection.
    pub(super) widths: [usize; 4],
    pub(super) eps: f32,
}

impl<B: Backend> SingleBlock<B> {
    pub(super) fn load(b: &B, vars: &Vars<'_>, plan: &ResidencyPlan, config: &Config) -> Result<Self> {
        let (dim, mlp) = (config.dim(), config.mlp_dim());
        let attn = vars.at("attn");
        let norm = |name: &str| {
            let weight = attn.at(name).tensor("weight", [config.attention_head_dim])?;
            Ok::<_, crate::Error>(b.upload(&weight, DType::F32)?)
        };
        Ok(SingleBlock {
            to_qkv_mlp_proj: Linear::load(b, &attn, plan, "to_qkv_mlp_proj", 3 * dim + 2 * mlp, dim)?,
            norm_q: norm("norm_q")?,
            norm_k: norm("norm_k")?,
            to_out: Linear::load(b, &attn, plan, "to_out", dim, dim + mlp)?,
            widths: [dim, dim, dim, 2 * mlp],
            eps: config.eps,
        })
    }

    pub(super) fn linears(&mut self) -> [&mut Linear<B>; 2] {
        [&mut self.to_qkv_mlp_proj, &mut self.to_out]
    }

    /// `x`: `[tokens, dim]`, each image's text before its image stream.
    pub(super) fn forward(
        &self,
        b: &B,
        x: B::Tensor,
        m: &SingleModulation<B>,
        rope: &RopeTable<B::Tensor>,
        attention: &mut BatchAttention<'_, B>,
    ) -> Result<B::Tensor> {
        let modulation = [&m.block.scale, &m.block.shift];
        let [q, k, v, mlp] =
            b.ada_linear_swiglu(&x, modulation, &m.groups, self.eps, &self.to_qkv_mlp_proj, self.widths)?;
        let qk = HeadBlock { qk: [&q, &k], weights: [&self.norm_q, &self.norm_k], rope };
        let attended = attention.single(b, Qkv { qk, v: &v }, self.eps)?;
        // Frees their memory for what follows.
        drop([q, k, v]);
        let gate = Some((&m.block.gate, &m.groups));
        Ok(b.linear_gated_add(&[&attended, &mlp], &self.to_out, gate, &x)?)
    }
}
