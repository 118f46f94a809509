use kiln_family::{ModuleLayout, ModuleNames};

const fn names(file: &'static str, model: &'static [&'static str]) -> ModuleNames {
    ModuleNames::new(file, model)
}

const fn conv1x1(file: &'static str, model: &'static [&'static str]) -> ModuleNames {
    ModuleNames { layout: ModuleLayout::Conv1x1, ..names(file, model) }
}

/// The names of latent diffusion's autoencoder, which Black Forest Labs kept (`ae.safetensors`). It counts the decoder's
/// levels from the full size, the model from the smallest; its attention matrices are 1×1 convolutions.
pub(super) const LATENT_DIFFUSION: &[ModuleNames] = &[
    names("encoder.down.#.block.#.nin_shortcut", &["encoder.down_blocks.#.resnets.#.conv_shortcut"]),
    names("encoder.down.#.block.#.*", &["encoder.down_blocks.#.resnets.#.*"]),
    names("encoder.down.#.downsample.conv", &["encoder.down_blocks.#.downsamplers.0.conv"]),
    names("encoder.mid.block_1.*", &["encoder.mid_block.resnets.0.*"]),
    names("encoder.mid.block_2.*", &["encoder.mid_block.resnets.1.*"]),
    names("encoder.mid.attn_1.norm", &["encoder.mid_block.attentions.0.group_norm"]),
    conv1x1("encoder.mid.attn_1.q", &["encoder.mid_block.attentions.0.to_q"]),
    conv1x1("encoder.mid.attn_1.k", &["encoder.mid_block.attentions.0.to_k"]),
    conv1x1("encoder.mid.attn_1.v", &["encoder.mid_block.attentions.0.to_v"]),
    conv1x1("encoder.mid.attn_1.proj_out", &["encoder.mid_block.attentions.0.to_out.0"]),
    names("encoder.norm_out", &["encoder.conv_norm_out"]),
    names("encoder.quant_conv", &["quant_conv"]),
    names("decoder.up.~.block.#.nin_shortcut", &["decoder.up_blocks.#.resnets.#.conv_shortcut"]),
    names("decoder.up.~.block.#.*", &["decoder.up_blocks.#.resnets.#.*"]),
    names("decoder.up.~.upsample.conv", &["decoder.up_blocks.#.upsamplers.0.conv"]),
    names("decoder.mid.block_1.*", &["decoder.mid_block.resnets.0.*"]),
    names("decoder.mid.block_2.*", &["decoder.mid_block.resnets.1.*"]),
    names("decoder.mid.attn_1.norm", &["decoder.mid_block.attentions.0.group_norm"]),
    conv1x1("decoder.mid.attn_1.q", &["decoder.mid_block.attentions.0.to_q"]),
    conv1x1("decoder.mid.attn_1.k", &["decoder.mid_block.attentions.0.to_k"]),
    conv1x1("decoder.mid.attn_1.v", &["decoder.mid_block.attentions.0.to_v"]),
    conv1x1("decoder.mid.attn_1.proj_out", &["decoder.mid_block.attentions.0.to_out.0"]),
    names("decoder.norm_out", &["decoder.conv_norm_out"]),
    names("decoder.post_quant_conv", &["post_quant_conv"]),
];
