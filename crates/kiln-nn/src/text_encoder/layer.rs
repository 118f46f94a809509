//! One layer of a language model: causal attention, then an MLP, each with its norm and residual.
//!
//! Its halves are separate methods: padding that attends to nothing passes through the MLP only, and a model that
//! continues a text attends to the keys and values that it kept.

use kiln_ops::{AttentionMask, AttentionSpec, Backend, RopeTable};
use kiln_tensor::{DType, HostLinear};
use kiln_weights::Vars;

use super::Config;
use crate::{Error, ResidencyPlan, Result};

/// The weights of a layer on a backend.
pub struct Layer<B: Backend> {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    eps: f32,
    input_layernorm: B::Tensor,
    qkv: B::Weight,
    /// The norms of query and key heads; `None` in Mistral.
    qk_norm: Option<[B::Tensor; 2]>,
    o_proj: B::Weight,
    post_attention_layernorm: B::Tensor,
    gate_up: B::Weight,
    down_proj: B::Weight,
}

impl<B: Backend> Layer<B> {
    /// Loads the layer whose tensors `vars` holds.
    pub fn load(b: &B, vars: &Vars<'_>, plan: &ResidencyPlan, config: &Config) -> Result<Self> {
        let (dim, mlp, head_dim) = (config.hidden_size, config.intermediate_size, config.head_dim());
        let (q_dim, kv_dim) = (config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim);
        let norm = |name: &str, dim: usize| Ok::<_, Error>(b.upload(&vars.tensor(name, [dim])?, DType::F32)?);
        let qkv = [("self_attn.q_proj", q_dim), ("self_attn.k_proj", kv_dim), ("self_attn.v_proj", kv_dim)];
        let gate_up = [("mlp.gate_proj", mlp), ("mlp.up_proj", mlp)];
        let weight = |layer: HostLinear| plan.load(b, layer);
        let head_norm = |name: &str| norm(name, head_dim);
        let qk_norm = if config.encoder().has_qk_norms {
            Some([head_norm("self_attn.q_norm.weight")?, head_norm("self_attn.k_norm.weight")?])
        } else {
            None
        };
        Ok(Layer {
            heads: config.num_attention_heads,
            kv_heads: config.num_key_value_heads,
            head_dim,
            eps: config.rms_norm_eps,
            input_layernorm: norm("input_layernorm.weight", dim)?,
            qkv: weight(vars.linear_stack(&qkv, dim)?)?,
            qk_norm,
            o_proj: weight(vars.linear("self_attn.o_proj", dim, q_dim)?)?,
            post_attention_layernorm: norm("post_attention_layernorm.weight", dim)?,
            gate_up: weight(vars.linear_stack(&gate_up, dim)?)?,
            down_proj: weight(vars.linear("mlp.down_proj", dim, mlp)?)?,
        })
    }

    /// Queries, keys and values of the tokens `x` `[tokens, hidden]`, queries and keys rotated to their positions.
    pub fn qkv(&self, b: &B, x: &B::Tensor, rope: &RopeTable<B::Tensor>) -> Result<[B::Tensor; 3]> {
        let h = b.rms_norm(x, &self.input_layernorm, self.eps)?;
        let widths = [self.heads, self.kv_heads, self.kv_heads].map(|heads| heads * self.head_dim);
        let [q, k, v] = b.linear_split(&h, &self.qkv, widths)?;
        let norms = self.qk_norm.as_ref().map(|[q, k]| [q, k]);
        let [q, k] = b.qk_norm_rope([&q, &k], norms, rope, self.eps)?;
        Ok([q, k, v])
    }

    /// Attention of queries to the keys and values of all tokens, given as lists of row blocks, added to the queries'
    /// tokens `x`.
    pub fn attend(
        &self,
        b: &B,
        x: &B::Tensor,
        q: &B::Tensor,
        [k, v]: [&[&B::Tensor]; 2],
        mask: AttentionMask,
    ) -> Result<B::Tensor> {
        let spec = AttentionSpec::new(self.heads, self.kv_heads, mask);
        let attended = b.attention(&[q], k, v, &spec)?;
        Ok(b.linear_gated_add(&[&attended], &self.o_proj, None, x)?)
    }

    /// The MLP, added to its input `x`.
    pub fn mlp(&self, b: &B, x: &B::Tensor) -> Result<B::Tensor> {
        let h = b.rms_norm(x, &self.post_attention_layernorm, self.eps)?;
        let h = b.linear_swiglu(&h, &self.gate_up)?;
        Ok(b.linear_gated_add(&[&h], &self.down_proj, None, x)?)
    }
}
