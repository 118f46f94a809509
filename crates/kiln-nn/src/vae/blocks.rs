//! Building blocks of encoder and decoder: group norm, residual block, middle block with attention.
//!
//! Tensors are `[h, w, channels]`.

use kiln_ops::{Activation, AttentionMask, AttentionSpec, Backend, ConvGeometry, Residency, Tensor as _};
use kiln_tensor::DType;
use kiln_weights::Vars;

use super::config::Config;
use crate::{Observer, Result};

const EPS: f32 = 1e-6;

/// Loads a square convolution with bias.
pub(super) fn conv<B: Backend>(
    b: &B,
    vars: &Vars<'_>,
    [out, input]: [usize; 2],
    kernel: usize,
) -> Result<B::Conv> {
    let weight = vars.finite_tensor("weight", [out, input, kernel, kernel])?;
    Ok(b.load_conv(&weight, Some(&vars.finite_tensor("bias", [out])?))?)
}

/// A group norm with weight and bias, and an optional activation.
pub(super) struct GroupNorm<B: Backend> {
    weight: B::Tensor,
    bias: B::Tensor,
    groups: usize,
}

impl<B: Backend> GroupNorm<B> {
    pub(super) fn load(b: &B, vars: &Vars<'_>, channels: usize, groups: usize) -> Result<Self> {
        let parameter =
            |name: &str| Ok::<_, crate::Error>(b.upload(&vars.finite_tensor(name, [channels])?, DType::F32)?);
        Ok(GroupNorm { weight: parameter("weight")?, bias: parameter("bias")?, groups })
    }

    pub(super) fn forward(&self, b: &B, x: &B::Tensor, f: Option<Activation>) -> Result<B::Tensor> {
        Ok(b.group_norm(x, self.groups, &self.weight, &self.bias, EPS, f)?)
    }
}

/// A residual block of two convolutions; a 1×1 convolution adapts the input if the channels change.
pub(super) struct ResnetBlock<B: Backend> {
    norm1: GroupNorm<B>,
    conv1: B::Conv,
    norm2: GroupNorm<B>,
    conv2: B::Conv,
    conv_shortcut: Option<B::Conv>,
}

impl<B: Backend> ResnetBlock<B> {
    pub(super) fn load(b: &B, vars: &Vars<'_>, [input, out]: [usize; 2], groups: usize) -> Result<Self> {
        let shortcut = (input != out).then(|| conv(b, &vars.at("conv_shortcut"), [out, input], 1));
        Ok(ResnetBlock {
            norm1: GroupNorm::load(b, &vars.at("norm1"), input, groups)?,
            conv1: conv(b, &vars.at("conv1"), [out, input], 3)?,
            norm2: GroupNorm::load(b, &vars.at("norm2"), out, groups)?,
            conv2: conv(b, &vars.at("conv2"), [out, out], 3)?,
            conv_shortcut: shortcut.transpose()?,
        })
    }

    pub(super) fn forward(&self, b: &B, mut x: B::Tensor) -> Result<B::Tensor> {
        // Assigned, not shadowed: at full size each of these takes up to a gigabyte, and must be freed as soon as it is used.
        let mut h = self.norm1.forward(b, &x, Some(Activation::Silu))?;
        h = b.conv2d(&h, &self.conv1, ConvGeometry::same(3), None)?;
        h = self.norm2.forward(b, &h, Some(Activation::Silu))?;
        if let Some(shortcut) = &self.conv_shortcut {
            x = b.conv2d(&x, shortcut, ConvGeometry::same(1), None)?;
        }
        Ok(b.conv2d(&h, &self.conv2, ConvGeometry::same(3), Some(&x))?)
    }
}

/// The middle block: residual block, attention over all pixels, residual block.
pub(super) struct MidBlock<B: Backend> {
    first: ResnetBlock<B>,
    attention: Option<SelfAttention<B>>,
    second: ResnetBlock<B>,
}

impl<B: Backend> MidBlock<B> {
    pub(super) fn load(b: &B, vars: &Vars<'_>, channels: usize, config: &Config) -> Result<Self> {
        let groups = config.norm_num_groups;
        let attention = config
            .mid_block_add_attention
            .then(|| SelfAttention::load(b, &vars.at("attentions.0"), channels, groups));
        Ok(MidBlock {
            first: ResnetBlock::load(b, &vars.at("resnets.0"), [channels; 2], groups)?,
            attention: attention.transpose()?,
            second: ResnetBlock::load(b, &vars.at("resnets.1"), [channels; 2], groups)?,
        })
    }

    pub(super) fn forward(
        &self,
        b: &B,
        x: B::Tensor,
        name: &str,
        observer: &mut dyn Observer<B>,
    ) -> Result<B::Tensor> {
        let mut x = self.first.forward(b, x)?;
        observer.inspect(&format!("{name}.resnet0"), &x)?;
        if let Some(attention) = &self.attention {
            x = attention.forward(b, x)?;
            observer.inspect(&format!("{name}.attn"), &x)?;
        }
        let x = self.second.forward(b, x)?;
        observer.inspect(name, &x)?;
        Ok(x)
    }
}

/// Self-attention over all pixels, with a single head.
struct SelfAttention<B: Backend> {
    group_norm: GroupNorm<B>,
    qkv: B::Weight,
    to_out: B::Weight,
    channels: usize,
}

impl<B: Backend> SelfAttention<B> {
    fn load(b: &B, vars: &Vars<'_>, channels: usize, groups: usize) -> Result<Self> {
        let qkv = ["to_q", "to_k", "to_v"].map(|name| (name, channels));
        Ok(SelfAttention {
            group_norm: GroupNorm::load(b, &vars.at("group_norm"), channels, groups)?,
            qkv: b.load_weight(vars.linear_stack(&qkv, channels)?, Residency::Device)?,
            to_out: b.load_weight(vars.linear("to_out.0", channels, channels)?, Residency::Device)?,
            channels,
        })
    }

    fn forward(&self, b: &B, x: B::Tensor) -> Result<B::Tensor> {
        let shape = x.shape().clone();
        let flat = [shape.rows(), self.channels];
        let h = b.reshape(&self.group_norm.forward(b, &x, None)?, flat.into())?;
        let [q, k, v] = b.linear_split(&h, &self.qkv, [self.channels; 3])?;
        let spec = AttentionSpec::new(1, 1, AttentionMask::None);
        let attended = b.attention(&[&q], &[&k], &[&v], &spec)?;
        let x = b.linear_gated_add(&[&attended], &self.to_out, None, &b.reshape(&x, flat.into())?)?;
        Ok(b.reshape(&x, shape)?)
    }
}
