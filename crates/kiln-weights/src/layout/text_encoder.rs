use kiln_family::ModuleNames;

const fn names(file: &'static str, model: &'static [&'static str]) -> ModuleNames {
    ModuleNames::new(file, model)
}

/// llama.cpp's names, which GGUF files have. For Qwen3 its rows are those of transformers; for Llama and Mistral it permutes
/// the rows of q and k, so that neighbours rotate together (see [`crate::WeightSource::has_interleaved_rotary`]).
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
pub(crate) const GGUF_SETTINGS: [(&str, &str); 3] = [
    (".rope.freq_base", "rope_theta"),
    (".attention.layer_norm_rms_epsilon", "rms_norm_eps"),
    (".attention.key_length", HEAD_DIM),
];

/// A tensor that Qwen3 has and Mistral does not.
pub(crate) const Q_NORM: &str = "model.layers.0.self_attn.q_norm.weight";

/// The metadata key of a head's width, as in transformers' config.
pub(crate) const HEAD_DIM: &str = "head_dim";

/// The tensor in which ComfyUI's Mistral files have their tokenizer, a `tekken.json`.
pub(crate) const TEKKEN: &str = "tekken_model";
/// Modules beside the layers: the head that predicts the next token, and what reads images.
const BESIDE: [&str; 3] = ["lm_head.", "vision_tower.", "multi_modal_projector."];

/// Whether a tensor, by its name in the model, has no influence on the states of the layers.
pub(crate) fn is_beside_layers(name: &str) -> bool {
    name == TEKKEN || BESIDE.iter().any(|module| name.starts_with(module))
}

/// The model's name of a tensor beside the layers, in a file that has `prefix` before `layers.`; `None` for other tensors.
///
/// | | layers | head | vision tower |
/// |---|---|---|---|
/// | transformers 4 | `language_model.model.layers` | `language_model.lm_head` | `vision_tower` |
/// | transformers 5 | `model.language_model.layers` | `lm_head` | `model.vision_tower` |
/// | ComfyUI, a language model alone | `model.layers` | `lm_head` | `vision_tower` |
pub(super) fn beside_layers<'n>(prefix: &str, name: &'n str) -> Option<&'n str> {
    const LANGUAGE_MODEL: [&str; 4] = ["language_model.model.", "model.language_model.", "model.", ""];
    let root = LANGUAGE_MODEL.iter().find_map(|ending| prefix.strip_suffix(ending))?;
    let rest = name.strip_prefix(root)?;
    let inner = ["language_model.", "model."].iter().find_map(|wrapper| rest.strip_prefix(wrapper));
    [Some(rest), inner].into_iter().flatten().find(|name| is_beside_layers(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_beside_the_layers_have_one_name_in_every_naming() {
        for (prefix, name, expected) in [
            ("language_model.model.", "language_model.lm_head.weight", Some("lm_head.weight")),
            ("language_model.model.", "vision_tower.ln_pre.weight", Some("vision_tower.ln_pre.weight")),
            ("model.language_model.", "model.vision_tower.ln_pre.weight", Some("vision_tower.ln_pre.weight")),
            ("model.language_model.", "lm_head.weight", Some("lm_head.weight")),
            ("model.", "tekken_model", Some("tekken_model")),
            ("model.", "model.norm.weight", None),
            ("te.mistral.model.", "te.mistral.lm_head.weight", Some("lm_head.weight")),
            ("te.mistral.model.", "lm_head.weight", None),
            ("language_model.model.", "language_model.model.layers.0.mlp.up_proj.weight", None),
            ("", "lm_head_norm.weight", None),
        ] {
            assert_eq!(beside_layers(prefix, name), expected, "{prefix} {name}");
        }
    }
}
