use super::rules::{How, Rule};

const fn same(theirs: &'static str, ours: &'static [&'static str]) -> Rule {
    Rule { theirs, ours, how: How::Same }
}

const fn conv(theirs: &'static str, ours: &'static [&'static str]) -> Rule {
    Rule { theirs, ours, how: How::Convolution }
}

/// The names of latent diffusion's autoencoder, which Black Forest Labs kept (`ae.safetensors`). The decoder's levels are
/// counted from the full size there and from the smallest here; the attention's matrices are convolutions there.
pub(super) const LATENT_DIFFUSION: &[Rule] = &[
    same("encoder.down.#.block.#.nin_shortcut", &["encoder.down_blocks.#.resnets.#.conv_shortcut"]),
    same("encoder.down.#.block.#.*", &["encoder.down_blocks.#.resnets.#.*"]),
    same("encoder.down.#.downsample.conv", &["encoder.down_blocks.#.downsamplers.0.conv"]),
    same("encoder.mid.block_1.*", &["encoder.mid_block.resnets.0.*"]),
    same("encoder.mid.block_2.*", &["encoder.mid_block.resnets.1.*"]),
    same("encoder.mid.attn_1.norm", &["encoder.mid_block.attentions.0.group_norm"]),
    conv("encoder.mid.attn_1.q", &["encoder.mid_block.attentions.0.to_q"]),
    conv("encoder.mid.attn_1.k", &["encoder.mid_block.attentions.0.to_k"]),
    conv("encoder.mid.attn_1.v", &["encoder.mid_block.attentions.0.to_v"]),
    conv("encoder.mid.attn_1.proj_out", &["encoder.mid_block.attentions.0.to_out.0"]),
    same("encoder.norm_out", &["encoder.conv_norm_out"]),
    same("encoder.quant_conv", &["quant_conv"]),
    same("decoder.up.~.block.#.nin_shortcut", &["decoder.up_blocks.#.resnets.#.conv_shortcut"]),
    same("decoder.up.~.block.#.*", &["decoder.up_blocks.#.resnets.#.*"]),
    same("decoder.up.~.upsample.conv", &["decoder.up_blocks.#.upsamplers.0.conv"]),
    same("decoder.mid.block_1.*", &["decoder.mid_block.resnets.0.*"]),
    same("decoder.mid.block_2.*", &["decoder.mid_block.resnets.1.*"]),
    same("decoder.mid.attn_1.norm", &["decoder.mid_block.attentions.0.group_norm"]),
    conv("decoder.mid.attn_1.q", &["decoder.mid_block.attentions.0.to_q"]),
    conv("decoder.mid.attn_1.k", &["decoder.mid_block.attentions.0.to_k"]),
    conv("decoder.mid.attn_1.v", &["decoder.mid_block.attentions.0.to_v"]),
    conv("decoder.mid.attn_1.proj_out", &["decoder.mid_block.attentions.0.to_out.0"]),
    same("decoder.norm_out", &["decoder.conv_norm_out"]),
    same("decoder.post_quant_conv", &["post_quant_conv"]),
];
