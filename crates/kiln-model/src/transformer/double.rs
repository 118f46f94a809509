use kiln_ops::{Backend, RopeTable};
use kiln_tensor::DType;
use kiln_weights::Vars;

use super::attention::Attention;
use super::config::Config;
use super::embed::DoubleModulation;
use super::layout::Layout;
use super::linear::Linear;
use crate::{ResidencyPlan, Result};

/// Text and image with weights of their own, meeting in one attention.
pub(super) struct DoubleBlock<B: Backend> {
    text: Stream<B>,
    image: Stream<B>,
}

/// One stream's half of a double block.
struct Stream<B: Backend> {
    qkv: Linear<B>,
    norm_q: B::Tensor,
    norm_k: B::Tensor,
    to_out: Linear<B>,
    linear_in: Linear<B>,
    linear_out: Linear<B>,
    dim: usize,
    /// Of the MLP's gate-and-value.
    mlp_width: usize,
    eps: f32,
}

/// The names one stream's layers have in the checkpoint.
struct Names {
    qkv: [&'static str; 3],
    norms: [&'static str; 2],
    out: &'static str,
    feed_forward: &'static str,
}

const IMAGE: Names = Names {
    qkv: ["attn.to_q", "attn.to_k", "attn.to_v"],
    norms: ["attn.norm_q", "attn.norm_k"],
    out: "attn.to_out.0",
    feed_forward: "ff",
};

const TEXT: Names = Names {
    qkv: ["attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"],
    norms: ["attn.norm_added_q", "attn.norm_added_k"],
    out: "attn.to_add_out",
    feed_forward: "ff_context",
};

impl<B: Backend> DoubleBlock<B> {
    pub(super) fn load(b: &B, vars: &Vars<'_>, plan: &ResidencyPlan, config: &Config) -> Result<Self> {
        Ok(DoubleBlock {
            text: Stream::load(b, vars, plan, config, &TEXT)?,
            image: Stream::load(b, vars, plan, config, &IMAGE)?,
        })
    }

    pub(super) fn linears(&mut self) -> impl Iterator<Item = &mut Linear<B>> {
        self.text.linears().into_iter().chain(self.image.linears())
    }

    /// `text`: `[t, dim]`, all texts; `image`: `[n, dim]`, all image streams.
    #[expect(clippy::too_many_arguments, reason = "two streams, each with its modulation")]
    pub(super) fn forward(
        &self,
        b: &B,
        text: B::Tensor,
        image: B::Tensor,
        text_mod: &DoubleModulation<B>,
        image_mod: &DoubleModulation<B>,
        layout: &Layout<B>,
        attention: &mut Attention<'_, B>,
    ) -> Result<(B::Tensor, B::Tensor)> {
        let of_text = self.text.project(b, &text, text_mod, &layout.text)?;
        let of_image = self.image.project(b, &image, image_mod, &layout.image)?;
        let [attended_text, attended_image] = attention.double(b, of_text.each_ref(), of_image.each_ref())?;
        // Their memory serves what follows.
        drop([of_text, of_image]);
        let text = self.text.finish(b, text, &attended_text, text_mod)?;
        let image = self.image.finish(b, image, &attended_image, image_mod)?;
        Ok((text, image))
    }
}

impl<B: Backend> Stream<B> {
    fn load(b: &B, vars: &Vars<'_>, plan: &ResidencyPlan, config: &Config, names: &Names) -> Result<Self> {
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

    /// Queries, keys (both normed and turned) and values.
    fn project(
        &self,
        b: &B,
        x: &B::Tensor,
        m: &DoubleModulation<B>,
        rope: &RopeTable<B>,
    ) -> Result<[B::Tensor; 3]> {
        let modulation = [&m.attn.scale, &m.attn.shift];
        let [mut q, mut k, v] =
            b.ada_linear_split(x, modulation, &m.groups, self.eps, &self.qkv, [self.dim; 3])?;
        [q, k] = b.qk_norm_rope([&q, &k], [&self.norm_q, &self.norm_k], rope, self.eps)?;
        Ok([q, k, v])
    }

    /// The output projection and the MLP, each gated onto the stream.
    fn finish(
        &self,
        b: &B,
        x: B::Tensor,
        attended: &B::Tensor,
        m: &DoubleModulation<B>,
    ) -> Result<B::Tensor> {
        let x = b.linear_gated_add(&[attended], &self.to_out, Some((&m.attn.gate, &m.groups)), &x)?;
        let modulation = [&m.mlp.scale, &m.mlp.shift];
        let width = [self.mlp_width];
        let [gate_up] = b.ada_linear_split(&x, modulation, &m.groups, self.eps, &self.linear_in, width)?;
        Ok(b.swiglu_gated_add(None, &gate_up, &self.linear_out, Some((&m.mlp.gate, &m.groups)), &x)?)
    }
}
