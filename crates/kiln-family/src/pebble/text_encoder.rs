//! Pebble's text encoder.

use crate::{BuiltInTokenizer, ChatArguments, Side, Template, TextEncoder};

/// Layers of Qwen3's kind. Models have a tokenizer of their own.
pub(super) static PEBBLE_TEXT: TextEncoder = TextEncoder {
    name: "PebbleText",
    model_types: &["pebble_text"],
    architectures: &["pebble_text"],
    sizes: &[],
    repository_words: &[],
    rms_norm_eps: 1e-6,
    rope_theta: 1e4,
    has_qk_norms: true,
    states_unused_window: false,
    layers: &[2],
    template: Template {
        start: "",
        end: "<|im_end|>",
        deleted: None,
        required: &["<|im_end|>"],
        padding: "<|endoftext|>",
        padding_side: Side::Right,
        truncation_side: Side::Right,
    },
    chat: ChatArguments { system: None, generation_prompt: false, thinking: None, starts_itself: false },
    tokenizer: BuiltInTokenizer::None,
    vocabulary: usize::MAX,
    embeds_tokenizer: false,
    rewrites_prompts: false,
};
