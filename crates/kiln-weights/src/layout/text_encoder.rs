use super::rules::{How, Rule};

const fn same(theirs: &'static str, ours: &'static [&'static str]) -> Rule {
    Rule { theirs, ours, how: How::Same }
}

/// llama.cpp's names for Qwen3, which GGUF files have. (Of other families it also turns rows about; of Qwen3 it doesn't.)
pub(super) const LLAMA_CPP: &[Rule] = &[
    same("token_embd", &["model.embed_tokens"]),
    same("output_norm", &["model.norm"]),
    same("output", &["lm_head"]),
    same("blk.#.attn_norm", &["model.layers.#.input_layernorm"]),
    same("blk.#.attn_q", &["model.layers.#.self_attn.q_proj"]),
    same("blk.#.attn_k", &["model.layers.#.self_attn.k_proj"]),
    same("blk.#.attn_v", &["model.layers.#.self_attn.v_proj"]),
    same("blk.#.attn_output", &["model.layers.#.self_attn.o_proj"]),
    same("blk.#.attn_q_norm", &["model.layers.#.self_attn.q_norm"]),
    same("blk.#.attn_k_norm", &["model.layers.#.self_attn.k_norm"]),
    same("blk.#.ffn_norm", &["model.layers.#.post_attention_layernorm"]),
    same("blk.#.ffn_gate", &["model.layers.#.mlp.gate_proj"]),
    same("blk.#.ffn_up", &["model.layers.#.mlp.up_proj"]),
    same("blk.#.ffn_down", &["model.layers.#.mlp.down_proj"]),
];

/// Settings of a GGUF file, by the end of their names, and what transformers calls them.
pub(crate) const SETTINGS: [(&str, &str); 2] =
    [(".rope.freq_base", "rope_theta"), (".attention.layer_norm_rms_epsilon", "rms_norm_eps")];
