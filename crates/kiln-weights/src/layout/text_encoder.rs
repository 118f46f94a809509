use super::module_names::ModuleNames;

const fn names(file: &'static str, model: &'static [&'static str]) -> ModuleNames {
    ModuleNames::new(file, model)
}

/// llama.cpp's names for Qwen3, which GGUF files have. (For other families llama.cpp also permutes rows; not for Qwen3.)
pub(super) const LLAMA_CPP: &[ModuleNames] = &[
    names("token_embd", &["model.embed_tokens"]),
    names("output_norm", &["model.norm"]),
    names("output", &["lm_head"]),
    names("blk.#.attn_norm", &["model.layers.#.input_layernorm"]),
    names("blk.#.attn_q", &["model.layers.#.self_attn.q_proj"]),
    names("blk.#.attn_k", &["model.layers.#.self_attn.k_proj"]),
    names("blk.#.attn_v", &["model.layers.#.self_attn.v_proj"]),
    names("blk.#.attn_output", &["model.layers.#.self_attn.o_proj"]),
    names("blk.#.attn_q_norm", &["model.layers.#.self_attn.q_norm"]),
    names("blk.#.attn_k_norm", &["model.layers.#.self_attn.k_norm"]),
    names("blk.#.ffn_norm", &["model.layers.#.post_attention_layernorm"]),
    names("blk.#.ffn_gate", &["model.layers.#.mlp.gate_proj"]),
    names("blk.#.ffn_up", &["model.layers.#.mlp.up_proj"]),
    names("blk.#.ffn_down", &["model.layers.#.mlp.down_proj"]),
];

/// GGUF metadata keys, without the architecture that they begin with, and the names of the same settings in transformers' config.
pub(crate) const GGUF_SETTINGS: [(&str, &str); 2] =
    [(".rope.freq_base", "rope_theta"), (".attention.layer_norm_rms_epsilon", "rms_norm_eps")];
