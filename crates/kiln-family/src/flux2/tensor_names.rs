//! The names of FLUX.2's tensors in files and in LoRAs.

use crate::{BlockPrefix, Layout, ModuleLayout, ModuleNames, TransformerNames};

const fn names(file: &'static str, model: &'static [&'static str]) -> ModuleNames {
    ModuleNames::new(file, model)
}

const fn norm(file: &'static str, model: &'static [&'static str]) -> ModuleNames {
    ModuleNames { is_norm: true, ..names(file, model) }
}

/// FLUX.2's transformer.
pub(super) static TRANSFORMER: TransformerNames = TransformerNames {
    class: "Flux2Transformer2DModel",
    architecture: "flux",
    layouts: &[Layout {
        name: "Black Forest Labs",
        anchor: "single_stream_modulation.lin.weight",
        modules: MODULES,
    }],
    lora_blocks: &[
        block("double_blocks_", DOUBLE),
        block("transformer_blocks_", DOUBLE),
        // What is left of `transformer_blocks_` behind `lora_tran`.
        block("sformer_blocks_", DOUBLE),
        block("single_blocks_", SINGLE),
        block("single_transformer_blocks_", SINGLE),
    ],
    original_words: &[
        "double_blocks_",
        "single_blocks_",
        "img_in",
        "txt_in",
        "time_in_",
        "guidance_in_",
        "final_layer_",
        "double_stream_modulation_img_lin",
        "double_stream_modulation_txt_lin",
        "single_stream_modulation_lin",
    ],
    sensitive: (DOUBLE, &["to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj"]),
};

const DOUBLE: &str = "transformer_blocks.";
const SINGLE: &str = "single_transformer_blocks.";

const fn block(flat: &'static str, model: &'static str) -> BlockPrefix {
    BlockPrefix { flat, model }
}

/// The modules of the transformer: their names in Black Forest Labs' checkpoints, which ComfyUI and GGUF files share, in
/// diffusers, which are the model's, and in LoRA files where those differ from both.
const MODULES: &[ModuleNames] = &[
    names("img_in", &["x_embedder"]),
    names("txt_in", &["context_embedder"]),
    names("time_in.in_layer", &["time_guidance_embed.timestep_embedder.linear_1"]),
    names("time_in.out_layer", &["time_guidance_embed.timestep_embedder.linear_2"]),
    names("guidance_in.in_layer", &["time_guidance_embed.guidance_embedder.linear_1"]),
    names("guidance_in.out_layer", &["time_guidance_embed.guidance_embedder.linear_2"]),
    names("double_stream_modulation_img.lin", &["double_stream_modulation_img.linear"]),
    names("double_stream_modulation_txt.lin", &["double_stream_modulation_txt.linear"]),
    names("single_stream_modulation.lin", &["single_stream_modulation.linear"]),
    names("final_layer.linear", &["proj_out"]),
    // (shift, scale) in the file, (scale, shift) in the model.
    ModuleNames {
        layout: ModuleLayout::SwappedHalves,
        ..names("final_layer.adaLN_modulation.1", &["norm_out.linear"])
    },
    ModuleNames {
        // `attn.qkv` is OneTrainer's, `attn.to_qkv` that of diffusers' fused projections.
        lora_names: &["transformer_blocks.#.attn.to_qkv", "transformer_blocks.#.attn.qkv"],
        ..names(
            "double_blocks.#.img_attn.qkv",
            &[
                "transformer_blocks.#.attn.to_q",
                "transformer_blocks.#.attn.to_k",
                "transformer_blocks.#.attn.to_v",
            ],
        )
    },
    ModuleNames {
        lora_names: &["transformer_blocks.#.attn.to_added_qkv", "transformer_blocks.#.attn.added_qkv"],
        ..names(
            "double_blocks.#.txt_attn.qkv",
            &[
                "transformer_blocks.#.attn.add_q_proj",
                "transformer_blocks.#.attn.add_k_proj",
                "transformer_blocks.#.attn.add_v_proj",
            ],
        )
    },
    ModuleNames {
        lora_names: &["transformer_blocks.#.attn.to_out"],
        ..names("double_blocks.#.img_attn.proj", &["transformer_blocks.#.attn.to_out.0"])
    },
    names("double_blocks.#.txt_attn.proj", &["transformer_blocks.#.attn.to_add_out"]),
    norm("double_blocks.#.img_attn.norm.query_norm", &["transformer_blocks.#.attn.norm_q"]),
    norm("double_blocks.#.img_attn.norm.key_norm", &["transformer_blocks.#.attn.norm_k"]),
    norm("double_blocks.#.txt_attn.norm.query_norm", &["transformer_blocks.#.attn.norm_added_q"]),
    norm("double_blocks.#.txt_attn.norm.key_norm", &["transformer_blocks.#.attn.norm_added_k"]),
    names("double_blocks.#.img_mlp.0", &["transformer_blocks.#.ff.linear_in"]),
    names("double_blocks.#.img_mlp.2", &["transformer_blocks.#.ff.linear_out"]),
    names("double_blocks.#.txt_mlp.0", &["transformer_blocks.#.ff_context.linear_in"]),
    names("double_blocks.#.txt_mlp.2", &["transformer_blocks.#.ff_context.linear_out"]),
    ModuleNames {
        lora_slices: &[
            "single_transformer_blocks.#.attn.to_q",
            "single_transformer_blocks.#.attn.to_k",
            "single_transformer_blocks.#.attn.to_v",
            "single_transformer_blocks.#.proj_mlp",
        ],
        ..names("single_blocks.#.linear1", &["single_transformer_blocks.#.attn.to_qkv_mlp_proj"])
    },
    ModuleNames {
        lora_names: &["single_transformer_blocks.#.attn.to_out.0", "single_transformer_blocks.#.proj_out"],
        ..names("single_blocks.#.linear2", &["single_transformer_blocks.#.attn.to_out"])
    },
    norm("single_blocks.#.norm.query_norm", &["single_transformer_blocks.#.attn.norm_q"]),
    norm("single_blocks.#.norm.key_norm", &["single_transformer_blocks.#.attn.norm_k"]),
];
