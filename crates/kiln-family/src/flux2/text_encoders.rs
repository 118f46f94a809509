//! FLUX.2's text encoders: Qwen3 of klein, Mistral Small 3 of dev.

use crate::{BuiltInTokenizer, ChatArguments, Side, Template, TextEncoder};

/// Qwen3. Its template is one user message, with thinking disabled.
pub static QWEN3: TextEncoder = TextEncoder {
    name: "Qwen3",
    model_types: &["qwen3"],
    architectures: &["qwen3"],
    sizes: &[(2560, "Qwen3-4B"), (4096, "Qwen3-8B")],
    repository_words: &[],
    rms_norm_eps: 1e-6,
    rope_theta: 1e6,
    has_qk_norms: true,
    states_unused_window: true,
    layers: &[9, 18, 27],
    template: Template {
        start: "<|im_start|>user\n",
        end: "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        deleted: None,
        required: &[],
        padding: "<|endoftext|>",
        padding_side: Side::Right,
        truncation_side: Side::Right,
    },
    // klein's pipeline always adds what the tokenizer's file says.
    chat: ChatArguments {
        system: None,
        generation_prompt: true,
        thinking: Some(false),
        starts_itself: false,
    },
    tokenizer: BuiltInTokenizer::Merges(include_bytes!("../../assets/tokenizer.zst")),
    vocabulary: 151_669,
    embeds_tokenizer: false,
    rewrites_prompts: false,
};

/// The system message of dev's pipeline.
macro_rules! system_message {
    () => {
        "You are an AI that reasons about image descriptions. You give structured responses focusing on object \
         relationships, object\nattribution and actions without speculation."
    };
}

/// Mistral Small 3. Its template is the system message and one user message; an `[IMG]` would stand for an image that is
/// not there.
pub static MISTRAL: TextEncoder = TextEncoder {
    name: "Mistral",
    model_types: &["mistral", "mistral3"],
    // llama.cpp's name for Mistral's language models, too; in newer files `mistral3`.
    architectures: &["llama", "cow"],
    sizes: &[(5120, "Mistral-Small-3.2-24B")],
    repository_words: &["mistral-small-3"],
    rms_norm_eps: 1e-5,
    rope_theta: 1e9,
    has_qk_norms: false,
    states_unused_window: false,
    layers: &[10, 20, 30],
    template: Template {
        start: concat!("<s>[SYSTEM_PROMPT]", system_message!(), "[/SYSTEM_PROMPT][INST]"),
        end: "[/INST]",
        deleted: Some("[IMG]"),
        required: &["<s>", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]"],
        padding: "<pad>",
        padding_side: Side::Left,
        truncation_side: Side::Right,
    },
    // dev's pipeline lets the template alone put the first token.
    chat: ChatArguments {
        system: Some(system_message!()),
        generation_prompt: false,
        thinking: None,
        starts_itself: true,
    },
    tokenizer: BuiltInTokenizer::RankPairs(include_bytes!("../../assets/tekken.zst")),
    vocabulary: 131_072,
    embeds_tokenizer: true,
    rewrites_prompts: true,
};
