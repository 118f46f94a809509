use super::rules::{How, Rule};

const fn same(theirs: &'static str, ours: &'static [&'static str]) -> Rule {
    Rule { theirs, ours, how: How::Same }
}

/// Black Forest Labs' names, which ComfyUI and GGUF files have, too.
pub(super) const ORIGINAL: &[Rule] = &[
    same("img_in", &["x_embedder"]),
    same("txt_in", &["context_embedder"]),
    same("time_in.in_layer", &["time_guidance_embed.timestep_embedder.linear_1"]),
    same("time_in.out_layer", &["time_guidance_embed.timestep_embedder.linear_2"]),
    same("guidance_in.in_layer", &["time_guidance_embed.guidance_embedder.linear_1"]),
    same("guidance_in.out_layer", &["time_guidance_embed.guidance_embedder.linear_2"]),
    same("double_stream_modulation_img.lin", &["double_stream_modulation_img.linear"]),
    same("double_stream_modulation_txt.lin", &["double_stream_modulation_txt.linear"]),
    same("single_stream_modulation.lin", &["single_stream_modulation.linear"]),
    same("final_layer.linear", &["proj_out"]),
    // (shift, scale) there, (scale, shift) here.
    Rule { theirs: "final_layer.adaLN_modulation.1", ours: &["norm_out.linear"], how: How::Swapped },
    same(
        "double_blocks.#.img_attn.qkv",
        &[
            "transformer_blocks.#.attn.to_q",
            "transformer_blocks.#.attn.to_k",
            "transformer_blocks.#.attn.to_v",
        ],
    ),
    same(
        "double_blocks.#.txt_attn.qkv",
        &[
            "transformer_blocks.#.attn.add_q_proj",
            "transformer_blocks.#.attn.add_k_proj",
            "transformer_blocks.#.attn.add_v_proj",
        ],
    ),
    same("double_blocks.#.img_attn.proj", &["transformer_blocks.#.attn.to_out.0"]),
    same("double_blocks.#.txt_attn.proj", &["transformer_blocks.#.attn.to_add_out"]),
    same("double_blocks.#.img_attn.norm.query_norm", &["transformer_blocks.#.attn.norm_q"]),
    same("double_blocks.#.img_attn.norm.key_norm", &["transformer_blocks.#.attn.norm_k"]),
    same("double_blocks.#.txt_attn.norm.query_norm", &["transformer_blocks.#.attn.norm_added_q"]),
    same("double_blocks.#.txt_attn.norm.key_norm", &["transformer_blocks.#.attn.norm_added_k"]),
    same("double_blocks.#.img_mlp.0", &["transformer_blocks.#.ff.linear_in"]),
    same("double_blocks.#.img_mlp.2", &["transformer_blocks.#.ff.linear_out"]),
    same("double_blocks.#.txt_mlp.0", &["transformer_blocks.#.ff_context.linear_in"]),
    same("double_blocks.#.txt_mlp.2", &["transformer_blocks.#.ff_context.linear_out"]),
    same("single_blocks.#.linear1", &["single_transformer_blocks.#.attn.to_qkv_mlp_proj"]),
    same("single_blocks.#.linear2", &["single_transformer_blocks.#.attn.to_out"]),
    same("single_blocks.#.norm.query_norm", &["single_transformer_blocks.#.attn.norm_q"]),
    same("single_blocks.#.norm.key_norm", &["single_transformer_blocks.#.attn.norm_k"]),
];
